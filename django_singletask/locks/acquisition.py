"""One acquisition of a TaskLock: its attempts, and the pauses between them."""

from __future__ import annotations

import logging
import math
import random
from typing import TYPE_CHECKING

from django_singletask import clock
from django_singletask.conf import check_seconds
from django_singletask.holder import Holder
from django_singletask.locks import blocks, renewal
from django_singletask.locks.address import lease_length
from django_singletask.locks.lease import Lease
from django_singletask.locks.run import NO_RUN, Run

if TYPE_CHECKING:
    from django_singletask.locks.lock import TaskLock

__all__ = ["Acquisition"]

logger = logging.getLogger("django_singletask")

POLL = 0.05
MAX_POLL = 0.5
BEHIND_ITSELF = "the same code already holds it, and a lock is not re-entrant"


class Acquisition:
    """Take a lock, waiting up to ``wait`` seconds (None: the lock's own ``wait``).

    The steps may run in other threads, so the run and the place of the caller are read here.
    ``in_block``: it is for a ``with`` block, which uses the lock until its end. The lock refers to
    its acquisition, but not the reverse: a cycle would keep an unused lease alive.
    """

    pause = POLL

    def __init__(self, lock: TaskLock, wait: float | None, *, in_block: bool = False) -> None:
        if wait is not None:
            check_seconds("wait", wait, zero=True, infinite=True)
        self.wait = lock.wait if wait is None else wait
        self.until = clock.now() + self.wait
        self.in_block = in_block
        self.run = lock.run or Run.current()
        self.place = blocks.here()
        lock.note = ""

    def step(self, lock: TaskLock) -> float | None:
        """Make an attempt; after the last one, handle a conflict as the options say."""
        pause = self.attempt(lock)
        if pause is None and lock.blocker is not None:
            if self.in_block:
                lock.meet_conflict()
            else:
                lock.report_conflict("skip")
        return pause

    def attempt(self, lock: TaskLock) -> float | None:
        """Make an attempt; return the seconds until the next one, or None after the last one."""
        lease = lock.lease
        if lease is None or not lease.is_waiting:
            lease = self.new_lease(lock)
        around = blocks.around(lease, self.place) if len(lease.slots.keys) > 1 else None
        if around is None:
            pause = lease.attempt()
            if pause is not None:
                return pause
        else:
            lease.meet(around)
        lock.blocker, lock.blocker_remaining = lease.blocker, lease.blocker_remaining
        if lease.blocker is not None:
            return self._after_conflict(lock, lease, lease.blocker)
        lock.key = lease.key
        lease.address.tell("acquired", lease.holder)
        return None

    def _after_conflict(self, lock: TaskLock, lease: Lease, blocker: Holder) -> float | None:
        wait = self.wait
        if lock.run and blocker.is_run_of(lock.run.task_id):
            return None  # an earlier run of the same message
        is_own = renewal.keeper().took(blocker.token, lease.key, self.place)
        lock.note = BEHIND_ITSELF if is_own else ""
        if not wait:
            return None
        if blocks.outlast(blocker.token, lease.key, self.until, self.place):
            lock.refuse("wait")
        left = self.until - clock.now()
        if left <= 0:
            lock.say_gave_up(wait)
            return None
        if is_own and wait == math.inf and self.pause == POLL:
            text = "Endless wait for %s: %s. Only another thread can release it."
            logger.warning(text, lease.address, lock.note)
        pause = min(left, self.pause * random.uniform(0.5, 1))
        self.pause = min(self.pause * 1.5, MAX_POLL)
        return pause

    def new_lease(self, lock: TaskLock) -> Lease:
        """Return a new lease of the lock, with a new token."""
        holder = self.run.holder(lock.name, lease_length(lock.timeout), lock.slots)
        # Set before the take, so that the lock can release it after any error or signal.
        lock.lease = Lease(
            lock.address,
            holder,
            renews=lock.renew,
            at_least=lock.at_least,
            run=lock.run or NO_RUN,
            place=self.place,
        )
        return lock.lease
