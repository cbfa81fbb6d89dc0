"""Stand in for the locks in the tests of an application: no server, no database, no worker."""

from __future__ import annotations

import inspect
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from django.core.cache.backends.locmem import LocMemCache
from django.test.utils import TestContextDecorator

from django_singletask.conf import conf
from django_singletask.exceptions import LockConflict
from django_singletask.history import recorder as writer
from django_singletask.holder import Holder
from django_singletask.locks import renewal
from django_singletask.locks.lock import TaskLock
from django_singletask.stores import Entry, Outcome, Store, open_with
from django_singletask.stores.locmem import LocMemStore
from django_singletask.task.base import SingletonTask

__all__ = ["hold", "no_locks"]

F = TypeVar("F", bound=Callable[..., Any])

DAY = 24 * 60 * 60.0


class _Memory(LocMemCache):
    """A cache in memory that is nobody else's; its base shares what has the same name."""

    def __init__(self) -> None:
        super().__init__(__name__, {})
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._expire_info: dict[str, float] = {}
        self._lock = threading.Lock()


class _Granting(Store):
    """Grant every lock and store none."""

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        return None

    def release(self, key: str, value: bytes) -> Outcome:
        # It may have been taken before no_locks() began, inside hold().
        LocMemStore(self.cache).release(key, value)
        return Outcome.OK

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        return Outcome.OK

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        return True

    def read(self, key: str) -> Entry | None:
        return None

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        return False

    def entries(self) -> Iterator[tuple[str, Entry]]:
        return iter(())


# They hold for the whole process, so that the threads which a test starts see them too.
_guard = threading.RLock()
_active: list[_StandIn] = []
_memory: dict[str, _Memory] = {}
_kept_before: set[tuple[str, str]] = set()


class _StandIn(TestContextDecorator):
    """Let another store stand in for those of the configured caches, in every thread."""

    store_class: type[Store] = LocMemStore

    def enable(self) -> Any:
        global _kept_before
        with _guard:
            if not _active:
                _memory.clear()
            entered = self._begin()
            if not _active:
                _kept_before = renewal.keeper().kept()
                # Not by override_settings(): whoever overrides a setting inside and restores it
                # outside (pytest-django's fixture "settings") would restore this one with it.
                conf.history = "off"
                writer.stop()
            _active.append(self)
            open_with(self._open)
            return entered

    def disable(self) -> None:
        with _guard:
            # Of two threads the first to begin may be the first to end.
            del _active[max(i for i, other in enumerate(_active) if other is self)]
            self._end()
            if _active:
                open_with(_active[-1]._open)
                return
            # A lock that the test forgot must not be renewed, so taken, in the configured cache.
            keeper = renewal.keeper()
            for token, key in keeper.kept() - _kept_before:
                keeper.forget(token, key)
            del conf.history
            open_with(None)

    def _begin(self) -> Any:
        """Prepare what stands in, before anybody sees it."""

    def _end(self) -> None:
        """Undo :meth:`_begin`."""

    def _open(self, alias: str) -> Store:
        return self.store_class(_memory.setdefault(alias, _Memory()))

    def decorate_callable(self, func: F) -> F:
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"{func.__qualname__} is a generator function, whose body runs after the call has "
                f"returned: write 'with {type(self).__name__}(…):' around its yield instead."
            )
        return super().decorate_callable(func)


class _Held(NamedTuple):
    alias: str
    key: str
    value: bytes


class hold(_StandIn):
    """Let somebody else hold a lock: a run that wants it finds it held.

    ``hold(task, *args, **kwargs)`` is about the lock of that call of a :class:`SingletonTask`;
    instead of the task stands a :class:`TaskLock`, or the name of one or of an ``only_one``
    function as a string. A context manager, which gives the :class:`Holder` (a task on a host
    called "elsewhere", with a lease of a day), and a decorator of functions, coroutine functions
    and ``unittest`` classes, where it is entered before each ``setUp``.

    All locks live in the memory of this process meanwhile, at first none but this one, whatever
    ``SINGLETASK_CACHE`` names and in every thread; nothing is written to the history. Other locks
    are taken as usual. At the end of the outermost ``hold()`` or ``no_locks()`` they are gone.

    Raises on entry ``TypeError`` for anything else than a lock, and for arguments that do not fit
    the task, and :class:`LockConflict` if the test itself took that lock inside another
    ``hold()``.
    """

    def __init__(self, task: SingletonTask | TaskLock | str, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._call = (task, args, kwargs)
        self._held: _Held | None = None

    def __enter__(self) -> Holder:  # type: ignore[override] # the stubs think of isolate_apps()
        holder: Holder = self.enable()
        return holder

    def _begin(self) -> Holder:
        task, args, kwargs = self._call
        lock = _lock(task, args, kwargs)
        holder = Holder(
            token=os.urandom(16).hex(),
            name=lock.name,
            task=task.name if isinstance(task, SingletonTask) else None,
            task_id=str(uuid.uuid4()),
            retries=0,
            host="elsewhere",
            boot_id="",
            pid_ns="",
            pid=0,  # so nobody can prove it dead
            start="",
            since=time.time(),
            timeout=DAY,
        )
        alias, value = lock.cache or conf.cache, holder.encode()
        entry = self._open(alias).add(lock.key, value, DAY)
        if entry is not None:
            holder, value = Holder.decode(entry.value), entry.value
            if value not in {held.value for held in _all_held()}:
                raise LockConflict(lock.name, holder, entry.remaining)
        self._held = _Held(alias, lock.key, value)
        return holder

    def _end(self) -> None:
        assert self._held is not None
        alias, key, value = self._held
        if self._held not in _all_held():
            self._open(alias).release(key, value)


def _all_held() -> list[_Held]:
    return [other._held for other in _active if isinstance(other, hold) and other._held]


def _lock(task: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TaskLock:
    if isinstance(task, SingletonTask):
        return task.lock(*args, **kwargs)
    if not isinstance(task, (TaskLock, str)):
        raise TypeError(
            f"hold() takes a SingletonTask, a TaskLock or the name of a lock, not {task!r}. "
            "The name of the lock of an only_one function is its key."
        )
    if args or kwargs:
        raise TypeError(f"hold({task!r}) takes no arguments: only the lock of a task has some.")
    return TaskLock(task) if isinstance(task, str) else task


class no_locks(_StandIn):
    """Grant every lock, so that no run is skipped, put off or made to wait.

    Nothing is stored: ``locked()`` and ``owned()`` are False, ``holder()`` is None. A context
    manager and a decorator, for every thread and without a history, like :class:`hold`; of two
    that are nested, the inner one decides.
    """

    store_class = _Granting
