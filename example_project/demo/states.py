"""Locks in the states that the imports do not reach, for `manage.py demo --serve`."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.management import CommandError, call_command
from django.utils import timezone

from django_singletask import LockLost, TaskLock
from django_singletask.models import TaskLockEvent
from example_project.feeds.tasks import import_feed

HOUR = 3600
# A process that gets no chance to release its lock.
KILLED = f"""
import os, signal, django
django.setup()
from django_singletask import TaskLock
TaskLock("backup", timeout={HOUR}).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


def show(stack: contextlib.ExitStack, feed_url: str) -> None:
    """Bring locks and calls into each state. `stack` ends the hold of this process."""
    # The warnings about cleared and lost locks belong to the pages, not to the terminal.
    logging.getLogger("django_singletask").addHandler(logging.NullHandler())
    top, quiet = settings.BASE_DIR.parent, subprocess.DEVNULL
    subprocess.run([sys.executable, "-c", KILLED], cwd=top, stderr=quiet)  # process dead
    handed_over = TaskLock("video upload")
    handed_over.acquire()
    handed_over.hand_over(for_=HOUR)

    cleared = TaskLock("price update")
    cleared.acquire()
    TaskLock("price update").clear(actor="operator", reason="it was stuck")
    with contextlib.suppress(LockLost):
        cleared.extend()  # this is when its holder notices: lost

    send(f"{feed_url}?once-an-hour", lock_at_least=HOUR)  # kept
    for _ in range(2):  # queued, and its duplicate
        send(f"{feed_url}?later", countdown=HOUR, unique_until="start")

    record("newsletter", hours=7.7, kind="skipped", count=27, last_at=timezone.now())  # starving
    record("stock report", hours=2, kind="acquired", token="0" * 32, timeout=HOUR)  # expired

    for _ in range(5):
        with TaskLock("search index"):
            time.sleep(0.1)
    stack.enter_context(TaskLock("search index"))  # slow after 10 seconds


def send(feed_url: str, countdown: int = 0, **lock_options: Any) -> None:
    call = {"feed_url": feed_url}
    import_feed.apply_async(kwargs=call, countdown=countdown, lock_options=lock_options)


def record(name: str, hours: float, **fields: Any) -> None:
    """Add a row to the history, as if it was written by another host so many hours ago."""
    at = timezone.now() - timedelta(hours=hours)
    key = TaskLock(name).key
    facts = {"cache": "locks", "host": "worker-7", "pid": 4711}
    TaskLockEvent.objects.create(name=name, key=key, at=at, **facts, **fields)


def free() -> None:
    """Free all locks and queued calls of the demo in a cache that others use too."""
    for what in ([], ["--queued"]):
        with contextlib.suppress(CommandError):
            call_command("locks", "clear", "*", "--yes", *what, stdout=io.StringIO())
