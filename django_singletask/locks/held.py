"""What any process can ask about a lock, and what its holder can do with it."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from django_singletask.conf import check_seconds, conf
from django_singletask.exceptions import LockError, LockLost
from django_singletask.holder import Holder
from django_singletask.locks.address import Address
from django_singletask.locks.handover import hand_over
from django_singletask.locks.keys import LockKey, check_slots, name_key
from django_singletask.locks.lease import Lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.run import NO_RUN, Run
from django_singletask.locks.steps import offer_in_thread
from django_singletask.stores import Entry, get_store

if TYPE_CHECKING:
    from django_singletask.locks.acquisition import Acquisition

__all__ = ["HeldLock"]

logger = logging.getLogger("django_singletask")


@lru_cache(maxsize=128)
def _report_field(name: str) -> None:
    """Log once that a name has an unfilled field: an f-string may have lost its f."""
    if re.search(r"\{[A-Za-z_][\w.]*\}", name):
        text = "TaskLock(%r) has an unfilled field, so all values share one lock. Use an f-string."
        logger.warning(text, name)


class HeldLock:
    """A lock by name and its options, which :class:`TaskLock` explains.

    Each question to the cache is one request, and can raise :class:`LockUnavailable`.
    """

    at_least: float = 0
    """A body that returns keeps the lock until so many seconds after its start."""
    lease: Lease | None = None
    """The last acquisition; ``lease.held`` tells whether it lasts."""
    _user: Acquisition | None = None
    """The acquisition, or the block, that uses this object now."""
    _received: Acquisition | None = None
    """The same, until a block enters a lock that was received."""

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
        self.lock_key = name if isinstance(name, LockKey) else name_key(name)
        if isinstance(name, str) and "{" in name:
            _report_field(name)
        self.name, self.key = self.lock_key
        self.timeout = timeout
        self.cache = cache
        self.slots = check_slots("slots", slots)
        self.run = run
        if timeout is not None:
            check_seconds("timeout", timeout)
        elif not renew:
            raise TypeError("renew=False needs a timeout, a lease that is longer than any run.")
        check_seconds("wait", wait, zero=True, infinite=True)
        if on_conflict not in ("raise", "skip"):
            raise ValueError(
                f'on_conflict must be "raise" or "skip", not {on_conflict!r}. To wait, use wait=….'
            )
        self.renew = renew
        self.wait = wait
        self.on_conflict = on_conflict

    def __repr__(self) -> str:
        state = f"held, token {self.token}" if self.token else "not held"
        return f"<TaskLock {self.name} ({state})>"

    def __bool__(self) -> bool:
        return self.lease is not None and self.lease.held

    @property
    def token(self) -> str | None:
        """The token of the acquisition; None if the lock is not held by this object."""
        return self.lease.token if self.lease is not None and self.lease.held else None

    @property
    def address(self) -> Address:
        """Where the entry is, by the settings of this moment."""
        return Address(self.cache or conf.cache, self.lock_key, (self.run or NO_RUN).quiet)

    # For any process

    def locked(self) -> bool:
        """Ask the cache whether the lock (all its slots) is held; a dead holder does not count."""
        holders = [Holder.decode(entry.value) for entry in self._entries().values()]
        return sum(proof_of_death(holder) is None for holder in holders) == self.slots

    alocked = offer_in_thread(locked)

    def holder(self) -> Holder | None:
        """Ask the cache for the holder of the lock; of several, the one whose lease ends first.

        memcached does not report ends: there it is the holder of the first slot that is held.
        """
        entry = self._first()
        return None if entry is None else Holder.decode(entry.value)

    aholder = offer_in_thread(holder)

    def remaining(self) -> float | None:
        """Ask the cache for the rest of the lease of :meth:`holder` in seconds.

        None if the lock is free, or if the cache does not report it.
        """
        entry = self._first()
        return None if entry is None else entry.remaining

    aremaining = offer_in_thread(remaining)

    def clear(self, *, token: str | None = None, actor: str = "", reason: str = "") -> bool:
        """Free the lock of any holder, or only of the holder with ``token``.

        ``actor`` and ``reason`` say who frees it and why, for the log and the history. If the
        holder is still running, it keeps running, and another run can start at the same time. The
        holder learns at its next renewal that the lock is lost. Return whether a lock was freed.
        Raises ``TypeError`` if the lock has several slots and there is no token.
        """
        if token is None and self.slots > 1:
            raise TypeError(
                f"{self.name} has {self.slots} slots: choose a holder with clear(token=…)."
            )
        return self.address_of(token).clear(token, actor, self.timeout, reason)

    aclear = offer_in_thread(clear)

    def address_of(self, token: str | None) -> Address:
        if self.slots > 1:
            for key, entry in self._entries().items():
                if Holder.decode(entry.value).token == token:
                    return self.address._replace(lock_key=LockKey(self.name, key))
        return self.address

    def _entries(self) -> dict[str, Entry]:
        return get_store(self.address.cache).read_many(self.lock_key.slots(self.slots))

    def _first(self) -> Entry | None:
        return min(self._entries().values(), key=lambda each: each.remaining or 0.0, default=None)

    # While this object holds it

    def release(self) -> bool:
        """Release the lock; return whether this object still held it.

        Any thread may do this. Raises :class:`LockError` if the lock was not acquired, and
        :class:`LockUnavailable`: then the release is tried again until the lease has ended.
        """
        lease = self._held_lease()
        try:
            return lease.release("returned")
        finally:
            self._end_use()

    arelease = offer_in_thread(release)

    def hand_over(self, *, for_: float) -> str:
        """Leave the lock to another process; return the handle with which it can :meth:`receive`.

        From then on the lock belongs to no process and is not renewed. It ends after ``for_``
        seconds, unless a process receives it before. This object no longer holds it, so the end
        of its ``with`` block frees nothing. The handle is a string.

        Raises :class:`LockError` if the lock was not acquired, and :class:`LockLost` if it is gone.
        If it raises :class:`LockUnavailable`, the lock cannot be received, and is freed.
        """
        try:
            return hand_over(self._held_lease(), for_)
        finally:
            if not self:
                self._end_use()

    @property
    def lost(self) -> bool:
        """Whether this object acquired the lock and has lost it since; sends no request."""
        return self.lease is not None and self.lease.lost

    def check(self) -> None:
        """Raise :class:`LockLost` if :attr:`lost`, :class:`LockError` if it was not acquired.

        Call it in the loops of long bodies. Only in a forked child of the holder it sends a
        request.
        """
        if self._held_lease().lost:
            raise LockLost(f"{self.name} is no longer held by this run.")

    def extend(self, timeout: float | None = None) -> None:
        """Let the lease end ``timeout`` seconds from now (default: the length of the lease).

        A lease that is renewed keeps the new length. Raises :class:`LockLost` if the lock is lost,
        :class:`LockError` if it was not acquired or belongs to the parent of this forked process,
        and :class:`LockUnavailable`.
        """
        lease = self._held_lease()
        lease.extend(lease.length if timeout is None else check_seconds("timeout", timeout))
        self.check()

    aextend = offer_in_thread(extend)

    def fencing_token(self) -> int:
        """Return a number that is greater than that of every earlier holder, and below ``2**63``.

        The number stays the same until the release; only the first call sends a request. Get it
        before you read the data, store it with the data, and write only if the stored number is
        not greater. Then a run that wakes up after its lease cannot overwrite newer data. The idea
        is Martin Kleppmann's.

        Raises :class:`LockError` if the lock was not acquired, :class:`LockLost` if it was lost or
        retaken, ``TypeError`` with several slots, ``NotImplementedError`` on memcached, and
        :class:`LockUnavailable`.
        """
        return self._held_lease().fencing_token()

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
    # It is in use from before the take until after the release, and while a block runs, also a
    # skipped one. Otherwise the acquisition of one thread would let another thread in:
    #
    #   thread 1: with LOCK as lock: (taken)  body ...................... exit: frees it
    #   thread 2:     with LOCK as lock: (held by another)   if lock: True, by thread 1 -> body
    #
    # setdefault() and pop() are atomic between threads.

    def note_received(self, user: Acquisition) -> None:
        """Reserve the object for an acquisition that has received the lock."""
        self._user = self._received = user

    def _reserve(self, user: Acquisition) -> bool:
        """Reserve the object; return whether a block enters a lock that was received.

        Raises :class:`LockError` if the object is in use.
        """
        if user.in_block and vars(self).pop("_received", None) is not None:
            self._user = user
            return True
        if vars(self).setdefault("_user", user) is not user:
            raise LockError(
                f"This TaskLock of {self.name} is in use: an object serves one acquisition at a "
                "time. Create one for each use: with TaskLock(…):"
            )
        return False

    def _end_use(self) -> bool:
        """Let the object be used again, unless a block uses it; return False."""
        if self._user is not None and not self._user.in_block:
            self._end_block()
        return False

    def _end_block(self) -> None:
        vars(self).pop("_received", None)
        vars(self).pop("_user", None)
