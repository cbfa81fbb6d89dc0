"""What anybody may ask of a lock: who holds it, and for how long; and free it for somebody else."""

from __future__ import annotations

from django_singletask.conf import conf
from django_singletask.holder import Holder
from django_singletask.locks.address import Address
from django_singletask.locks.keys import LockKey, name_key
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.run import NO_RUN, Run
from django_singletask.locks.steps import offer_in_thread

__all__ = ["LockView"]


class LockView:
    """A lock by name, whoever holds it.

    Each question is one request to the cache, and raises :class:`LockUnavailable`.
    """

    at_least: float = 0
    """Seconds from its start for which a body that returns keeps the lock."""

    def __init__(
        self,
        name: str | LockKey,
        *,
        timeout: float | None = None,
        cache: str | None = None,
        run: Run | None = None,
    ) -> None:
        self.lock_key = name if isinstance(name, LockKey) else name_key(name)
        self.name, self.key = self.lock_key
        self.timeout = timeout
        self.cache = cache
        self.run = run

    @property
    def address(self) -> Address:
        """Where the entry is, by the settings of this moment."""
        return Address(self.cache or conf.cache, self.lock_key, (self.run or NO_RUN).quiet)

    def locked(self) -> bool:
        """Ask the cache whether anybody holds the lock; one who is proven dead does not."""
        holder = self.holder()
        return holder is not None and proof_of_death(holder) is None

    alocked = offer_in_thread(locked)

    def holder(self) -> Holder | None:
        """Ask the cache who holds the lock."""
        entry = self.address.read()
        return None if entry is None else Holder.decode(entry.value)

    aholder = offer_in_thread(holder)

    def remaining(self) -> float | None:
        """Ask the cache for the seconds left of the lease; None if free or if it cannot tell."""
        entry = self.address.read()
        return None if entry is None else entry.remaining

    aremaining = offer_in_thread(remaining)

    def clear(self, *, token: str | None = None, actor: str = "") -> bool:
        """Free the lock, whoever holds it; with ``token``, only if that holder has it.

        The holder, if it still runs, learns at its next renewal that the lock is lost, and
        another run can start beside it. Say whether a lock was freed.
        """
        return self.address.clear(token, actor, self.timeout)

    aclear = offer_in_thread(clear)
