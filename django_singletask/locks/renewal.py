"""Keep the leases of this process alive: one thread, started by the first lock that wants it."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from django.db import connections

from django_singletask.stores import Outcome, close_stores, get_store

if TYPE_CHECKING:
    from django_singletask.locks.lock import TaskLock

__all__ = ["clock", "drop", "held_by_this_thread", "keep", "owe", "renew"]

logger = logging.getLogger("django_singletask")

RETRY = 1.0
MAX_DEBTS = 10_000
AT_ONCE = 100


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# The machine's own clock, that nobody sets. Where there is one that goes on while the machine is
# suspended, it is that one: a lease does not stop for a sleeping laptop.
clock = _boottime if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic


class Debt(NamedTuple):
    """A release that could not be made, to be tried again until the lease has ended anyway."""

    cache: str
    key: str
    value: bytes
    until: float


class Keeper:
    """Know the locks that this process holds, and renew each at a third of its lease.

    The locks are known by weak references: one that nobody holds any more, because a signal
    struck between taking and giving back, is no longer renewed, and its lease frees it.
    """

    def __init__(self) -> None:
        # By token and key: a run has one token for its lock and for the entry of its call.
        self.locks: weakref.WeakValueDictionary[tuple[str, str], TaskLock]
        self.locks = weakref.WeakValueDictionary()
        self.debts: deque[Debt] = deque()
        self.failed: list[Debt] = []
        self.retries_at = math.inf
        self.pays_at = math.inf
        self.down: set[str] = set()
        self.wakes_at = math.inf
        self.changed = threading.Condition()
        self.renewing = threading.Lock()
        self.thread: threading.Thread | None = None

    def keep(self, lock: TaskLock) -> None:
        assert lock.token is not None
        self.locks[lock.token, lock.key] = lock
        self.wake_for(lock)

    def wake_for(self, lock: TaskLock) -> None:
        # A thread that wakes early enough anyway is left asleep: the hot path costs no switch.
        if lock.renew and due(lock) < self.wakes_at:
            self.wake(due(lock))

    def owe(self, debt: Debt) -> None:
        if len(self.debts) + len(self.failed) >= MAX_DEBTS:
            forgotten = self.failed.pop(0) if self.failed else self.debts.popleft()
            logger.warning("%s is not given back: its lease will end it.", forgotten.key)
        self.debts.append(debt)
        self.pays_at = clock()
        self.wake(self.pays_at)

    def wake(self, at: float) -> None:
        # The hour last: if no thread can start now, or a signal strikes, the next lock tries again.
        with self.changed:
            if self.thread is None or not self.thread.is_alive():
                has_threads()
                thread = threading.Thread(target=self.run, name="singletask-renewal", daemon=True)
                thread.start()
                self.thread = thread
            self.changed.notify()
            self.wakes_at = min(self.wakes_at, at)

    def run(self) -> None:
        while True:
            try:
                self.wait()
                self.tick()
            except Exception:
                logger.exception("The renewal of locks failed; it goes on.")
                time.sleep(RETRY)

    def wait(self) -> None:
        if self.next_due() == math.inf:
            # Nothing to do: leave no connection open, of a store or the history.
            close_stores()
            connections.close_all()
        with self.changed:
            # A lock that comes while this thread reckons finds no hour of waking, and so comes to
            # wake(), which waits until this thread sleeps and can hear it:
            #
            #   this thread: wakes_at = inf   next_due() -> inf                  sleeps -> woken
            #   keep():                                 due < inf   wake() ......... notify
            self.wakes_at = math.inf
            self.wakes_at = self.next_due()
            # Not reckoned anew when woken: of locks that are held for a moment each, one after the
            # other, the first alone wakes this thread, and the hour that it set stands for all.
            while (pause := self.wakes_at - clock()) > 0:
                self.changed.wait(None if pause == math.inf else pause)

    def next_due(self) -> float:
        return min([self.pays_at, *map(due, self.renewed())])

    def tick(self) -> None:
        """Renew what is due, and what will be soon, so that locks taken together stay together."""
        now = clock()
        by_cache: dict[str, list[TaskLock]] = {}
        for lock in self.renewed():
            if due(lock) <= now + lock._leased / 10:
                by_cache.setdefault(lock._alias, []).append(lock)
        for alias, locks in by_cache.items():
            self.renew_all(alias, locks)
        if self.pays_at <= now:
            self.pay()

    def renewed(self) -> list[TaskLock]:
        # valuerefs() is one step, which another thread that takes a lock cannot upset.
        locks = (reference() for reference in self.locks.valuerefs())
        return [lock for lock in locks if lock is not None and lock.renew]

    def renew_all(self, alias: str, locks: list[TaskLock]) -> None:
        with self.renewing:
            asked = [(lock, lock.token, lock._leased) for lock in locks]
            requests = [(lock.key, lock._value, lease) for lock, _, lease in asked]
            sent = clock()
            try:
                outcomes = get_store(alias).renew_many(requests)
            except Exception as error:
                # The store may be back at the next attempt, before the leases end.
                for lock in locks:
                    lock._retry_at = clock() + min(RETRY, lock._leased / 10)
                logger.warning("%d locks could not be renewed: %s", len(locks), error)
                return
            for (lock, token, lease), outcome in zip(asked, outcomes, strict=True):
                settle(lock, token, sent, lease, outcome)

    def pay(self) -> None:
        # Some at a time: renewals are due meanwhile. Those of a cache that is down wait apart, so
        # that they hold up no other.
        self.pays_at = math.inf
        if clock() >= self.retries_at:
            self.debts.extend(self.failed)
            self.failed, self.retries_at = [], math.inf
        down: set[str] = set()
        for _ in range(min(len(self.debts), AT_ONCE)):
            debt = self.debts.popleft()
            try:
                # One error is enough: each may take as long as the client waits.
                if debt.cache not in down:
                    get_store(debt.cache).release(debt.key, debt.value)
                    self.down.discard(debt.cache)
                    continue
            except Exception as error:
                down.add(debt.cache)
                if debt.cache not in self.down:  # once an outage
                    self.down.add(debt.cache)
                    logger.warning(
                        "The cache %r does not answer; what may be held there is given back when "
                        "it does: %s",
                        debt.cache,
                        error,
                    )
            if clock() < debt.until:
                self.failed.append(debt)
                self.retries_at = clock() + RETRY
        # Not above what owe() may have set meanwhile.
        self.pays_at = min(self.pays_at, clock() if self.debts else self.retries_at)


def due(lock: TaskLock) -> float:
    """Return when a lock wants its next renewal."""
    return max(lock._renewed + lock._leased / 3, lock._retry_at)


def renew(lock: TaskLock, lease: float) -> None:
    """Let the lease of a lock end ``lease`` seconds from now; or learn that the lock is lost."""
    # Two renewals of one lock at a time could settle in another order than the store saw them:
    #
    #   thread: asks for 9 s -> granted second                      settles first: trusts for 9 s
    #   extend: asks for 600 s -> granted first, cut to 9 s          settles last: trusts for 600 s
    with _keeper.renewing:
        token = lock.token
        # The new deadline is counted from before the request, like that of the acquisition: the
        # server may have handled it long before the reply is here.
        sent = clock()
        try:
            outcome = get_store(lock._alias).renew(lock.key, lock._value, lease)
        except BaseException:
            if lock.token == token is not None and lease < lock._leased:
                # It may have been carried out all the same: of the two leases trust the shorter.
                lock._shorten(sent, lease)
                _keeper.wake_for(lock)
            raise
        settle(lock, token, sent, lease, outcome)


def settle(lock: TaskLock, token: str | None, sent: float, lease: float, outcome: Outcome) -> None:
    """Tell a lock what its renewal found."""
    if lock.token is None or lock.token != token:
        # Given back meanwhile. If the release came to the store first, this renewal found
        # nothing there and took the lock again, for nobody:
        #
        #   renewal: request on its way                    -> taken again -> released here
        #   body:                          release -> freed
        if outcome is Outcome.RETAKEN:
            owe(lock._alias, lock.key, lock._value, lease)
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
    lock._leased = lease
    lock._trust(sent)
    _keeper.wake_for(lock)


@cache
def has_threads() -> bool:
    """Say whether threads run here; where they do not, leases are not renewed, and it is said."""
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None or {"enable-threads", "threads"} & set(uwsgi.opt):
        return True
    logger.warning(
        "uWSGI runs without threads, so held locks are not renewed and end with their lease. "
        "Start uWSGI with --enable-threads."
    )
    return False


_keeper = Keeper()


def keep(lock: TaskLock) -> None:
    """Renew a lock from now on."""
    _keeper.keep(lock)


def drop(lock: TaskLock, token: str | None = None) -> None:
    """Renew a lock no longer; ``token`` is the one under which it was taken (default: its own)."""
    token = token or lock.token
    if token is not None:
        _keeper.locks.pop((token, lock.key), None)


def kept() -> set[tuple[str, str]]:
    """Return token and key of each lock that is renewed."""
    return {reference.key for reference in _keeper.locks.valuerefs()}


def forget(kept: Iterable[tuple[str, str]]) -> None:
    """Renew these locks no longer, by token and key."""
    for each in kept:
        _keeper.locks.pop(each, None)


def owe(cache: str, key: str, value: bytes, lease: float) -> None:
    """Release an entry in the background, for as long as its lease can last."""
    _keeper.owe(Debt(cache, key, value, clock() + lease))


def held_by_this_thread(token: str, key: str) -> bool:
    """Say whether the running thread itself holds the lock with this token."""
    lock = _keeper.locks.get((token, key))
    return lock is not None and lock.thread == threading.get_ident()


def _after_fork() -> None:
    # Locks that were held over a fork are the parent's: it goes on renewing them.
    global _keeper
    _keeper = Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
