"""The lock of a delivery, and what the delivery does if the cache cannot be used."""

from __future__ import annotations

import logging

from django_singletask.exceptions import LockUnavailable
from django_singletask.locks import blocks
from django_singletask.locks.keys import LockKey
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run
from django_singletask.task.options import LockOptions

logger = logging.getLogger("django_singletask")

SHORT_WAIT = 0.02
"""Seconds for which a delivery of "requeue" waits before it is postponed.

Many calls that wait for one lock often meet a very short run, and postponing a call takes longer.
"""


class DeliveryLock(TaskLock):
    """The lock of a delivery, whose policy handles a conflict.

    ``outage`` is the error of a cache that could not be used; the delivery handles this, too.
    """

    outage: LockUnavailable | None = None

    def __init__(self, key: LockKey, options: LockOptions, run: Run) -> None:
        waits = {"wait": options.lock_wait or 0, "requeue": SHORT_WAIT}
        super().__init__(
            key,
            timeout=options.lock_timeout,
            renew=options.lock_renew,
            wait=waits.get(options.on_conflict, 0),
            slots=options.lock_slots,
            run=run,
        )
        self.at_least = options.lock_at_least
        self.is_requeued = options.on_conflict == "requeue"
        self.on_outage = options.on_outage

    def meet_conflict(self) -> None:
        """Do nothing: the delivery handles the conflict."""

    def __enter__(self) -> DeliveryLock:
        try:
            super().__enter__()
            if self.is_requeued:
                self.note = ""  # the call has not given up
        except LockUnavailable as error:
            self.outage = error
            self._block = blocks.enter(self)
        return self

    def report_conflict(self, reason: str, result: str) -> None:
        """Report a conflict, or the outage that postpones the call, which is no event."""
        if self.outage is None:
            super().report_conflict(reason, result)
        else:
            logger.warning("%s: the call is postponed. %s", self.address, self.outage)

    @property
    def is_kept(self) -> bool:
        """Whether the run has returned and keeps its lock (``lock_at_least``)."""
        return self.lease is not None and self.lease.kept

    def report_outage(self) -> None:
        assert self.lease is not None  # the one that could not be taken
        address, holder, reason = self.address, self.lease.holder, str(self.outage)
        if self.on_outage == "run":
            text = "%s: the task runs without its lock (on_outage='run'). %s"
            logger.error(text, address, reason)
            address.tell("unguarded", holder, reason=reason)
        else:
            logger.warning("%s: the task is skipped (on_outage='skip'). %s", address, reason)
            address.tell_of_conflict("outage", "skipped", holder, None)

    def check(self) -> None:
        """Raise :class:`LockLost` if the lock is lost; do nothing if the body runs without it."""
        if self.outage is None:
            super().check()
