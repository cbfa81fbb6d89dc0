"""What anybody may ask of a lock: who holds it, and for how long; and free it for somebody else."""

from __future__ import annotations

import logging
import re
from functools import lru_cache

from django_singletask.conf import conf
from django_singletask.holder import Holder
from django_singletask.locks.address import Address
from django_singletask.locks.keys import LockKey, check_slots, name_key
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.run import NO_RUN, Run
from django_singletask.locks.steps import offer_in_thread
from django_singletask.stores import Entry, get_store

__all__ = ["LockView"]

logger = logging.getLogger("django_singletask")


@lru_cache(maxsize=128)
def _report_field(name: str) -> None:
    """Log once that a name has a field that nothing fills: an f-string may have lost its f."""
    if re.search(r"\{[A-Za-z_][\w.]*\}", name):
        text = "TaskLock(%r) is one lock, since nothing fills its field. Write an f-string."
        logger.warning(text, name)


class LockView:
    """A lock by name, whoever holds it; several may hold one of ``slots``.

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

    @property
    def address(self) -> Address:
        """Where the entry is, by the settings of this moment."""
        return Address(self.cache or conf.cache, self.lock_key, (self.run or NO_RUN).quiet)

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

    def clear(self, *, token: str | None = None, actor: str = "") -> bool:
        """Free the lock, whoever holds it; with ``token``, only if that holder has it.

        The holder, if it still runs, learns at its next renewal that the lock is lost, and
        another run can start beside it. Say whether a lock was freed. Raises ``TypeError`` if the
        lock has several slots and no token says whose to free.
        """
        if token is None and self.slots > 1:
            raise TypeError(
                f"{self.name} has {self.slots} slots: say whose to free, with clear(token=…)."
            )
        return self.address_of(token).clear(token, actor, self.timeout)

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
