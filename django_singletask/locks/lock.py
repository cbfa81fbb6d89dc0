"""Take, hold and give back one lock."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Coroutine, Generator
from contextvars import Token
from typing import Any, NoReturn

from django_singletask import clock
from django_singletask.conf import check_seconds
from django_singletask.exceptions import LockConflict
from django_singletask.holder import Holder
from django_singletask.locks import blocks, renewal
from django_singletask.locks.address import lease_length
from django_singletask.locks.handover import Handle, receive
from django_singletask.locks.held import HeldLock
from django_singletask.locks.keys import LockKey
from django_singletask.locks.lease import Lease
from django_singletask.locks.run import NO_RUN, Run, result_of
from django_singletask.locks.steps import do, do_in_threads, in_thread
from django_singletask.locks.use import Use

__all__ = ["TaskLock", "current_lock"]

logger = logging.getLogger("django_singletask")

POLL = 0.05
MAX_POLL = 0.5
BEHIND_ITSELF = "this code itself has it already, and a lock is not re-entrant"


def current_lock() -> TaskLock | None:
    """Return the innermost lock whose ``with`` block, function or task body is running here."""
    lock: TaskLock | None = blocks.innermost()
    return lock


class TaskLock(HeldLock):
    """Hold a lock by name, so that one ``with`` block runs at a time in all processes.

    ``timeout`` is the length of the lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``); with
    ``renew`` it is extended at a third of that for as long as the process lives. ``wait`` is how
    many seconds an acquisition waits for a held lock; ``math.inf``: without end. ``on_conflict``
    says what ``with`` does with a lock that is held: ``"raise"`` :class:`LockConflict`, or
    ``"skip"``: it yields this object, which is then false. ``cache`` is an alias in ``CACHES``
    (default ``SINGLETASK_CACHE``). ``slots`` is how many may hold the lock at once. ``run`` is for
    this package alone.

    The lock is an entry in the cache that ends by itself: see "What such a lock cannot promise" in
    the documentation. One object serves one acquisition at a time. A lock is not re-entrant:
    to wait for one whose ``with`` block is around the call raises at once. One that the same code
    took by ``acquire()`` may be released by another thread, so a wait for it goes on; if it is
    without end, a warning is logged when it begins.
    Raises ``TypeError`` and ``ValueError`` for options that cannot work. Unlike the locks of
    redis-py and ``threading``, ``acquire()`` does not wait by default.
    """

    def __init__(
        self,
        name: str | LockKey,
        *,
        timeout: float | None = None,
        renew: bool = True,
        wait: float = 0,
        on_conflict: str = "raise",
        cache: str | None = None,
        slots: int = 1,
        run: Run | None = None,
    ) -> None:
        super().__init__(name, timeout=timeout, cache=cache, slots=slots, run=run)
        if timeout is not None:
            check_seconds("timeout", timeout)
        elif not renew:
            raise TypeError("renew=False needs a timeout: after it the lock ends under the run.")
        check_seconds("wait", wait, zero=True, infinite=True)
        if on_conflict not in ("raise", "skip"):
            hint = (
                f'on_conflict must be "raise" or "skip", not {on_conflict!r}. To wait, use wait=….'
            )
            raise ValueError(hint)
        self.renew = renew
        self.wait = wait
        self.on_conflict = on_conflict
        self.blocker: Holder | None = None
        self.blocker_remaining: float | None = None
        self.note = ""
        """What the log and :class:`LockConflict` add about the last conflict."""
        self._use = Use(self.name)
        self._block: Token[Any] | None = None

    # Taking

    def acquire(self, wait: float | None = None) -> bool:
        """Take the lock, waiting up to ``wait`` seconds for it, and say whether it was taken.

        When it was not, ``blocker`` is the holder that was in the way. Raises
        :class:`LockConflict` instead of waiting for the lock of a ``with`` block around this call,
        :class:`LockError` if this object is in use already, and :class:`LockUnavailable`, also if
        the cache answers later than the lease lasts.
        """
        use = object()
        try:
            do(self._acquisition(use, wait))
            return bool(self)
        except BaseException as error:
            self._end(use, error)
            raise

    async def aacquire(self, wait: float | None = None) -> bool:
        """Take the lock as :meth:`acquire` does, while the loop goes on.

        A call that is cancelled takes nothing: what its last request took is given back.
        """
        await self._in_threads(wait)
        return bool(self)

    def _in_threads(
        self, wait: float | None = None, *, block: bool = False
    ) -> Coroutine[Any, Any, None]:
        use, cache = object(), self.address.cache
        steps = self._acquisition(use, wait, block=block)
        return do_in_threads(cache, steps, functools.partial(self._end, use))

    def take(self, wait: float = 0) -> bool:
        """Take the lock as :meth:`acquire` does, but report no conflict and reserve nothing."""
        return do(self._attempts(wait, self.run or Run.current(), blocks.here()))

    def _acquisition(
        self, use: object, wait: float | None = None, *, block: bool = False
    ) -> Generator[float, None, None]:
        """Return the steps that take the lock for an acquisition or a block.

        They may be done in other threads, so who wants the lock is known before they begin.
        """
        wait = self.wait if wait is None else check_seconds("wait", wait, zero=True, infinite=True)
        return self._steps(
            use, block, self._attempts(wait, self.run or Run.current(), blocks.here())
        )

    def _steps(
        self, use: object, block: bool, attempts: Generator[float, None, bool]
    ) -> Generator[float, None, None]:
        if block:
            if self._use.begin_block(use) or (yield from attempts):
                return
            self.meet_conflict()
        else:
            self._use.begin(use)
            if not (yield from attempts):
                self.report_conflict("skip")
                self._use.end()

    def _attempts(self, wait: float, run: Run, place: blocks.Place) -> Generator[float, None, bool]:
        until, pause, self.note = clock.now() + wait, POLL, ""
        while True:
            lease = self._new_lease(run, place)
            around = blocks.around(lease, place)
            if around is None:
                self.blocker, self.blocker_remaining = yield from lease.steps()
            else:
                lease.move_to(around.key)
                self.blocker = around.holder
                self.blocker_remaining = max(0.0, around.deadline - clock.now())
            blocker = self.blocker
            if blocker is None:
                self.key = lease.key
                lease.address.tell("acquired", lease.holder)
                return True
            left = until - clock.now()
            if self.run and blocker.is_run_of(self.run.task_id):
                return False  # an earlier run of the same message: not to be waited for here
            is_own = renewal.keeper().took(blocker.token, lease.key, place)
            self.note = BEHIND_ITSELF if is_own else ""
            if wait and blocks.outlast(blocker.token, lease.key, until, place):
                self.refuse("wait")
            if left <= 0:
                if wait:
                    self.say_gave_up(wait)
                return False
            if self.note and wait == math.inf and pause == POLL:
                text = "%s is waited for without end: %s. Only another thread can release it."
                logger.warning(text, lease.address, self.note)
            yield min(left, pause * random.uniform(0.5, 1))
            pause = min(pause * 1.5, MAX_POLL)

    def _end(self, use: object, error: BaseException) -> None:
        """End what could not be entered, for a conflict or a signal that struck after the take."""
        if self._use.is_by(use):
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Give back what is held, and let the object be used again."""
        try:
            if self.lease is not None and self.lease.held:
                self.lease.give_back(result_of(error))
        finally:
            self._use.end_block()

    def _new_lease(self, run: Run, place: blocks.Place) -> Lease:
        # Known here before it is taken: whatever strikes after the take, this object can give back.
        self.lease = Lease(
            self.address,
            run.holder(self.name, lease_length(self.timeout), self.slots),
            renews=self.renew,
            at_least=self.at_least,
            run=self.run or NO_RUN,
        )
        self.lease.place = place
        return self.lease

    # A lock that outlives its process

    @classmethod
    def receive(cls, handle: str, *, timeout: float | None = None, renew: bool = True) -> TaskLock:
        """Take the lock that was handed over, and return it: held, and renewed from then on.

        Use it in a ``with`` block, or :meth:`release` it. It can be received once; only the same
        Celery task, delivered again, receives it again if its first run is proven dead. The
        options are those of :class:`TaskLock`.

        Raises :class:`LockLost` if the lock is gone or somebody else's, ``ValueError`` for what
        :meth:`hand_over` did not return, and :class:`LockUnavailable`.
        """
        waiting = Handle.decode(handle)
        key, cache, slots = waiting.lock_key, waiting.cache, waiting.slots
        lock = cls(key, timeout=timeout, renew=renew, cache=cache, slots=slots)
        lease = lock._new_lease(lock.run or Run.current(), blocks.here())
        try:
            receive(lease, waiting.token)
            lock._use.receive(lease)
            return lock
        except BaseException:
            if lease.held:  # a signal struck: the caller does not know that it holds the lock
                lease.give_back("raised")
            raise

    def __enter__(self) -> TaskLock:
        use = object()
        try:
            do(self._acquisition(use, block=True))
            if self:
                self._block = blocks.enter(self)
            return self
        except BaseException as error:
            # It is a conflict, or a signal struck after the take: no __exit__ follows.
            if self._use.is_by(use):
                self.__exit__(type(error), error, None)
            raise

    def __exit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        try:
            self._leave(exc)
        finally:
            self._leave_block()

    async def __aenter__(self) -> TaskLock:
        await self._in_threads(block=True)
        if self:
            self._block = blocks.enter(self)
        return self

    async def __aexit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        try:
            await in_thread(self.address.cache, functools.partial(self._leave, exc))
        finally:
            self._leave_block()

    def _leave_block(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            blocks.leave(block)

    def meet_conflict(self) -> None:
        """Do what ``on_conflict`` says in a ``with`` that finds the lock held."""
        if self.on_conflict == "raise":
            self.refuse("wait" if self.wait else "raise")
        self.report_conflict("skip")

    def say_gave_up(self, wait: float) -> None:
        """Let the log and the error say that the lock was waited for, and how long."""
        note = f"gave up after {wait:g} s ({'lock_wait' if self.run else 'wait'})"
        self.note = f"{self.note}; {note}" if self.note else note

    def refuse(self, reason: str) -> NoReturn:
        """Report the conflict and raise :class:`LockConflict`."""
        self.report_conflict(reason)
        raise LockConflict.of(self)

    def report_conflict(self, reason: str) -> None:
        """Log a conflict, and send its event; ``reason`` is the policy."""
        assert self.lease is not None  # the one that was refused
        why = f"{reason}; {self.note}" if self.note else reason
        logger.info("%s is held by %s: %s.", self.lease.address, self.blocker, why)
        self.lease.address.tell_of_conflict("skipped", reason, self.lease.holder, self.blocker)
