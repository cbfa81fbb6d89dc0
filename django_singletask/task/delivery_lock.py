"""The lock of a delivery, and what the delivery does if the cache cannot be used."""

from __future__ import annotations

import logging
import random
from time import sleep, time

from django_singletask.exceptions import LockUnavailable
from django_singletask.holder import Holder
from django_singletask.locks import blocks
from django_singletask.locks.keys import LockKey
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run
from django_singletask.task.options import LockOptions

__all__ = ["YOUNG", "DeliveryLock"]

logger = logging.getLogger("django_singletask")

# A queue behind one lock
#
# While many calls wait for one lock, a delivery often meets a very short run. Postponing the
# delivery costs more time than such a run, and leaves the lock free meanwhile:
#
#   A: takes, runs, releases      C: takes, runs, releases     D: held by C: publishes D' .....
#   B:    held by A: publishes B' ............ at the earliest a second later: takes
#
# So a delivery of "requeue" tries again a few times before it is postponed. It does so only while
# the holder is young: an older run probably takes long, and this process has other work to do.
#
#   A: takes, runs, releases                 D: takes, runs, releases
#   B:    held by A: tries again, takes, runs, releases

YOUNG = 0.05
"""The greatest age of a holder, and the longest wait for it here, in seconds."""
LOOK_AGAIN = 0.002
"""Seconds until the first new attempt."""


class DeliveryLock(TaskLock):
    """The lock of a delivery, whose policy handles a conflict.

    ``outage`` is the error of a cache that could not be used, unless ``on_outage`` is ``"raise"``.
    Then the body runs without its lock, or is skipped. If this acquisition has met a holder, which
    may still be running, the body does not run without the lock: the error is raised, or a call of
    "requeue" is postponed.
    """

    outage: LockUnavailable | None = None

    def __init__(self, key: LockKey, options: LockOptions, run: Run, *, is_message: bool) -> None:
        super().__init__(
            key,
            timeout=options.lock_timeout,
            renew=options.lock_renew,
            wait=(options.lock_wait or 0) if options.on_conflict == "wait" else 0,
            slots=options.lock_slots,
            run=run,
        )
        self.at_least = options.lock_at_least
        self.can_be_postponed = is_message and options.on_conflict == "requeue"
        self.has_waited = False
        self.on_outage = options.on_outage

    def meet_conflict(self) -> None:
        """Do nothing: the delivery handles the conflict."""

    def __enter__(self) -> DeliveryLock:
        try:
            super().__enter__()
            if self.can_be_postponed and not self:
                self._wait_for_young_holder()
        except LockUnavailable as error:
            if self.on_outage != "skip" and (self.on_outage != "run" or self.blocker is not None):
                raise
            self.outage = error
            self._block = blocks.enter(self)
        return self

    def _wait_for_young_holder(self) -> None:
        """Take the lock if its holder, or the next one, ends within a few milliseconds."""
        try:
            waited, pause = 0.0, LOOK_AGAIN
            while waited < YOUNG and self._is_young(self.blocker):
                pause = max(pause, waited / 2)
                waited += pause
                self.has_waited = True
                sleep(pause * random.uniform(0.5, 1))
                if self.take():
                    self._block = blocks.enter(self)
        except LockUnavailable as error:  # it has met a holder, so it is postponed
            logger.warning("%s: the call is postponed. %s", self.address, error)
        except BaseException as error:  # such as a signal after the take: no __exit__ follows
            self.__exit__(type(error), error, None)
            raise

    def _is_young(self, blocker: Holder | None) -> bool:
        """Return whether a holder started just now, by the clocks of both hosts."""
        if blocker is None or blocker.kept or (self.run and blocker.is_run_of(self.run.task_id)):
            return False
        return 0 <= time() - blocker.since < YOUNG

    def report_outage(self) -> None:
        assert self.lease is not None  # the one that could not be taken
        address, holder, reason = self.address, self.lease.holder, str(self.outage)
        if self.on_outage == "run":
            text = "%s: the task runs without its lock (on_outage='run'). %s"
            logger.error(text, address, reason)
            address.tell("unguarded", holder, reason=reason)
        else:
            logger.warning("%s: the task is skipped (on_outage='skip'). %s", address, reason)
            address.tell_of_conflict("skipped", "outage", holder, None)

    def check(self) -> None:
        """Raise :class:`LockLost` if the lock is lost; do nothing if the body runs without it."""
        if self.outage is None:
            super().check()
