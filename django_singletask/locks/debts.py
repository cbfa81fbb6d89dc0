"""Releases that could not be made yet, because the cache was down or a signal came between."""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import NamedTuple

from django_singletask import clock
from django_singletask.stores import Outcome, get_store

__all__ = ["MAX_DEBTS", "Debt", "Debts", "Kept", "release"]

logger = logging.getLogger("django_singletask")

RETRY = 1.0
"""Seconds after which a cache that did not answer is asked again."""
MAX_DEBTS = 10_000
"""Releases that are owed to one cache; then the oldest is forgotten, and its lease ends it."""
AT_ONCE = 100
"""Releases that are made before the thread looks whether renewals are due."""


class Kept(NamedTuple):
    """The bytes that stay in the place of an entry that is released, and until when."""

    value: bytes
    until: float


class Debt(NamedTuple):
    """A release that is tried again until ``until``, when the lease has ended anyway."""

    key: str
    value: bytes
    until: float
    kept: Kept | None = None


def release(cache: str, key: str, value: bytes, kept: Kept | None) -> Outcome:
    """Delete an entry, or leave there for a while what is kept of it."""
    store = get_store(cache)
    if kept is not None and (left := kept.until - clock.now()) > 0:
        return store.change(key, value, kept.value, left)
    return store.release(key, value)


class Debts:
    """The releases that are owed to one cache."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.waiting: deque[Debt] = deque()
        self.due_at = math.inf
        self.is_down = False

    def add(self, debt: Debt) -> None:
        """Note a release, to be made as soon as the cache answers."""
        if len(self.waiting) >= MAX_DEBTS:
            logger.warning("%s is not given back: its lease ends it.", self.waiting.popleft().key)
        self.waiting.append(debt)
        self.due_at = min(self.due_at, clock.now())

    def pay(self) -> None:
        """Make some of the releases; if the cache does not answer, try again in a second."""
        for _ in range(min(len(self.waiting), AT_ONCE)):
            debt = self.waiting.popleft()
            try:
                release(self.cache, debt.key, debt.value, debt.kept)
            except Exception as error:
                # Last, so that a release which always fails does not block the others.
                if clock.now() < debt.until:
                    self.waiting.append(debt)
                self.due_at = clock.now() + RETRY
                if not self.is_down:  # told once an outage
                    self.is_down = True
                    logger.warning(
                        "The cache %r does not answer a release; locks that may be held there are "
                        "given back when it does: %s",
                        self.cache,
                        error,
                    )
                return
            self.is_down = False
        # Set due_at before testing waiting. Otherwise a debt that add() notes in between is not
        # paid until the next one comes:
        #
        #   this thread: nothing waits?                due_at = inf
        #   add():                        due_at = now
        self.due_at = math.inf
        if self.waiting:
            self.due_at = clock.now()
