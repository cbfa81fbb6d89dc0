"""Releases that could not be made yet, because the cache was down or a signal came between."""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import NamedTuple

from django_singletask.locks import clock
from django_singletask.stores import get_store

__all__ = ["MAX_DEBTS", "Debt", "Debts"]

logger = logging.getLogger("django_singletask")

RETRY = 1.0
"""Seconds after which a cache that did not answer is asked again."""
MAX_DEBTS = 10_000
AT_ONCE = 100


class Debt(NamedTuple):
    """A release that is tried again until ``until``, when the lease has ended anyway."""

    cache: str
    key: str
    value: bytes
    until: float


class Debts:
    """Keep the releases that are owed, and make them when the cache answers."""

    def __init__(self) -> None:
        self.waiting: deque[Debt] = deque()
        self.failed: list[Debt] = []
        self.retries_at = math.inf
        self.due_at = math.inf
        self.down: set[str] = set()

    def add(self, debt: Debt) -> None:
        """Note a release; of more than 10,000 the oldest is forgotten, and its lease ends it."""
        if len(self.waiting) + len(self.failed) >= MAX_DEBTS:
            forgotten = self.failed.pop(0) if self.failed else self.waiting.popleft()
            logger.warning("%s is not given back: its lease will end it.", forgotten.key)
        self.waiting.append(debt)
        self.due_at = clock.now()

    def pay(self) -> None:
        """Make some of the releases; those of a cache that is down wait until it is asked again.

        Some at a time, because renewals are due meanwhile.
        """
        self.due_at = math.inf
        if clock.now() >= self.retries_at:
            self.waiting.extend(self.failed)
            self.failed, self.retries_at = [], math.inf
        down: set[str] = set()
        for _ in range(min(len(self.waiting), AT_ONCE)):
            debt = self.waiting.popleft()
            try:
                # One error a cache is enough: each may take as long as the client waits.
                if debt.cache not in down:
                    get_store(debt.cache).release(debt.key, debt.value)
                    self.down.discard(debt.cache)
                    continue
            except Exception as error:
                down.add(debt.cache)
                self._warn_of(debt.cache, error)
            if clock.now() < debt.until:
                self.failed.append(debt)
                self.retries_at = clock.now() + RETRY
        # add() may have set an earlier time meanwhile.
        self.due_at = min(self.due_at, clock.now() if self.waiting else self.retries_at)

    def _warn_of(self, cache: str, error: Exception) -> None:
        if cache not in self.down:  # once an outage
            self.down.add(cache)
            logger.warning(
                "The cache %r does not answer; locks that may be held there are given back when it "
                "does: %s",
                cache,
                error,
            )
