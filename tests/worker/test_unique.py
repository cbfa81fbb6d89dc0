"""Duplicates at enqueue, with real workers."""

from __future__ import annotations

import os
import signal
import time
import uuid

import pytest

from django_singletask import SingletonTask
from tests.deadline import wait_for
from tests.testapp import tasks
from tests.testapp.celery import app
from tests.worker.harness import burst, get


def wait_until_free(task, key):
    wait_for(lambda: task.queued(key) is None, "an equal call can be queued")


def test_exactly_one_run_a_window(worker, key):
    """8 processes send 40 calls while the worker takes no messages, twice."""
    ids = []
    for _ in range(2):
        with worker.deaf():
            sent = {call.id for call in burst(worker, tasks.unique, *[key] * 5)}
        assert len(sent) == 1
        ids += sent
        assert get(app.AsyncResult(ids[-1])) == "ran"
        assert [line["task_id"] for line in worker.events("start")] == ids
    assert len(set(ids)) == 2


def test_until_the_run_has_its_lock(worker, key):
    with worker.deaf():
        first = worker.send(tasks.unique, key, 60)
        assert worker.send(tasks.unique, key).id == first.id
    wait_for(lambda: worker.events("start"), "it runs")
    assert tasks.unique.lock(key).locked()
    second = worker.send(tasks.unique, key)
    assert second.id != first.id
    worker.end(key)
    assert get(first) == "ran"
    get(second)


def test_until_the_run_has_finished_with_its_retries(worker, key):
    task = tasks.unique_to_the_end
    first, _ = worker.run(task, key, 1)
    assert worker.send(task, key).id == first.id
    worker.end(key)
    wait_for(lambda: first.state == "RETRY", "it waits to be tried again")
    assert worker.send(task, key).id == first.id
    assert get(first) == "ran"
    assert len(worker.events("start")) == 2
    wait_until_free(task, key)


@pytest.mark.only_all("it outlives its lease")
def test_a_run_longer_than_its_lease(worker, key):
    """The lock and the entry have one token, and both are renewed."""
    task = tasks.unique_to_the_end
    first, _ = worker.run(task, key, lock_options={"lock_timeout": 1})
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert worker.send(task, key).id == first.id
        # A call with a task id is always sent. This one is skipped.
        assert worker.call(task, key, task_id=uuid.uuid4().hex) == "skipped"
    worker.end(key)
    assert get(first) == "ran"
    assert worker.overlaps() == 0
    assert "lost" not in worker.text()


@pytest.mark.only_all("a run that is killed shows more")
def test_a_call_killed_while_it_waits_blocks_nobody(worker, key):
    first, _ = worker.run(tasks.unique, key)
    options = {"on_conflict": "wait", "lock_wait": 60}
    second = worker.send(tasks.unique, key, lock_options=options)

    def pid_of_second():
        active = app.control.inspect([worker.host], timeout=5, limit=1).active() or {}
        ids = {call["id"]: call["worker_pid"] for call in active.get(worker.host, [])}
        return ids.get(second.id)

    # Before a child has accepted the message, the worker cannot know which call is killed with it.
    pid = wait_for(pid_of_second, "a child has accepted the second")
    assert tasks.unique.queued(key).id == second.id
    os.kill(pid, signal.SIGKILL)
    wait_until_free(tasks.unique, key)
    worker.end(key)
    get(first)


@pytest.mark.only_all("shown on another cache", "pymemcache", "db_postgres")
@pytest.mark.parametrize("cache", ["redis", "pymemcache", "db_postgres"])
def test_a_killed_run_blocks_nobody(worker, key):
    task = tasks.unique_to_the_end
    # The entry of the queued call lasts an hour, that of the run ten minutes: the test waits for
    # neither.
    first, pid = worker.run(task, key, lock_options={"lock_timeout": 600})
    os.kill(pid, signal.SIGKILL)
    wait_until_free(task, key)
    second = worker.send(task, key)
    assert second.id != first.id
    assert get(second) == "ran"


@pytest.mark.only_all("it kills a worker")
def test_a_killed_worker_blocks_nobody_on_its_host(start_worker, key):
    task = tasks.unique_to_the_end
    worker = start_worker(concurrency=1)
    first, _ = worker.run(task, key, lock_options={"lock_timeout": 600})
    assert worker.send(task, key).id == first.id
    worker.kill_group()
    wait_until_free(task, key)
    assert worker.send(task, key).id != first.id


def test_a_call_revoked_before_its_delivery(worker, key):
    with worker.deaf():
        call = worker.send(tasks.unique, key)
        worker.obey("revoke", call.id)
        assert tasks.unique.queued(key).id == call.id
    wait_until_free(tasks.unique, key)
    assert not worker.events("start")


def test_an_expired_call(worker, key):
    with worker.deaf():
        call = worker.send(tasks.unique, key, expires=0.01)
        assert tasks.unique.queued(key).id == call.id
    wait_until_free(tasks.unique, key)
    assert not worker.events("start")


def test_a_call_of_a_task_that_the_worker_does_not_know(worker, key):
    @app.task(base=SingletonTask, unique_until="start", name="gone", shared=False)
    def gone(key):
        pass

    try:
        with worker.deaf():
            worker.send(gone, key)
            assert gone.queued(key)
        wait_until_free(gone, key)
    finally:
        app.tasks.pop("gone")


def test_a_call_that_was_received_and_lost_blocks_until_it_expires(start_worker, key):
    """Redis delivers it again after its visibility timeout, an hour by default."""
    worker = start_worker(concurrency=1)
    worker.run(tasks.plain, key)
    call = worker.send(tasks.unique, key, expires=2)
    wait_for(lambda: f"{call.id}] received" in worker.text(), "the call is received")
    worker.kill_group()
    assert worker.send(tasks.unique, key).id == call.id
    wait_until_free(tasks.unique, key)
    assert worker.send(tasks.unique, key).id != call.id
