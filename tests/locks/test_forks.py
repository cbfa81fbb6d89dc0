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

from django_singletask import TaskLock, forks
from django_singletask.history import flush
from django_singletask.models import TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from tests import inside
from tests.command_line import locks
from tests.entries import in_child
from tests.history.test_recorder import event
from tests.past_rows import before_now, keep_history_in

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/fd lists the open files")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a fork wait for so long that a busy machine is no reason to give up."""
    monkeypatch.setattr(forks, "PATIENCE", 30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "history.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE rows (name TEXT)")
    return path


def child_can_write(file: Path, block: Any, *, seconds: float) -> bool:
    """Fork while another thread writes in a block; say whether the child can write afterwards.

    The thread writes until the fork is over, but no longer than so many seconds.
    """
    began, forked = threading.Event(), threading.Event()

    def write() -> None:
        with block, closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            began.set()
            forked.wait(seconds)
            connection.execute("COMMIT")

    thread = threading.Thread(target=write)
    thread.start()
    assert began.wait(30)

    def let_it_end() -> None:
        forked.set()
        thread.join()

    return in_child(lambda: can_write(file), meanwhile=let_it_end)


def can_write(file: Path) -> bool:
    """Write as the history's thread of a child does: with a connection of its own."""
    try:
        child = sqlite3.connect(file, timeout=1, isolation_level=None)
        child.execute("INSERT INTO rows VALUES ('child')")
    except sqlite3.OperationalError:
        return False
    return True


def test_a_fork_waits_for_a_thread_that_writes(file: Path) -> None:
    assert child_can_write(file, forks.undivided(connections["sqlite"]), seconds=0.3)


def test_control_a_fork_in_the_middle_of_a_write_shuts_the_child_out(file: Path) -> None:
    assert not child_can_write(file, nullcontext(), seconds=30)


def child_has_open(file: str) -> bool:
    assert file in open_files()
    return in_child(lambda: file in open_files())


@LINUX
@pytest.mark.django_db(transaction=True, databases="__all__")
def test_a_child_inherits_no_connection_of_the_history(settings: Any) -> None:
    keep_history_in(settings, "sqlite")
    settings.SINGLETASK_HISTORY = "background"
    connections["sqlite"].close()
    with inside.new_history():
        write_history()
        assert flush(10)
        assert not child_has_open(str(connections["sqlite"].settings_dict["NAME"]))
        write_history()  # opens again what the fork has closed
    assert TaskLockEvent.objects.count() == 2


@LINUX
@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("cache_alias", ["db_sqlite"], indirect=True)
def test_a_child_inherits_no_connection_of_the_locks(cache_alias: str) -> None:
    connection = inside.store_of(cache_alias).connection
    connections[connection.alias].close()  # the set-up of the tests opened it
    lock = TaskLock("forks")
    assert lock.acquire()
    assert not child_has_open(str(connection.settings_dict["NAME"]))
    assert lock.owned()


def open_files() -> list[str]:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if link.is_symlink()]


def fork_and_wait() -> None:
    in_child(lambda: True)


@pytest.mark.needs("default")
def test_a_fork_waits_for_no_server() -> None:
    with forks.undivided(connections["default"]):
        thread = threading.Thread(target=fork_and_wait)
        thread.start()
        thread.join(15)  # half the time for which a fork waits
        assert not thread.is_alive()


def write_history() -> None:
    lock_event.send(LockEvent, event=event())


def take_lock() -> None:
    assert TaskLock("forks").acquire()


def prune_history() -> None:
    locks("prune", "--older-than", "1m")
    assert not TaskLockEvent.objects.exists()


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("cache_alias", ["db_sqlite"], indirect=True)
@pytest.mark.parametrize("work", [write_history, take_lock, prune_history])
def test_a_fork_waits_for_the_history_the_locks_and_the_pruning(
    work: Any, cache_alias: str, settings: Any
) -> None:
    settings.SINGLETASK_HISTORY = "off" if work is take_lock else "inline"
    if work is take_lock:
        connection = inside.store_of(cache_alias).connection
    else:
        connection = connections["sqlite"]
        keep_history_in(settings, "sqlite")
        lock_event.send(LockEvent, event=event("conflict", at=before_now(3600)))
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
