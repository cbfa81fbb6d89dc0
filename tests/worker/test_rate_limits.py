"""What the guide about debouncing and limits promises, with its own options and real workers."""

from __future__ import annotations

import time

import pytest

from tests.deadline import wait_for
from tests.guides import lock_options
from tests.testapp import tasks

PAGE = lock_options("guides/rate-limits.rst")
REQUEUE = {"on_conflict": "requeue"}


@pytest.fixture
def call(queue):
    """Give the function that sends a call with lock options."""

    def send(options, value=0, seconds=0, **rest):
        arguments = ("a", seconds, value)
        return tasks.requeue.apply_async(arguments, queue=queue, lock_options=options, **rest)

    return send


def starts(worker):
    return sorted(line["t"] for line in worker.events("start"))


@pytest.mark.only_all("a control, which starts a worker", "control")
@pytest.mark.parametrize(
    ("options", "runs"), [(PAGE["reindex"], [5]), (REQUEUE, [*range(6)])], ids=["", "control"]
)
def test_debounce_runs_once_after_the_last_call(start_worker, call, options, runs):
    worker = start_worker(concurrency=2)
    calls = []
    for value in range(6):
        last = time.monotonic()
        calls.append(call(options, value, countdown=1))
        time.sleep(0.2)  # the pause between two changes
    for each in calls:
        each.get(timeout=20)
    assert sorted(line["value"] for line in worker.events("start")) == runs
    assert starts(worker)[-1] > last + 0.9


@pytest.mark.only_all("it starts a worker")
@pytest.mark.parametrize(
    ("options", "runs"), [(PAGE["refresh"], 2), (REQUEUE, 6)], ids=["", "control"]
)
def test_coalesce_runs_once_more_for_all_calls_during_a_run(start_worker, call, options, runs):
    worker = start_worker(concurrency=2)
    first = call(options, seconds=1)
    wait_for(lambda: worker.events("start"), "it runs")
    for each in [first, *(call(options) for _ in range(5))]:
        each.get(timeout=30)
    assert len(worker.events("start")) == runs
    assert starts(worker)[1] > worker.events("end")[0]["t"]


@pytest.mark.only_all("it starts a worker")
def test_throttle_keeps_a_time_between_two_starts_and_loses_no_change(start_worker, call):
    worker = start_worker(concurrency=2)
    options = {**PAGE["publish"], "lock_at_least": 2}
    call(options, 1).get(timeout=20)
    second = call(options, 2)
    assert call(options, 3).id == second.id
    second.get(timeout=20)
    assert [line["value"] for line in worker.events("start")] == [1, 2]
    first, second = starts(worker)
    assert second - first > 1.9


@pytest.mark.only_all("it starts a worker")
@pytest.mark.parametrize("period", [2, 0], ids=["", "control"])
def test_a_rate_limit_lets_so_many_start_in_any_period(start_worker, call, period):
    worker = start_worker(concurrency=4)
    options = {**PAGE["call_partner"], "lock_slots": 3, "lock_at_least": period}
    for each in [call(options) for _ in range(7)]:
        each.get(timeout=30)
    times = starts(worker)
    assert len(times) == 7
    # The lock is taken a moment before the body starts.
    spans = [later - earlier for earlier, later in zip(times, times[3:], strict=False)]
    assert (min(spans) > 1.9) == bool(period), spans
