"""Locks in the states that the imports do not reach, for `manage.py demo --serve`."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
import time
from datetime import timedelta

from django.conf import settings
from django.core.management import CommandError, call_command
from django.utils.timezone import now

from django_singletask import LockLost, TaskLock
from django_singletask.models import TaskLockEvent
from example_project.feeds.tasks import import_feed

HOUR = 3600
# The warnings about cleared and lost locks belong to the pages, not to the terminal.
logging.getLogger("django_singletask").addHandler(logging.NullHandler())
KILLED = """import os, django; django.setup(); from django_singletask import TaskLock
TaskLock("backup", timeout=3600).acquire(); os.kill(os.getpid(), 9)"""


def show(stack: contextlib.ExitStack, url: str) -> None:
    """Bring locks and calls into each state. `stack` ends the hold of this process."""
    subprocess.run([sys.executable, "-c", KILLED], cwd=settings.BASE_DIR.parent)  # dead
    with TaskLock("video upload") as lock:
        lock.hand_over(for_=HOUR)
    with contextlib.suppress(LockLost), TaskLock("price update") as lock:
        lock.clear(actor="operator", reason="it was stuck")
        lock.extend()  # this is when its holder notices
    for _ in range(5):
        with TaskLock("search index"):
            time.sleep(0.1)
    stack.enter_context(TaskLock("search index"))  # slow after 10 seconds
    send, once = import_feed.apply_async, {"unique_until": "start"}
    send(kwargs={"feed_url": f"{url}?once-an-hour"}, lock_options={"lock_at_least": HOUR})  # kept
    for _ in range(2):  # queued, and its duplicate
        send(kwargs={"feed_url": f"{url}?later"}, countdown=HOUR, lock_options=once)
    # As if another host had written them: the calls of one lock starve, the other lock expired.
    conflicts = {"kind": "conflict", "result": "skipped", "reason": "skip", "count": 27}
    starving = {"name": "newsletter", "ref": "0" * 32, "last_at": now(), **conflicts}
    expired = {"name": "stock report", "ref": "1" * 32, "kind": "run", "timeout": HOUR}
    for hours, row in (7.7, starving), (2, expired):
        row |= {"key": TaskLock(row["name"]).key, "cache": "locks", "host": "web-7", "pid": 4711}
        at = now() - timedelta(hours=hours)
        TaskLockEvent.objects.create(at=at, happened_at=row.get("last_at", at), **row)


def free() -> None:
    """Free all locks and queued calls of the demo in a cache that others use too."""
    for queued in (False, True):
        with contextlib.suppress(CommandError):
            call_command("locks", "clear", "*", yes=True, queued=queued, stdout=io.StringIO())
