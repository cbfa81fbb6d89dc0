"""What the guide about debouncing and limits promises, with its own options and real workers."""

from __future__ import annotations

import itertools
import multiprocessing
import time

import pytest

from tests.deadline import wait_for
from tests.guides import lock_options
from tests.testapp import tasks
from tests.worker.harness import get

PAGE = lock_options("guides/rate-limits.rst")
REQUEUE = {"on_conflict": "requeue"}


@pytest.fixture
def call(worker, key):
    """Give the function that sends a call with lock options."""

    def send(options, value=0, **rest):
        return worker.send(tasks.requeue, key, 0, value, lock_options=options, **rest)

    return send


def starts(worker):
    return sorted(line["t"] for line in worker.events("start"))


@pytest.mark.only_all("a control", "control")
@pytest.mark.parametrize(
    ("options", "runs"), [(PAGE["reindex"], [5]), (REQUEUE, [*range(6)])], ids=["", "control"]
)
def test_debounce_runs_once_after_the_last_call(worker, call, options, runs):
    calls = []
    for value in range(6):
        last = time.monotonic()
        calls.append(call(options, value, countdown=1))
    for each in calls:
        get(each)
    assert sorted(line["value"] for line in worker.events("start")) == runs
    assert starts(worker)[-1] > last + 0.9


def test_debounce_runs_in_time_although_two_producers_send_without_a_pause(worker, key):
    options = {**PAGE["reindex"], "unique_for": 2}
    fork = multiprocessing.get_context("fork")
    is_enough = fork.Event()

    def send(value):
        return worker.send(tasks.requeue, key, 0, value, countdown=1, lock_options=options)

    def produce(first):
        for value in itertools.count(first, 2):
            send(value)
            if is_enough.wait(0.05):
                break

    before = time.monotonic()
    producers = [fork.Process(target=produce, args=[first]) for first in (0, 1)]
    for each in producers:
        each.start()
    wait_for(lambda: len(starts(worker)) > 1, "two runs, while calls go on")
    is_enough.set()
    for each in producers:
        each.join()
    assert get(send(-1)) == "ran"
    values = [line["value"] for line in worker.events("start")]
    assert values[-1] == -1
    assert len({*values}) == len(values)
    assert worker.overlaps() == 0
    assert worker.events("start")[0]["t"] > before + 0.9


@pytest.mark.only_all("a control", "control")
@pytest.mark.parametrize(
    ("options", "runs"), [(PAGE["refresh"], 2), (REQUEUE, 6)], ids=["", "control"]
)
def test_coalesce_runs_once_more_for_all_calls_during_a_run(worker, key, call, options, runs):
    first, _ = worker.run(tasks.requeue, key, lock_options=options)
    calls = [first, *(call(options) for _ in range(5))]
    worker.end(key)
    for each in calls:
        get(each)
    assert len(worker.events("start")) == runs
    assert starts(worker)[1] > worker.events("end")[0]["t"]


# The time is counted from a moment before the body writes its line.


def test_throttle_keeps_a_time_between_two_starts_and_loses_no_change(worker, call):
    options = {**PAGE["publish"], "lock_at_least": 2}
    get(call(options, 1))
    second = call(options, 2)
    assert call(options, 3).id == second.id
    get(second)
    assert [line["value"] for line in worker.events("start")] == [1, 2]
    first, second = starts(worker)
    assert second - first > 1.5


THIRD = [("raise",), ("retry",), ("reject",), ("autoretry",), *[()] * 8]
"""How the runs of some calls end: a third of the first tries in another way than by returning."""


@pytest.mark.only_all(
    "a control, and shown on other caches", "control", "pymemcache", "db_postgres"
)
@pytest.mark.parametrize(
    ("cache", "first"),
    [
        *[(cache, "raise") for cache in ("redis", "pymemcache", "db_postgres", "cluster")],
        ("redis", "free and raise"),
    ],
    ids=["redis", "pymemcache", "db_postgres", "cluster", "control"],
)
def test_a_rate_limit_counts_attempts_however_they_end(worker, key, cache, first):
    """In any two seconds, at most three bodies start."""
    options = {**PAGE["call_partner"], "lock_slots": 3, "lock_at_least": 2}
    calls = [
        worker.send(tasks.ending, key, *ends, lock_options=options)
        for ends in [(first,), *THIRD[1:]]
    ]
    for each in calls:
        get(each, propagate=False)
    times = starts(worker)
    assert len(times) == 15
    spans = [later - earlier for earlier, later in zip(times, times[3:], strict=False)]
    assert (min(spans) > 1.8) == (first == "raise"), spans
