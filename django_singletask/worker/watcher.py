"""Free the lock of a run whose pool process is gone, and let one worker of the fleet sweep."""

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
from django_singletask.history.sweep import Sweeper, leader_key
from django_singletask.holder import start_time
from django_singletask.locks.address import lease_length
from django_singletask.locks.liveness import is_gone
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run
from django_singletask.stores import CannotList, get_store, look_at_epoch
from django_singletask.stores.epoch import epoch_of
from django_singletask.task.header import Header
from django_singletask.task.options import LockOptions
from django_singletask.task.unique import QueuedCall

__all__ = [
    "LEARN",
    "SWEEP",
    "Accepted",
    "Killed",
    "Watcher",
    "current_watcher",
    "has_processes",
    "sweep",
    "watch",
]

logger = logging.getLogger("django_singletask")

LOOK = 0.2
"""Seconds between two looks at the processes of the pool."""
RETRY = 1.0
"""Seconds until a store that was down is asked again."""
SWEEP = 60.0
"""Seconds between two sweeps of the history."""
LEARN = 1.0
"""Seconds between two looks at the epoch of the cache."""


class Accepted:
    """The delivery that a pool process has accepted last."""

    start = ""
    """When the process started: tells it from a later process with the same pid."""
    ended = False

    def __init__(self, request: Any) -> None:
        self.request = request

    @property
    def header(self) -> Header:
        request = self.request
        name = request.task.name
        return Header.of(request.request_dict, request.id, name) or Header(request.id, name)


class Killed(NamedTuple):
    """A delivery whose process is gone; its lock is to be freed while its lease can last."""

    delivery: Accepted
    lock: TaskLock
    how: str
    until: float

    def free(self) -> None:
        """Free the lock, and the entry of the queued call."""
        header = self.delivery.header
        token = header.token or ""
        self.lock.address_of(token).bury(token, self.how)
        if header.queued is None:
            return
        lock_key = self.lock.lock_key
        queued_call = QueuedCall(lock_key, LockOptions(), Run(header.task), header.queued)
        if not self.delivery.ended:
            # Killed before it gave back the entry. A delivery that has ended may have queued its
            # call again with that entry.
            queued_call.discard()
        queued_call.address.bury(token, self.how)


# Who frees the lock of a killed process
#
# The main process chooses the token, and so can give back just that run's lock once its process
# is gone. Not before: the signals that tell of a failure (task_failure, task_revoked, on_timeout)
# are sent while the process still runs its "finally", up to seconds before the body has ended:
#
#   main:   time limit -> on_timeout ............ pid gone -> release(token)
#   child:  body ....................... SIGKILL
#
# A process runs one task at a time, so the delivery that it accepted last is the one to look
# after, and an earlier one is over. Releasing what the child has released finds nothing.
#
# When the process started is read at the first look, not when it accepts each delivery, which would
# cost more than all the rest here. If the process was killed before that look, and another has its
# pid already, nothing proves the death: the lease ends the lock, and no living run is harmed.
#
#   main:         accepted by pid 7                               looks: start of the new pid 7
#   process 7:                      runs   killed   new process 7


class Watcher(threading.Thread):
    """Look after the pool's processes, in a thread: a store that is down must not stop the hub."""

    def __init__(self) -> None:
        super().__init__(name="singletask-watcher", daemon=True)
        self.deliveries: dict[int, Accepted] = {}
        self.someone_died = False
        self.timer: Any = None
        self.killed: list[Killed] = []
        self.free_at = 0.0
        self.sweep_at = time.monotonic() + SWEEP
        self.sweeper: threading.Thread | None = None
        self.leader: TaskLock | None = None
        """The lock of the worker that sweeps, from the first sweep on."""
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
                logger.exception("The watch over the pool's processes failed; it goes on.")

    def sweep(self) -> None:
        """Sweep each minute, in a thread of its own: a database may hang, locks must be freed."""
        if time.monotonic() < self.sweep_at or (self.sweeper and self.sweeper.is_alive()):
            return
        self.sweep_at = time.monotonic() + SWEEP
        self.sweeper = threading.Thread(
            target=sweep, args=(self,), name="singletask-sweep", daemon=True
        )
        self.sweeper.start()

    def learn_epoch(self) -> None:
        """Ask the cache for its epoch, so that a process that is forked later inherits it.

        With an old one it would wait for a second before it takes its first lock.
        """
        if clock.now() >= epoch_of(conf.cache).seen_at + LEARN:
            with suppress(Exception):  # the cache is down: whoever needs a lock reports it
                look_at_epoch(conf.cache)

    def look(self) -> None:
        """Find the processes that are gone."""
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
        """Free the locks of killed runs; while the store is down, try again each second."""
        if not self.killed or time.monotonic() < self.free_at:
            return
        try:
            while self.killed:
                self.killed[0].free()
                del self.killed[0]
        except Exception as error:
            logger.warning("The locks of killed runs are not freed yet: %s", error)
            now = time.monotonic()
            self.free_at = now + RETRY
            self.killed = [one for one in self.killed if now < one.until]
        finally:
            connections.close_all()


def lock_of(delivery: Accepted) -> TaskLock | None:
    """Return the lock that a delivery takes, not acquired; None if it takes none."""
    task, header = delivery.request.task, delivery.header
    key = header.lock_key
    try:
        options = LockOptions.of(task).but(header.overrides)
        if key is None:
            args, kwargs, _embed = delivery.request._payload  # noqa: SLF001, Celery has no other way
            key = task.lock_key(args, kwargs, options)
        return options.lock(key, task.name)
    except (TypeError, ValueError, LockError):
        return None  # the run itself failed with it, or lock_name says that it takes no lock


_history = Sweeper()


def sweep(watcher: Watcher) -> None:
    """Close the history's rows of locks that nobody holds any more, and clean up the lock table.

    One worker of the fleet does it for as long as it lives: it keeps a lock, which another worker
    takes over when it is gone. A row is closed only when its entry was missing twice.
    """
    try:
        leader = watcher.leader = watcher.leader or TaskLock(leader_key(), run=Run(quiet=True))
        if (leader and not leader.lost) or leader.take():
            with suppress(CannotList):  # a key function hides which entries are locks
                get_store(conf.cache).purge()
            if conf.history != "off":
                _history.sweep()
        watcher.sweep_failed = False
    except Exception as error:
        if not watcher.sweep_failed:
            logger.warning(
                "The history is not swept (%s: %s). This is tried again each minute; until then, "
                "runs that were killed can stand in it as held.",
                type(error).__name__,
                str(error).partition("\n")[0].rstrip("."),
            )
        watcher.sweep_failed = True
    finally:
        connections.close_all()


_watcher: Watcher | None = None


def current_watcher() -> Watcher | None:
    """Return the watcher of this process, if it is a worker's main process that is ready."""
    return _watcher


def has_processes(consumer: Any) -> bool:
    """Say whether the pool of a worker has processes, which can be killed one by one."""
    return type(consumer.pool).__module__ == "celery.concurrency.prefork"


def watch(sender: Any, **kwargs: Any) -> None:
    """Start to look after the processes; sent anew after each lost connection to the broker."""
    global _watcher
    if _watcher is None:
        _watcher = Watcher()
        _watcher.start()
    if has_processes(sender) and getattr(sender, "hub", None) is not None:
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
