"""The epoch of a cache, which shows that the cache has forgotten its locks."""

from __future__ import annotations

import math

from django_singletask import clock
from django_singletask.conf import conf
from django_singletask.log import logger

LOOK = 0.4
"""Seconds between two looks of a process that holds locks."""
HOLD_BACK = 1.0
"""Seconds for which a process takes no lock in a cache that has forgotten its locks."""
TELL_AGAIN = 60.0
"""Seconds for which the log does not repeat that a cache has forgotten its locks."""
LOOK_AGAIN = 0.1
"""Seconds until a holder looks again at the entry of another one, after a change of the epoch."""


class Forgotten(Exception):
    """The cache has just forgotten its locks; try again after so many seconds (the argument)."""


class Epoch:
    """The epoch of one cache, as this process knows it; a forked child inherits it.

    In a cluster each group of locks has an epoch, which is a part of the ``whole``: that counts the
    changes of all groups. Outside a cluster an epoch is its own whole.
    """

    value: bytes | None = None
    server: bytes | None = None
    seen_at: float = -math.inf
    changed_at: float = -math.inf
    told_at: float = -math.inf
    in_cluster: bool | None = None
    """Whether the server is a node of a cluster; None: it was not asked."""
    changes = 0

    def __init__(self, cache: str, whole: Epoch | None = None) -> None:
        self.cache = cache
        if whole is None:
            whole = self
        self.whole = whole

    def see(self, value: bytes) -> None:
        """Note the value of the epoch, which was read just now."""
        self.seen_at = clock.now()
        self.note("value", value)

    # note() sets changed_at before the new fact. In the other order another thread would find the
    # epoch unchanged, and take a lock at once:
    #
    #   this thread:   value = new                              changed_at = now
    #   other thread:                see(new): as before   take

    def note(self, fact: str, seen: bytes) -> None:
        """Note the ``"value"`` of the epoch, or the ``"server"`` that answers."""
        before = getattr(self, fact)
        if seen == before:
            return
        self.whole.changes += 1
        if before is not None:
            now = clock.now()
            self.changed_at = now
            self.whole.changed_at = now
            if now >= self.whole.told_at + TELL_AGAIN and not conf.testing:
                self.whole.told_at = now
                logger.warning(
                    "The cache %r may have forgotten its locks: it was restarted or flushed, or a "
                    "replica took over. Holders take their locks again; new runs wait %g s first.",
                    self.cache,
                    HOLD_BACK,
                )
        setattr(self, fact, seen)

    def pause(self) -> float:
        """Return for how many more seconds nobody takes a lock; less than 0 if that time is over.

        In tests, which flush often, the answer is 0.
        """
        if conf.testing:
            return 0.0
        return self.changed_at + HOLD_BACK - clock.now()

    def check(self) -> None:
        """Raise :class:`Forgotten` soon after a change."""
        pause = self.pause()
        if pause > 0:
            raise Forgotten(pause)


epochs: dict[str, Epoch] = {}


def epoch_of(alias: str) -> Epoch:
    """Return what this process knows of the epoch of a cache."""
    return epochs.setdefault(alias, Epoch(alias))
