"""Locks in diskcache, by a store of a third party."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diskcache import Cache
from django.core.cache import caches

from django_singletask.testing.stores import StoreContract
from tests.diskcache_store import DiskStore


class TestDiskStore(StoreContract):
    alias = "disk"
    on_one_host = True

    def empty(self) -> None:
        with Cache(DiskStore(caches["disk"], "disk").folder) as locks:
            locks.clear()

    @contextmanager
    def broken(self) -> Iterator[None]:
        folder = DiskStore(caches["disk"], "disk").folder
        aside = folder.rename(folder.with_name("aside"))
        folder.touch()  # a file where the folder should be
        try:
            yield
        finally:
            folder.unlink()
            aside.rename(folder)
