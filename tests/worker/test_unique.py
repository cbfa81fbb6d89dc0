"""Duplicates at enqueue, with real workers."""

from __future__ import annotations

import os
import signal
import time
import uuid

import pytest

from django_singletask import SingletonTask
from tests.deadline import wait_for
from tests.testapp import log, tasks
from tests.worker.test_policies import burst

EACH_FAMILY = pytest.mark.parametrize("cache", ["redis", "pymemcache", "db_postgres"])


def wait_until_free(task, key):
    wait_for(lambda: task.queued(key) is None, "an equal call can be queued")


@pytest.mark.only_all("600 calls take long")
def test_exactly_one_run_a_window(start_worker, queue, runs_log):
    """8 processes send 200 calls while the worker takes no messages, three times."""
    worker = start_worker(concurrency=4)
    control = tasks.unique.app.control

    def obey(order):
        # A broadcast can come before a worker that has just started listens to it.
        def replies():
            return order(queue, reply=True, limit=1, timeout=2)

        wait_for(replies, f"the worker's reply to {order.__name__}")

    ids = []
    for _ in range(3):
        obey(control.cancel_consumer)
        sent = burst(tasks.unique, [("a", 0)] * 25, queue=queue)
        assert (len(sent), len(set(sent))) == (200, 1)
        ids.append(sent[0])
        obey(control.add_consumer)
        assert tasks.unique.AsyncResult(sent[0]).get(timeout=20) == "ran"
        assert [line["task_id"] for line in worker.events("start")] == ids
    assert len(set(ids)) == 3


@pytest.mark.only_all("a control, which starts a worker")
def test_without_unique_until_each_call_of_a_burst_is_sent(queue):
    """Negative control."""
    assert len(set(burst(tasks.requeue, [("a", 0)] * 25, queue=queue))) == 200


def test_until_the_run_has_its_lock(start_worker, queue):
    first = tasks.unique.apply_async(("a", 1), queue=queue)
    assert tasks.unique.apply_async(("a",), queue=queue).id == first.id
    worker = start_worker(concurrency=2)
    wait_for(lambda: worker.events("start"), "it runs")
    assert tasks.unique.lock("a").locked()
    assert tasks.unique.apply_async(("a",), queue=queue).id != first.id
    assert first.get(timeout=20) == "ran"


def test_until_the_run_has_finished_with_its_retries(start_worker, queue):
    task = tasks.unique_to_the_end
    worker = start_worker(concurrency=2)
    first = task.apply_async(("a", 0.5, 1), queue=queue)
    wait_for(lambda: worker.events("start"), "it runs")
    assert task.apply_async(("a",), queue=queue).id == first.id
    wait_for(lambda: first.state == "RETRY", "it waits to be tried again")
    assert task.apply_async(("a",), queue=queue).id == first.id
    assert first.get(timeout=20) == "ran"
    assert len(worker.events("start")) == 2
    wait_until_free(task, "a")


@pytest.mark.only_all("it starts a worker")
def test_a_run_longer_than_its_lease(start_worker, queue, runs_log):
    """The lock and the entry have one token, and both are renewed."""
    task = tasks.unique_to_the_end
    worker = start_worker(concurrency=2)
    options = {"lock_timeout": 1}
    first = task.apply_async(("a", 3), queue=queue, lock_options=options)
    wait_for(lambda: worker.events("start"), "it runs")
    until = worker.events("start")[0]["t"] + 2.5
    while time.monotonic() < until:
        assert task.apply_async(("a",), queue=queue).id == first.id
        # A call with a task id is always sent. This one is skipped.
        other = task.apply_async(("a", 0), queue=queue, task_id=uuid.uuid4().hex)
        assert other.get(timeout=20) == "skipped"
    assert first.get(timeout=20) == "ran"
    assert log.overlaps(runs_log) == 0
    assert "lost" not in worker.text()


@pytest.mark.only_all("it starts a worker")
def test_a_call_killed_while_it_waits_blocks_nobody(start_worker, queue):
    worker = start_worker(concurrency=2)
    tasks.unique.apply_async(("a", 60), queue=queue)
    wait_for(lambda: worker.events("start"), "the first runs")
    options = {"on_conflict": "wait", "lock_wait": 60}
    second = tasks.unique.apply_async(("a",), queue=queue, lock_options=options)
    name = f"one-{queue}@test"
    inspect = tasks.unique.app.control.inspect([name], timeout=5, limit=1)

    def pid_of_second():
        active = (inspect.active() or {}).get(name, [])
        return next((task["worker_pid"] for task in active if task["id"] == second.id), None)

    # Before a child has accepted the message, the worker cannot know which call is killed with it.
    pid = wait_for(pid_of_second, "a child has accepted the second")
    assert tasks.unique.queued("a").id == second.id
    os.kill(pid, signal.SIGKILL)
    wait_until_free(tasks.unique, "a")


@pytest.mark.only_all("shown on another cache", "pymemcache", "db_postgres")
@EACH_FAMILY
def test_a_killed_run_blocks_nobody(start_worker, queue, on_cache, cache):
    on_cache(cache)
    task = tasks.unique_to_the_end
    # The entry of the queued call lasts an hour, that of the run ten minutes: the test waits for
    # neither.
    options = {"lock_timeout": 600}
    worker = start_worker(cache=cache, concurrency=1)
    first = task.apply_async(("a", 60), queue=queue, lock_options=options)
    wait_for(lambda: worker.events("start"), "it runs")
    os.kill(worker.events("start")[0]["pid"], signal.SIGKILL)
    wait_for(lambda: task.queued("a") is None, "it is free")
    second = task.apply_async(("a", 0), queue=queue)
    assert second.id != first.id
    assert second.get(timeout=20) == "ran"


@pytest.mark.only_all("it starts a worker")
def test_a_killed_worker_blocks_nobody_on_its_host(start_worker, queue):
    task = tasks.unique_to_the_end
    worker = start_worker(concurrency=1)
    first = task.apply_async(("a", 60), queue=queue, lock_options={"lock_timeout": 600})
    wait_for(lambda: worker.events("start"), "it runs")
    assert task.apply_async(("a", 60), queue=queue).id == first.id
    worker.kill_group()
    wait_until_free(task, "a")
    assert task.apply_async(("a", 0), queue=queue).id != first.id


def test_a_call_revoked_before_its_delivery(start_worker, queue):
    worker = start_worker(concurrency=1)
    busy = tasks.plain.apply_async(("busy", 1), queue=queue)
    wait_for(lambda: worker.events("start"), "it runs")
    call = tasks.unique.apply_async(("a",), queue=queue)
    call.revoke()
    busy.get(timeout=20)
    wait_until_free(tasks.unique, "a")
    assert len(worker.events("start")) == 1


@pytest.mark.only_all("it starts a worker")
def test_an_expired_call(start_worker, queue):
    call = tasks.unique.apply_async(("a",), queue=queue, expires=0.01)
    assert tasks.unique.queued("a").id == call.id
    worker = start_worker(concurrency=1)
    wait_until_free(tasks.unique, "a")
    assert not worker.events("start")


def test_a_call_that_was_received_and_lost_blocks_until_it_expires(start_worker, queue):
    """Redis delivers it again after its visibility timeout, an hour by default."""
    worker = start_worker(concurrency=1)
    tasks.plain.apply_async(("busy", 60), queue=queue)
    wait_for(lambda: worker.events("start"), "a call keeps the worker busy")
    call = tasks.unique.apply_async(("a",), queue=queue, expires=5)
    wait_for(lambda: f"{call.id}] received" in worker.text(), "the call is received")
    worker.kill_group()
    assert tasks.unique.apply_async(("a",), queue=queue).id == call.id
    wait_until_free(tasks.unique, "a")
    assert tasks.unique.apply_async(("a",), queue=queue).id != call.id


@pytest.mark.only_all("it starts a worker")
def test_a_call_of_a_task_that_the_worker_does_not_know(start_worker, queue):
    app = tasks.unique.app

    @app.task(base=SingletonTask, unique_until="start", name="gone", shared=False)
    def gone(key):
        pass

    try:
        gone.apply_async(("a",), queue=queue)
        assert gone.queued("a")
        start_worker(concurrency=1)
        wait_until_free(gone, "a")
    finally:
        app.tasks.pop("gone")
