"""TaskLock: acquire, hold and release one lock."""

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
    """Return the lock of the innermost ``with`` block, function or task body that runs here."""
    lock: TaskLock | None = blocks.innermost()
    return lock


class TaskLock(HeldLock):
    """Hold a lock by name, so that only one ``with`` block runs at a time in all processes.

    ``timeout`` is the length of the lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``). With
    ``renew``, the lease is extended at each third of that while the process lives. ``wait`` is how
    many seconds an acquisition waits for a held lock; ``math.inf``: without end. ``on_conflict``
    is what ``with`` does if the lock is held: ``"raise"`` :class:`LockConflict`, or ``"skip"``: it
    returns this object, which is then false. ``cache`` is an alias in ``CACHES`` (default
    ``SINGLETASK_CACHE``). ``slots`` is how many holders the lock can have at once. ``run`` is for
    internal use.

    The lock is an entry in the cache that expires: see "What such a lock cannot promise" in the
    documentation. Use an object for one acquisition at a time. A lock is not re-entrant: waiting
    for the lock of a ``with`` block around the call raises at once. If the same code took the lock
    with ``acquire()``, the wait continues, because another thread may release the lock; an endless
    wait logs a warning. ``acquire()`` does not wait by default, as ``threading`` and redis-py do.
    Raises ``TypeError`` and ``ValueError`` for invalid options.
    """

    blocker: Holder | None = None
    """The holder that the last acquisition met."""
    blocker_remaining: float | None = None
    note = ""
    """Details of the last conflict, for the log and :class:`LockConflict`."""
    _block: Token[Any] | None = None

    # Taking

    def acquire(self, wait: float | None = None) -> bool:
        """Acquire the lock, waiting up to ``wait`` seconds; return whether it was acquired.

        If it was not, ``blocker`` is its holder. Raises :class:`LockConflict` instead of waiting
        for the lock of a ``with`` block around this call, :class:`LockError` if this object is in
        use, and :class:`LockUnavailable`, also if the cache answers too late for the lease.
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
        """Acquire the lock as :meth:`acquire` does, without stopping the event loop.

        A cancelled call releases what its last request may have taken.
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
        """Acquire the lock, but report no conflict and do not reserve this object."""
        do(Acquisition(self, wait).attempt, self)
        return bool(self)

    def _end(self, acquisition: Acquisition, error: BaseException) -> None:
        """End an acquisition that failed, by a conflict or by a signal after the take."""
        if self._user is acquisition:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
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
        """Take a lock that was handed over, and return it; it is held, and renewed from now on.

        Use it in a ``with`` block, or :meth:`release` it. A lock can be received once. Only a
        redelivery of the same Celery task can receive it again, if its first run is proven dead.
        The options are those of :class:`TaskLock`.

        Raises :class:`LockLost` if the lock is gone or has another holder, ``ValueError`` for an
        invalid handle, and :class:`LockUnavailable`.
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
            if lease.held:  # a signal came, and the caller does not get the lock
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
            # A conflict, or a signal after the take: Python does not call __exit__.
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
        if self.on_conflict == "raise":
            self.refuse("wait" if self.wait else "raise")
        self.report_conflict("skip")

    def say_gave_up(self, wait: float) -> None:
        """Note for the log and the error how long the call waited."""
        note = f"gave up after {wait:g} s ({'lock_wait' if self.run else 'wait'})"
        self.note = f"{self.note}; {note}" if self.note else note

    def refuse(self, reason: str) -> NoReturn:
        self.report_conflict(reason)
        raise LockConflict.of(self)

    def report_conflict(self, reason: str) -> None:
        """Log a conflict, and send its event; ``reason`` is the policy."""
        assert self.lease is not None  # the refused one
        why = f"{reason}; {self.note}" if self.note else reason
        logger.info("%s is held by %s; policy: %s.", self.lease.address, self.blocker, why)
        self.lease.address.tell_of_conflict("skipped", reason, self.lease.holder, self.blocker)
