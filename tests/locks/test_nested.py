"""Locks that a signal handler uses in the middle of another request of its thread.

So does a generator that the garbage collector closes. Nothing hangs, and no reply is mistaken for
another.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import pytest
from django.core.cache import caches
from django.db import connections

import django_singletask
from django_singletask import TaskLock
from tests import inside
from tests.interruptions import Interruption, in_locks

HUNG = 30
"""Seconds after which a use of a lock hangs."""

CLIENTS = {"psycopg", "MySQLdb"}
PACKAGE = django_singletask.__name__


class Hung(BaseException):
    """Raised in the thread that waits for itself."""


def in_clients(file: str) -> bool:
    """Return whether a file belongs to a store, or to the client of a cache or a database."""
    parts = Path(file).parts
    if PACKAGE in parts:
        return "stores" in parts
    return in_locks(file) or bool(CLIENTS.intersection(parts))


class Handler(Interruption):
    """Use a lock at that place, as a signal handler does."""

    def __init__(self, number: int) -> None:
        super().__init__(number, Hung, in_clients)

    def strike(self) -> None:
        use(f"nested {self.number}")


def use(name: str) -> None:
    assert not TaskLock("held").acquire()
    take_and_give_back(name)


def take_and_give_back(name: str) -> None:
    lock = TaskLock(name)
    assert lock.acquire()
    assert lock.release()


@pytest.fixture
def held_by_another(cache_alias, settings) -> Iterator[None]:
    settings.SINGLETASK_HISTORY = "off"
    locks = [TaskLock("held")]

    def hold() -> None:
        assert locks[0].acquire()
        inside.close_connections()

    def release() -> None:
        locks[0].release()
        inside.close_connections()

    in_thread(hold)
    yield
    in_thread(release)


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def end(_number: int, _frame: FrameType | None) -> None:
    raise Hung


@pytest.fixture
def alarm() -> Iterator[None]:
    """Let what hangs fail."""
    before = signal.signal(signal.SIGALRM, end)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def interrupt_each_place() -> int:
    """Let a handler use a lock at each place of another use; return how many places there are."""
    use("connects")
    places = 0
    while True:
        handler = Handler(places + 1)
        signal.alarm(HUNG)
        try:
            with handler:
                use(f"outer {handler.number}")
        except BaseException as error:
            error.add_note(f"at {handler.place}")
            raise
        if not handler.place:
            return places
        places += 1


@pytest.mark.usefixtures("held_by_another", "alarm")
@pytest.mark.parametrize(
    "cache_alias",
    ["redis", "pylibmc", "pymemcache", "db_postgres", "db_mariadb", "db_sqlite"],
    indirect=True,
)
def test_a_signal_handler_can_use_a_lock_inside_any_request(cache_alias):
    assert interrupt_each_place() > 20


@pytest.mark.usefixtures("held_by_another", "alarm")
@pytest.mark.parametrize("cache_alias", ["db_mariadb"], indirect=True)
def test_control_on_the_same_connection_a_lock_of_another_is_taken(cache_alias, monkeypatch):
    inside.share_connections(monkeypatch, cache_alias)
    with pytest.raises(AssertionError, match="assert not True"):
        interrupt_each_place()


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("cache_alias", ["db_postgres"], indirect=True)
def test_a_real_signal_inside_a_request_does_not_hang(cache_alias, settings):
    """Another transaction has the row, so the request waits until the handler has run."""
    settings.SINGLETASK_HISTORY = "off"
    take_and_give_back("connects")
    lock, other = TaskLock("waits"), connections.create_connection("default")
    signal.alarm(0)

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, end)
        signal.alarm(HUNG)
        take_and_give_back("in the handler")
        other.rollback()

    signal.signal(signal.SIGALRM, handle)
    other.set_autocommit(False)
    try:
        table = caches.settings[cache_alias]["LOCATION"]
        row = [caches[cache_alias].make_key(lock.key), "x", datetime.now(UTC)]
        with other.cursor() as cursor:
            cursor.execute(f"INSERT INTO {table} VALUES (%s, %s, %s)", row)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert lock.acquire()
        assert lock.release()
    finally:
        other.close()


@pytest.mark.parametrize("cache_alias", ["redis"], indirect=True)
def test_a_signal_handler_can_use_a_store_that_is_being_opened(cache_alias):
    opened = []
    with inside.signal_while_opening(lambda: opened.append(inside.store_of(cache_alias))):
        assert inside.store_of(cache_alias) is opened[0]
