"""Take, hold and give back one lock."""

from __future__ import annotations

import functools
import logging
from contextvars import Token
from typing import Any, NoReturn

from django_singletask.exceptions import LockConflict
from django_singletask.holder import Holder
from django_singletask.locks import blocks
from django_singletask.locks.acquisition import Acquisition
from django_singletask.locks.handover import Handle, receive
from django_singletask.locks.held import HeldLock
from django_singletask.locks.keys import LockKey
from django_singletask.locks.run import result_of
from django_singletask.locks.steps import do, do_in_threads, in_thread

__all__ = ["TaskLock", "current_lock"]

logger = logging.getLogger("django_singletask")


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

    blocker: Holder | None = None
    """Who was in the way of the last acquisition."""
    blocker_remaining: float | None = None
    note = ""
    """What the log and :class:`LockConflict` add about the last conflict."""
    _block: Token[Any] | None = None

    # Taking

    def acquire(self, wait: float | None = None) -> bool:
        """Take the lock, waiting up to ``wait`` seconds for it, and say whether it was taken.

        When it was not, ``blocker`` is the holder that was in the way. Raises
        :class:`LockConflict` instead of waiting for the lock of a ``with`` block around this call,
        :class:`LockError` if this object is in use already, and :class:`LockUnavailable`, also if
        the cache answers later than the lease lasts.
        """
        acquisition = Acquisition(self, wait)
        try:
            self._reserve(acquisition)
            do(acquisition.step, self)
            return self.blocker is None or self._end_use()
        except BaseException as error:
            self._end(acquisition, error)
            raise

    async def aacquire(self, wait: float | None = None) -> bool:
        """Take the lock as :meth:`acquire` does, while the loop goes on.

        A call that is cancelled takes nothing: what its last request took is given back.
        """
        acquisition = Acquisition(self, wait)
        self._reserve(acquisition)
        await self._in_threads(acquisition)
        return self.blocker is None or self._end_use()

    async def _in_threads(self, acquisition: Acquisition) -> None:
        step = functools.partial(acquisition.step, self)
        undo = functools.partial(self._end, acquisition)
        await do_in_threads(self.address.cache, step, undo)

    def take(self, wait: float = 0) -> bool:
        """Take the lock as :meth:`acquire` does, but report no conflict and reserve nothing."""
        do(Acquisition(self, wait).attempt, self)
        return bool(self)

    def _end(self, acquisition: Acquisition, error: BaseException) -> None:
        """End what could not be entered, for a conflict or a signal that struck after the take."""
        if self._user is acquisition:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Give back what is held, and let the object be used again."""
        try:
            if (lease := self.lease) is not None:
                if lease.held:
                    lease.give_back(result_of(error))
                elif lease.is_waiting:
                    lease.abandon()
        finally:
            self._end_block()

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
        name, key, cache, token, slots = Handle.decode(handle)
        lock_key = LockKey(name, key)
        lock = cls(lock_key, timeout=timeout, renew=renew, cache=cache, slots=slots)
        acquisition = Acquisition(lock, 0)
        lease = acquisition.new_lease(lock)
        try:
            receive(lease, token)
            lock.note_received(acquisition)
            return lock
        except BaseException:
            if lease.held:  # a signal struck: the caller does not know that it holds the lock
                lease.give_back("raised")
            raise

    def __enter__(self) -> TaskLock:
        block = Acquisition(self, None, in_block=True)
        try:
            if not self._reserve(block):
                do(block.step, self)
            if self.blocker is None:
                self._block = blocks.enter(self)
            return self
        except BaseException as error:
            # It is a conflict, or a signal struck after the take: no __exit__ follows.
            if self._user is block:
                self.__exit__(type(error), error, None)
            raise

    def __exit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        try:
            self._leave(exc)
        finally:
            self._leave_block()

    async def __aenter__(self) -> TaskLock:
        block = Acquisition(self, None, in_block=True)
        if not self._reserve(block):
            await self._in_threads(block)
        if self.blocker is None:
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

    # Conflicts

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
        self.report_conflict(reason)
        raise LockConflict.of(self)

    def report_conflict(self, reason: str) -> None:
        """Log a conflict, and send its event; ``reason`` is the policy."""
        assert self.lease is not None  # the one that was refused
        why = f"{reason}; {self.note}" if self.note else reason
        logger.info("%s is held by %s: %s.", self.lease.address, self.blocker, why)
        self.lease.address.tell_of_conflict("skipped", reason, self.lease.holder, self.blocker)
