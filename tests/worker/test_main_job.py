"""Real prefork workers on a Redis broker."""

from __future__ import annotations

import uuid

import pytest

from tests.deadline import wait_for
from tests.testapp import tasks
from tests.worker.harness import get


def test_40_calls_of_one_key_over_two_workers_never_overlap(start_worker, key):
    worker = start_worker(name="one")
    start_worker(name="two")
    answers = [get(call) for call in [worker.send(tasks.hold, key, 0.05) for _ in range(40)]]
    assert set(answers) == {"ran", "skipped"}
    assert len(worker.events("end")) == answers.count("ran")
    assert worker.overlaps() == 0


@pytest.mark.only_all("a control")
def test_without_the_lock_the_same_calls_overlap(worker, key):
    """Negative control: the log shows overlaps."""
    for call in [worker.send(tasks.plain, key, 0.05) for _ in range(40)]:
        get(call)
    assert worker.overlaps() > 0


def test_4_keys_run_in_parallel(worker, key):
    calls = [worker.send(tasks.meet, f"{key} {number}", 4, key) for number in range(4)]
    assert [get(call) for call in calls] == ["met"] * 4


def test_the_result_of_a_raised_conflict_is_the_conflict(worker, key):
    first, _ = worker.run(tasks.insist, key)
    error = get(worker.send(tasks.insist, key), propagate=False)
    assert type(error).__name__ == "LockConflict"
    assert error.holder.task_id == first.id
    worker.end(key)
    assert get(first) == "ran"
    assert "Traceback" not in worker.text()


def test_the_caller_sees_who_runs(worker, key):
    lock = tasks.hold.lock(key)
    assert not lock.locked()
    call, pid = worker.run(tasks.hold, key)
    assert pid in worker.children()
    assert (lock.holder().task_id, lock.holder().pid) == (call.id, pid)
    assert tasks.hold.lock(key=key).locked()
    worker.end(key)
    get(call)
    assert not lock.locked()


def test_the_body_sees_its_own_lock(worker, key):
    lock = tasks.whose.lock(key)
    assert worker.call(tasks.whose, key) == [lock.name, lock.key, True]
    assert lock.name == f"tests.testapp.tasks.whose(key='{key}')"


def test_only_one_below_shared_task(worker):
    answers = [get(call) for call in [worker.send(tasks.alone, 0.1) for _ in range(8)]]
    assert set(answers) == {"ran", "skipped"}
    assert worker.overlaps() == 0


def test_a_message_of_send_task_is_locked_too(worker, key):
    first, _ = worker.run(tasks.hold, key)
    second = tasks.hold.app.send_task(tasks.hold.name, (key,), queue=worker.queue)
    assert get(second) == "skipped"
    worker.end(key)
    get(first)


@pytest.mark.only_all("tests/task/test_bases.py shows it without a worker")
def test_another_base_is_called_once_a_run(worker, key):
    sides = {tasks.noted_inside: True, tasks.noted_outside: False}
    calls = [worker.send(task, key) for task in sides]
    assert [get(call) for call in calls] == ["ran", "ran"]
    for task, is_locked in sides.items():
        wait_for(lambda task=task: task.queued(key) is None, "it is queued no more")
        called = worker.events("called", task=task.name)
        assert [line["locked"] for line in called] == [is_locked] * 2  # and once for its retry


WRONG = [
    {"options": "x"},
    {"ticket": 7},
    {"queued": {"x": 1}},
    {"key": ["x"], "hops": 1},
    {"hops": "x", "key": "k", "name": "n"},
]
"""What another program may have put into the header of a message."""


def test_each_wrong_header_fails_its_own_task_and_the_worker_goes_on(worker, key):
    name, sent = tasks.requeue.name, []
    for wrong in WRONG:
        task_id = str(uuid.uuid4())
        headers = {"singletask": {"id": task_id, "task": name, **wrong}}
        options = {"task_id": task_id, "queue": worker.queue, "headers": headers}
        sent.append(tasks.requeue.app.send_task(name, (key,), **options))
    for result in sent:
        with pytest.raises(ValueError, match=r"^The message header 'singletask' has an invalid"):
            get(result)
    assert worker.call(tasks.requeue, key) == "ran"
    assert len(worker.events("start")) == 1
    text = worker.text()
    assert text.count("ValueError: The message header 'singletask'") == len(WRONG)
    assert "Signal handler" not in text
    assert "failed; trying again" not in text
