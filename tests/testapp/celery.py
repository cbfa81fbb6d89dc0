"""The Celery application of the tests, in the test process and in the workers that it starts."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from celery.signals import before_task_publish, task_failure, task_received

from django_singletask import process
from django_singletask.signals import LockEvent, lock_event
from tests import intervals, traced
from tests.testapp import log

REDIS = urlsplit(os.environ.get("SINGLETASK_TEST_REDIS_URL", "redis://127.0.0.1:1/0")).netloc

# Let the worker seem to run on another machine.
if "SINGLETASK_TEST_BOOT_ID" in os.environ:
    process.boot_id = lambda: os.environ["SINGLETASK_TEST_BOOT_ID"]


class ImportsOfThreads:
    """Log each import of a module in another thread than the main one."""

    def find_spec(self, name: str, *args: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.write("import", module=name)


if "SINGLETASK_TEST_IMPORTS" in os.environ:
    sys.meta_path.insert(0, ImportsOfThreads())


def note_received(request: Any, **kwargs: object) -> None:
    intervals.note("received", task_id=request.id)


def note_failed(task_id: str, **kwargs: object) -> None:
    intervals.note("failed", task_id=task_id)


def note_postponed(headers: dict[str, Any], **kwargs: object) -> None:
    """Note a message before a worker publishes it, since another one may receive it at once."""
    intervals.note("postponed", task_id=headers["id"])


def note_event(event: LockEvent, **kwargs: object) -> None:
    if event.kind in ("conflict", "dead") and "SINGLETASK_TEST_LOG" in os.environ:
        log.write(event.kind, key=event.key, task_id=event.task_id, reason=event.reason)


traced.trace()
lock_event.connect(note_event)
if intervals.FOLDER in os.environ:
    intervals.record()
    task_received.connect(note_received)
    task_failure.connect(note_failed)
    before_task_publish.connect(note_postponed)

app = Celery("tests")
app.conf.update(
    broker_url=os.environ.get("SINGLETASK_TEST_BROKER", f"redis://{REDIS}/1"),
    result_backend=f"redis://{REDIS}/2",
    broker_connection_retry_on_startup=True,
    task_default_queue=os.environ.get("SINGLETASK_TEST_QUEUE", "celery"),
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
)
app.conf.update(json.loads(os.environ.get("SINGLETASK_TEST_CELERY", "{}")))
app.autodiscover_tasks()
app.autodiscover_tasks(related_name="workflow_tasks")
