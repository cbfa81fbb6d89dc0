"""Keep the leases of this process alive: one thread, started by the first lock that needs it."""

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
    """Know the leases that this process holds, and renew each at a third of its length.

    The keeper has weak references only. A lease that nobody else refers to any more, because a
    signal struck between the take and the release, is no longer renewed, so it ends by itself:

      body:    take -> "yours"   SIGUSR1: SoftTimeLimitExceeded    the frames go, and the lease
      keeper:                                                      finds no reference: no renewal
    """

    def __init__(self) -> None:
        # By token and key: a run has one token for its lock and for the entry of its queued call.
        self.leases: weakref.WeakValueDictionary[tuple[str, str], Holding]
        self.leases = weakref.WeakValueDictionary()
        self.watches: dict[str, Watch] = {}
        self.debts: dict[str, Debts] = {}
        """The releases that are owed, by cache: one that is down holds up no other."""
        self.wakes_at = math.inf
        self.renew_at = math.inf
        """When the first renewal is due, as far as the thread has looked at the leases."""
        self.new_dues: deque[float] = deque()
        """Due times that the thread has not read yet."""
        self.changed = threading.Condition()
        self.sleeps = False
        # Two renewals of one lease at a time could settle in another order than the store saw them:
        #
        #   thread: asks for 9 s -> granted second                      settles first: trusts 9 s
        #   extend: asks for 600 s -> granted first, cut to 9 s          settles last: trusts 600 s
        # Re-entrant: a receiver of the event of a renewal may itself extend the lock.
        self.renewing = threading.RLock()
        self.thread: threading.Thread | None = None

    def keep(self, lease: Holding) -> None:
        """Renew a lease from now on, if it is one that renews, and watch the cache of any."""
        self.leases[lease.token, lease.key] = lease
        self.wake_for(lease)

    def drop(self, lease: Holding) -> None:
        self.leases.pop((lease.token, lease.key), None)

    def took(self, token: str, key: str, place: object) -> bool:
        """Say whether the entry was taken at this place, which is a thread and asyncio task."""
        lease = self.leases.get((token, key))
        return lease is not None and lease.place == place

    def kept(self) -> set[tuple[str, str]]:
        """Return token and key of each lease that is kept."""
        return {reference.key for reference in self.leases.valuerefs()}

    def owe(
        self, cache: str, key: str, value: bytes, lease: float, kept: Kept | None = None
    ) -> None:
        """Release an entry in the background, and try again for as long as its lease can last."""
        debts = self.debts.setdefault(cache, Debts(cache))
        debts.add(Debt(key, value, clock.now() + lease, kept))
        self.wake(debts.due_at)

    def wake_for(self, lease: Holding) -> None:
        """Wake the thread if the lease is due before the thread would wake by itself.

        Otherwise let it sleep: to wake it would cost each short run a switch of threads.
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
        """Let the thread look again, and start it if it does not run."""
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
        """Renew and pay what is due, for ever."""
        while True:
            try:
                self.wait()
                self.tick()
            except Exception:
                logger.exception("The renewal of locks failed; it goes on.")
                time.sleep(RETRY)

    def wait(self) -> None:
        if self.next_due() == math.inf:
            # Nothing to do: leave no connection open, of a store or of the history.
            close_stores()
            connections.close_all()
        with self.changed:
            # A lock that is taken while this thread computes next_due() sees wakes_at = inf. So it
            # calls wake(), which waits for this condition, that is, until this thread sleeps:
            #
            #   this thread: wakes_at = inf   next_due() -> inf                  sleeps -> woken
            #   keep():                                 due < inf   wake() ......... notify
            self.wakes_at = math.inf
            self.wakes_at = self.next_due()
            self.sleeps = True
            # When woken, do not compute next_due() anew. Of locks that are held for a moment each,
            # one after the other, only the first wakes this thread, and the time that it set
            # serves all of them.
            while (pause := self.wakes_at - clock.now()) > 0:
                self.changed.wait(None if pause == math.inf else pause)
            self.sleeps = False

    def next_due(self) -> float:
        times = [debts.due_at for debts in list(self.debts.values())]
        times += [watch.due_at(self.held()) for watch in list(self.watches.values())]
        return min([self.next_renewal(), *times])

    def next_renewal(self) -> float:
        """Return when the next renewal is due.

        Look at all leases only when ``renew_at`` has come; the last look at all leases computed it.
        The thread wakes each 0.4 s to look at epochs, and there may be very many leases.
        """
        while self.new_dues:
            self.renew_at = min(self.renew_at, self.new_dues.popleft())
        if self.renew_at <= clock.now():
            renewals = (lease.due_at for lease in self.held() if lease.renews)
            self.renew_at = min(renewals, default=math.inf)
        return self.renew_at

    def tick(self) -> None:
        """Look at epochs, renew the leases that are due now or soon, then pay debts.

        To renew early keeps leases that were taken together in one request.
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
        # valuerefs() is one step: another thread that takes a lock meanwhile cannot disturb it.
        for reference in self.leases.valuerefs():
            lease = reference()
            if lease is not None:
                yield lease

    def renew_forgotten(self, watch: Watch) -> None:
        """Renew all leases of a cache. A lease that is not renewed may be lost: look at it."""
        changes = epoch_of(watch.cache).changes
        leases = [lease for lease in self.held() if lease.cache == watch.cache]
        if self.renew_all(watch.cache, [lease for lease in leases if lease.renews]):
            for lease in leases:
                if not lease.renews:
                    lease.look()
            watch.renewed(changes)

    def renew_all(self, alias: str, leases: list[Holding]) -> bool:
        """Renew leases of one cache in as few trips as its store can; say whether it answered."""
        with self.renewing:
            leases = [lease for lease in leases if not lease.has_ended()]
            if not leases:
                return True
            requests = [(lease.key, lease.value, lease.length) for lease in leases]
            sent = clock.now()
            try:
                outcomes = get_store(alias).renew_many(requests)
            except Exception as error:
                # The store may be back at the next attempt, before the leases end.
                for lease in leases:
                    lease.retry_at = clock.now() + min(RETRY, lease.length / 10)
                logger.warning("%d locks could not be renewed: %s", len(leases), error)
                return False
            for lease, (_, _, length), outcome in zip(leases, requests, outcomes, strict=True):
                lease.settle(sent, length, outcome)
            return True


@cache
def has_threads() -> bool:
    """Say whether threads run here; where they do not, log that leases are not renewed."""
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None or {"enable-threads", "threads"} & set(uwsgi.opt):
        return True
    logger.warning(
        "uWSGI runs without threads, so held locks are not renewed and end with their lease. "
        "Start uWSGI with --enable-threads."
    )
    return False


_keeper = Keeper()


def keeper() -> Keeper:
    """Return the keeper of this process; a forked child has one of its own."""
    return _keeper


def _after_fork() -> None:
    # Locks that were held over a fork are the parent's, which goes on renewing them.
    global _keeper
    _keeper = Keeper()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
