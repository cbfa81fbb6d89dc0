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
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from diskcache import Cache, Disk, DjangoCache, Timeout
from diskcache.core import DBNAME

from django_singletask.stores.base import Entry, Outcome, Store

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

    # The requests: each is one transaction.

    def insert(self, key: str, value: bytes, lease: float) -> bool:
        with self.transaction() as locks:
            return locks.add(self.make_key(key), value, lease)

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        with self.transaction() as locks:
            name = self.make_key(key)
            entry = self.live(locks, name)
            if entry is None:
                return Outcome.GONE
            if entry.value not in (old, new):
                return Outcome.TAKEN
            if lease is None:
                locks.delete(name)
            else:
                locks.set(name, new, lease)
            return Outcome.OK

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        with self.transaction() as locks:
            found = {key: self.live(locks, self.make_key(key)) for key in keys}
            return {key: entry for key, entry in found.items() if entry is not None}

    def scan(self, prefix: str) -> list[tuple[str, Entry]]:
        with self.transaction() as locks:
            found = [(name, self.live(locks, name)) for name in locks]
            return [(name, entry) for name, entry in found if entry is not None]

    # How

    def live(self, locks: Cache, name: str) -> Entry | None:
        """Return the entry with this name, unless its lease has ended."""
        value, ends_at = locks.get(name, expire_time=True)
        if value is None:
            return None
        return Entry(value, None if ends_at is None else max(ends_at - time.time(), 0.0))

    @contextmanager
    def transaction(self) -> Iterator[Cache]:
        """Let one process and thread at a time read and write the locks."""
        try:
            if not _open.acquire(timeout=self.timeout):
                raise Timeout("another thread uses the database")
            # After any exception, the next request begins with a new object.
            locks, self.locks = self.locks or self.open(), None
            with closing(locks):
                with locks.transact():
                    yield locks
            self.locks = locks
        except self.client_errors as error:
            raise self.unavailable(error) from error
        finally:
            with suppress(RuntimeError):  # it was not acquired
                _open.release()

    def open(self) -> Cache:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Cache() waits a minute for a busy database, so see first whether it is busy.
        with closing(sqlite3.connect(self.folder / DBNAME, self.timeout)) as database:
            database.execute("BEGIN IMMEDIATE")
        return Cache(self.folder, self.timeout, RawDisk, eviction_policy="none")
