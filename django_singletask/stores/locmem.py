"""Locks in the memory of one process, for eager tests; otherwise a system check refuses them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from django_singletask.stores.base import FENCE, Entry, Outcome, Store


class LocMemStore(Store):
    """Keep the entries in the cache's own dict, so that ``cache.clear()`` in a test frees them."""

    family = "locmem"
    place = "in the memory of this process"

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        # Not by Django's methods, which are not atomic.
        self.lock = cache._lock  # noqa: SLF001
        self.values: dict[str, bytes] = cache._cache  # noqa: SLF001
        self.expiries: dict[str, float] = cache._expire_info  # noqa: SLF001

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        with self.lock:
            entry = self._find(key)
            if entry is None:
                self._write(self.make_key(key), value, lease)
            return entry

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        cache_key = self.make_key(key)
        with self.lock:
            entry = self._find(key)
            if entry is None:
                return Outcome.GONE
            if entry.value not in (old, new):
                return Outcome.TAKEN
            if lease is None:
                del self.values[cache_key], self.expiries[cache_key]
            else:
                self._write(cache_key, new, lease)
            return Outcome.OK

    def read(self, key: str) -> Entry | None:
        with self.lock:
            return self._find(key)

    def fence(self, key: str, value: bytes) -> int | None:
        with self.lock:
            entry = self._find(key)
            return None if entry is None or entry.value != value else self._next_number()

    def entries(self) -> Iterator[tuple[str, Entry]]:
        self.prefix()  # raises CannotList
        with self.lock:
            cache_keys = list(self.values)
        for key in filter(None, map(self.lock_key, cache_keys)):
            entry = self.read(key)
            if entry is not None:
                yield key, entry

    def _find(self, key: str) -> Entry | None:
        cache_key = self.make_key(key)
        value = self.values.get(cache_key)
        # A foreign entry may have no expiry.
        remaining = (self.expiries.get(cache_key) or math.inf) - time.time()
        return None if value is None or remaining <= 0 else Entry(value, remaining)

    def _next_number(self) -> int:
        last = self._find(FENCE)
        number = max(int(last.value) + 1 if last else 0, time.time_ns() // 1000)
        self._write(self.make_key(FENCE), b"%d" % number, math.inf)
        return number

    def _write(self, cache_key: str, value: bytes, lease: float) -> None:
        self.values[cache_key] = value
        self.expiries[cache_key] = time.time() + lease
