"""Locks in diskcache: a store for ``diskcache.DjangoCache``, for processes of one host.

Name it in the settings::

    CACHES = {"disk": {"BACKEND": "diskcache.DjangoCache", "LOCATION": "/var/lib/shop/cache"}}
    SINGLETASK_CACHE = "disk"
    SINGLETASK_STORES = {"diskcache.djangocache.DjangoCache": "tests.diskcache_store.DiskStore"}

The locks are in a ``diskcache.Cache`` of their own, in the folder ``singletask`` of the LOCATION.
The shards of the ``DjangoCache`` cannot keep them, since they evict entries when they are full,
and return False if the database is busy. ``cache.clear()`` and the limits of its size do not
reach the locks, so this store does not forget. As all of SQLite, it needs a local disk.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from diskcache import Cache, Disk, DjangoCache, Timeout
from diskcache.core import DBNAME

from django_singletask.stores.base import Entry, Outcome, Store

T = TypeVar("T")

# SQLite remembers for each file which locks this process has on it. A forked child inherits that
# memory without the locks, and would then write beside the others:
#
#     parent:  opens the database (and locks it)
#     child:   opens it, too (SQLite believes that it is locked already)
#     parent:  closes it; it seems to be the last, so SQLite deletes the log
#     child:   writes to the deleted log, which nobody else reads
#
# So the database is open only during a request, and a fork waits for the end of the request.
_open = threading.RLock()
os.register_at_fork(
    before=_open.acquire, after_in_parent=_open.release, after_in_child=_open.release
)


class RawDisk(Disk):
    """Returns what is in the database as it is, and never loads a pickle."""

    def get(self, key: Any, raw: Any) -> Any:
        return key

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> bytes:
        return value if isinstance(value, bytes) else str(value).encode()


class DiskStore(Store):
    """Keep the locks in a diskcache of their own, with a transaction for each request."""

    family = "disk"
    client_errors = (Timeout, sqlite3.Error, OSError)
    timeout = 5.0

    def __init__(self, cache: DjangoCache, alias: str) -> None:
        super().__init__(cache, alias)
        cache.close()  # it opened a database for each of its shards
        self.folder = Path(cache.directory).resolve() / "singletask"
        self.places = frozenset({str(self.folder)})
        self.locks: Cache | None = None

    def set_timeouts(self, seconds: float) -> None:
        self.timeout = seconds
        self.locks = None

    def insert(self, key: str, value: bytes, lease: float) -> bool:
        return self.request(lambda locks: locks.add(self.make_key(key), value, lease))

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        name = self.make_key(key)

        def change(locks: Cache) -> Outcome:
            entry = live(locks, name)
            if entry is None:
                return Outcome.GONE
            if entry.value not in (old, new):
                return Outcome.TAKEN
            if lease is None:
                locks.delete(name)
            else:
                locks.set(name, new, lease)
            return Outcome.OK

        return self.request(change)

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        names = {key: self.make_key(key) for key in keys}
        found = self.request(lambda locks: [(key, live(locks, names[key])) for key in names])
        return {key: entry for key, entry in found if entry is not None}

    def scan(self, prefix: str) -> list[tuple[str, Entry]]:
        found = self.request(lambda locks: [(name, live(locks, name)) for name in locks])
        return [(name, entry) for name, entry in found if entry is not None]

    def request(self, work: Callable[[Cache], T]) -> T:
        """Return what ``work`` returns; one process and thread at a time does this."""
        # A signal can raise an error wherever a function of Python begins. So release the lock by
        # the first call of ``finally``: a ``@contextmanager`` could miss it.
        try:
            if not _open.acquire(timeout=self.timeout):
                raise Timeout("another thread uses the locks")
            # After an error, the next request begins with a new object.
            locks, self.locks = self.open() if self.locks is None else self.locks, None
            try:
                with locks.transact():
                    result = work(locks)
            finally:
                locks.close()
            self.locks = locks
            return result
        except self.client_errors as error:
            raise self.unavailable(error) from error
        finally:
            try:  # noqa: SIM105
                _open.release()
            except RuntimeError:
                pass  # it was not acquired

    def open(self) -> Cache:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Cache() waits a minute for a busy database, so see first whether it is busy.
        database = sqlite3.connect(self.folder / DBNAME, timeout=self.timeout)
        try:
            database.execute("BEGIN IMMEDIATE")
        finally:
            database.close()
        # Nothing is evicted, and no value is in a file beside the database.
        options = {"eviction_policy": "none", "disk_min_file_size": 2**30}
        return Cache(self.folder, self.timeout, RawDisk, **options)


def live(locks: Cache, name: str) -> Entry | None:
    """Return the entry with this name, unless its lease has ended."""
    value, ends_at = locks.get(name, expire_time=True)
    if value is None:
        return None
    return Entry(value, None if ends_at is None else max(ends_at - time.time(), 0.0))
