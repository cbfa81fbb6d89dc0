"""What anybody may ask of a lock, and what its holder may do with it."""

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
    """Log once that a name has a field that nothing fills: an f-string may have lost its f."""
    if re.search(r"\{[A-Za-z_][\w.]*\}", name):
        text = "TaskLock(%r) is one lock, since nothing fills its field. Write an f-string."
        logger.warning(text, name)


class HeldLock:
    """A lock by name and its options, which are explained in :class:`TaskLock`.

    Each question to the cache is one request, and raises :class:`LockUnavailable`.
    """

    at_least: float = 0
    """Seconds from its start for which a body that returns keeps the lock."""
    lease: Lease | None = None
    """The last acquisition; ``lease.held`` says whether it lasts."""
    _user: Acquisition | None = None
    """The acquisition, or the block, that uses this object now."""
    _received: Acquisition | None = None
    """The same until a block enters a lock that was received."""

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
            raise TypeError("renew=False needs a timeout: after it the lock ends under the run.")
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

    # Whoever holds it

    def locked(self) -> bool:
        """Ask the cache whether all slots are held; one who is proven dead holds none."""
        holders = [Holder.decode(entry.value) for entry in self._entries().values()]
        return sum(proof_of_death(holder) is None for holder in holders) == self.slots

    alocked = offer_in_thread(locked)

    def holder(self) -> Holder | None:
        """Ask the cache who holds the lock; of several, whose lease ends first.

        Where the cache cannot tell that, it is the holder of the first slot that is held.
        """
        entry = self._first()
        return None if entry is None else Holder.decode(entry.value)

    aholder = offer_in_thread(holder)

    def remaining(self) -> float | None:
        """Ask the cache for the seconds left of the lease of :meth:`holder`.

        None if the lock is free or if the cache cannot tell.
        """
        entry = self._first()
        return None if entry is None else entry.remaining

    aremaining = offer_in_thread(remaining)

    def clear(self, *, token: str | None = None, actor: str = "", reason: str = "") -> bool:
        """Free the lock, whoever holds it; with ``token``, only if that holder has it.

        ``actor`` and ``reason`` say who frees it and why; the log and the history keep them.

        The holder, if it still runs, learns at its next renewal that the lock is lost, and
        another run can start beside it. Say whether a lock was freed. Raises ``TypeError`` if the
        lock has several slots and no token says whose to free.
        """
        if token is None and self.slots > 1:
            raise TypeError(
                f"{self.name} has {self.slots} slots: say whose to free, with clear(token=…)."
            )
        return self.address_of(token).clear(token, actor, self.timeout, reason)

    aclear = offer_in_thread(clear)

    def address_of(self, token: str | None) -> Address:
        """Return where the holder with this token is, as far as the cache must be asked for it."""
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
    # It is in use from before the take until after the release, and for as long as a block runs,
    # also one that is skipped. Without that, the acquisition of one thread would let the other
    # thread in:
    #
    #   thread 1: with LOCK as lock: (taken)  body ...................... exit: frees it
    #   thread 2:     with LOCK as lock: (held by another)   if lock: True, by thread 1 -> body
    #
    # setdefault() and pop() are one step each, also between threads.

    def note_received(self, user: Acquisition) -> None:
        """Let the object be in use by an acquisition that has received the lock."""
        self._user = self._received = user

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
