"""What real workers do with a call that finds its lock held."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from django_singletask.models import TaskLockEvent
from tests.deadline import wait_for
from tests.testapp import log, tasks
from tests.worker.harness import burst, get

EACH_FAMILY = pytest.mark.parametrize("cache", ["redis", "pymemcache"])


def test_of_calls_that_replace_each_other_only_the_last_runs(worker, key):
    with tasks.latest.lock(key):
        calls = [worker.send(tasks.latest, key, 0, value) for value in range(1, 8)]
        wait_for(lambda: len(worker.events("conflict")) == 7, "each has met the conflict")
    assert [get(call) for call in calls] == ["superseded"] * 6 + ["ran"]
    assert [line["value"] for line in worker.events("start")] == [7]


def test_of_calls_that_replace_each_other_in_bursts_the_last_runs(worker, key):
    """8 processes send a call to each of 5 keys at the same time, and this one sends the last."""
    keys = [f"{key} {number}" for number in range(5)]
    with ExitStack() as stack:
        for each in keys:
            stack.enter_context(tasks.latest.lock(each))
        calls = burst(worker, tasks.latest, *keys)
        wait_for(lambda: sum(not call.ready() for call in calls) == 5, "one of each key is left")
        last = [worker.send(tasks.latest, each) for each in keys]
        wait_for(lambda: all(call.ready() for call in calls), "they have given way as well")
    assert [get(call) for call in last] == ["ran"] * 5
    assert [get(call) for call in calls] == ["superseded"] * 40
    assert sorted(line["key"] for line in worker.events("start")) == keys


def test_requeue_in_a_burst_runs_all_one_at_a_time(worker, key):
    calls = burst(worker, tasks.requeue, *[key] * 5)
    assert len({call.id for call in calls}) == 40
    assert {get(call) for call in calls} == {"ran"}
    assert len(worker.events("end")) == 40
    assert worker.overlaps() == 0


def test_wait_runs_when_the_lock_is_free(worker, key):
    first, _ = worker.run(tasks.wait, key)
    second = worker.send(tasks.wait, key)
    rows = TaskLockEvent.objects.filter(task_id=second.id)
    waiting = wait_for(rows.filter(result="waiting").first, "the history says that it waits")
    assert waiting.blocked_by_task_id == first.id
    worker.end(key)
    assert [get(first), get(second)] == ["ran", "ran"]
    assert worker.overlaps() == 0
    assert "LockConflict" not in worker.text()
    run = wait_for(rows.filter(kind="run").first, "its run is recorded")
    assert 1 <= run.waited < 30


@pytest.mark.only_all("shown on another cache", "redis")
@EACH_FAMILY
def test_as_many_run_at_once_as_the_lock_has_slots(worker, key):
    options = {"lock_options": {"lock_slots": 2}}
    calls = [worker.send(tasks.wait, key, 0.2, **options) for _ in range(8)]
    assert [get(call) for call in calls] == ["ran"] * 8
    spans = [(start, end) for _, start, end in log.runs(worker.lines())]
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) == 2


def test_wait_raises_in_the_end(worker, key):
    first, _ = worker.run(tasks.wait, key)
    second = worker.send(tasks.wait, key, lock_options={"lock_wait": 0.5})
    error = get(second, propagate=False)
    assert type(error).__name__ == "LockConflict"
    assert error.holder.task_id == first.id
    assert str(error).endswith("; gave up after 0.5 s (lock_wait)")
    assert "Traceback" not in worker.text()
    worker.end(key)
    get(first)


@pytest.mark.only_all("shown on another cache", "pymemcache")
@EACH_FAMILY
def test_requeue_raises_after_lock_wait(worker, key):
    options = {"lock_wait": 1.2, "unique_until": "start"}
    with tasks.requeue.lock(key):
        call = worker.send(tasks.requeue, key, lock_options=options)
        error = get(call, propagate=False)
    assert type(error).__name__ == "LockConflict"
    assert call.state == "FAILURE"
    assert tasks.requeue.queued(key) is None
    assert not worker.events("start")


def test_requeue_leaves_the_retries_alone_and_honours_expires(worker, key):
    with tasks.requeue.lock(key):
        call = worker.send(tasks.requeue, key, expires=1)
        wait_for(lambda: call.state == "REVOKED", "it has expired")
    assert not worker.events("start")


def test_calls_without_a_lock_run_beside_each_other(worker, key):
    """The message says that there is no lock; the task itself would have one."""
    options = {"lock_options": {"lock_name": lambda key, number, place: None}}
    calls = [worker.send(tasks.meet, key, 2, key, **options) for _ in range(2)]
    assert [get(call) for call in calls] == ["met", "met"]


def test_a_worker_that_is_stopped_gives_back_the_calls_that_it_has_postponed(start_worker, key):
    first = start_worker(concurrency=1)
    with tasks.requeue.lock(key):
        call = first.send(tasks.requeue, key)
        received = f"[{call.id}] received"
        wait_for(lambda: first.text().count(received) > 1, "it waits in this worker")
        first.stop()
    start_worker(name="two", concurrency=1)
    # Long before the visibility timeout of Redis, which is an hour.
    assert get(call) == "ran"


# What raises a conflict, or is told of it, may try again


def test_a_conflict_is_retried_until_the_lock_is_free(worker, key):
    task = tasks.tenacious
    with task.lock(key):
        call = worker.send(task, key)
        wait_for(lambda: len(worker.events("conflict")) > 1, "it was retried")
        assert task.queued(key).id == call.id
        assert not worker.events("start")
    assert get(call) == "ran"


def test_a_call_that_is_skipped_is_tried_again_or_rejected(worker, key):
    again, rejecting = tasks.trying_again, tasks.rejecting

    def skips(call):
        return len(worker.events("skipped", task_id=call.id))

    with again.lock(key), rejecting.lock(key):
        tried = worker.send(again, key)
        wait_for(lambda: skips(tried) >= 2, "it was skipped again")
        assert again.queued(key).id == tried.id
        rejected = worker.send(rejecting, key)
        wait_for(lambda: skips(rejected), "it was skipped")
        wait_for(lambda: rejecting.queued(key) is None, "an equal call can be queued")
    assert get(tried) == "ran"
    wait_for(lambda: again.queued(key) is None, "an equal call can be queued")
    later = worker.send(rejecting, key)
    assert get(later) == "ran"
    assert skips(rejected) == 1
    assert [line["task_id"] for line in worker.events("start")] == [tried.id, later.id]
