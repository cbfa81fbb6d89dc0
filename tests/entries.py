"""Entries for the tests of the stores, and stores with changed settings."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.core.cache import caches

from django_singletask import TaskLock
from django_singletask.holder import Holder
from django_singletask.signals import LockEvent, lock_event
from tests import inside

T = TypeVar("T")


def key_of(name: str) -> str:
    """Return the key of the lock with this name, before a store prefixes it."""
    return TaskLock(name).key


def holder(who: str, *, lease: float = 60) -> bytes:
    """Return the bytes of a holder; they differ for each ``who``."""
    token = who.encode().hex().zfill(32)
    fields = {"token": token, "name": "tests", "host": "tests", "pid": 1, "timeout": lease}
    return Holder.from_dict(fields).encode()


def eventually(condition: Callable[[], T], *, within: float = 15) -> T:
    """Return the first true result of a condition; fail if there is none in time."""
    deadline = time.monotonic() + within
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.01)
    return result


@contextmanager
def listening(receive: Callable[[LockEvent], object] | None = None) -> Iterator[list[LockEvent]]:
    """Collect the events of locks during a block, or call ``receive`` for each."""
    seen: list[LockEvent] = []

    def hear(event: LockEvent, **kwargs: Any) -> None:
        (receive or seen.append)(event)

    lock_event.connect(hear)
    try:
        yield seen
    finally:
        lock_event.disconnect(hear)


def in_child(work: Callable[[], object], meanwhile: Callable[[], object] = bool) -> bool:
    """Say whether ``work()`` was true in a forked child; do something ``meanwhile`` in this one."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if work() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    meanwhile()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextmanager
def private_store(
    settings: Any, alias: str, location: object = None, *, options: object = None, **changes: object
) -> Iterator[Any]:
    """Open the store of a cache alias with a changed configuration."""
    configuration = dict(settings.CACHES[alias]) | changes
    if location is not None:
        configuration["LOCATION"] = location
    if options is not None:
        configuration["OPTIONS"] = configuration["OPTIONS"] | options
    settings.CACHES = settings.CACHES | {alias: configuration}
    try:
        yield inside.store_of(alias)
    finally:
        inside.close_connections()
        caches[alias].close()
