"""Listen to the worker, and let it exit at its start if its locks would not hold."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from celery import signals
from django.db import router

from django_singletask.checks import run
from django_singletask.conf import conf
from django_singletask.history.recorder import flush
from django_singletask.models import TaskLockEvent
from django_singletask.stores import close_stores, look_at_epoch
from django_singletask.worker.tokens import free_revoked, free_unreadable, hand_out_token
from django_singletask.worker.watcher import watch

__all__ = ["connect", "load", "refuse"]


def connect() -> None:
    for signal, receiver in (
        (signals.worker_init, refuse),
        (signals.worker_init, load),
        (signals.task_received, hand_out_token),
        (signals.task_revoked, free_revoked),
        (signals.task_rejected, free_unreadable),
        (signals.task_unknown, free_unreadable),
        (signals.worker_ready, watch),
        (signals.worker_process_shutdown, flush_history),
        (signals.worker_shutdown, flush_history),
    ):
        uid = f"django_singletask.{receiver.__name__}"
        signal.connect(receiver, dispatch_uid=uid, weak=False)


def refuse(**kwargs: Any) -> None:
    """Let a worker exit whose locks would not lock.

    Celery's Django fixup runs the system checks and throws their result away. Only SystemExit
    ends the worker from here: Celery logs and swallows any other error of a signal's receiver.
    """
    if os.environ.get("CELERY_SKIP_CHECKS"):
        return
    errors = [message for message in run() if message.is_serious() and not message.is_silenced()]
    if errors:
        text = "\n".join(str(error) for error in errors)
        sys.stderr.write(f"The worker does not start: its locks would not hold.\n{text}\n")
        sys.stderr.flush()
        raise SystemExit(1)


def load(**kwargs: Any) -> None:
    """Do once what would otherwise be done in each process of the pool, or at a bad time.

    Ask the cache for its epoch: the processes of the pool inherit it, so they notice if the cache
    is restarted before their first task. A cache that is down is reported by the first lock.

    Import what the threads of the main process need, before it has any. A process that is forked
    while a thread imports a module inherits the lock of that module, and not the thread that would
    free it. Its first task would wait for ever:

      watcher:      a process is gone    imports the store ......... frees its lock
      hub:                                     forks the next process
      next process:                                      imports the store: waits
    """
    with suppress(Exception):
        look_at_epoch(conf.cache)
    close_stores()
    router.db_for_write(TaskLockEvent)


def flush_history(**kwargs: Any) -> None:
    """Write what has gathered: the processes of a pool end without their exit handlers."""
    flush(2.0)
