"""What the holder of a lock may do with it, and what it knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_singletask.conf import check_seconds
from django_singletask.exceptions import LockError, LockLost
from django_singletask.locks.fencing import fencing_token
from django_singletask.locks.handover import hand_over
from django_singletask.locks.lease import Lease
from django_singletask.locks.steps import offer_in_thread
from django_singletask.locks.view import LockView

if TYPE_CHECKING:
    from django_singletask.locks.acquisition import Acquisition

__all__ = ["HeldLock"]


class HeldLock(LockView):
    """A lock that this object may hold."""

    lease: Lease | None = None
    """The last acquisition; ``lease.held`` says whether it lasts."""
    _user: Acquisition | None = None
    """The acquisition, or the block, that uses this object now."""
    _received: Acquisition | None = None
    """The same until a block enters a lock that was received."""

    def __repr__(self) -> str:
        state = f"held, token {self.token}" if self.token else "not held"
        return f"<TaskLock {self.name} ({state})>"

    def __bool__(self) -> bool:
        return self.lease is not None and self.lease.held

    @property
    def token(self) -> str | None:
        """The token of the acquisition; None if the lock is not held by this object."""
        return self.lease.token if self.lease is not None and self.lease.held else None

    def release(self) -> bool:
        """Give the lock back; say whether it still was this object's own to give.

        Any thread may do it. Raises :class:`LockError` if it was not acquired, and
        :class:`LockUnavailable`: then the lease frees it.
        """
        lease = self._held_lease()
        try:
            return lease.release("returned")
        finally:
            self._end_use()

    arelease = offer_in_thread(release)

    def hand_over(self, *, for_: float) -> str:
        """Leave the lock to another process, and return the handle with which it receives the lock.

        From then on the lock belongs to no process and is not renewed: it ends after ``for_``
        seconds, unless :meth:`receive` takes it before. This object holds it no more, so the end
        of its ``with`` block frees nothing. The handle is a string that any serializer takes.

        Raises :class:`LockError` if the lock was not acquired, :class:`LockLost` if it is gone,
        and :class:`LockUnavailable`; then nobody can receive the lock, and it is freed.
        """
        try:
            return hand_over(self._held_lease(), for_)
        finally:
            if not self:
                self._end_use()

    @property
    def lost(self) -> bool:
        """Whether the lock was acquired here and can no longer be trusted; costs no request."""
        return self.lease is not None and self.lease.lost

    def check(self) -> None:
        """Raise :class:`LockLost` if :attr:`lost`, :class:`LockError` if it was not acquired.

        For the loops of long bodies: it costs no request, but in a forked child of the holder.
        """
        if self._held_lease().lost:
            raise LockLost(f"{self.name} is no longer held by this run.")

    def extend(self, timeout: float | None = None) -> None:
        """Let the lease end ``timeout`` seconds from now (default: its own length).

        A lease that is renewed has that length from now on. Raises :class:`LockLost` if the lock is
        lost, :class:`LockError` if it was not acquired or is that of the process which forked this
        one, and :class:`LockUnavailable`.
        """
        lease = self._held_lease()
        lease.extend(lease.length if timeout is None else check_seconds("timeout", timeout))
        self.check()

    aextend = offer_in_thread(extend)

    def fencing_token(self) -> int:
        """Return a number greater than that of every earlier holder, below ``2**63``.

        It stays the same until the release; the first call is a request. Fetch it before the data
        is read, and write only where the data's own number is smaller: then the write of a run
        that woke up after its lease is refused. The idea is Martin Kleppmann's.

        Raises :class:`LockError` if the lock was not acquired, :class:`LockLost` once it was lost
        or retaken, ``TypeError`` with several slots, ``NotImplementedError`` on memcached, and
        :class:`LockUnavailable`.
        """
        return fencing_token(self._held_lease())

    afencing_token = offer_in_thread(fencing_token)

    def owned(self) -> bool:
        """Ask the cache whether this object holds the lock."""
        lease = self.lease
        entry = lease.address.read() if lease is not None and lease.held else None
        return bool(self and lease and entry and entry.value == lease.value)

    aowned = offer_in_thread(owned)

    def _held_lease(self) -> Lease:
        if self.lease is None or not self.lease.held:
            raise LockError(f"{self.name} is not held by this TaskLock: acquire() it first.")
        return self.lease

    # Who uses this object
    #
    # It is in use from before the take until after the release, and for as long as a block runs,
    # also one that is skipped. Without that, the acquisition of one thread would let the other
    # thread in:
    #
    #   thread 1: with LOCK as lock: (taken)  body ...................... exit: frees it
    #   thread 2:     with LOCK as lock: (held by another)   if lock: True, by thread 1 -> body
    #
    # setdefault() and pop() are one step each, also between threads.

    def _reserve(self, user: Acquisition) -> bool:
        """Reserve the object; say whether a block enters a lock that was received.

        Raises :class:`LockError` if the object is in use.
        """
        if user.in_block and vars(self).pop("_received", None) is not None:
            self._user = user
            return True
        if vars(self).setdefault("_user", user) is not user:
            raise LockError(
                f"This TaskLock of {self.name} is in use: one object serves one acquisition at a "
                "time. Make one for each use: with TaskLock(…):"
            )
        return False

    def _end_use(self) -> bool:
        """Let the object be used again; inside a block, the end of the block does it.

        Return False: it holds no lock now.
        """
        if self._user is not None and not self._user.in_block:
            self._end_block()
        return False

    def _end_block(self) -> None:
        """Let the object be used again, whoever uses it."""
        vars(self).pop("_received", None)
        vars(self).pop("_user", None)
