"""Notice that a cache has forgotten the locks of this process."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from django_singletask import clock
from django_singletask.stores import look_at_epoch
from django_singletask.stores.epoch import LOOK, epoch_of

if TYPE_CHECKING:
    from django_singletask.locks.holding import Holding

__all__ = ["LOOK_AGAIN", "Watch"]

logger = logging.getLogger("django_singletask")

LOOK_AGAIN = 0.2
"""Seconds until the next look at a cache that does not answer."""


class Watch:
    """Watch the epoch of a cache in which this process holds locks."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.look_at = 0.0
        self.renewed_at_change = epoch_of(cache).changes
        """The number of changes of the epoch when all locks of this process were last renewed."""
        self.was_down = False

    def due_at(self, leases: Iterable[Holding]) -> float:
        """Return when the next look is due, given the leases of this process, the oldest first.

        The oldest current lease decides, so a short run sends no request.
        """
        now = clock.now()
        for lease in leases:
            lasts = lease.renews or now < lease.deadline
            if lease.watched and lasts and lease.cache == self.cache:
                return max(lease.taken_at + LOOK, self.look_at)
        return math.inf

    def forgotten(self) -> bool:
        """Read the epoch; return whether the cache may have forgotten locks of this process.

        After an outage the answer is yes: the server may be back with an old snapshot, which has
        the same epoch.
        """
        try:
            look_at_epoch(self.cache)
        except Exception as error:
            self.look_at = clock.now() + LOOK_AGAIN
            if not self.was_down:  # logged once per outage
                self.was_down = True
                text = "The cache %r does not answer (%s). Held locks are renewed when it does."
                logger.warning(text, self.cache, error)
            return False
        self.look_at = clock.now() + LOOK
        return self.was_down or epoch_of(self.cache).changes != self.renewed_at_change

    def renewed(self, changes: int) -> None:
        self.renewed_at_change = changes
        self.was_down = False
