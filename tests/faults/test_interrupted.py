"""A soft time limit that strikes while a lock is taken or released is told, and leaves no lock.

Each test raises the limit at one place after the other of the package and of the cache's client,
and uses another lock for each.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from django_singletask import LockUnavailable, SingletonTask, TaskLock, current_lock, only_one
from django_singletask.signals import lock_event
from tests import inside
from tests.deadline import wait_for
from tests.interruptions import Interruption, interruptions

LEASE = 2.0
NOT_MEANWHILE = 300.0
"""The lease of a lock that must be released: it does not end during a test."""

on_each_family = pytest.mark.parametrize(
    "cache_alias",
    ["redis", "cluster", "pymemcache", "db_postgres"],
    indirect=True,
)

on_one_store = pytest.mark.parametrize("cache_alias", ["redis"], indirect=True)


class Logged(logging.Handler):
    """Count the soft time limits in the log, and keep no record: an error keeps its frames."""

    number = 0

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.number += isinstance(error, SoftTimeLimitExceeded)


@pytest.fixture(autouse=True)
def logged(settings, monkeypatch) -> Iterator[Logged]:
    """Count what is logged, without history and without the handlers of pytest."""
    settings.SINGLETASK_HISTORY = "off"
    handler, logger = Logged(), logging.getLogger("django_singletask")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logging.getLogger("celery.app.trace"), "disabled", True)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def is_free(name: str) -> bool:
    """Take a lock and give it back, as another thread; return whether that was possible."""
    taken = []

    def take() -> None:
        with suppress(LockUnavailable):
            lock = TaskLock(name, timeout=LEASE)
            taken.append(lock.acquire() and lock.release())

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return any(taken)


def assert_free_in_the_end(names: list[str]) -> None:
    gc.collect()  # Celery keeps errors in cycles, and an error keeps the lock of its frames
    held = set(names)

    def all_free() -> bool:
        held.difference_update({name for name in held if is_free(name)})
        return not held

    try:
        wait_for(all_free, "all locks are free")
    except AssertionError:
        pytest.fail(f"{len(held)} of {len(names)} locks are never free: {sorted(held)}")


def assert_none(places: list[str], names: list[str], what: str) -> None:
    if places:
        pytest.fail(f"{len(places)} of {len(names)} {what}: {places}")


def with_block(name: str) -> None:
    with TaskLock(name, timeout=NOT_MEANWHILE):
        pass


def acquire_and_release(name: str) -> None:
    lock = TaskLock(name, timeout=LEASE)
    if lock.acquire():
        lock.release()


def guarded_function(name: str) -> None:
    @only_one(key=name, timeout=NOT_MEANWHILE)
    def function() -> None:
        pass

    function()


def interrupt_each_place(use: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Return the names of the locks, and the places where an error was not told."""
    names, swallowed = [], []
    for interruption in interruptions(SoftTimeLimitExceeded):
        name = f"place {interruption.number}"
        names.append(name)
        use(name)  # an interruption closes the connection: count no places of a new one
        try:
            with interruption:
                use(name)
        except SoftTimeLimitExceeded:
            continue
        if interruption.place:
            swallowed.append(interruption.place)
    assert len(names) > 50
    return names, swallowed


@on_each_family
def test_a_limit_anywhere_in_a_with_block_is_told_and_the_lock_is_free(cache_alias):
    names, swallowed = interrupt_each_place(with_block)
    assert_free_in_the_end(names)
    assert_none(swallowed, names, "were not told")


@pytest.mark.only_all("a with block shows it")
@on_one_store
@pytest.mark.parametrize("use", [guarded_function, acquire_and_release])
def test_a_limit_anywhere_in_another_use_is_told_and_the_lock_is_free(use, cache_alias):
    names, swallowed = interrupt_each_place(use)
    assert_free_in_the_end(names)
    assert_none(swallowed, names, "were not told")


# A signal at the very beginning of an exit: nothing but the thread can leave the lock then


class Struck(Exception):
    """What the signal raises."""

    cycle: Exception


@contextmanager
def listening(receiver: Callable[..., None]) -> Iterator[None]:
    lock_event.connect(receiver, weak=False)
    try:
        yield
    finally:
        lock_event.disconnect(receiver)


AT_EXIT = re.compile(r"lock\.py:\d+ TaskLock\.__a?exit__ ")


numbers = itertools.count()


def in_lock(file: str) -> bool:
    """Return whether a file has the exit; how often the others are called differs each time."""
    return file.endswith("/locks/lock.py")


def interrupt_exit(use: Callable[[str], object]) -> tuple[str, Struck]:
    """Let a signal strike at the beginning of an exit.

    Return the name of the lock, and the error, whose traceback has the lock.
    """
    for interruption in interruptions(Struck, watched=in_lock):
        name = f"exit {next(numbers)}"  # an earlier lock may still be held
        use(f"{name}, connects")
        try:
            with interruption:
                use(name)
        except Struck as error:
            if AT_EXIT.fullmatch(interruption.place):
                return name, error
    raise AssertionError("no place is at the beginning of an exit")


def async_block(name: str) -> None:
    async def main() -> None:
        async with TaskLock(name, timeout=NOT_MEANWHILE):
            pass

    asyncio.run(main())


def received_block(name: str) -> None:
    lock = TaskLock(name, timeout=NOT_MEANWHILE)
    lock.acquire()
    handle = lock.hand_over(for_=NOT_MEANWHILE)
    with TaskLock.receive(handle, timeout=NOT_MEANWHILE):
        pass


def fixed_block(name: str) -> None:
    with TaskLock(name, timeout=NOT_MEANWHILE, renew=False):
        pass


def keeping_block(name: str) -> None:
    with TaskLock(name, timeout=NOT_MEANWHILE, at_least=NOT_MEANWHILE):
        pass


@on_one_store
@pytest.mark.parametrize("use", [async_block, received_block, fixed_block])
def test_a_block_that_a_signal_ends_at_its_exit_frees_its_lock(use, cache_alias):
    name, error = interrupt_exit(use)
    assert TaskLock(name).locked()
    del error
    assert_free_in_the_end([name])


@on_one_store
def test_a_block_of_an_error_in_a_cycle_frees_its_lock(cache_alias):
    """As Celery keeps errors. Python 3.13 empties what only the cycle refers to."""
    name, error = interrupt_exit(with_block)
    error.cycle = error
    del error
    assert_free_in_the_end([name])


@on_one_store
def test_a_block_that_a_signal_ends_at_its_exit_keeps_its_lock_as_it_must(cache_alias):
    name, error = interrupt_exit(keeping_block)
    assert not TaskLock(name).holder().kept
    del error
    wait_for(lambda: TaskLock(name).holder().kept, "the lock is kept")
    assert 0 < TaskLock(name).remaining() <= NOT_MEANWHILE


@on_one_store
def test_a_block_that_a_signal_ends_at_its_exit_is_told(cache_alias):
    told = []

    def note(event: Any, **kwargs: Any) -> None:
        told.append((event.name, event.kind, event.outcome, event.result))

    with listening(note):
        name, error = interrupt_exit(with_block)
        del error
        wait_for(lambda: (name, "released", "released", "returned") in told, "it is told")


@on_one_store
def test_a_stored_traceback_keeps_the_lock_of_its_block(cache_alias):
    kept, stored = interrupt_exit(with_block)
    dropped, error = interrupt_exit(with_block)
    del error
    assert_free_in_the_end([dropped])  # so the thread has looked
    assert TaskLock(kept).locked()
    del stored
    assert_free_in_the_end([kept])


@on_one_store
def test_the_end_of_a_process_waits_for_the_lock_of_that_block(cache_alias):
    name, error = interrupt_exit(with_block)
    del error
    inside.wait_as_a_process_that_ends(30)
    assert not TaskLock(name).locked()


# The lock of a task itself: its body has returned, or failed, and that is what counts


class OfTheBody(Exception):
    """What a body raises."""


@pytest.fixture
def app() -> Iterator[Celery]:
    options = {"broker": "memory://", "backend": "cache+memory://"}
    with Celery("interrupted", set_as_current=False, **options) as app:
        yield app


def end_of_run(app: Celery, interruption: Interruption, name: str, error: type | None) -> Any:
    """Run a task whose body lets the error come after its end; return the task's result."""

    @app.task(base=SingletonTask, shared=False, name=f"tests.{name}", lock_name=name)
    def task() -> str:
        interruption.begin()
        if error is not None:
            raise error
        return "ran"

    try:
        return task.apply().result
    except BaseException as raised:
        return raised
    finally:
        interruption.end()


def interrupt_each_end(app: Celery, expected: Any, logged: Logged) -> tuple[list[str], ...]:
    """Return the names of the locks, and three lists of places.

    Those with another result, those with another log, and those that leave a current lock.
    """
    names, other_result, other_log, left = [], [], [], []
    results = []  # as somebody keeps the traceback of an error
    error = None if isinstance(expected, str) else expected
    for interruption in interruptions(SoftTimeLimitExceeded):
        names.append(f"place {interruption.number}")
        with_block("connects")
        logged.number = 0
        result = end_of_run(app, interruption, names[-1], error)
        results.append(result)
        if current_lock() is not None:
            left.append(interruption.place)
        if result != expected and type(result) is not expected:
            other_result.append(interruption.place)
        if logged.number != bool(interruption.place):
            other_log.append(interruption.place)
    assert len(names) > 20
    return names, other_result, other_log, left


@pytest.mark.only_all("shown on another cache", "cluster", "pymemcache", "db_postgres")
@on_each_family
@pytest.mark.parametrize("expected", ["ran", OfTheBody])
def test_a_limit_after_the_body_of_a_task_changes_no_result(
    cache_alias, app, expected, logged, settings
):
    settings.SINGLETASK_LOCK_TIMEOUT = LEASE
    names, other_result, other_log, left = interrupt_each_end(app, expected, logged)
    assert_none(other_result, names, "changed the result")
    assert_none(other_log, names, "were not logged once")
    assert_none(left, names, "left a current lock")
    assert_free_in_the_end(names)


# If the signal strikes before a connection is closed, Python closes its socket, and warns.
@pytest.mark.only_all("it interrupts at each place")
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_after_a_limit_anywhere_in_a_with_block_there_is_no_current_lock(on_redis):
    # Not in local memory, which is for tests: Python 3.14 can leave the lock of its cache locked.
    kept = []  # as an error does whose traceback somebody keeps

    def keep(name: str) -> None:
        kept.append(TaskLock(name, timeout=LEASE))
        with kept[-1]:
            pass

    for interruption in interruptions(SoftTimeLimitExceeded):
        with suppress(SoftTimeLimitExceeded), interruption:
            keep(f"place {interruption.number}")
        # At the very beginning of __exit__, the lock is still held.
        lock = current_lock()
        assert lock is None or lock, interruption.place
    assert len(kept) > 20
