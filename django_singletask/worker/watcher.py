"""The worker's main process: stop on a bad cache, free the lock of a run whose process is gone."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from celery.signals import (
    task_received,
    task_rejected,
    task_revoked,
    task_unknown,
    worker_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
)
from django.db import connections, router

from django_singletask.checks import run
from django_singletask.conf import conf
from django_singletask.history.queries import SWEEPER
from django_singletask.history.recorder import flush
from django_singletask.history.sweep import Sweeper
from django_singletask.holder import start_time
from django_singletask.locks.address import lease_length
from django_singletask.locks.keys import LockKey
from django_singletask.locks.liveness import is_gone
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run
from django_singletask.stores import CannotList, close_stores, get_store
from django_singletask.task.base import SingletonTask
from django_singletask.task.delivery import HEADER, own_header
from django_singletask.task.unique import discard

__all__ = ["connect"]

logger = logging.getLogger("django_singletask")

LOOK = 0.2
"""Seconds between two looks at the processes of the pool."""

RETRY = 1.0
"""Seconds until a store that was down is asked again."""

SWEEP = 60.0
"""Seconds between two sweeps of the history."""


def connect() -> None:
    """Listen to the worker."""
    for signal, receiver in (
        (worker_init, refuse),
        (worker_init, load),
        (task_received, hand_out_token),
        (task_revoked, free_revoked),
        (task_rejected, free_unreadable),
        (task_unknown, free_unreadable),
        (worker_ready, watch),
        (worker_process_shutdown, flush_history),
        (worker_shutdown, flush_history),
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
    """Import what the threads of the main process need, before it has any; connect to nothing.

    A process that is forked while a thread imports a module inherits the lock of that module, and
    not the thread that would free it. Its first task would wait for ever:

      watcher:      a process is gone    imports the store ......... frees its lock
      hub:                                     forks the next process
      next process:                                      imports the store: waits
    """
    from django_singletask.models import TaskLockEvent

    get_store(conf.cache)
    close_stores()
    router.db_for_write(TaskLockEvent)


@dataclasses.dataclass
class Accepted:
    """The run that a pool process took last."""

    token: str
    start: str  # of the process, to tell it from a later one with its pid
    request: Any
    ended: bool = False


class Corpse(NamedTuple):
    """The lock of a run whose process is gone, to be freed while its lease can last."""

    lock: TaskLock
    token: str
    how: str
    until: float
    run: Accepted

    def bury(self) -> None:
        self.lock.address.bury(self.token, self.how)
        task, header = self.run.request.task, header_of(self.run.request)
        if not header.get("queued"):
            return
        if not self.run.ended:
            # Killed before it gave back the entry. One that has ended may be queued again with it.
            discard(task.name, header)
        call = task.queued_call(self.lock.lock_key, header.get("options") or {}, Run(task.name))
        call.address.bury(self.token, self.how)


# Who frees the lock of a killed process
#
# The main process chooses the token, and so can give back just that run's lock once its process
# is gone. Not before: the signals that tell of a failure (task_failure, task_revoked, on_timeout)
# are sent while the process still runs its "finally", up to seconds before the body has ended:
#
#   main:   time limit -> on_timeout ............ pid gone -> release(token)
#   child:  body ....................... SIGKILL
#
# A process runs one task at a time, so the last run that it accepted is the one to look after,
# and an earlier one is over. Releasing what the child has released itself finds nothing.


class Watcher(threading.Thread):
    """Look after the pool's processes, in a thread: a store that is down must not stop the hub."""

    def __init__(self) -> None:
        super().__init__(name="singletask-watcher", daemon=True)
        self.runs: dict[int, Accepted] = {}
        self.someone_died = False
        self.timer: Any = None
        self.corpses: list[Corpse] = []
        self.bury_at = 0.0
        self.sweep_at = time.monotonic() + SWEEP
        self.sweeper: threading.Thread | None = None
        self.leader = TaskLock(SWEEPER, run=Run(quiet=True))

    def accepted(self, pid: int, run: Accepted) -> None:
        run.start = start_time(pid)
        self.runs[pid] = run

    def run(self) -> None:
        while True:
            time.sleep(LOOK)
            try:
                self.look()
                self.bury()
                self.sweep()
            except Exception:
                logger.exception("The watch over the pool's processes failed; it goes on.")

    def sweep(self) -> None:
        # In a thread of its own: a database that hangs must not keep locks from being freed.
        if time.monotonic() < self.sweep_at or (self.sweeper and self.sweeper.is_alive()):
            return
        self.sweep_at = time.monotonic() + SWEEP
        self.sweeper = threading.Thread(
            target=sweep, args=(self.leader,), name="singletask-sweep", daemon=True
        )
        self.sweeper.start()

    def look(self) -> None:
        for pid, last in list(self.runs.items()):
            how = is_gone(pid, last.start)
            if how is None:
                continue
            if self.runs.get(pid) is last:
                del self.runs[pid]
            self.someone_died = True
            lock = lock_of(last.request)
            if lock is not None:
                until = time.monotonic() + lease_length(lock.timeout)
                self.corpses.append(Corpse(lock, last.token, how, until, last))

    def bury(self) -> None:
        if not self.corpses or time.monotonic() < self.bury_at:
            return
        corpses, self.corpses = self.corpses, []
        try:
            while corpses:
                corpses[0].bury()
                del corpses[0]
        except Exception as error:
            logger.warning("The locks of killed runs are not freed yet: %s", error)
            self.bury_at = time.monotonic() + RETRY
        finally:
            now = time.monotonic()
            self.corpses += [corpse for corpse in corpses if now < corpse.until]
            connections.close_all()


def header_of(request: Any) -> Mapping[str, Any]:
    """Return our header of a request that a worker received."""
    return own_header(request.request_dict, request.id, request.task.name)


def lock_of(request: Any) -> TaskLock | None:
    """Return the lock that the run of a request takes; None if its arguments give none."""
    task, header = request.task, header_of(request)
    options = header.get("options") or {}
    try:
        if header.get("key"):
            key = LockKey(header["name"], header["key"])
        else:
            args, kwargs, _embed = request._payload
            key = task.lock_key(args, kwargs, options)
        lock: TaskLock = task.lock_for(key, options)
    except (TypeError, ValueError):
        return None  # the run itself failed with it, and took no lock
    return lock


_history = Sweeper()


def sweep(leader: TaskLock) -> None:
    """Close the history's rows of locks that nobody holds any more, and clean up the lock table.

    One worker of the fleet does it for as long as it lives: it keeps a lock, which another worker
    takes over when it is gone. What it has missed once in the store it must see again.
    """
    try:
        if (leader and not leader.lost) or leader.take():
            with suppress(CannotList):  # a key function hides which entries are locks
                get_store(conf.cache).purge()
            if conf.history != "off":
                _history.sweep()
    except Exception:
        logger.exception("The sweep failed; the next one is in a minute.")
    finally:
        connections.close_all()


_watcher: Watcher | None = None


def hand_out_token(sender: Any, request: Any, **kwargs: Any) -> None:
    """Choose the token under which this delivery takes its lock, and note who runs it."""
    if not isinstance(request.task, SingletonTask) or not _has_processes(sender):
        return
    token = os.urandom(16).hex()
    headers = request.request_dict
    own = {"id": request.id, "task": request.task.name, "token": token}
    headers[HEADER] = {**header_of(request), **own}
    run = Accepted(token, "", request)
    accepted, succeeded = request.on_accepted, request.on_success

    # On the request itself, since the worker makes the final class of requests on its own.
    def on_accepted(pid: int, time_accepted: float) -> None:
        if _watcher is not None and pid:
            _watcher.accepted(pid, run)
        accepted(pid, time_accepted)

    def on_success(*args: Any, **kwargs: Any) -> None:
        # Whatever became of the task, its process has told so.
        run.ended = True
        succeeded(*args, **kwargs)

    request.on_accepted, request.on_success = on_accepted, on_success


def free_revoked(sender: Any, request: Any, terminated: bool, **kwargs: Any) -> None:
    """Let equal calls be queued again: this one was revoked, or has expired, unstarted."""
    if not terminated:
        discard(sender.name, own_header(request.headers, request.id, sender.name))


def free_unreadable(message: Any, **kwargs: Any) -> None:
    """The same for a message that the worker cannot read, or of a task that it does not know."""
    headers = getattr(message, "headers", None) or {}
    task = str(headers.get("task"))
    discard(task, own_header(headers, headers.get("id"), task))


def flush_history(**kwargs: Any) -> None:
    """Write what has gathered: the processes of a pool end without their exit handlers."""
    flush(2.0)


def _has_processes(consumer: Any) -> bool:
    return type(consumer.pool).__module__ == "celery.concurrency.prefork"


def watch(sender: Any, **kwargs: Any) -> None:
    """Start to look after the processes; sent anew after each lost connection to the broker."""
    global _watcher
    if _watcher is None:
        _watcher = Watcher()
        _watcher.start()
    if _has_processes(sender) and getattr(sender, "hub", None) is not None:
        # The pool notices a dead process within 5 seconds and replaces it then; look at once.
        # Where there is no hub (the filesystem broker), the pool has a thread that looks.
        pool, watcher = sender.pool, _watcher

        def replace() -> None:
            if watcher.someone_died:
                watcher.someone_died = False
                pool.maintain_pool()

        if watcher.timer is not None:
            watcher.timer.cancel()
        watcher.timer = sender.hub.call_repeatedly(LOOK, replace)
