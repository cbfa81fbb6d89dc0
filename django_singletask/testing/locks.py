"""Keep the locks in the memory of this process during a test."""

from __future__ import annotations

import inspect
import re
import threading
import time
import uuid
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from django.core.cache.backends.locmem import LocMemCache
from django.test.utils import TestContextDecorator

from django_singletask.arguments import check_seconds
from django_singletask.conf import Conf, conf
from django_singletask.exceptions import DuplicateTask, LockConflict, LockError
from django_singletask.holder import Holder, without_process
from django_singletask.locks import renewal
from django_singletask.locks.keys import NO_LOCK, QUEUED
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.ref import LockRef
from django_singletask.stores import open_with
from django_singletask.stores.base import Entry, Store
from django_singletask.stores.locmem import LocMemStore
from django_singletask.task.base import SingletonTask
from django_singletask.task.options import LockOptions

F = TypeVar("F", bound=Callable[..., Any])

DAY = 24 * 60 * 60.0
ELSEWHERE = "elsewhere"
"""The host of the holder of each :class:`hold` and :class:`queued`."""


class _Memory:
    """The locks of a test, in each cache that it uses."""

    def __init__(self) -> None:
        self.caches: dict[str, LocMemCache] = {}
        self.advances: list[tuple[float, float]] = []
        """When :func:`advance_time` was called, by ``time.time()``, and with how many seconds."""
        self.aside: Final = {alias: each.leases for alias, each in [*renewal.renewers.items()]}
        """The leases from before: renewing them here would create them in this memory."""
        self._forget_leases()

    def close(self) -> None:
        # Renewing a lock that the test did not release would create it in the configured cache.
        self._forget_leases()
        for alias, leases in self.aside.items():
            for lease in filter(None, [reference() for reference in leases.values()]):
                if lease.held:
                    renewal.renewers[alias].keep(lease)

    def _forget_leases(self) -> None:
        for renewer in [*renewal.renewers.values()]:
            renewer.leases = {}

    def open_store(self, alias: str) -> Store:
        if alias not in self.caches:
            cache = LocMemCache(__name__, {})
            # Otherwise all objects with this name share their entries.
            vars(cache).update(_cache=OrderedDict(), _expire_info={}, _lock=threading.Lock())
            self.caches.setdefault(alias, cache)  # another thread may be faster
        return _MemoryStore(self, alias)

    def advance(self, seconds: float) -> None:
        self.advances.append((time.time(), seconds))
        renewed = set()
        for alias, renewer in [*renewal.renewers.items()]:
            for lease in renewer.held():
                lease.taken_at -= seconds
                lease.began_at -= seconds
                if lease.renews and not lease.lost:
                    renewed.add((alias, lease.key))
                else:
                    lease.deadline -= seconds
        for alias, cache in [*self.caches.items()]:
            kept = {cache.make_key(key) for name, key in renewed if name == alias}
            store = LocMemStore(cache, alias)
            with store.lock:
                for key in store.expiries.keys() - kept:
                    store.expiries[key] -= seconds


class _MemoryStore(LocMemStore):
    def __init__(self, memory: _Memory, alias: str) -> None:
        super().__init__(memory.caches[alias], alias)
        self.memory = memory

    def insert(self, key: str, value: bytes, lease: float) -> bool:
        # The rest of a period that began before the time was advanced.
        if (holder := Holder.decode(value)).kept:
            lease -= sum(passed for at, passed in self.memory.advances if at >= holder.since)
        return super().insert(key, value, lease)


# These are for the whole process, so that they also apply to threads that a test starts.
_active: list[_StandIn] = []


class _StandIn(TestContextDecorator):
    """Replace the stores of the configured caches in every thread."""

    memory: _Memory
    starts_empty = False

    def enable(self) -> Any:
        is_new = self.starts_empty or not _active
        self.memory = _Memory() if is_new else _active[-1].memory
        try:
            entered = self._begin()
        except BaseException:
            if is_new:
                self.memory.close()
            raise
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
        open_with(self.memory.open_store)
        return entered

    def disable(self) -> None:
        _active.pop()
        self._end()
        outer = _active[-1].memory if _active else None
        open_with(outer.open_store if outer else None)
        if outer is not self.memory:
            self.memory.close()
        if not _active:
            del Conf.history

    def _begin(self) -> Any:
        """Add entries to the memory before it is active."""

    def _end(self) -> None:
        """Undo :meth:`_begin`."""

    def decorate_callable(self, func: F) -> F:
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(
                f"{func.__qualname__} is a generator function: its body runs after the call has "
                f"returned. Write 'with {type(self).__name__}(…):' around its yield instead."
            )
        return super().decorate_callable(func)


class no_locks(_StandIn):
    """Begin a test with no lock held and no call queued.

    Until its end, the locks of all threads are in the memory of this process, where they work as in
    production. No history is written. Use it as a context manager, or as a decorator of functions,
    coroutine functions and ``unittest`` classes, where it begins before each ``setUp``::

        with no_locks():
            import_feed(7)
    """

    starts_empty = True


class _Elsewhere(_StandIn):
    """Add the entries of a holder on another host."""

    _store: Store
    _keys: Sequence[str] = ()
    _value = b""

    def __init__(self, *call: Any) -> None:
        super().__init__()
        self._call = call

    def __enter__(self) -> Holder:  # type: ignore[override] # the stubs think of isolate_apps()
        holder: Holder = self.enable()
        return holder

    def _add(self, ref: LockRef, keys: Sequence[str], seconds: float) -> Holder:
        """Add entries of a holder without a process, so that it never counts as dead.

        Return the holder, or the one that is there from elsewhere.
        """
        holder = without_process(ref.holder(seconds), seconds, host=ELSEWHERE)
        self._store = self.memory.open_store(ref.cache)
        self._keys = keys
        self._value = holder.encode()
        for key in keys:
            entry = self._store.add(key, self._value, seconds)
            if entry is not None:
                holder = Holder.decode(entry.value)
                if holder.host != ELSEWHERE:
                    self._end()
                    raise self._refusal(holder, entry)
        return holder

    @abstractmethod
    def _refusal(self, holder: Holder, entry: Entry) -> Exception:
        """Return the error if the test itself has made the entry."""

    def _end(self) -> None:
        for key in self._keys:  # an entry of another block stays
            self._store.release(key, self._value)


class hold(_Elsewhere):
    """Simulate another holder, so that a run that wants the lock finds it held.

    ::

        with hold(import_feed, 7):
            assert import_feed(7) is None  # skipped

    ``task`` can also be a :class:`TaskLock`, the name of a lock, or the key of an ``only_one``
    function. Use it like :class:`no_locks`. As a context manager it returns the :class:`Holder`.

    On entry it raises ``TypeError`` for other arguments, ``ValueError`` for a key with unfilled
    fields, and :class:`LockConflict` if the test itself has the lock.
    """

    def __init__(self, task: SingletonTask | TaskLock | str, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(task, args, kwargs)

    def _begin(self) -> Holder:
        task, args, kwargs = self._call
        lock = _lock(task, args, kwargs)
        name = task.name if isinstance(task, SingletonTask) else None
        ref = LockRef(lock.cache or conf.cache, lock.name, lock.key, name, str(uuid.uuid4()))
        return self._add(ref, ref.lock_key.slots(lock.slots), DAY)

    def _refusal(self, holder: Holder, entry: Entry) -> Exception:
        return LockConflict(holder.name, holder, entry.remaining)


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


class queued(_Elsewhere):
    """Simulate a queued call, so that an identical call with ``unique_until`` is a duplicate.

    ::

        with queued(import_feed, 7) as call:
            assert import_feed.delay(7).id == call.task_id

    Use it like :class:`hold`. The call stops identical calls for ``unique_for`` seconds.

    On entry it raises ``TypeError`` for other arguments, ``ValueError`` if the call has no lock,
    and :class:`DuplicateTask` if the test itself has queued an identical call.
    """

    def __init__(self, task: SingletonTask, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(task, args, kwargs)

    def _begin(self) -> Holder:
        task, args, kwargs = self._call
        if not isinstance(task, SingletonTask):
            raise TypeError(f"queued() takes a SingletonTask, not {task!r}.")
        options = LockOptions.of(task)
        key = options.key(task, args, kwargs, partial=True)
        if key == NO_LOCK:
            raise ValueError(f"queued(): this call of {task.name} has no lock, so no duplicates.")
        ref = LockRef(conf.cache, *key, task=task.name, task_id=str(uuid.uuid4())).beside(QUEUED)
        return self._add(ref, [ref.key], options.blocks_for)

    def _refusal(self, holder: Holder, entry: Entry) -> Exception:
        return DuplicateTask(holder.name, holder.task_id or "")


def advance_time(seconds: float) -> None:
    """Let time pass for the locks inside :class:`no_locks`, :class:`hold` or :class:`queued`.

    Queued calls, the rest of ``lock_at_least``, and leases that are not renewed end as they would
    after these seconds; ``time.time()`` does not change. Raises :class:`LockError` outside these
    blocks, and ``ValueError`` for a negative number.
    """
    check_seconds("advance_time()", seconds, zero=True)
    if not _active:
        raise LockError("advance_time() works inside no_locks(), hold() or queued() only.")
    _active[-1].memory.advance(seconds)
