"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from django_singletask import clock, stores
from django_singletask.history import sweep
from django_singletask.locks import keys, renewal
from django_singletask.stores import base

# == Stores and the epoch


def store_of(cache: str) -> Any:
    """Return the store with which this thread keeps its locks in a cache."""
    return stores.get_store(cache)


def slots_of(name: str, count: int) -> tuple[str, ...]:
    """Return the keys of the first slots of a lock; the first one is the key of the lock."""
    return keys.name_key(name).slots(count)


def marker_of(key: str, value: bytes) -> str:
    """Return the key of the marker that is left if somebody clears the entry ``value``."""
    return base.marker_key(key, value)


def take(
    store: Any, value: bytes, *slots: str, allowed: int = 1, mark: bytes = b"", waits: bool = False
) -> str | dict[str, bytes]:
    """Take one of the ``allowed`` first slots, as a run does whose message has the ``mark``.

    Return its key, or what is in the slots. ``waits``: raise an error, as for a run that waits, if
    the cache has just forgotten its locks.
    """
    wanted = base.Slots(slots, allowed, mark)
    taken = store.take(wanted, value, 60, heeds_epoch=waits)
    return taken if isinstance(taken, str) else {key: taken[key].value for key in taken}


@contextmanager
def outside_of_tests() -> Iterator[None]:
    """Hold takes back in a cache that has forgotten its locks, which is not done in tests."""
    with mock.patch.object(base, "is_test", return_value=False):
        yield


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """Let the clock of the locks be so many seconds ahead."""
    now = clock.now
    with mock.patch.object(clock, "now", side_effect=lambda: now() + seconds):
        yield


def take_turn_to_sweep() -> bool:
    """Let this process be the one that sweeps next; return whether no other one has the turn."""
    return sweep.takes_turn()


def wait_as_a_process_that_ends(seconds: float) -> None:
    """Wait until this process has left all entries that it must, at most for so long."""
    renewal.release_owed(seconds)


# == Locks, leases, renewal

# == Tasks, messages, headers

# == Options, settings, checks, keys

# == The history

# == Operators: held now, names, words, the command, the admin

# == Workers
