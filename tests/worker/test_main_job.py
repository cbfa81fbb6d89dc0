"""Real prefork workers on a Redis broker."""

from __future__ import annotations

import pytest
from celery import group

from tests.deadline import wait_for
from tests.testapp import log, tasks


def test_40_calls_of_one_key_over_two_workers_never_overlap(start_worker, runs_log, queue):
    start_worker(name="one", concurrency=2)
    start_worker(name="two", concurrency=2)
    results = [tasks.hold.apply_async(("a", 0.05), queue=queue) for _ in range(40)]
    answers = [result.get(timeout=30) for result in results]
    assert set(answers) == {"ran", "skipped"}
    assert len(log.runs(runs_log)) == answers.count("ran")
    assert log.overlaps(runs_log) == 0


@pytest.mark.only_all("a control, which starts a worker")
def test_without_the_lock_the_same_calls_overlap(start_worker, runs_log, queue):
    """Negative control: the log shows overlaps."""
    start_worker(name="one", concurrency=2)
    start_worker(name="two", concurrency=2)
    results = [tasks.plain.apply_async(("a", 0.05), queue=queue) for _ in range(40)]
    for result in results:
        result.get(timeout=30)
    assert log.overlaps(runs_log) > 0


@pytest.mark.only_all("it starts a worker")
def test_8_keys_run_in_parallel(start_worker, queue):
    start_worker(concurrency=8)
    calls = group(tasks.meet.s(str(key), 8) for key in range(8))
    assert calls.apply_async(queue=queue).get(timeout=40) == ["met"] * 8


def test_the_result_of_a_raised_conflict_is_the_conflict(start_worker, queue, runs_log):
    worker = start_worker(concurrency=2)
    first = tasks.insist.apply_async(("a", 1), queue=queue)
    wait_for(lambda: worker.events("start"), "the first runs")
    second = tasks.insist.apply_async(("a", 1), queue=queue)
    error = second.get(timeout=30, propagate=False)
    assert type(error).__name__ == "LockConflict"
    assert error.holder.task_id == first.id
    assert first.get(timeout=30) == "ran"
    assert "Traceback" not in worker.text()


def test_the_caller_sees_who_runs(start_worker, queue):
    worker = start_worker(concurrency=1)
    assert not tasks.hold.lock("a").locked()
    first = tasks.hold.apply_async(("a", 1), queue=queue)
    wait_for(lambda: worker.events("start"), "the first runs")
    holder = tasks.hold.lock("a").holder()
    assert holder.task_id == first.id
    assert holder.pid in worker.children()
    assert tasks.hold.lock(key="a").locked()
    first.get(timeout=30)
    assert not tasks.hold.lock("a").locked()


@pytest.mark.only_all("it starts a worker")
def test_the_body_sees_its_own_lock(start_worker, queue):
    start_worker(concurrency=1)
    name, key, owned = tasks.whose.apply_async(("a",), queue=queue).get(timeout=30)
    assert name == "tests.testapp.tasks.whose(key='a')"
    assert key == tasks.whose.lock("a").key
    assert owned


@pytest.mark.only_all("it starts a worker")
def test_only_one_below_shared_task(start_worker, queue, runs_log):
    start_worker(concurrency=4)
    results = [tasks.alone.apply_async((0.3,), queue=queue) for _ in range(8)]
    answers = [result.get(timeout=20) for result in results]
    assert set(answers) == {"ran", "skipped"}
    assert log.overlaps(runs_log) == 0


@pytest.mark.only_all("it starts a worker")
def test_a_message_of_send_task_is_locked_too(start_worker, queue):
    worker = start_worker(concurrency=2)
    first = tasks.hold.apply_async(("a", 1), queue=queue)
    wait_for(lambda: worker.events("start"), "the first runs")
    second = tasks.hold.app.send_task(tasks.hold.name, ("a", 1), queue=queue)
    assert second.get(timeout=30) == "skipped"
    first.get(timeout=30)
