"""Replace the locks in the tests of a project, without a server, a database or a worker."""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from django.core.cache.backends.locmem import LocMemCache
from django.test.utils import TestContextDecorator

from django_singletask.conf import Conf, conf
from django_singletask.exceptions import LockConflict
from django_singletask.holder import Holder
from django_singletask.locks import renewal
from django_singletask.locks.address import Run
from django_singletask.locks.keys import LockKey
from django_singletask.locks.lock import TaskLock
from django_singletask.stores import open_with
from django_singletask.stores.base import Entry, Outcome, Store
from django_singletask.stores.locmem import LocMemStore
from django_singletask.task.base import SingletonTask

__all__ = ["hold", "no_locks"]

F = TypeVar("F", bound=Callable[..., Any])

DAY = 24 * 60 * 60.0
ELSEWHERE = "elsewhere"
"""The host of the holder of each :class:`hold`."""


class _GrantingStore(LocMemStore):
    """Grant every lock and store none."""

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        return None

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        super().change(key, old, new, lease)  # the lock may have been acquired inside hold()
        return Outcome.OK

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        return {}

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        return False

    def fence(self, key: str, value: bytes) -> int | None:
        return self.microseconds()


# These are for the whole process, so that they also apply to threads that a test starts.
_active: list[_StandIn] = []
_caches: dict[str, LocMemCache] = {}


class _StandIn(TestContextDecorator):
    """Replace the stores of the configured caches in every thread."""

    store_class: type[Store] = LocMemStore

    def enable(self) -> Any:
        if not _active:
            for cache in _caches.values():
                cache.clear()
        entered = self.begin()
        self.kept = renewal.kept()
        if not _active:
            # Not by override_settings(): a test that overrides a setting inside and restores it
            # outside, as pytest-django's "settings" can, would restore this one too. An attribute
            # of the class outlasts forget().
            Conf.history = "off"
            conf.forget()
            # Imported here, because a conftest.py cannot import models yet.
            from django_singletask.history.recorder import stop

            stop()
        _active.append(self)
        open_with(self.open_store)
        return entered

    def disable(self) -> None:
        _active.pop()
        self.end()
        open_with(_active[-1].open_store if _active else None)
        # Renewing a lock that the test did not release would create it in the configured cache.
        for cache, token, key in renewal.kept() - self.kept:
            renewal.renewers[cache].leases.pop((token, key), None)
        if not _active:
            del Conf.history

    def begin(self) -> Any:
        """Prepare the replacement before it is active."""

    def end(self) -> None:
        """Undo :meth:`begin`."""

    def open_store(self, alias: str) -> Store:
        """Return the store that replaces the one of a cache alias."""
        # LocMemCache objects with the same name share their entries.
        cache = _caches.setdefault(alias, LocMemCache(f"{__name__} {alias}", {}))
        return self.store_class(cache, alias)

    def decorate_callable(self, func: F) -> F:
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"{func.__qualname__} is a generator function: its body runs after the call has "
                f"returned. Write 'with {type(self).__name__}(…):' around its yield instead."
            )
        return super().decorate_callable(func)


class hold(_StandIn):
    """Simulate another holder, so that a run that wants the lock finds it held.

    ``hold(task, *args, **kwargs)`` holds the lock of that call of a :class:`SingletonTask`.
    Instead of the task, pass a :class:`TaskLock`, the name of a lock, or the key of an
    ``only_one`` function. All slots of the lock are held; a name has one slot.
    Use it as a context manager, which returns the :class:`Holder` (a task on a host called
    "elsewhere", with a lease of one day). Or use it as a decorator of functions, coroutine
    functions and ``unittest`` classes, where it begins before each ``setUp``.

    Meanwhile, in every thread, all locks are in the memory of this process, and no history is
    written. At first this is the only held lock; other locks can be acquired as usual. All of them
    disappear when the outermost ``hold()`` or ``no_locks()`` ends.

    Raises ``TypeError`` on entry if the first argument is not a lock, or if the other arguments do
    not fit the task. Raises ``ValueError`` for the key of an ``only_one`` function with unfilled
    fields, and :class:`LockConflict` if the test itself acquired that lock inside another
    ``hold()``.
    """

    def __init__(self, task: SingletonTask | TaskLock | str, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._call = (task, args, kwargs)

    def __enter__(self) -> Holder:  # type: ignore[override] # the stubs think of isolate_apps()
        holder: Holder = self.enable()
        return holder

    def begin(self) -> Holder:
        task, args, kwargs = self._call
        lock = _lock(task, args, kwargs)
        run = Run(task.name if isinstance(task, SingletonTask) else None, str(uuid.uuid4()))
        # Without a process, so it never counts as dead.
        holder = run.holder(lock.name, DAY, host=ELSEWHERE, pid=0, start="")
        self._store, self._value = self.open_store(lock.cache or conf.cache), holder.encode()
        self._keys = LockKey(lock.name, lock.key).slots(lock.slots)
        for key in self._keys:
            entry = self._store.add(key, self._value, DAY)
            if entry is not None:
                holder = Holder.decode(entry.value)
                if holder.host != ELSEWHERE:
                    self.end()
                    raise LockConflict(lock.name, holder, entry.remaining)
        return holder

    def end(self) -> None:
        for key in self._keys:  # an entry of another hold() stays
            self._store.release(key, self._value)


def _lock(task: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TaskLock:
    if isinstance(task, SingletonTask):
        return task.lock(*args, **kwargs)
    if not isinstance(task, (TaskLock, str)):
        raise TypeError(
            f"hold() takes a SingletonTask, a TaskLock or the name of a lock, not {task!r}. "
            "The name of the lock of an only_one function is its key."
        )
    if args or kwargs:
        raise TypeError(f"hold({task!r}) takes no arguments: only the lock of a task has any.")
    if isinstance(task, str) and re.search(r"\{[A-Za-z_][\w.]*\}", task):
        raise ValueError(
            f"hold({task!r}) has an unfilled field: write the name of one call's lock, such as "
            "'sync-7', or pass a TaskLock if the braces are part of the name."
        )
    return TaskLock(task) if isinstance(task, str) else task


class no_locks(_StandIn):
    """Grant every lock, so that no run is skipped, postponed or has to wait.

    Nothing is stored: ``locked()`` and ``owned()`` are False, and ``holder()`` is None. Like
    :class:`hold`, it is a context manager and a decorator, applies to every thread, and writes no
    history. If two are nested, the inner one decides.
    """

    store_class = _GrantingStore
