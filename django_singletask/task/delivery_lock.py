"""The lock of a delivery, and what the delivery does if the cache cannot be asked."""

from __future__ import annotations

import logging

from django_singletask.exceptions import LockUnavailable
from django_singletask.locks import blocks
from django_singletask.locks.keys import LockKey
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run
from django_singletask.task.options import LockOptions

__all__ = ["DeliveryLock"]

logger = logging.getLogger("django_singletask")


class DeliveryLock(TaskLock):
    """The lock of a delivery, which leaves a conflict to ``on_conflict``.

    ``outage`` is the error of a cache that could not be asked, unless ``on_outage`` is ``"raise"``.
    The body then runs in the block of a lock that is false, or not at all. It never runs if this
    acquisition has waited for a holder, which may go on: then the error is raised.
    """

    outage: LockUnavailable | None = None

    def __init__(self, key: LockKey, options: LockOptions, run: Run) -> None:
        super().__init__(
            key,
            timeout=options.lock_timeout,
            renew=options.lock_renew,
            wait=(options.lock_wait or 0) if options.on_conflict == "wait" else 0,
            slots=options.lock_slots,
            run=run,
        )
        self.at_least = options.lock_at_least
        self.on_outage = options.on_outage

    def meet_conflict(self) -> None:
        """Leave the conflict to the delivery."""

    def __enter__(self) -> DeliveryLock:
        try:
            super().__enter__()
        except LockUnavailable as error:
            if self.on_outage != "skip" and (self.on_outage != "run" or self.blocker is not None):
                raise
            self.outage = error
            self._block = blocks.enter(self)
        return self

    def report_outage(self) -> None:
        """Log what ``on_outage`` lets the delivery do, and send its event."""
        assert self.lease is not None  # the one that could not be taken
        address, holder, reason = self.address, self.lease.holder, str(self.outage)
        if self.on_outage == "run":
            logger.error("%s: it runs without its lock (on_outage='run'). %s", address, reason)
            address.tell("unguarded", holder, reason=reason)
        else:
            logger.warning("%s: it is skipped (on_outage='skip'). %s", address, reason)
            address.tell_of_conflict("skipped", "outage", holder, None)

    def check(self) -> None:
        """Raise :class:`LockLost` if the lock is lost; pass in a body that runs without it."""
        if self.outage is None:
            super().check()
