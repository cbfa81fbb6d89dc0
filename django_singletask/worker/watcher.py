"""Free the lock of a run whose pool process is dead, and let one of all workers sweep."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from django.db import connections

from django_singletask import clock
from django_singletask.conf import conf
from django_singletask.exceptions import LockError
from django_singletask.history import sweep as history
from django_singletask.holder import start_time
from django_singletask.locks.address import lease_length
from django_singletask.locks.liveness import is_gone
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run
from django_singletask.stores import get_store, look_at_epoch
from django_singletask.stores.base import CannotList
from django_singletask.stores.epoch import epoch_of
from django_singletask.task.header import Header
from django_singletask.task.options import LockOptions
from django_singletask.task.unique import QueuedCall

logger = logging.getLogger("django_singletask")

LOOK = 0.2
"""Seconds between two checks of the processes of the pool."""
RETRY = 1.0
"""Seconds until the next attempt if a store is down."""
SWEEP = 60.0
"""Seconds between two sweeps of the history."""
LEARN = 1.0
"""Seconds between two looks at the epoch of the cache."""


class Accepted:
    """The last delivery that a pool process has accepted."""

    start = ""
    """When the process started, to distinguish it from a later one with the same pid."""
    ended = False

    def __init__(self, request: Any) -> None:
        self.request = request

    @property
    def header(self) -> Header:
        request = self.request
        name = request.task.name
        return Header.of(request.request_dict, request.id, name) or Header(request.id, name)


class Killed(NamedTuple):
    """A delivery whose process is dead; its lock must be freed unless its lease has ended."""

    delivery: Accepted
    lock: TaskLock
    how: str
    until: float

    def free(self) -> None:
        header = self.delivery.header
        token = header.token or ""
        self.lock.address_of(token).bury(token, self.how)
        if header.queued is None:
            return
        lock_key = self.lock.lock_key
        queued_call = QueuedCall(lock_key, LockOptions(), Run(header.task), header.queued)
        if not self.delivery.ended:
            # Not if the delivery has ended: then it may have queued its call again with that entry.
            queued_call.discard()
        queued_call.address.bury(token, self.how)


# Which process frees the lock of a killed process
#
# The main process chooses the token, so it can release the lock of that run only, once its process
# is gone. Not before: the signals of a failure (task_failure, task_revoked, on_timeout) come while
# the process still runs its "finally", up to seconds before the body has ended:
#
#   main:   time limit -> on_timeout ............ pid gone -> release(token)
#   child:  body ....................... SIGKILL
#
# A process runs one task at a time, so only the last accepted delivery matters. If the child has
# already released the lock, the release finds nothing.
#
# The start time of the process is read at the first check, because reading it at each delivery
# would cost more than everything else here. If the process was killed before that check, and a new
# process already has its pid, nothing proves the death. Then the lock expires with its lease, and
# no living run is harmed.
#
#   main:         accepted by pid 7                               looks: start of the new pid 7
#   process 7:                      runs   killed   new process 7


class Watcher(threading.Thread):
    """Watch the pool's processes in a thread, since a store that is down must not stop the hub."""

    def __init__(self) -> None:
        super().__init__(name="singletask-watcher", daemon=True)
        self.deliveries: dict[int, Accepted] = {}
        self.someone_died = False
        self.timer: Any = None
        self.killed: list[Killed] = []
        self.free_at = 0.0
        self.sweep_at = time.monotonic() + SWEEP
        self.sweeper: threading.Thread | None = None
        self.sweep_failed = False

    def run(self) -> None:
        while True:
            time.sleep(LOOK)
            try:
                self.look()
                self.free()
                self.sweep()
                self.learn_epoch()
            except Exception:
                logger.exception("The check of the pool's processes failed; trying again.")

    def sweep(self) -> None:
        """Sweep each minute, in a separate thread, since a database may hang."""
        if time.monotonic() < self.sweep_at or (self.sweeper and self.sweeper.is_alive()):
            return
        self.sweep_at = time.monotonic() + SWEEP
        self.sweeper = threading.Thread(
            target=sweep, args=(self,), name="singletask-sweep", daemon=True
        )
        self.sweeper.start()

    def learn_epoch(self) -> None:
        """Read the epoch of the cache, so that a process that is forked later inherits it.

        With an old epoch the process would wait for a second before its first lock.
        """
        if clock.now() >= epoch_of(conf.cache).seen_at + LEARN:
            with suppress(Exception):  # if the cache is down, the next lock reports it
                look_at_epoch(conf.cache)

    def look(self) -> None:
        for pid, delivery in list(self.deliveries.items()):
            how = is_gone(pid, delivery.start)
            if how is None:
                delivery.start = delivery.start or start_time(pid)
                continue
            if self.deliveries.get(pid) is delivery:
                del self.deliveries[pid]
            self.someone_died = True
            lock = lock_of(delivery)
            if lock is not None:
                until = time.monotonic() + lease_length(lock.timeout)
                self.killed.append(Killed(delivery, lock, how, until))

    def free(self) -> None:
        """Free the locks of killed runs; if the store is down, try again each second."""
        if not self.killed or time.monotonic() < self.free_at:
            return
        try:
            while self.killed:
                self.killed[0].free()
                del self.killed[0]
        except Exception as error:
            logger.warning("The locks of killed runs are not freed yet; trying again: %s", error)
            now = time.monotonic()
            self.free_at = now + RETRY
            self.killed = [one for one in self.killed if now < one.until]
        finally:
            connections.close_all()


def lock_of(delivery: Accepted) -> TaskLock | None:
    """Return the lock of a delivery, not acquired; None if it takes none."""
    task = delivery.request.task
    try:
        header = delivery.header
        key, options = header.lock_key, LockOptions.of(task).but(header.overrides)
        if key is None:
            args, kwargs, _embed = delivery.request._payload  # noqa: SLF001, Celery has no other way
            key = task.lock_key(args, kwargs, options)
        return options.lock(key, task.name)
    except (TypeError, ValueError, LockError):
        return None  # the run itself failed with this error, or it takes no lock


def sweep(watcher: Watcher) -> None:
    """Close the history's rows of locks that are no longer held, and clean up the lock table."""
    try:
        if history.takes_turn():
            with suppress(CannotList):  # a key function hides which entries are locks
                get_store(conf.cache).purge()
            if conf.history != "off":
                history.sweep()
        watcher.sweep_failed = False
    except Exception as error:
        if not watcher.sweep_failed:
            logger.warning(
                "The history cannot be cleaned up (%s: %s); trying again each minute. Until then "
                "the history may show killed runs as held.",
                type(error).__name__,
                str(error).partition("\n")[0].rstrip("."),
            )
        watcher.sweep_failed = True
    finally:
        connections.close_all()


_watcher: Watcher | None = None


def current_watcher() -> Watcher | None:
    """Return the watcher of this process, if it is the main process of a ready worker."""
    return _watcher


def has_processes(consumer: Any) -> bool:
    return type(consumer.pool).__module__ == "celery.concurrency.prefork"


def watch(sender: Any, **kwargs: Any) -> None:
    """Start to watch the processes; called again after each lost connection to the broker."""
    global _watcher
    if _watcher is None:
        _watcher = Watcher()
        _watcher.start()
    if has_processes(sender) and getattr(sender, "hub", None) is not None:
        # The pool itself replaces a dead process only within 5 seconds. Without a hub (filesystem
        # broker), it has a thread for that.
        pool, watcher = sender.pool, _watcher

        def replace() -> None:
            if watcher.someone_died:
                watcher.someone_died = False
                pool.maintain_pool()

        if watcher.timer is not None:
            watcher.timer.cancel()
        watcher.timer = sender.hub.call_repeatedly(LOOK, replace)
