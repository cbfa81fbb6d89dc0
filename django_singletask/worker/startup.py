"""Connect the worker's signals, and stop a worker whose checks find an Error."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from celery import signals
from django.core.exceptions import ImproperlyConfigured
from django.db import router

from django_singletask.checks import run
from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.recorder import flush
from django_singletask.locks.renewal import release_owed
from django_singletask.models import TaskLockEvent
from django_singletask.stores import close_stores, look_at_epoch
from django_singletask.task.base import SingletonTask
from django_singletask.task.header import Header
from django_singletask.task.unique import discard
from django_singletask.worker.watcher import Accepted, has_processes, watcher


@signals.task_received.connect
def hand_out_token(sender: Any, request: Any, **kwargs: Any) -> None:
    """Choose the token of this delivery's lock, and note which process runs the delivery.

    So the main process and the child know the same token. This changes the request itself, because
    a request class of this package would replace the user's. In each pool the run is told when the
    worker received its message.
    """
    if not isinstance(request.task, SingletonTask):
        return
    name = request.task.name
    try:
        header = Header.of(request.request_dict, request.id, name)
    except ValueError:
        return  # the run itself fails with this error
    if header is None:
        header = Header(request.id, name)
    header.received = time.time()
    has_pool = has_processes(sender)
    if has_pool:
        header.token = os.urandom(16).hex()
    request.request_dict.update(header.into(None))
    if not has_pool:
        return
    delivery = Accepted(request, header)
    accepted = request.on_accepted
    succeeded = request.on_success

    def on_accepted(pid: int, time_accepted: float) -> None:
        del request.on_accepted  # part of a cycle, which would keep the request
        watcher.deliveries[pid] = delivery
        accepted(pid, time_accepted)

    def on_success(*args: Any, **kwargs: Any) -> None:
        del request.on_success
        delivery.ended = True
        succeeded(*args, **kwargs)

    request.on_accepted = on_accepted
    if header.queued:
        request.on_success = on_success


@signals.task_revoked.connect
def free_revoked(sender: Any, request: Any, terminated: bool, **kwargs: Any) -> None:
    """Free the entry of a call that was revoked, or expired, before its start."""
    if not terminated:
        discard(vars(request), request.id, sender.name)


@signals.task_rejected.connect
@signals.task_unknown.connect
def free_unreadable(message: Any, **kwargs: Any) -> None:
    """Free the entry of a call whose message or task the worker does not know."""
    headers = message.headers
    if headers:
        discard(headers, headers.get("id"), str(headers.get("task")))


@signals.worker_init.connect
def refuse(sender: Any = None, **kwargs: Any) -> None:
    """Stop a worker whose checks find an Error.

    Celery's Django fixup runs the system checks, but ignores their result. Only SystemExit stops
    the worker from here: Celery logs any other error of a receiver, and continues.
    """
    from celery.apps.worker import Worker  # only workers need it

    # The worker of celery.contrib.testing, which runs in a thread of a test, is not of this class.
    if conf.testing and isinstance(sender, Worker):
        end_worker(
            "SINGLETASK_TESTING is True, so these are settings of tests. Remove it, or start the "
            "worker with other settings."
        )
    if os.environ.get("CELERY_SKIP_CHECKS"):
        return
    errors = [message for message in run() if message.is_serious() and not message.is_silenced()]
    if errors:
        end_worker("\n".join(map(str, errors)))


def end_worker(text: str) -> None:
    """Let the process end with exit code 1 and this text on stderr."""
    text = f"The worker does not start until this is corrected.\n{text}"
    print(text, file=sys.stderr, flush=True)  # Python would print it only in the main thread
    raise SystemExit(1)


@signals.worker_init.connect
def load(**kwargs: Any) -> None:
    """Prepare the main process before it has threads and forks the processes of the pool.

    Read the epoch of the cache. The processes of the pool inherit the epoch, so they notice if the
    cache restarts before their first task.

    Import the modules that the threads of the main process need. A process that is forked while a
    thread imports a module inherits that module's lock, but not the thread that would free it. Its
    first task would wait for ever:

      watcher:      a process is gone    imports the store ......... frees its lock
      hub:                                     forks the next process
      next process:                                      imports the store: waits
    """
    try:
        look_at_epoch()
    except LockUnavailable:
        pass  # the first lock reports that
    # The server may be a node of a cluster that does not fit, or its client may not be installed.
    except (ImproperlyConfigured, ImportError) as error:
        if not os.environ.get("CELERY_SKIP_CHECKS"):
            end_worker(f"SINGLETASK_CACHE cannot be used: {error}")
    close_stores()
    router.db_for_write(TaskLockEvent)


@signals.worker_process_shutdown.connect
@signals.worker_shutdown.connect
def finish(**kwargs: Any) -> None:
    """Make the releases that are owed, and write all events.

    Otherwise both would be lost: the processes of a pool end without exit handlers.
    """
    release_owed(1.0)
    flush(2.0)
