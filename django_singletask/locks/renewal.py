"""Keep the leases of this process: renew them, release later, notice a cache that forgot them.

What the thread does
--------------------

Each cache has one thread (:class:`Renewer`), so that a cache that hangs delays no other cache. The
thread has a client of its own, whose requests take at most a sixth of the shortest lease.

*It sleeps* while no lease is kept and no release is owed, because a switch of threads would slow
down each short run. The first lease, a shorter one and an owed release wake it.

*It ticks* otherwise: each 0.4 seconds, or each quarter of the shortest lease. A tick

1. leaves the entries of blocks that a signal ended before they could;
2. looks at the epoch, from which it learns whether the cache has forgotten its locks;
3. renews the leases that are *due*, of which about a third has passed. After an outage, or if the
   epoch has changed, it renews all of them at once, and asks for those that are never renewed.

*It makes the releases that are owed*, when one wakes it and after each tick: until its lease has
ended, an entry that could not be left is tried again.

An error stops nothing: the next tick tries again, and an outage is logged once. The lease itself
knows from its deadline whether it is lost. A second thread is never started, since two renewals of
a lease could settle in another order than in the store. A thread that hangs is reported.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from django.db import connections

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.forks import at_fork
from django_singletask.log import logger
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.base import Outcome, Store
from django_singletask.stores.epoch import LOOK, LOOK_AGAIN, epoch_of
from django_singletask.threads import Background

LONGEST = 2.0
"""Seconds that a request of the thread takes at most; with short leases less."""
MAX_OWED = 10_000
"""How many releases can be owed to one cache. A lock beyond them is free when its lease ends."""


class Owed(NamedTuple):
    """An entry that must be left: the cache was down, or a signal interrupted the request.

    ``keys`` are those of the slots where the entry may be. The release is tried ``until`` the lease
    of the entry has ended. The entry is replaced by ``replacement`` until ``replacement_until``; if
    ``replacement`` is empty, the entry is deleted.
    """

    keys: Sequence[str]
    value: bytes
    until: float
    replacement: bytes
    replacement_until: float


class Renewer(Background):
    """Keep the leases of this process in one cache, in one thread.

    The references to leases are weak. If a signal comes at the very beginning of ``__exit__``, no
    other reference to the lease remains. Then the thread leaves the entry:

      block:   takes   body   SIGUSR1: SoftTimeLimitExceeded   the frames go, and the lease
      thread:                                                  finds its twin: leaves the entry

    A lease that ``acquire()`` took is only forgotten then, and ends without renewals.
    """

    name = "singletask-renewal"

    def __init__(self, cache: str) -> None:
        self.cache = cache
        # By token and key: a run's lock and its duplicate entry have the same token.
        self.leases: dict[tuple[str, str], weakref.ref[Any]] = {}
        self.dead: dict[Any, object] = {}
        """Twins of the leases of blocks that a signal ended before they could leave the entry."""
        self.owed: deque[Owed] = deque()
        self.shortest: float = math.inf
        """The shortest lease that the thread knows of, in seconds; without end while it sleeps."""
        self.tick_at: float = 0.0
        self.read_at: float = 0.0
        """When the due times of all leases are read again."""
        self.error: Exception | None = None
        """The last error since the thread woke up."""
        self.failed: bool = False
        """Whether the thread has had errors since its last round without one."""
        self.is_unsure: bool = False
        """Whether the last tick met an entry of another holder that may be given back at once."""
        self.changes: int = epoch_of(cache).changes
        """The number of changes of the epoch when all leases were last renewed."""
        self.late_at: float = math.inf
        """When the thread is late, unless it has ticked again before."""

    # In a task's thread

    def keep(self, lease: Any) -> None:
        """Renew a lease from now on, if it renews, and watch its cache."""
        # Add the lease before the comparison. In the other order the thread could sleep:
        #
        #   keep():    shortest is 60: no wake                              adds
        #   thread:                              shortest = inf   no lease        sleeps
        #
        # If nothing refers to a lease any more, and it was not dropped, at_end is called. That must
        # not be a function in Python, because Python ignores the error of a signal that strikes in
        # it. Nor need the thread be woken: it ticks as long as ``leases`` has a name, and the name
        # of a block's lease stays there.
        name = lease.token, lease.key
        at_end: Callable[..., object] = partial(self.leases.pop, name)
        if lease.in_block:
            # Both have one dict, so that the twin knows each later change. It is a copy, because
            # Python 3.13 keeps the first one inside the lease, and empties it with the lease's
            # cycle. Nothing, and no thread, comes between the copy and these assignments.
            twin = object.__new__(type(lease))
            twin.__dict__ = lease.__dict__ = {**vars(lease)}
            at_end = partial(self.dead.setdefault, twin)
        self.leases[name] = weakref.ref(lease, at_end)
        if lease.length < self.shortest:
            self.shortest = lease.length
            self.wake()
        if self.thread is None or clock.now() > self.late_at:
            self.check_thread()

    def drop(self, lease: Any) -> None:
        self.leases.pop((lease.token, lease.key), None)

    def find(self, token: str, key: str, origin: object) -> Any:
        """Return the lease of an entry that this thread and asyncio task took, or None."""
        reference = self.leases.get((token, key))
        if reference is not None:
            lease = reference()
            if lease is not None and lease.origin == origin:
                return lease
        return None

    def owe(
        self,
        keys: Sequence[str],
        value: bytes,
        lease: float,
        replacement: bytes = b"",
        replacement_until: float = 0.0,
    ) -> None:
        """Leave an entry in the background, and try again until its lease has ended.

        :class:`Owed` says what the arguments mean.
        """
        if len(self.owed) >= MAX_OWED:
            logger.warning("%s is not released; it is free when its lease ends.", keys[0])
            return
        until = clock.now() + lease
        self.owed.append(Owed(keys, value, until, replacement, replacement_until))
        self.wake()
        self.check_thread()

    def check_thread(self) -> None:
        """Start the thread if there is none; report one that hangs."""
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
            self.error = None
            self.try_to(self.pause)
            if clock.now() >= self.tick_at:
                self.try_to(self.tick)
            self.try_to(self.release_some)
            if self.error is None:
                self.failed = False
            elif not self.failed:
                self.failed = True  # logged once per outage
                unknown: Exception | None = self.error
                if isinstance(self.error, LockUnavailable):
                    unknown = None
                text = "Locks cannot be renewed or released now; trying again. %s"
                logger.warning(text, self.error, exc_info=unknown)

    def try_to(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do some work, and note its error: of several servers, another may be reachable."""
        try:
            work(*arguments)
        except Exception as error:
            self.error = error

    @property
    def interval(self) -> float:
        return min(LOOK, self.shortest / 4)

    def pause(self) -> None:
        """Sleep until the next tick, or until a release is owed."""
        if not self.leases and not self.owed:
            self.rest()
        self.late_at = self.tick_at + 2 * LONGEST
        while self.failed or not self.owed:  # in an outage, releases wait for the tick
            left = self.tick_at - clock.now()
            if left <= 0:
                return
            if self.sleep(left):  # there may be a shorter lease
                self.read_at = 0.0
                self.tick_at = min(self.tick_at, clock.now() + self.interval)

    def rest(self) -> None:
        """Close the stores, and sleep until there is something to do."""
        close_stores()
        # If a connection cannot be closed, such as one from before gevent patched the sockets, no
        # lock is affected, and the thread must sleep all the same.
        with suppress(Exception):
            connections.close_all()
        # Set shortest before the test: a lease that keep() adds after it wakes the thread.
        self.shortest = math.inf
        self.late_at = math.inf
        if not self.leases and not self.owed:
            self.sleep(None)
        self.read_at = 0.0
        self.tick_at = clock.now() + self.interval

    def tick(self) -> None:
        """Look at the epoch, and renew the leases that are due, or all of them."""
        self.tick_at = clock.now() + self.interval
        self.is_unsure = False
        self.leave_entries()
        leases = self.held()
        if not leases:
            return
        store = self.store()
        epoch = epoch_of(self.cache)
        # A run that is shorter than a tick costs no look.
        known_at = max(leases[0].taken_at, epoch.seen_at)
        if clock.now() - known_at > self.interval / 2:
            self.try_to(store.look, (lease.key for lease in leases))
        changes = epoch.changes
        everything = changes != self.changes
        if self.failed:
            # The server may be back with an old snapshot, which has the same epoch.
            everything = True
        now = clock.now()
        if now < self.read_at and not everything:
            return
        self.note_shortest()
        # With long leases the due times are read less often than at each tick: there may be very
        # many leases. A lease that is due within half of the period is renewed now.
        period = max(self.interval, self.shortest / 12)
        self.read_at = now + period - self.interval / 2
        soon = now + period / 2
        if everything:
            soon = math.inf
        due = [lease for lease in leases if lease.renews and lease.due_at <= soon]
        for start in range(0, len(due), store.batch):
            self.try_to(self.renew, store, due[start : start + store.batch])
            self.late_at = clock.now() + 2 * LONGEST
        if everything:
            self.check_fixed(leases)
        if self.is_unsure:
            self.tick_at = min(self.tick_at, clock.now() + LOOK_AGAIN)
            self.read_at = self.tick_at
        elif self.error is None:
            self.changes = changes

    def note_shortest(self) -> None:
        """Note how long the shortest lease is that is kept now."""
        # keep() wakes the thread again for a lease that is added meanwhile:
        #
        #   thread: shortest = inf   reads leases                    shortest = 60   wakes again
        #   keep():                                adds; 1 < inf: wake
        self.shortest = math.inf
        self.shortest = min([lease.length for lease in self.held()], default=math.inf)

    def store(self) -> Store:
        store = get_store(self.cache)
        store.limit(min(self.shortest / 6, LONGEST))
        return store

    def held(self) -> list[Any]:
        """Return the leases that are kept, the oldest first."""
        # list() is atomic, even if another thread takes a lock meanwhile.
        leases = [reference() for reference in list(self.leases.values())]
        return [lease for lease in leases if lease is not None]

    def leave_entries(self) -> None:
        """Leave the entries of blocks that did not; their bodies have ended."""
        for twin in list(self.dead):
            self.store()  # limits the request
            self.drop(twin)
            # With a result of its own, the record does not say that the body returned: a signal
            # may have ended it.
            self.try_to(twin.leave_body, None, "returned")
            self.dead.pop(twin)  # last: release_owed() waits for it

    def renew(self, store: Store, leases: list[Any]) -> None:
        """Renew leases in one request."""
        mine = []
        try:
            for lease in leases:
                # Leave out a lease that the task's thread extends now: its request may hang.
                if lease.held and lease.renewing.acquire(blocking=False):
                    mine.append(lease)
            due = [lease for lease in mine if not lease.has_ended()]
            if not due:
                return
            requests = [(lease.key, lease.value, lease.length) for lease in due]
            sent = clock.now()
            outcomes = store.renew_many(requests)
            for lease, (_key, _value, length), outcome in zip(due, requests, outcomes, strict=True):
                if isinstance(outcome, LockUnavailable):  # the error is for this lease alone
                    self.error = outcome
                elif outcome is Outcome.UNSURE:
                    self.is_unsure = True
                else:
                    lease.settle(sent, length, outcome)
        finally:
            for lease in mine:
                lease.renewing.release()

    def check_fixed(self, leases: list[Any]) -> None:
        """Find out which leases that are never renewed the cache has forgotten."""
        for lease in leases:
            # The body of the lease may end during the request.
            if not lease.renews and not lease.is_there() and lease.held:
                lease.lose()

    def release_some(self) -> None:
        """Make owed releases until the next tick is due.

        Of several servers, another may answer. So after an error this tries the other releases,
        for a tenth of a tick.
        """
        soon = clock.now() + self.interval / 10
        for _ in range(len(self.owed)):
            owed = self.owed[0]
            try:
                self.release(owed)
            except Exception as error:
                self.error = error
                if clock.now() < owed.until:
                    self.owed.append(owed)
            finally:
                self.owed.popleft()  # last: release_owed() waits for it
            end = self.tick_at
            if self.error is not None:
                end = soon
            if clock.now() >= end:
                break

    def release(self, owed: Owed) -> None:
        """Leave an entry; of several slots, only in those that have its bytes."""
        store = self.store()
        keys = owed.keys
        if len(keys) > 1:
            found = store.read_many(keys)
            keys = [key for key, entry in found.items() if entry.value == owed.value]
        for key in keys:
            store.release(key, owed.value, owed.replacement, owed.replacement_until)


class Renewers(dict[str, Renewer]):
    """The renewers of this process by the aliases of their caches, made when they are needed."""

    def __missing__(self, cache: str) -> Renewer:
        return self.setdefault(cache, Renewer(cache))


renewers: Renewers = Renewers()


def release_owed(seconds: float) -> None:
    """Wait, at most so long, until no entry is owed any more, before the process ends."""
    until = clock.now() + seconds
    while clock.now() < until:
        if not any(each.owed or each.dead for each in list(renewers.values())):
            return
        time.sleep(0.01)


# Locks that were held before the fork belong to the parent, which keeps renewing them.
at_fork(after_in_child=renewers.clear)
