"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from celery.app.task import Context

from django_singletask import Holder, LockUnavailable, TaskLock, clock, stores
from django_singletask.history import recorder
from django_singletask.locks import address, keys, lease, liveness, renewal
from django_singletask.locks import lock as locking
from django_singletask.operators import held
from django_singletask.stores import base
from django_singletask.task import delivery, header
from django_singletask.worker import startup, watcher
from tests.deadline import wait_for

# == Stores and the epoch

# == Locks, leases, renewal


def stop_clock(patch: pytest.MonkeyPatch) -> Any:
    """Stop the clock by which this process counts its leases; add seconds to ``now`` of the result.

    The caches have clocks of their own, which go on.
    """
    stopped = SimpleNamespace(now=clock.now())
    patch.setattr(clock, "now", lambda: stopped.now)
    return stopped


@contextmanager
def handled(
    request: str, handle: Callable[..., Any], *, cache: str = "redis", of_all_threads: bool = False
) -> Iterator[None]:
    """Let ``handle(send, *arguments)`` handle this kind of request to a cache; ``send`` sends it.

    Each thread has a store of its own, so this is for the requests of this thread alone, or for
    those of all threads to caches of this kind.
    """
    store = stores.get_store(cache)
    place = type(store) if of_all_threads else store
    real = getattr(type(store), request)

    def instead(*arguments: Any, **options: Any) -> Any:
        asked = store
        if of_all_threads:
            asked, *arguments = arguments
        return handle(real.__get__(asked), *arguments, **options)

    with mock.patch.object(place, request, instead):
        yield


@contextmanager
def failing(
    request: str, error: Exception | None = None, *, sent: bool = False, **where: Any
) -> Iterator[None]:
    """Let a kind of request fail; with ``sent``, the server handles it and the reply is lost.

    ``where`` is as for :func:`handled`.
    """

    def fail(send: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        if sent:
            send(*arguments, **options)
        raise error or LockUnavailable("down")

    with handled(request, fail, **where):
        yield


def put_entry(key: str, value: bytes, seconds: float = 60, alias: str = "redis") -> None:
    """Put an entry into a cache, as another process does; it must not be there."""
    assert stores.get_store(alias).add(key, value, seconds) is None


def slot_keys(lock: TaskLock) -> Sequence[str]:
    """Return the keys of all slots that the lock of this name can have."""
    return lock._lock_key.slots()


def holder_of(lock: Any, task: Any = None, task_id: str | None = None, retries: int = 0) -> Holder:
    """Return the record with which a run in this process has this lock for a minute."""
    run = address.Run(task and task.name, task_id, retries)
    return run.holder(lock.name, 60)


def call_dead(patch: pytest.MonkeyPatch, is_dead: Callable[[Holder], object]) -> None:
    """Let the process of each holder for which this is true be proven dead, and no other."""
    patch.setattr(liveness, "proof_of_death", lambda holder: "gone" if is_dead(holder) else None)


def lock_of_run(lock: TaskLock, *, token: str = "5a3e", **options: Any) -> TaskLock:
    """Return the lock that a run of a task takes, whose token the worker's main process chose."""
    run = address.Run(token=token)
    return locking.lock_of(TaskLock, lock._lock_key, run, **options)


def held_back(seconds: float) -> Exception:
    """Return the error of a take that must wait, since the cache has forgotten its locks."""
    return base.Forgotten(seconds)


def hurry_cancelled_calls(patch: pytest.MonkeyPatch) -> None:
    """Let a cancelled call of asyncio code hardly wait for the reply to its request."""
    patch.setattr(locking, "GRACE", 0.05)


def store_of(cache: str) -> Any:
    """Return the store with which this thread keeps its locks in a cache."""
    return stores.get_store(cache)


def close_connections() -> None:
    """Close the connections to the lock caches that this thread has opened."""
    stores.close_stores()


def emptied_long_ago(cache: str) -> None:
    """Let no take wait because the cache was emptied: that seems to be long ago."""
    base.epoch_of(cache).changed_at = -math.inf


@contextmanager
def signal_while_opening(handle: Callable[[], object]) -> Iterator[None]:
    """Let a signal handler run where the next store is opened."""
    signals = [handle]

    def open_store(cache: str) -> Any:
        while signals:
            signals.pop()()
        return stores.open_store(cache)

    stores.open_with(open_store)
    try:
        yield
    finally:
        stores.open_with(None)


def share_connections(patch: pytest.MonkeyPatch, cache: str) -> None:
    """Let a signal handler use the connection of the request that it interrupts: a broken lock."""
    never = property(lambda store: False, lambda store, value: None)
    patch.setattr(type(stores.get_store(cache)), "is_asking", never)


def in_words(error: Exception) -> str:
    """Return what the command and the admin print of an error of a cache's client."""
    return held.cannot_ask(error)


def accepted(task: Any, headers: dict[str, Any], *args: Any) -> Any:
    """Return what the main process notes of a message that a process of the pool runs."""
    request = SimpleNamespace(task=task, _payload=(args, {}, {}))
    task_id = header_of(headers)["id"]
    return watcher.Accepted(request, header.Header.of(headers, task_id, task.name))


@contextmanager
def new_history() -> Iterator[None]:
    """Let a new thread of this process write the history, and try again soon after a failure."""
    with (
        mock.patch.object(recorder, "writer", recorder.Writer()),
        mock.patch.object(recorder, "RETRY", 0.01),
    ):
        yield
        recorder.stop()


@contextmanager
def signal_before_release(error: BaseException) -> Iterator[None]:
    """Let a signal raise an error where the first release of a lock begins."""
    signals, leave = [error], lease.Lease.leave

    def strike(held: lease.Lease, *arguments: Any, **options: Any) -> bool:
        if signals:
            raise signals.pop()
        return leave(held, *arguments, **options)

    with mock.patch.object(lease.Lease, "leave", strike):
        yield


def free_killed(lock: TaskLock, token: str) -> bool:
    """Free a lock for a process that was killed, as the worker's main process does."""
    return lock._address.free_killed(token, "its process was killed")


def renewed_at(lock: TaskLock) -> float:
    """Return when the last renewal of a held lock was sent, by the clock of its process."""
    return lock._lease.renewed_at


def wait_for_renewals(lock: TaskLock, seconds: float) -> None:
    """Wait until a lock is renewed that many seconds after its last renewal, or is lost."""
    until = renewed_at(lock) + seconds
    wait_for(lambda: lock.lost or renewed_at(lock) > until, "renewals")
    assert not lock.lost


def kept_leases(cache: str = "redis") -> list[tuple[str, str]]:
    """Return token and key of the entries that this process keeps in a cache."""
    return [*renewal.renewers[cache].leases]


def make_owed_releases(cache: str = "redis") -> None:
    """Leave now the entries that the background thread has to leave, if no thread runs."""
    renewal.renewers[cache].release_some()


def stop_renewal(lock: TaskLock) -> None:
    """Let this process no longer keep the lease of a lock, as if the process was gone."""
    renewal.renewers[lock.cache or "redis"].drop(lock._lease)


# == Tasks, messages, headers

WAITS = {"redelivered": header.WAITS}
"""What the header says of a message that waits for the end of its first run."""
READS = {"redelivered": header.READS}
"""What the header says of a message that looks for the result of its first run the last time."""


def header_of(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a message's headers that the package has written."""
    part: dict[str, Any] = headers[header.HEADER]
    return part


def read(lock: Any) -> base.Entry | None:
    """Return value and rest of an entry in Redis."""
    return stores.get_store("redis").read(lock.key)


def write(lock: Any, value: bytes, seconds: float = 60) -> None:
    """Write the value of an entry in Redis, whoever has it."""
    store, entry = stores.get_store("redis"), read(lock)
    if entry is None:
        assert store.add(lock.key, value, seconds) is None
    else:
        assert store.replace(lock.key, entry.value, value, seconds)


def beside(lock: TaskLock, kind: str, whose: str) -> address.Address:
    """Return the place of another entry next to that of a lock."""
    place = lock._address
    return address.Address(place.cache, place.lock_key.beside(kind, whose))


def queued_entry(task: Any, *args: Any) -> TaskLock:
    """Return a lock that reads and clears the entry of a queued call."""
    place = beside(task.lock(*args), keys.QUEUED, task.name)
    return TaskLock(place.lock_key, cache=place.cache)


def discard(task: Any, fields: dict[str, Any], task_id: str = "mine") -> None:
    """Discard a message of a revoked call, as the main process does."""
    startup.free_revoked(task, Context(fields, id=task_id), terminated=False)


def headers_for(task: Any, task_id: str = "mine", /, **fields: Any) -> dict[str, Any]:
    """Return the headers of a message of this call; ``fields`` are those of the package's part."""
    return {header.HEADER: {"id": task_id, "task": task.name, **fields}}


def postponed() -> Any:
    """Expect that the message was published again."""
    return pytest.raises(lease.Postponed)


def dropped() -> Any:
    """Expect that the delivery ends because another one does the work or has done it."""
    return pytest.raises(delivery.Dropped)


# == Options, settings, checks, keys

# == The history

# == Operators: held now, names, words, the command, the admin

# == Workers
