"""Keep the leases of this process alive: one thread, started by the first lock that wants it."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from django.db import connections

from django_singletask.stores import Outcome, close_stores

if TYPE_CHECKING:
    from django_singletask.locks import TaskLock

__all__ = ["clock", "drop", "held_by_this_thread", "keep", "renew"]

logger = logging.getLogger("django_singletask")


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# The machine's own clock, that nobody sets. Where there is one that goes on while the machine is
# suspended, it is that one: a lease does not stop for a sleeping laptop.
clock = _boottime if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


class Keeper:
    """Know the locks that this process holds, and renew each at a third of its lease.

    The locks are known by weak references: one that nobody holds any more, because a signal
    struck between taking and giving back, is no longer renewed, and its lease frees it.
    """

    def __init__(self) -> None:
        self.locks: weakref.WeakValueDictionary[str, TaskLock] = weakref.WeakValueDictionary()
        self.wakes_at = float("inf")
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def keep(self, lock: TaskLock) -> None:
        assert lock.token is not None
        self.locks[lock.token] = lock
        # A thread that wakes early enough anyway is left asleep: the hot path costs no switch.
        if lock.renew and due(lock) < self.wakes_at:
            with self.changed:
                self.wakes_at = due(lock)
                if self.thread is None:
                    self.thread = threading.Thread(
                        target=self.run, name="singletask-renewal", daemon=True
                    )
                    self.thread.start()
                self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                self.wakes_at = min((due(lock) for lock in self.renewed()), default=float("inf"))
                if self.wakes_at == float("inf"):
                    # Nothing to renew: leave no connection open meanwhile, neither of a store nor
                    # of the history.
                    close_stores()
                    connections.close_all()
                pause = self.wakes_at - clock()
                if pause > 0:
                    self.changed.wait(None if pause == float("inf") else pause)
            now = clock()
            for lock in self.renewed():
                if due(lock) <= now:
                    self.attempt(lock)

    def renewed(self) -> list[TaskLock]:
        return [lock for lock in list(self.locks.values()) if lock.renew]

    def attempt(self, lock: TaskLock) -> None:
        try:
            renew(lock)
        except Exception as error:
            # The store may be back at the next attempt, before the lease ends.
            lock._retry_at = clock() + min(1.0, lock._leased / 10)
            logger.warning("%s could not be renewed: %s", lock.key, error)


def due(lock: TaskLock) -> float:
    """Return when a lock wants its next renewal."""
    return max(lock._renewed + lock._leased / 3, lock._retry_at)


def renew(lock: TaskLock) -> None:
    """Extend the lease of a lock by its length from now; or learn that the lock is lost."""
    token = lock.token
    sent = clock()
    outcome = lock._store().renew(lock.key, lock._value, lock._leased)
    if lock.token != token:
        # Given back meanwhile. If the release came to the store first, this renewal found
        # nothing there and took the lock again, for nobody:
        #
        #   renewal: request on its way                    -> taken again -> released here
        #   body:                          release -> freed
        if outcome is Outcome.RETAKEN:
            lock._store().release(lock.key, lock._value)
        return
    lock._longest_gap = max(lock._longest_gap, sent - lock._renewed)
    lock._renewed = sent
    if outcome in {Outcome.GONE, Outcome.TAKEN}:
        drop(lock)
        lock._lose(outcome)
        return
    if outcome is Outcome.RETAKEN:
        logger.warning(
            "%s was gone from the cache (evicted, flushed or restarted empty) and is taken again; "
            "another run may have started meanwhile.",
            lock.key,
        )
        if sent >= lock._deadline:
            # The lease ended before this renewal: others were free to run, and may have.
            lock._lose(Outcome.GONE)
    lock._trust(sent)


_keeper = Keeper()


def keep(lock: TaskLock) -> None:
    """Renew a lock from now on."""
    _keeper.keep(lock)


def drop(lock: TaskLock) -> None:
    """Renew a lock no longer."""
    if lock.token is not None:
        _keeper.locks.pop(lock.token, None)


def held_by_this_thread(token: str) -> bool:
    """Say whether the running thread itself holds the lock with this token."""
    lock = _keeper.locks.get(token)
    return lock is not None and lock.thread == threading.get_ident()


def _after_fork() -> None:
    # Locks that were held over a fork are the parent's: it goes on renewing them.
    global _keeper
    _keeper = Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
