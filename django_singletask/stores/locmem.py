"""Locks in the memory of one process: for eager tests, refused by a check otherwise."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from django_singletask.stores.base import Entry, Outcome, Store, marker_key

__all__ = ["LocMemStore"]


class LocMemStore(Store):
    """Keep the entries among those of the cache, under the cache's own thread lock.

    So ``cache.clear()`` in a test frees the locks too.
    """

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        with self.cache._lock:
            entry = self._find(self.make_key(key))
            if entry is None:
                self._write(key, value, lease)
            return entry

    def release(self, key: str, value: bytes) -> Outcome:
        with self.cache._lock:
            outcome = self._compare(key, value)
            if outcome is Outcome.OK:
                self.cache._delete(self.make_key(key))
            return outcome

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        with self.cache._lock:
            outcome = self._compare(key, value)
            marker = self._find(self.make_key(marker_key(key, value)))
            if outcome is Outcome.GONE and marker is None:
                outcome = Outcome.RETAKEN
            if outcome in {Outcome.OK, Outcome.RETAKEN}:
                self._write(key, value, lease)
            return outcome

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        with self.cache._lock:
            entry = self._find(self.make_key(key))
            if entry is None or entry.value not in (old, new):
                return False
            self._write(key, new, lease)
            return True

    def read(self, key: str) -> Entry | None:
        with self.cache._lock:
            return self._find(self.make_key(key))

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        with self.cache._lock:
            if self._compare(key, value) is not Outcome.OK:
                return False
            self._write(marker_key(key, value), b"1", lease)
            self.cache._delete(self.make_key(key))
            return True

    def entries(self) -> Iterator[tuple[str, Entry]]:
        self.prefix()
        with self.cache._lock:
            found = [(self.lock_key(made), self._find(made)) for made in list(self.cache._cache)]
        for key, entry in found:
            if key is not None and entry is not None:
                yield key, entry

    def _find(self, made: str) -> Entry | None:
        value = self.cache._cache.get(made)
        expires = self.cache._expire_info.get(made)
        remaining = (math.inf if expires is None else expires) - time.time()
        return None if value is None or remaining <= 0 else Entry(value, remaining)

    def _compare(self, key: str, value: bytes) -> Outcome:
        entry = self._find(self.make_key(key))
        if entry is None:
            return Outcome.GONE
        return Outcome.OK if entry.value == value else Outcome.TAKEN

    def _write(self, key: str, value: bytes, lease: float) -> None:
        made = self.make_key(key)
        self.cache._cache[made] = value
        self.cache._expire_info[made] = time.time() + lease
