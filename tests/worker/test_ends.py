"""The lock comes back at once, however a run ends."""

from __future__ import annotations

import os
import signal

import pytest
from celery import chain

from tests.deadline import wait_for
from tests.testapp import tasks
from tests.worker.harness import get


@pytest.mark.only_all("test_workflows.py shows it")
def test_a_replaced_task_runs_behind_itself(worker):
    assert worker.call(tasks.replacing, 0) == "step 3"
    assert [line["step"] for line in worker.events("step")] == [0, 1, 2, 3]


@pytest.mark.only_all("test_workflows.py shows it")
def test_the_next_link_of_a_chain_wants_the_same_lock(worker, key):
    links = chain(*[tasks.hold.si(key).set(queue=worker.queue) for _ in range(20)])
    assert get(links.apply_async()) == "ran"
    assert len(worker.events("end")) == 20


def test_a_soft_time_limit(worker, key):
    error = get(worker.send(tasks.limited, key), propagate=False)
    assert type(error).__name__ == "SoftTimeLimitExceeded"
    assert not tasks.limited.lock(key).locked()
    assert worker.events("end")


@pytest.mark.only_all("another case shows it", "cold", "soft")
@pytest.mark.parametrize("kind", ["warm", "cold", "soft"])
def test_a_shutdown(start_worker, key, kind):
    conf = {"worker_soft_shutdown_timeout": 1} if kind == "soft" else {}
    worker = start_worker(concurrency=1, conf=conf)
    worker.run(tasks.long, key)
    lock = tasks.long.lock(key)
    assert lock.locked()
    number = signal.SIGTERM if kind == "warm" else signal.SIGQUIT
    os.kill(worker.process.pid, number)
    if kind == "warm":
        worker.end(key)
    wait_for(lambda: worker.process.poll() is not None, "the worker ends")
    wait_for(lambda: not lock.locked(), "the lock is free")


def test_sigterm_to_the_child(worker, key):
    _, pid = worker.run(tasks.long, key)
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not tasks.long.lock(key).locked(), "the lock is free")
