"""Notice that a cache has forgotten the locks which this process holds."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Protocol

from django_singletask import clock
from django_singletask.stores import Outcome, get_store
from django_singletask.stores.epoch import LOOK, epoch_of

__all__ = ["CONNECT_WITHIN", "Renewable", "Watch"]

logger = logging.getLogger("django_singletask")

LOOK_AGAIN = 0.2
"""Seconds until a cache that does not answer is asked for its epoch again."""
CONNECT_WITHIN = 1.0
"""Seconds for which that question waits for a connection."""


class Renewable(Protocol):
    """What the thread must know of a lease; see :class:`django_singletask.locks.lease.Lease`."""

    cache: str
    key: str
    token: str
    value: bytes
    length: float
    renews: bool
    retry_at: float
    taken_at: float
    watched: bool

    @property
    def due_at(self) -> float: ...

    def has_ended(self) -> bool: ...

    def look(self) -> None: ...

    def settle(self, sent: float, length: float, outcome: Outcome) -> None: ...


class Watch:
    """Look at the epoch of a cache in which this process holds locks."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.look_at = 0.0
        self.renewed_under = epoch_of(cache).value
        """The epoch in which all locks of this process are known to be there."""

    def due_at(self, leases: Iterable[Renewable]) -> float:
        """Return when the next look is due, given the leases of this process, the oldest first.

        The oldest lease of this cache says it: a run that is short costs no look.
        """
        for lease in leases:
            if lease.watched and lease.cache == self.cache:
                return max(lease.taken_at + LOOK, self.look_at)
        return math.inf

    def forgotten(self) -> bool:
        """Ask for the epoch; say whether the cache has forgotten locks of this process."""
        try:
            store = get_store(self.cache)
            store.connect_within(CONNECT_WITHIN)
            store.look()
        except Exception as error:
            # It is not logged: if the outage lasts, the renewals report it.
            logger.debug("The cache %r cannot be asked for its epoch: %s", self.cache, error)
            self.look_at = clock.now() + LOOK_AGAIN
            return False
        self.look_at = clock.now() + LOOK
        return store.epoch.value != self.renewed_under
