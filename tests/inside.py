"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from django_singletask import LockUnavailable, TaskLock, clock, stores
from django_singletask.locks import address, renewal
from django_singletask.locks import lock as locking
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


def put(key: str, value: bytes, *, seconds: float = 60, cache: str = "redis") -> None:
    """Put an entry into a cache, as another process does; it must not be there."""
    assert stores.get_store(cache).add(key, value, seconds) is None


def slot_keys(lock: TaskLock) -> Sequence[str]:
    """Return the keys of all slots that the lock of this name can have."""
    return lock._lock_key.slots()


def lock_of_run(lock: TaskLock, *, token: str = "5a3e", **options: Any) -> TaskLock:
    """Return the lock that a run of a task takes, whose token the worker's main process chose."""
    run = address.Run(token=token)
    return locking.lock_of(TaskLock, lock._lock_key, run, **options)


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

# == Options, settings, checks, keys

# == The history

# == Operators: held now, names, words, the command, the admin

# == Workers
