"""The lock comes back at once, however a run ends."""

from __future__ import annotations

import os
import signal

import pytest
from celery import chain

from tests.deadline import wait_for
from tests.testapp import log, tasks


@pytest.mark.only_all("test_workflows.py shows it")
def test_a_replaced_task_runs_behind_itself(start_worker, queue):
    worker = start_worker(concurrency=4)
    assert tasks.replacing.apply_async((0,), queue=queue).get(timeout=30) == "step 3"
    assert [line["step"] for line in worker.events("step")] == [0, 1, 2, 3]


@pytest.mark.only_all("test_workflows.py shows it")
def test_the_next_link_of_a_chain_wants_the_same_lock(start_worker, queue, runs_log):
    start_worker(concurrency=4)
    links = chain(*[tasks.hold.si("a", 0.01).set(queue=queue) for _ in range(20)])
    assert links.apply_async().get(timeout=30) == "ran"
    assert len(log.runs(runs_log)) == 20


def test_a_soft_time_limit(start_worker, queue):
    worker = start_worker(concurrency=1)
    error = tasks.limited.apply_async(("a",), queue=queue).get(timeout=20, propagate=False)
    assert type(error).__name__ == "SoftTimeLimitExceeded"
    assert not tasks.limited.lock("a").locked()
    assert worker.events("end")


@pytest.mark.only_all("another case shows it", "cold", "soft")
@pytest.mark.parametrize("kind", ["warm", "cold", "soft"])
def test_a_shutdown(start_worker, queue, kind):
    conf = {"worker_soft_shutdown_timeout": 1} if kind == "soft" else {}
    worker = start_worker(concurrency=1, conf=conf)
    seconds = 1.5 if kind == "warm" else 60
    tasks.long.apply_async(("a", seconds), queue=queue)
    wait_for(lambda: worker.events("start"), "it runs")
    lock = tasks.long.lock("a")
    assert lock.locked()
    number = signal.SIGTERM if kind == "warm" else signal.SIGQUIT
    os.kill(worker.process.pid, number)
    wait_for(lambda: worker.process.poll() is not None, "the worker ends", deadline=30)
    wait_for(lambda: not lock.locked(), "the lock is free")


@pytest.mark.only_all("it starts a worker")
def test_sigterm_to_the_child(start_worker, queue):
    worker = start_worker(concurrency=1)
    tasks.long.apply_async(("a", 60), queue=queue)
    pid = wait_for(lambda: worker.events("start"), "it runs")[0]["pid"]
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not tasks.long.lock("a").locked(), "the lock is free")
