"""A child that is forked while a thread works on an SQLite file can use the file."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from django_singletask.forks import undivided
from django_singletask.history import recorder
from django_singletask.history.sweep import prune
from django_singletask.history.writing import write
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store
from tests.history.test_recorder import event
from tests.past_rows import before_now, keep_history_in

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd lists the open files")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "history.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE rows (name TEXT)")
    return path


def child_can_write(file: Path, block: Any) -> bool:
    """Fork while another thread writes in a block; say whether the child can write afterwards."""
    began, forking = threading.Event(), threading.Event()

    def write() -> None:
        with block, closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            began.set()
            forking.wait(0.3)  # the fork waits, or is over by then
            connection.execute("COMMIT")

    thread = threading.Thread(target=write)
    thread.start()
    assert began.wait(10)
    pid = os.fork()
    if not pid:
        try:
            # As the history's thread of the child does: with a connection of its own.
            child = sqlite3.connect(file, timeout=1, isolation_level=None)
            child.execute("INSERT INTO rows VALUES ('child')")
        except sqlite3.OperationalError:
            os._exit(1)
        os._exit(0)
    thread.join()
    return os.waitpid(pid, 0)[1] == 0


def test_a_fork_waits_for_a_thread_that_writes(file: Path) -> None:
    assert child_can_write(file, undivided(connections["sqlite"]))


def test_control_a_fork_in_the_middle_of_a_write_shuts_the_child_out(file: Path) -> None:
    assert not child_can_write(file, nullcontext())


def child_has_open(file: str) -> bool:
    assert file in open_files()
    pid = os.fork()
    if not pid:
        os._exit(file in open_files())
    return os.waitpid(pid, 0)[1] != 0


@LINUX
@pytest.mark.django_db(transaction=True, databases="__all__")
def test_a_child_inherits_no_connection_of_the_history(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_history_in(settings, "sqlite")
    settings.SINGLETASK_HISTORY = "background"
    connections["sqlite"].close()
    monkeypatch.setattr(recorder, "writer", recorder.Writer())
    recorder.receive(event=event())
    assert recorder.flush(10)
    assert not child_has_open(str(connections["sqlite"].settings_dict["NAME"]))
    recorder.receive(event=event())  # opens again what the fork has closed
    recorder.stop()
    assert TaskLockEvent.objects.count() == 2


@LINUX
@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("cache_alias", ["db_sqlite"], indirect=True)
def test_a_child_inherits_no_connection_of_the_locks(cache_alias: str) -> None:
    store = get_store(cache_alias)
    connections[store.connection.alias].close()  # the set-up of the tests opened it
    take_lock()
    assert not child_has_open(str(store.connection.settings_dict["NAME"]))
    assert store.read("singletask:forks") is not None


def open_files() -> list[str]:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if link.is_symlink()]


def fork_and_wait() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.needs("default")
def test_a_fork_waits_for_no_server() -> None:
    with undivided(connections["default"]):
        thread = threading.Thread(target=fork_and_wait)
        thread.start()
        thread.join(0.5)  # half the time for which a fork waits
        assert not thread.is_alive()


def write_history() -> None:
    write([event(token="t")])


def take_lock() -> None:
    get_store("db_sqlite").add("singletask:forks", b"{}", 60)


def prune_history() -> None:
    assert sum(prune(older_than=1)) == 1


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("cache_alias", ["db_sqlite"], indirect=True)
@pytest.mark.parametrize("work", [write_history, take_lock, prune_history])
def test_a_fork_waits_for_the_history_the_locks_and_the_pruning(
    work: Any, cache_alias: str, settings: Any
) -> None:
    if work is take_lock:
        connection = get_store(cache_alias).connection
    else:
        connection = connections["sqlite"]
        keep_history_in(settings, "sqlite")
        write([event("conflict", at=before_now(3600))])
    threads, waited = [], []

    def fork_here(execute: Any, sql: str, *rest: Any) -> Any:
        if not threads and sql.startswith(("INSERT", "UPDATE", "DELETE")):
            threads.append(threading.Thread(target=fork_and_wait))
            threads[0].start()
            threads[0].join(0.1)
            waited.append(threads[0].is_alive())
        return execute(sql, *rest)

    with connection.execute_wrapper(fork_here):
        work()
    threads[0].join()
    assert waited == [True]
