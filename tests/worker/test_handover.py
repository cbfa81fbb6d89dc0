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
from tests.worker.harness import get


def send(worker, way, name):
    """Send a chain from a process that ends, and return the result of its last link."""
    command = [sys.executable, "-m", "tests.sender", way, name, worker.queue]
    done = subprocess.run(command, env=worker.env, stdout=subprocess.PIPE, text=True, check=True)
    return app.AsyncResult(done.stdout.strip())


@pytest.mark.only_all("another case shows it", "pass_on")
@pytest.mark.parametrize("way", ["finish", "pass_on"])
def test_the_last_link_of_a_chain_frees_the_lock_of_the_command_that_sent_it(worker, key, way):
    result = send(worker, way, key)
    for link in (f"{key} first", f"{key} last"):
        wait_for(lambda link=link: worker.events("start", key=link), f"{link} runs")
        assert not TaskLock(key).acquire()
        worker.end(link)
    assert get(result) == "ran"
    assert not TaskLock(key).locked()


@pytest.mark.only_all("a control")
def test_control_without_handing_over_the_lock_is_free_while_the_chain_runs(worker, key):
    result = send(worker, "kept", key)
    wait_for(lambda: worker.events("start"), "the first link runs")
    with TaskLock(key):
        assert not result.ready()
    worker.end(f"{key} first")
    worker.end(f"{key} last")
    assert get(result) == "ran"


@pytest.fixture
def handle(key):
    with TaskLock(key) as lock:
        return lock.hand_over(for_=60)


def test_a_killed_receiver_receives_it_again_when_its_message_is_delivered_again(
    worker, key, handle
):
    result = worker.send(tasks.finish, handle, key, 60)
    (first,) = wait_for(lambda: worker.events("start"), "it has received the lock")
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: len(worker.events("start")) == 2, "the message is delivered again")
    assert TaskLock(key).holder().pid == worker.events("start")[1]["pid"]
    worker.end(key)
    assert get(result) == "ran"
    assert not TaskLock(key).locked()


def test_another_task_does_not_receive_the_lock_of_a_killed_receiver(worker, key, handle):
    worker.send(tasks.pass_on, handle, key, 60)
    (first,) = wait_for(lambda: worker.events("start"), "it has received the lock")
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: not TaskLock(key).locked(), "the receiver is dead")
    with pytest.raises(LockLost, match="was already received"):
        worker.call(tasks.finish, handle, key)
    with TaskLock(key):  # as a dead holder's, for whoever wants it
        pass


def test_a_web_view_answers_409_until_the_task_that_it_started_has_ended(worker, key):
    def start_import():
        """Answer a request as the view in docs/guides/handing-over.rst does."""
        with TaskLock(key, on_conflict="skip") as lock:
            if not lock:
                return 409
            handle = lock.hand_over(for_=60)
        worker.send(tasks.finish, handle, key, 60)
        return 202

    with worker.deaf():
        assert [start_import(), start_import()] == [202, 409]
    wait_for(lambda: worker.events("start"), "the task runs")
    assert start_import() == 409
    worker.end(key)
    wait_for(lambda: start_import() == 202, "the task has ended")
    wait_for(lambda: len(worker.events("end")) == 2, "and the next one")
