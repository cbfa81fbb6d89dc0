"""A lock that a command hands over to the tasks that it sends, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from django_singletask import LockLost, TaskLock
from tests.deadline import wait_for
from tests.testapp import tasks
from tests.testapp.celery import app


def send(worker, way):
    """Send a chain from a process that ends, and return the result of its last link."""
    command = [sys.executable, "-m", "tests.sender", way, worker.queue]
    done = subprocess.run(command, env=worker.env, stdout=subprocess.PIPE, text=True, check=True)
    return app.AsyncResult(done.stdout.strip())


@pytest.mark.only_all("another case shows it", "pass_on")
@pytest.mark.parametrize("way", ["finish", "pass_on"])
def test_the_last_link_of_a_chain_frees_the_lock_of_the_command_that_sent_it(
    start_worker, queue, way
):
    worker = start_worker(concurrency=1)
    result = send(worker, way)
    for link in (1, 2):
        wait_for(lambda link=link: len(worker.events("start")) == link, f"link {link} runs")
        assert not TaskLock("chain").acquire()
    assert result.get(timeout=20) == "ran"
    assert not TaskLock("chain").locked()


@pytest.mark.only_all("a control, which starts a worker")
def test_control_without_handing_over_the_lock_is_free_while_the_chain_runs(start_worker, queue):
    worker = start_worker(concurrency=1)
    result = send(worker, "kept")
    wait_for(lambda: worker.events("start"), "the first link runs")
    lock = TaskLock("chain")
    assert lock.acquire()
    assert not result.ready()
    lock.release()
    assert result.get(timeout=20) == "ran"


def test_a_killed_receiver_receives_it_again_when_its_message_is_delivered_again(
    start_worker, queue
):
    worker = start_worker(concurrency=1)
    with TaskLock("chain") as lock:
        handle = lock.hand_over(for_=60)
    result = tasks.finish.apply_async((handle, "last", 1), queue=queue)
    (first,) = wait_for(lambda: worker.events("start"), "it has received the lock")
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: len(worker.events("start")) == 2, "the message is delivered again")
    assert TaskLock("chain").holder().pid == worker.events("start")[1]["pid"]
    assert result.get(timeout=20) == "ran"
    assert not TaskLock("chain").locked()


@pytest.mark.only_all("it starts a worker")
def test_another_task_does_not_receive_the_lock_of_a_killed_receiver(start_worker, queue):
    worker = start_worker(concurrency=1)
    with TaskLock("chain") as lock:
        handle = lock.hand_over(for_=60)
    tasks.pass_on.apply_async((handle, "first", 60), queue=queue)
    (first,) = wait_for(lambda: worker.events("start"), "it has received the lock")
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: not TaskLock("chain").locked(), "the receiver is dead")
    with pytest.raises(LockLost, match="was already received"):
        tasks.finish.apply_async((handle, "last"), queue=queue).get(timeout=20)
    assert TaskLock("chain").acquire()  # as a dead holder's, for whoever wants it
    TaskLock("chain").clear()


def start_import(queue):
    """Answer a request as the view in docs/guides/handing-over.rst does."""
    with TaskLock("import", on_conflict="skip") as lock:
        if not lock:
            return 409
        handle = lock.hand_over(for_=60)
    tasks.finish.apply_async((handle, "import", 1), queue=queue)
    return 202


@pytest.mark.only_all("it starts a worker")
def test_a_web_view_answers_409_until_the_task_that_it_started_has_ended(start_worker, queue):
    assert [start_import(queue), start_import(queue)] == [202, 409]
    worker = start_worker(concurrency=1)
    wait_for(lambda: worker.events("start"), "the task runs")
    assert start_import(queue) == 409
    wait_for(lambda: start_import(queue) == 202, "the task has ended")
