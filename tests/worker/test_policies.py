"""What real workers do with a call that finds its lock held."""

from __future__ import annotations

import multiprocessing

import pytest
from celery.result import AsyncResult
from django.db import connections

from django_singletask.stores import close_stores
from tests.deadline import wait_for
from tests.deliveries import noted
from tests.testapp import log, tasks

fork = multiprocessing.get_context("fork")


def values(worker):
    """Return the values that ran, in the order in which they began."""
    return [line["value"] for line in worker.events("start")]


def test_rerun_runs_only_the_last_call(start_worker, queue):
    worker = start_worker(concurrency=4)
    calls = []
    with tasks.rerun.lock("a"):
        for value in range(1, 8):
            calls.append(tasks.rerun.apply_async(("a", 0, value), queue=queue))
            wait_for(lambda: noted("a") == value, "it has met the conflict")  # noqa: B023
    answers = [call.get(timeout=20) for call in calls]
    assert answers == ["superseded"] * 6 + ["ran"]
    assert values(worker) == [7]


def test_wait_runs_when_the_lock_is_free(start_worker, queue, runs_log):
    worker = start_worker(concurrency=2)
    results = [tasks.wait.apply_async(("a", 0.5, n), queue=queue) for n in range(2)]
    assert [result.get(timeout=20) for result in results] == ["ran", "ran"]
    spans = sorted((start, end) for _, start, end in log.runs(runs_log))
    assert spans[0][1] <= spans[1][0]
    assert "LockConflict" not in worker.text()


@pytest.mark.only_all("shown on another cache", "redis")
@pytest.mark.parametrize("cache", ["redis", "pymemcache"])
def test_as_many_run_at_once_as_the_lock_has_slots(start_worker, queue, on_cache, runs_log, cache):
    on_cache(cache)
    start_worker(cache=cache, concurrency=4)
    options = {"queue": queue, "lock_options": {"lock_slots": 2}}
    calls = [tasks.wait.apply_async(("a", 0.2), **options) for _ in range(8)]
    assert [call.get(timeout=20) for call in calls] == ["ran"] * 8
    spans = [(start, end) for _, start, end in log.runs(runs_log)]
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) == 2


@pytest.mark.only_all("it starts a worker")
def test_wait_raises_in_the_end(start_worker, queue):
    worker = start_worker(concurrency=2)
    first = tasks.wait.apply_async(("a", 60), queue=queue)
    wait_for(lambda: worker.events("start"), "the first runs")
    options = {"lock_wait": 0.5}
    second = tasks.wait.apply_async(("a", 0), queue=queue, lock_options=options)
    error = second.get(timeout=30, propagate=False)
    assert type(error).__name__ == "LockConflict"
    assert error.holder.task_id == first.id
    assert str(error).endswith("; gave up after 0.5 s (lock_wait)")
    assert "Traceback" not in worker.text()


@pytest.mark.only_all("shown on another cache", "pymemcache")
@pytest.mark.parametrize("cache", ["redis", "pymemcache"])
def test_requeue_raises_after_lock_wait(start_worker, queue, on_cache, cache):
    on_cache(cache)
    worker = start_worker(concurrency=1, cache=cache)
    options = {"lock_wait": 1.2, "unique_until": "start"}
    with tasks.requeue.lock("a"):
        call = tasks.requeue.apply_async(("a", 0), queue=queue, lock_options=options)
        error = call.get(timeout=30, propagate=False)
    assert type(error).__name__ == "LockConflict"
    assert call.state == "FAILURE"
    assert tasks.requeue.queued("a") is None
    assert not worker.events("start")


@pytest.mark.only_all("it starts a worker")
def test_requeue_leaves_the_retries_alone_and_honours_expires(start_worker, queue):
    worker = start_worker(concurrency=2)
    tasks.requeue.apply_async(("a", 6), queue=queue)
    wait_for(lambda: worker.events("start"), "the first runs")
    second = tasks.requeue.apply_async(("a", 0), queue=queue, expires=1)
    assert wait_for(lambda: second.state == "REVOKED", "it has expired")
    assert len(worker.events("start")) == 1


def send(number, ids, task, calls, options):
    """Send calls, in a process started for this."""
    sent = [task.apply_async((key, seconds, number), **options).id for key, seconds in calls]
    connections.close_all()
    close_stores()
    ids.put(sent)


def burst(task, calls, **options):
    """Let 8 processes send the same calls at the same time, and return their ids."""
    ids = fork.SimpleQueue()
    # Two processes must not use the same connection.
    connections.close_all()
    close_stores()
    senders = [
        fork.Process(target=send, args=(number, ids, task, calls, options)) for number in range(8)
    ]
    for sender in senders:
        sender.start()
    sent = [task_id for _ in senders for task_id in ids.get()]
    for sender in senders:
        sender.join()
    return sent


def results_of(ids):
    return [AsyncResult(task_id, app=tasks.rerun.app) for task_id in ids]


@pytest.mark.only_all("200 calls take long")
def test_requeue_in_a_burst_runs_all_200_one_at_a_time(start_worker, queue, runs_log):
    for name in ("one", "two"):
        start_worker(name=name, concurrency=4)
    results = results_of(burst(tasks.requeue, [("a", 0.005)] * 25, queue=queue))
    assert len({result.id for result in results}) == 200
    wait_for(lambda: all(result.ready() for result in results), "all have run", deadline=180)
    assert {result.result for result in results} == {"ran"}
    assert len(log.runs(runs_log)) == 200
    assert log.overlaps(runs_log) == 0


@pytest.mark.only_all("400 calls take long")
def test_rerun_in_50_bursts_runs_the_last_to_meet_the_conflict(start_worker, queue, runs_log):
    workers = [start_worker(name=name, concurrency=4) for name in ("one", "two")]
    keys = [f"round {number}" for number in range(50)]
    locks = [tasks.rerun.lock(key) for key in keys]
    for lock in locks:
        assert lock.acquire()
    results = results_of(burst(tasks.rerun, [(key, 0) for key in keys], queue=queue))
    assert len(results) == 400
    left = {result.id: result for result in results}

    def only_the_latest_are_left():
        for task_id in [task_id for task_id, result in left.items() if result.ready()]:
            del left[task_id]
        return len(left) == len(keys)

    wait_for(only_the_latest_are_left, "all other calls have given way", deadline=120)
    for lock in locks:
        assert lock.release()
    wait_for(lambda: all(result.ready() for result in left.values()), "they ran", deadline=60)
    assert {result.result for result in left.values()} == {"ran"}
    ran = {line["task_id"]: line["key"] for line in workers[0].events("start")}
    assert ran.keys() == left.keys()
    assert sorted(ran.values()) == sorted(keys)
    # Each was the last of its key to meet the conflict, as the tasks logged it. Calls that met it
    # within the time of one request are in no order.
    met = {line["task_id"]: (line["key"], line["t"]) for line in workers[0].events("conflict")}
    last = {}
    for key, at in met.values():
        last[key] = max(at, last.get(key, 0))
    assert len(met) == 400
    assert max(last[key] - at for key, at in map(met.get, ran)) < 0.2


@pytest.mark.only_all("it starts a worker")
def test_calls_without_a_lock_run_beside_each_other(start_worker, queue):
    """The message says that there is no lock; the task itself would have one."""
    start_worker(concurrency=2)
    options = {"lock_name": lambda key, number: None}
    calls = [tasks.meet.apply_async(("a", 2), queue=queue, lock_options=options) for _ in range(2)]
    assert [call.get(timeout=20) for call in calls] == ["met", "met"]


def test_a_worker_that_is_stopped_gives_back_the_calls_that_it_has_postponed(start_worker, queue):
    first = start_worker(concurrency=1)
    with tasks.requeue.lock("a"):
        call = tasks.requeue.apply_async(("a", 0), queue=queue)
        received = f"[{call.id}] received"
        wait_for(lambda: first.text().count(received) > 1, "it waits in this worker")
        first.stop()
    start_worker(name="two", concurrency=1)
    # Long before the visibility timeout of Redis, which is an hour.
    assert call.get(timeout=20) == "ran"
