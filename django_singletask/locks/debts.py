"""Releases that are still to be made, because the cache was down or a signal interrupted them."""

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
"""The longest queue for one cache; then the oldest is dropped, and its lease frees the lock."""
AT_ONCE = 100
"""Releases in a row before the thread checks for due renewals."""


class Kept(NamedTuple):
    """The bytes that replace a released entry, and until when."""

    value: bytes
    until: float


class Debt(NamedTuple):
    """A release that is tried again until the lease has ended anyway."""

    key: str
    value: bytes
    until: float
    kept: Kept | None = None


def release(cache: str, key: str, value: bytes, kept: Kept | None) -> Outcome:
    """Delete an entry, or replace it by what is kept of it for a while."""
    store = get_store(cache)
    if kept is not None and (left := kept.until - clock.now()) > 0:
        return store.change(key, value, kept.value, left)
    return store.release(key, value)


class Debts:
    """The releases still to be made in one cache."""

    def __init__(self, cache: str) -> None:
        self.cache = cache
        self.waiting: deque[Debt] = deque()
        self.due_at = math.inf
        self.is_down = False

    def add(self, debt: Debt) -> None:
        if len(self.waiting) >= MAX_DEBTS:
            key = self.waiting.popleft().key
            logger.warning("%s is not released; it is free when its lease ends.", key)
        self.waiting.append(debt)
        self.due_at = min(self.due_at, clock.now())

    def pay(self) -> None:
        """Make some of the releases; if the cache does not answer, try again in a second."""
        for _ in range(min(len(self.waiting), AT_ONCE)):
            debt = self.waiting.popleft()
            try:
                release(self.cache, debt.key, debt.value, debt.kept)
            except Exception as error:
                # Put it last, so that a release which always fails does not block the others.
                if clock.now() < debt.until:
                    self.waiting.append(debt)
                self.due_at = clock.now() + RETRY
                if not self.is_down:  # logged once per outage
                    self.is_down = True
                    text = "The cache %r does not answer (%s). Locks are released when it does."
                    logger.warning(text, self.cache, error)
                return
            self.is_down = False
        # Set due_at before testing waiting. Otherwise a debt that add() notes in between would
        # wait for the next one:
        #
        #   this thread: nothing waits?                due_at = inf
        #   add():                        due_at = now
        self.due_at = math.inf
        if self.waiting:
            self.due_at = clock.now()
