"""Renew the leases of this process, in one thread that the first lock starts."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from django.db import connections

from django_singletask import clock
from django_singletask.locks.debts import Debt, Debts, Kept
from django_singletask.locks.watch import Watch
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.epoch import LOOK, epoch_of

if TYPE_CHECKING:
    from django_singletask.locks.holding import Holding

__all__ = ["Keeper", "has_threads", "keeper"]

logger = logging.getLogger("django_singletask")

RETRY = 1.0
"""Seconds at most until a renewal that failed is tried again."""


class Keeper:
    """Renew each lease of this process at a third of its length.

    The references are weak. If a signal comes between the take and the release, no other reference
    to the lease remains. Then it is no longer renewed, so it expires:

      body:    take -> "yours"   SIGUSR1: SoftTimeLimitExceeded    the frames go, and the lease
      keeper:                                                      finds no reference: no renewal
    """

    def __init__(self) -> None:
        # By token and key: a run's lock and its duplicate entry have the same token.
        self.leases: weakref.WeakValueDictionary[tuple[str, str], Holding]
        self.leases = weakref.WeakValueDictionary()
        self.watches: dict[str, Watch] = {}
        self.debts: dict[str, Debts] = {}
        """The releases to be made, by cache, so that a cache that is down delays no other."""
        self.wakes_at = math.inf
        self.renew_at = math.inf
        """When the first renewal is due, without ``new_dues``."""
        self.new_dues: deque[float] = deque()
        """Due times that the thread has not read yet."""
        self.changed = threading.Condition()
        self.sleeps = False
        # Two simultaneous renewals of one lease could settle in another order than in the store:
        #
        #   thread: asks for 9 s -> granted second                      settles first: trusts 9 s
        #   extend: asks for 600 s -> granted first, cut to 9 s          settles last: trusts 600 s
        # Re-entrant, because a receiver of an event of a renewal may extend the lock.
        self.renewing = threading.RLock()
        self.thread: threading.Thread | None = None

    def keep(self, lease: Holding) -> None:
        """Renew a lease from now on, if it renews, and watch its cache."""
        self.leases[lease.token, lease.key] = lease
        self.wake_for(lease)

    def drop(self, lease: Holding) -> None:
        self.leases.pop((lease.token, lease.key), None)

    def took(self, token: str, key: str, place: object) -> bool:
        """Return whether this thread and asyncio task took the entry."""
        lease = self.leases.get((token, key))
        return lease is not None and lease.place == place

    def kept(self) -> set[tuple[str, str]]:
        return {reference.key for reference in self.leases.valuerefs()}

    def owe(
        self, cache: str, key: str, value: bytes, lease: float, kept: Kept | None = None
    ) -> None:
        """Release an entry in the background, and try again until its lease has ended."""
        debts = self.debts.setdefault(cache, Debts(cache))
        debts.add(Debt(key, value, clock.now() + lease, kept))
        self.wake(debts.due_at)

    def wake_for(self, lease: Holding) -> None:
        """Wake the thread if the lease is due before the thread's next wake-up.

        Otherwise let it sleep, since a switch of threads would slow down each short run.
        """
        due = math.inf
        if lease.renews:
            due = lease.due_at
            # The thread looks at all leases at the earliest of these times.
            if not (self.new_dues and self.new_dues[-1] <= due):
                self.new_dues.append(due)
        if lease.watched:
            if lease.cache not in self.watches:
                self.watches[lease.cache] = Watch(lease.cache)
            due = min(due, lease.taken_at + LOOK)
        if due < self.wakes_at:
            self.wake(due)

    def wake(self, at: float) -> None:
        with self.changed:
            if self.thread is None or not self.thread.is_alive():
                has_threads()
                thread = threading.Thread(target=self.run, name="singletask-renewal", daemon=True)
                thread.start()
                self.thread = thread
            self.changed.notify()
            # Set wakes_at last, so that the next lock retries if the thread could not start.
            self.wakes_at = min(self.wakes_at, at)

    def run(self) -> None:
        while True:
            try:
                self.wait()
                self.tick()
            except Exception:
                logger.exception("The renewal of locks failed; trying again.")
                time.sleep(RETRY)

    def wait(self) -> None:
        if self.next_due() == math.inf:
            # Nothing to do: leave no connection open.
            close_stores()
            connections.close_all()
        with self.changed:
            # A lock that is taken while this thread computes next_due() sees wakes_at = inf, and
            # calls wake(), which waits for this condition until this thread sleeps:
            #
            #   this thread: wakes_at = inf   next_due() -> inf                  sleeps -> woken
            #   keep():                                 due < inf   wake() ......... notify
            self.wakes_at = math.inf
            self.wakes_at = self.next_due()
            self.sleeps = True
            # After a wake-up, do not compute next_due() again. Of many short locks in a row, only
            # the first wakes this thread, and its time serves all of them.
            while (pause := self.wakes_at - clock.now()) > 0:
                self.changed.wait(None if pause == math.inf else pause)
            self.sleeps = False

    def next_due(self) -> float:
        times = [debts.due_at for debts in list(self.debts.values())]
        times += [watch.due_at(self.held()) for watch in list(self.watches.values())]
        return min([self.next_renewal(), *times])

    def next_renewal(self) -> float:
        """Return when the next renewal is due.

        All leases are read only at ``renew_at``: the thread wakes each 0.4 s to look at epochs, and
        there may be very many leases.
        """
        while self.new_dues:
            self.renew_at = min(self.renew_at, self.new_dues.popleft())
        if self.renew_at <= clock.now():
            renewals = (lease.due_at for lease in self.held() if lease.renews)
            self.renew_at = min(renewals, default=math.inf)
        return self.renew_at

    def tick(self) -> None:
        """Look at epochs, renew the leases that are due now or soon, then make owed releases.

        Leases that are due soon are included, so that one request renews leases of similar age.
        """
        now = clock.now()
        for watch in list(self.watches.values()):
            if watch.due_at(self.held()) <= now and watch.forgotten():
                self.renew_forgotten(watch)
        if self.next_renewal() <= now:
            by_cache: dict[str, list[Holding]] = {}
            for lease in self.held():
                if lease.renews and lease.due_at <= now + lease.length / 10:
                    by_cache.setdefault(lease.cache, []).append(lease)
            for alias, leases in by_cache.items():
                self.renew_all(alias, leases)
        for debts in list(self.debts.values()):
            if debts.due_at <= now:
                debts.pay()

    def held(self) -> Iterator[Holding]:
        """Yield the leases that are kept, the oldest first."""
        # valuerefs() is atomic, even if another thread takes a lock meanwhile.
        for reference in self.leases.valuerefs():
            lease = reference()
            if lease is not None:
                yield lease

    def renew_forgotten(self, watch: Watch) -> None:
        """Renew all leases of a cache, and check those that do not renew."""
        changes = epoch_of(watch.cache).changes
        leases = [lease for lease in self.held() if lease.cache == watch.cache]
        if self.renew_all(watch.cache, [lease for lease in leases if lease.renews]):
            for lease in leases:
                if not lease.renews:
                    lease.look()
            watch.renewed(changes)

    def renew_all(self, alias: str, leases: list[Holding]) -> bool:
        """Renew leases of one cache in few requests; return whether the cache answered."""
        with self.renewing:
            leases = [lease for lease in leases if not lease.has_ended()]
            if not leases:
                return True
            requests = [(lease.key, lease.value, lease.length) for lease in leases]
            sent = clock.now()
            try:
                outcomes = get_store(alias).renew_many(requests)
            except Exception as error:
                # Try again before the leases end.
                for lease in leases:
                    lease.retry_at = clock.now() + min(RETRY, lease.length / 10)
                logger.warning("%d locks could not be renewed: %s", len(leases), error)
                return False
            for lease, (_, _, length), outcome in zip(leases, requests, outcomes, strict=True):
                lease.settle(sent, length, outcome)
            return True


@cache
def has_threads() -> bool:
    """Return whether threads run here; if not, log that leases are not renewed."""
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None or {"enable-threads", "threads"} & set(uwsgi.opt):
        return True
    logger.warning(
        "uWSGI runs without threads, so held locks are not renewed: they expire after their "
        "lease. Start uWSGI with --enable-threads."
    )
    return False


_keeper = Keeper()


def keeper() -> Keeper:
    """Return the keeper of this process; a forked child has its own."""
    return _keeper


def _after_fork() -> None:
    # Locks that were held before the fork belong to the parent, which keeps renewing them.
    global _keeper
    _keeper = Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
