"""Notice that a cache has forgotten its locks, by a restart or a flush."""

from __future__ import annotations

import logging
import math
import os
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from django_singletask import clock
from django_singletask.conf import is_test
from django_singletask.exceptions import LockUnavailable
from django_singletask.stores.base import PREFIX, TRIES, Outcome, Store

logger = logging.getLogger("django_singletask")

EPOCH = f"{PREFIX}@epoch"
LOOK = 0.4
"""Seconds between two looks of a process that holds locks."""
HOLD_BACK = 1.0
"""Seconds for which a process takes no lock in a cache that has forgotten its locks."""
TELL_AGAIN = 60.0
"""Seconds for which the log does not repeat that a cache has forgotten its locks."""
LOOK_TWICE = 0.1
"""Seconds until a holder looks again at the entry of another one, after a change of the epoch."""

# The epoch is a random value that the cache keeps without a lease. The first process adds it. If
# the epoch changes, the cache has forgotten the locks of current runs. A process that holds a lock
# looks at the epoch often. A process that wants a lock waits until the holders have looked:
#
#   holder:  holds .................... looks: another epoch, takes its lock again
#   cache:           restarts empty
#   taker:                              takes: another epoch     waits 1 s       takes -> held
#
# A process that starts after the restart knows no epoch, and takes at once. Redis also identifies
# its server, because a server that restarts with an old snapshot has the old epoch.


class Forgotten(Exception):
    """The cache has just forgotten its locks; try again after ``pause`` seconds."""

    def __init__(self, pause: float) -> None:
        super().__init__(pause)
        self.pause = pause


class Epoch:
    """The epoch of one cache, as this process knows it; a forked child inherits it."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.value: bytes | None = None
        self.server: str | None = None
        self.seen_at = -math.inf
        self.takes_from = self.told_at = self.changed_at = -math.inf
        self.changes = 0

    def see(self, value: bytes) -> None:
        self.seen_at = clock.now()
        if value != self.value:
            self._note_change(self.value, "it was restarted empty, or flushed")
            self.value = value

    def see_server(self, server: str) -> None:
        """Note which server answers: after a restart with an old snapshot the epoch is the same."""
        if server != self.server:
            self._note_change(self.server, "the server was restarted, or a replica took over")
            self.server = server

    def _note_change(self, before: object, why: str) -> None:
        # Set takes_from before the new epoch. In the other order another thread would find the
        # epoch unchanged, and take a lock at once:
        #
        #   this thread:   value = new                               takes_from = in 1 s
        #   other thread:                see(new): as before   take
        #
        # Tests empty their cache again and again.
        now = clock.now()
        if before is not None:
            self.changed_at = now
        if before is not None and not is_test():
            self.takes_from = now + HOLD_BACK
        if self.takes_from > now >= self.told_at + TELL_AGAIN:  # eviction can repeat it at any time
            self.told_at = now
            logger.warning(
                "The cache %r may have forgotten its locks: %s. Holders take their locks again; "
                "new runs wait %g s first.",
                self.cache,
                why,
                HOLD_BACK,
            )
        self.changes += 1

    def check(self) -> None:
        pause = self.takes_from - clock.now()
        if pause > 0:
            raise Forgotten(pause)


epochs: dict[str, Epoch] = {}


def epoch_of(alias: str) -> Epoch:
    return epochs.setdefault(alias, Epoch(alias))


class ForgetfulStore(Store):
    """A store whose cache can lose all entries while locks are held."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.epoch = Epoch("")  # get_store() sets that of the alias

    @abstractmethod
    def add_epoch(self, value: bytes) -> None:
        """Add the epoch if there is none, without a lease."""

    # In memcached, a process that takes a lock adds its entry before it reads the epoch. If that
    # has changed, it gives the entry back. So after a change, another entry may be gone soon:
    #
    #   cache:    flushed
    #   taker:              adds                   reads the epoch: another one   gives it back
    #   holder:                   looks: not its own                                        looks
    #
    # On Redis the script of the take compares the epoch, so there this finds the same entry again.

    def renew_many(self, requests: Sequence[tuple[str, bytes, float]]) -> list[Outcome]:
        outcomes = super().renew_many(requests)
        taken = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.TAKEN]
        if taken:
            self.look()  # perhaps nobody here has seen the change yet
        if taken and clock.now() < self.epoch.changed_at + HOLD_BACK:
            time.sleep(LOOK_TWICE)
            again = super().renew_many([requests[i] for i in taken])
            for i, outcome in zip(taken, again, strict=True):
                outcomes[i] = outcome
        return outcomes

    def sent_twice(self, key: str, value: bytes, sent: float) -> Outcome:
        """Return GONE also if the cache has forgotten its locks since the first request."""
        self.look()
        forgot = self.epoch.changed_at >= sent
        return Outcome.GONE if forgot else super().sent_twice(key, value, sent)

    def look(self) -> None:
        """Read the epoch of the cache; add one if there is none."""
        for _ in range(TRIES):
            entry = self.read(EPOCH)
            if entry is not None:
                return self.epoch.see(entry.value)
            # If several processes find none, one adds its epoch, and all read that.
            self.add_epoch(os.urandom(16).hex().encode())
        raise LockUnavailable(
            f"The cache {self.cache_alias!r} does not keep new entries: it lost "
            f"{self.make_key(EPOCH)} {TRIES} times."
        )
