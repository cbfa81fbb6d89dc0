"""Locks in a file, for processes of one host: the example of "Add a store"."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.core.cache.backends.base import BaseCache

from django_singletask.stores.base import Entry, Outcome, Store


class FileCache(BaseCache):
    """The cache. It is used for locks only, so it needs no get() and set()."""

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(params)
        self.folder = Path(location)

    def clear(self) -> None:
        (self.folder / "locks.json").unlink(missing_ok=True)


# A child that is forked during a request has a copy of the file. It closes the copy, which does not
# unlock the file for the parent. Otherwise it would keep the file locked if the parent is killed.
_open_files: set[int] = set()


def _after_fork() -> None:
    for number in _open_files:
        os.close(number)
    _open_files.clear()


os.register_at_fork(after_in_child=_after_fork)


class FileStore(Store):
    """Keep all entries in one file, and lock another file during each request."""

    client_errors = (OSError, ValueError)
    timeout = 5.0

    def __init__(self, cache: FileCache, alias: str) -> None:
        super().__init__(cache, alias)
        self.folder = cache.folder
        self.places = frozenset({str(cache.folder)})

    def set_timeouts(self, seconds: float) -> None:
        self.timeout = seconds

    # The five requests: each is one critical section.

    def insert(self, key: str, value: bytes, lease: float) -> bool:
        with self.all() as entries:
            name = self.make_key(key)
            is_free = self.live(entries, name) is None
            if is_free:
                entries[name] = value.decode(), time.time() + lease
            return is_free

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        with self.all() as entries:
            name = self.make_key(key)
            entry = self.live(entries, name)
            if entry is None:
                return Outcome.GONE
            if entry.value not in (old, new):
                return Outcome.TAKEN
            if lease is None:
                del entries[name]
            else:
                entries[name] = new.decode(), time.time() + lease
            return Outcome.OK

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        with self.all() as entries:
            found = {key: self.live(entries, self.make_key(key)) for key in keys}
            return {key: entry for key, entry in found.items() if entry is not None}

    def scan(self, prefix: str) -> list[tuple[str, Entry]]:
        with self.all() as entries:
            found = [(name, self.live(entries, name)) for name in entries]
            return [(name, entry) for name, entry in found if entry is not None]

    def purge(self) -> int:
        with self.all() as entries:
            ended = [name for name in entries if self.live(entries, name) is None]
            for name in ended:
                del entries[name]
            return len(ended)

    # How

    def live(self, entries: dict[str, Any], name: str) -> Entry | None:
        """Return the entry with this name, unless its lease has ended."""
        value, ends_at = entries.get(name, ("", 0.0))
        remaining = ends_at - time.time()
        return Entry(value.encode(), remaining) if remaining > 0 else None

    @contextmanager
    def all(self) -> Iterator[dict[str, Any]]:
        """Give all entries to one process and thread at a time, and save what it changes."""
        try:
            with self.locked():
                file = self.folder / "locks.json"
                before = file.read_text() if file.exists() else "{}"
                entries = json.loads(before)
                yield entries
                if (after := json.dumps(entries)) != before:
                    # A process can be killed at any time, so never leave half a file.
                    new = self.folder / "new.json"
                    new.write_text(after)
                    new.replace(file)
        except self.client_errors as error:
            raise self.unavailable(error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR)
        _open_files.add(file)
        try:
            self.wait_for(file)
            yield
        finally:
            try:  # a signal may strike after the first call
                # To close the file would not unlock it while a child has a copy.
                fcntl.flock(file, fcntl.LOCK_UN)
                _open_files.discard(file)
            finally:
                os.close(file)

    def wait_for(self, file: int) -> None:
        until = time.monotonic() + self.timeout
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.001)
