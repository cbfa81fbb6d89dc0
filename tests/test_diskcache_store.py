"""Locks in diskcache, by a store of a third party."""

from __future__ import annotations

import gc
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from diskcache import Cache
from django.core.cache import caches

from django_singletask import LockUnavailable, TaskLock, checks
from django_singletask.stores import get_store
from django_singletask.stores.base import Outcome
from django_singletask.testing.stores import StoreContract
from tests import diskcache_store
from tests.command_line import locks_as_json
from tests.diskcache_store import DiskStore
from tests.interruptions import interruptions
from tests.processes import ROOT


def new_store(class_: type[DiskStore] = DiskStore) -> Any:
    store = class_(caches.create_connection("disk"), "disk")
    store.set_timeouts(1)  # the control of a test waits for it
    return store


def empty() -> None:
    """Delete the locks, since ``cache.clear()`` does not."""
    with Cache(new_store().folder) as locks:
        locks.clear()


@pytest.fixture(autouse=True)
def no_locks() -> None:
    empty()


class TestDiskStore(StoreContract):
    alias = "disk"
    on_one_host = True

    empty = staticmethod(empty)

    @contextmanager
    def broken(self) -> Iterator[None]:
        folder: Path = new_store().folder
        aside = folder.rename(folder.with_name("aside"))
        folder.touch()  # a file where the folder should be
        try:
            yield
        finally:
            folder.unlink()
            aside.rename(folder)


# The product on it


@pytest.mark.django_db(databases="__all__")
def test_a_lock_is_held_and_listed(settings: Any) -> None:
    settings.SINGLETASK_CACHE = "disk"
    with TaskLock("nightly"):
        assert type(get_store("disk")) is DiskStore
        assert not TaskLock("nightly").acquire()
        [listed] = locks_as_json("list", "nightly")["locks"]
        assert (listed["name"], listed["state"]) == ("nightly", "held")
        assert 50 < listed["remaining"] <= 60
    assert locks_as_json("list", "nightly")["locks"] == []
    assert checks.check_cache() == checks.check_deployment() == []


def test_probe_finds_that_another_process_sees_the_locks() -> None:
    command = subprocess.run(
        [sys.executable, "manage.py", "locks", "probe"],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "SINGLETASK_TEST_CACHE": "disk",
        },
        text=True,
        stdout=subprocess.PIPE,
    )
    assert command.returncode == 0
    assert str(new_store().folder) in command.stdout


# What is special to diskcache


def test_neither_clear_nor_a_full_cache_removes_a_lock(settings: Any) -> None:
    """The negative control is an entry in the cache itself."""
    full = {**settings.CACHES["disk"], "SHARDS": 1, "OPTIONS": {"size_limit": 1}}
    settings.CACHES = {**settings.CACHES, "disk": full}
    store = new_store()
    assert store.insert("lock", b"value", 60)
    caches["disk"].set("page", "text")
    for number in range(20):
        caches["disk"].set(f"page {number}", "text" * 20_000)
    assert caches["disk"].get("page") is None
    caches["disk"].clear()
    assert store.read("lock").value == b"value"


class Bomb:
    def __reduce__(self) -> Any:
        return os.abort, ()


def test_an_entry_of_another_program_is_not_loaded_as_a_pickle() -> None:
    store = new_store()
    with Cache(store.folder) as locks:
        locks.set(store.make_key("lock"), Bomb())
        locks.set(Bomb(), "text")
    value = pickle.dumps(Bomb(), protocol=pickle.HIGHEST_PROTOCOL)
    assert store.read("lock").value[:2] == value[:2]
    assert store.change("lock", b"old", b"new", 60) is Outcome.TAKEN
    assert store.scan(store.prefix())


def test_a_long_value_is_in_the_database_too() -> None:
    store, value = new_store(), b"x" * 100_000
    store.insert("lock", value, 60)
    assert store.read("lock").value == value


@pytest.mark.parametrize("has_been_used", [False, True])
def test_a_request_to_a_busy_database_fails_in_time(has_been_used: bool) -> None:
    store = new_store()
    store.set_timeouts(0.1)
    if has_been_used:
        store.insert("other", b"value", 60)
    else:
        new_store().insert("other", b"value", 60)
    with closing(sqlite3.connect(store.folder / "cache.db")) as database:
        database.execute("BEGIN IMMEDIATE")
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(LockUnavailable):
                store.insert("lock", b"value", 60)
            assert time.monotonic() - began < 5
    assert store.insert("lock", b"value", 60)


class Interrupted(BaseException):
    pass


class HoldingStore(DiskStore):
    """The negative control: a generator holds the lock, and may be interrupted before it ends."""

    def request(self, work: Any) -> Any:
        with self.lock():
            return super().request(work)

    @contextmanager
    def lock(self) -> Iterator[None]:
        with diskcache_store._open:
            yield


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("class_", "has_been_used", "watched"),
    [
        (DiskStore, True, ("/diskcache/", "/diskcache_store/", "contextlib")),
        (DiskStore, False, ("/diskcache_store/",)),
        (HoldingStore, True, ("contextlib",)),
    ],
)
def test_others_work_on_after_an_interruption_at_any_place(
    settings: Any, class_: type[DiskStore], has_been_used: bool, watched: tuple[str, ...]
) -> None:
    def is_watched(file: str) -> bool:
        return any(part in file for part in watched)

    settings.CACHES = {**settings.CACHES, "disk": {**settings.CACHES["disk"], "SHARDS": 1}}
    places, stopped = [], []
    for interruption in interruptions(Interrupted, watched=is_watched):
        store, error = new_store(class_), None
        if has_been_used:
            assert use(store)
        try:
            with interruption:
                store.insert("lock", b"value", 60)
        except Interrupted as interrupted:
            error = interrupted  # keep its frames, as a task does that cleans up after its limit
        if not in_thread(lambda: use(new_store())):
            stopped.append(interruption.place)
        del error
        assert use(store)
        places.append(interruption.place)
    assert len(places) > 5
    assert bool(stopped) == (class_ is HoldingStore), stopped
    gc.collect()  # what was interrupted while it opened the database: warn of it here, not later


def in_thread(function: Callable[[], bool]) -> bool:
    """Return what a thread returns; False if the lock is unavailable to it."""
    results = []

    def run() -> None:
        with suppress(LockUnavailable):
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results == [True]


def use(store: DiskStore) -> bool:
    store.add("lock", b"value", 60)
    return store.change("lock", b"value", b"value", None) is Outcome.OK


class OpenStore(DiskStore):
    """The negative control: it leaves the database open between its requests."""

    def open(self) -> Cache:
        locks = super().open()
        self.close, locks.close = locks.close, lambda: None
        return locks


@pytest.mark.parametrize("class_", [DiskStore, OpenStore])
def test_a_child_writes_where_others_read(class_: type[DiskStore]) -> None:
    """Although its parent has used the database before the fork, and ends first."""
    gc.collect()  # no other connection of this process is open
    parent = new_store(class_)
    assert parent.insert("lock of the parent", b"value", 60)
    child_waits, parent_goes_on = os.pipe()
    parent_waits, child_goes_on = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = new_store(class_)
            store.insert("first lock of the child", b"value", 60)
            os.write(child_goes_on, b".")
            os.read(child_waits, 1)
            os._exit(0 if store.insert("second lock of the child", b"value", 60) else 1)
        finally:
            os._exit(2)
    assert os.read(parent_waits, 1)
    parent.close()
    os.write(parent_goes_on, b".")
    assert os.waitpid(pid, 0)[1] == 0
    for pipe in (child_waits, parent_goes_on, parent_waits, child_goes_on):
        os.close(pipe)
    is_there = new_store().read("second lock of the child") is not None
    assert is_there == (class_ is DiskStore)


@pytest.mark.parametrize("waits", [True, False])
def test_a_fork_waits_for_the_request_of_another_thread(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the child believes that this thread is writing, even when it no longer is."""
    if not waits:  # the negative control: not the lock that forks wait for
        monkeypatch.setattr(diskcache_store, "_open", threading.RLock())
    begun, may_end = threading.Event(), threading.Event()

    def work(locks: Cache) -> None:
        begun.set()
        may_end.wait(20)

    thread = threading.Thread(target=new_store().request, args=[work])
    thread.start()
    assert begun.wait(20)
    child_waits, parent_goes_on = os.pipe()
    threading.Timer(0.1, may_end.set).start()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(child_waits, 1)
            if not waits:
                diskcache_store._open = threading.RLock()
            os._exit(0 if use(new_store()) else 1)
        finally:
            os._exit(2)
    thread.join()
    os.write(parent_goes_on, b".")
    works = os.waitpid(pid, 0)[1] == 0
    for pipe in (child_waits, parent_goes_on):
        os.close(pipe)
    assert works == waits
