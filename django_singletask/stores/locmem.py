"""Locks in the memory of one process, for eager tests; otherwise a system check refuses them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from django_singletask.stores.base import Entry, Outcome, Store


class LocMemStore(Store):
    """Keep the entries in the cache's own dict, so that ``cache.clear()`` in a test frees them."""

    family = "locmem"
    places: frozenset[str] = frozenset({"the memory of this process"})

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        # This store changes the dicts of the cache itself, because Django's methods are not atomic.
        self.lock: Any = cache._lock  # noqa: SLF001
        self.values: dict[str, bytes] = cache._cache  # noqa: SLF001
        self.expiries: dict[str, float] = cache._expire_info  # noqa: SLF001

    def insert(self, key: str, value: bytes, lease: float) -> bool:
        cache_key = self.make_key(key)
        with self.lock:
            if self._find(cache_key) is not None:
                return False
            self._write(cache_key, value, lease)
            return True

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        cache_key = self.make_key(key)
        with self.lock:
            entry = self._find(cache_key)
            if entry is None:
                return Outcome.GONE
            if entry.value not in (old, new):
                return Outcome.TAKEN
            if lease is None:  # the entry is to be deleted
                del self.values[cache_key]
                del self.expiries[cache_key]
            else:
                self._write(cache_key, new, lease)
            return Outcome.OK

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        with self.lock:
            found = {key: self._find(self.make_key(key)) for key in keys}
        return {key: entry for key, entry in found.items() if entry is not None}

    def scan(self, prefix: str) -> list[tuple[str, Entry]]:
        with self.lock:
            found = [(key, self._find(key)) for key in self.values]
        return [(key, entry) for key, entry in found if entry is not None]

    def _find(self, cache_key: str) -> Entry | None:
        value = self.values.get(cache_key)
        if value is None:
            return None
        expiry = self.expiries.get(cache_key)
        if expiry is None:  # an entry of other code may have no expiry
            expiry = math.inf
        remaining = expiry - time.time()
        if remaining <= 0:
            return None
        return Entry(value, remaining)

    def _write(self, cache_key: str, value: bytes, lease: float) -> None:
        self.values[cache_key] = value
        self.expiries[cache_key] = time.time() + lease
