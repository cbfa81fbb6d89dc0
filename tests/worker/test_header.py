"""Messages with headers that another program made up, with a real worker."""

from __future__ import annotations

import uuid

import pytest

from django_singletask.task.header import HEADER
from tests.testapp import tasks

WRONG = [
    {"options": "x"},
    {"ticket": 7},
    {"queued": {"x": 1}},
    {"key": ["x"], "hops": 1},
    {"hops": "x", "key": "k", "name": "n"},
]


def test_each_task_fails_with_its_own_error_and_the_worker_goes_on(start_worker, queue, runs_log):
    worker = start_worker(concurrency=1)
    sent = []
    for wrong in WRONG:
        task_id, name = str(uuid.uuid4()), tasks.requeue.name
        headers = {HEADER: {"id": task_id, "task": name, **wrong}}
        options = {"task_id": task_id, "queue": queue, "headers": headers}
        sent.append(tasks.requeue.app.send_task(name, ("a",), **options))
    for result in sent:
        with pytest.raises(ValueError, match=r"^The message header 'singletask' has an invalid"):
            result.get(timeout=20)
    assert tasks.requeue.apply_async(("a",), queue=queue).get(timeout=20) == "ran"
    assert len(worker.events("start")) == 1
    text = worker.text()
    assert text.count("ValueError: The message header 'singletask'") == len(WRONG)
    assert "Signal handler" not in text
    assert "failed; trying again" not in text
