"""Keep the leases of this process: renew them, release later, notice a cache that forgot them."""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from django.db import connections

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.base import Outcome, Store
from django_singletask.stores.epoch import LOOK, ForgetfulStore, epoch_of
from django_singletask.threads import Background

logger = logging.getLogger("django_singletask")

LONGEST = 2.0
"""Seconds that a request of the thread takes at most; with short leases less."""
MAX_OWED = 10_000
"""How many releases can be owed to one cache. A lock beyond them is free when its lease ends."""


class Kept(NamedTuple):
    """The bytes that replace a released entry, and until when."""

    value: bytes
    until: float


class Owed(NamedTuple):
    """A release that must be made: the cache was down, or a signal interrupted it.

    It is tried again until the lease has ended anyway. ``kept`` replaces the entry for a while.
    """

    key: str
    value: bytes
    until: float
    kept: Kept | None = None

    def release(self, store: Store) -> Outcome:
        if self.kept is not None and (left := self.kept.until - clock.now()) > 0:
            return store.change(self.key, self.value, self.kept.value, left)
        return store.release(self.key, self.value)


class Renewer(Background):
    """Keep the leases of this process in one cache, in one thread.

    While a lease is held or a release is owed, the thread *ticks*: each 0.4 seconds, or each
    quarter of the shortest lease. A tick looks whether the cache has forgotten its locks, renews
    each lease when about a third of it has passed, and makes the releases that are owed. The
    first lease, a shorter one and an owed release wake the thread. Otherwise it sleeps, because a
    switch of threads would slow down each short run.

    The thread has a client of its own, whose requests take at most a sixth of the shortest lease.
    A cache that hangs has its own thread, so it delays no other cache.

    The references to leases are weak. If a signal comes between the take and the release, no other
    reference to the lease remains. Then it is no longer renewed, so it expires:

      body:    take -> "yours"   SIGUSR1: SoftTimeLimitExceeded    the frames go, and the lease
      thread:                                                      finds no reference: no renewal
    """

    name = "singletask-renewal"

    def __init__(self, cache: str) -> None:
        self.cache = cache
        # By token and key: a run's lock and its duplicate entry have the same token.
        self.leases: weakref.WeakValueDictionary[tuple[str, str], Any]
        self.leases = weakref.WeakValueDictionary()
        self.owed: deque[Owed] = deque()
        self.shortest = math.inf
        """The shortest lease that the thread knows of, in seconds; without end while it sleeps."""
        self.tick_at = 0.0
        self.read_at = 0.0
        """When the due times of all leases are read again."""
        self.failed = False
        """Whether the last tick failed."""
        self.changes = epoch_of(cache).changes
        """The number of changes of the epoch when all leases were last renewed."""
        self.late_at = math.inf
        """When a thread that has not ticked again is late."""

    # In a task's thread

    def keep(self, lease: Any) -> None:
        """Renew a lease from now on, if it renews, and watch its cache."""
        # Add the lease before the comparison. In the other order the thread could sleep:
        #
        #   keep():    shortest is 60: no wake                              adds
        #   thread:                              shortest = inf   no lease        sleeps
        self.leases[lease.token, lease.key] = lease
        if lease.length < self.shortest:
            self.shortest = lease.length
            self.wake()
        if self.thread is None or clock.now() > self.late_at:
            self.check_thread()

    def drop(self, lease: Any) -> None:
        self.leases.pop((lease.token, lease.key), None)

    def took(self, token: str, key: str, place: object) -> bool:
        """Return whether this thread and asyncio task took the entry."""
        lease = self.leases.get((token, key))
        return lease is not None and lease.place == place

    def owe(self, key: str, value: bytes, lease: float, kept: Kept | None = None) -> None:
        """Release an entry in the background, and try again until its lease has ended."""
        if len(self.owed) >= MAX_OWED:
            logger.warning("%s is not released; it is free when its lease ends.", key)
            return
        self.owed.append(Owed(key, value, clock.now() + lease, kept))
        self.wake()
        self.check_thread()

    def check_thread(self) -> None:
        """Start the thread if there is none; report one that hangs.

        A second one is never started, since two renewals of a lease could settle in another order
        than in the store.
        """
        self.begin()
        if clock.now() > self.late_at:
            self.late_at = math.inf  # reported once
            logger.error(
                "The thread that renews the locks in the cache %r has not answered for %g s: a "
                "request hangs, or this process was stopped. Until it answers, locks expire after "
                "their lease. Set a timeout in the cache's OPTIONS.",
                self.cache,
                2 * LONGEST,
            )

    # In the thread

    def run(self) -> None:
        self.tick_at = clock.now() + self.interval
        while True:
            error = self.try_to(self.pause)
            if clock.now() >= self.tick_at:
                error = self.try_to(self.tick) or error
            error = self.try_to(self.release_some) or error
            if error is not None and not self.failed:  # logged once per outage
                text = "Locks cannot be renewed or released now; trying again. %s"
                unknown = None if isinstance(error, LockUnavailable) else error
                logger.warning(text, error, exc_info=unknown)
            self.failed = error is not None

    def try_to(self, work: Callable[[], None]) -> Exception | None:
        try:
            work()
        except Exception as error:
            return error
        return None

    @property
    def interval(self) -> float:
        return min(LOOK, self.shortest / 4)

    def pause(self) -> None:
        """Sleep until the next tick, or until a release is owed."""
        if not self.leases and not self.owed:
            # If one cannot be closed, such as a connection from before gevent patched, no lock is
            # affected, and the thread must sleep all the same.
            self.try_to(close_stores)
            self.try_to(connections.close_all)
            # Set shortest before the test: a lease that keep() adds after it wakes the thread.
            self.shortest = self.late_at = math.inf
            if not self.leases and not self.owed:
                self.sleep(None)
            self.read_at = 0.0
            self.tick_at = clock.now() + self.interval
        self.late_at = self.tick_at + 2 * LONGEST
        while (left := self.tick_at - clock.now()) > 0 and (self.failed or not self.owed):
            if self.sleep(left):  # there may be a shorter lease
                self.read_at = 0.0
                self.tick_at = min(self.tick_at, clock.now() + self.interval)

    def tick(self) -> None:
        self.tick_at = clock.now() + self.interval
        leases, epoch = self.held(), epoch_of(self.cache)
        if not leases:
            return
        store = self.store()
        error = None
        if isinstance(store, ForgetfulStore):
            # A run that is shorter than a tick costs no look.
            age = clock.now() - max(leases[0].taken_at, epoch.seen_at)
            if age > self.interval / 2:
                try:
                    store.look()
                except LockUnavailable as unavailable:
                    error = unavailable  # of several servers, another may have the locks
        changes = epoch.changes
        # After an outage the server may be back with an old snapshot, which has the same epoch.
        everything = self.failed or changes != self.changes
        if everything or clock.now() >= self.read_at:
            self.renew_due(store, leases, everything)
            self.changes = changes
        if error is not None:
            raise error

    def store(self) -> Store:
        store, seconds = get_store(self.cache), min(self.shortest / 6, LONGEST)
        if store.limited < seconds / 2:  # a lease that was very short has ended
            close_stores()
            store = get_store(self.cache)
        store.limit(seconds)
        return store

    def held(self) -> list[Any]:
        """Return the leases that are kept, the oldest first."""
        # valuerefs() is atomic, even if another thread takes a lock meanwhile.
        leases = (reference() for reference in self.leases.valuerefs())
        return [lease for lease in leases if lease is not None]

    def renew_due(self, store: Store, leases: list[Any], everything: bool) -> None:
        """Renew the leases that are due about now, or all of them.

        With long leases the due times are read less often than at each tick: there may be very
        many leases.
        """
        now = clock.now()
        # keep() wakes the thread again for a lease that is added meanwhile:
        #
        #   thread: shortest = inf   reads leases                    shortest = 60   wakes again
        #   keep():                                adds; 1 < inf: wake
        self.shortest = math.inf
        self.shortest = min((lease.length for lease in self.held()), default=math.inf)
        again = max(self.interval, self.shortest / 12)
        due = [lease for lease in leases if lease.renews and lease.due_at <= now + again / 2]
        self.renew_all(store, [lease for lease in leases if lease.renews] if everything else due)
        if everything:
            for lease in leases:
                if not lease.renews:
                    lease.look()
        self.read_at = now + again - self.interval / 2

    def renew_all(self, store: Store, leases: list[Any]) -> None:
        """Renew leases in few requests; raise the last error, if there was any."""
        error = None
        for start in range(0, len(leases), store.batch):
            # Leave out a lease that the task's thread extends now: its request may hang.
            batch = [each for each in leases[start : start + store.batch] if each.begin_renewal()]
            try:
                self.renew_batch(store, [lease for lease in batch if not lease.has_ended()])
            except LockUnavailable as unavailable:
                error = unavailable  # of several servers, another may have the other locks
            finally:
                for lease in batch:
                    lease.renewing.release()
            self.late_at = clock.now() + 2 * LONGEST
        if error is not None:
            raise error

    def renew_batch(self, store: Store, leases: list[Any]) -> None:
        requests = [(lease.key, lease.value, lease.length) for lease in leases]
        sent = clock.now()
        outcomes = store.renew_many(requests) if requests else []
        for lease, (_, _, length), outcome in zip(leases, requests, outcomes, strict=True):
            lease.settle(sent, length, outcome)

    def release_some(self) -> None:
        """Make owed releases until the next tick is due, or until the cache does not answer."""
        for _ in range(len(self.owed)):
            owed = self.owed[0]
            try:
                owed.release(self.store())
            except Exception:
                if clock.now() < owed.until:
                    self.owed.append(owed)  # so that one that always fails does not block others
                raise
            finally:
                self.owed.popleft()
            if clock.now() >= self.tick_at:
                break


class Renewers(dict[str, Renewer]):
    """The renewers of this process by the aliases of their caches, made when they are needed."""

    def __missing__(self, cache: str) -> Renewer:
        return self.setdefault(cache, Renewer(cache))


renewers = Renewers()


def kept() -> set[tuple[str, str, str]]:
    """Return the cache, token and key of each lease that is kept."""
    return {
        (cache, *reference.key)
        for cache, each in list(renewers.items())
        for reference in each.leases.valuerefs()
    }


def release_owed(seconds: float) -> None:
    """Wait at most so long until all owed releases are made, before the process ends."""
    until = clock.now() + seconds
    while any(each.owed for each in list(renewers.values())) and clock.now() < until:
        time.sleep(0.01)


if hasattr(os, "register_at_fork"):
    # Locks that were held before the fork belong to the parent, which keeps renewing them.
    os.register_at_fork(after_in_child=renewers.clear)
