"""The contract of the store of "Add a store"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.core.cache import caches

from django_singletask.testing.stores import StoreContract


class TestFileStore(StoreContract):
    alias = "files"
    on_one_host = True

    @contextmanager
    def broken(self) -> Iterator[None]:
        folder = caches["files"].folder
        aside = folder.rename(folder.with_name("aside"))
        folder.touch()  # a file where the folder should be
        try:
            yield
        finally:
            folder.unlink()
            aside.rename(folder)
