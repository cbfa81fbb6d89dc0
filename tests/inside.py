"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from django_singletask import Holder, TaskLock, clock, stores
from django_singletask.history import sweep
from django_singletask.locks import keys, lease, liveness, renewal
from django_singletask.stores import base
from tests.deadline import wait_for

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


# The protocol, simulated


def lease_of(lock: TaskLock) -> Any:
    """Return what a process knows of its lease: its ``deadline``, and when a renewal is due."""
    return lock._lease


@contextmanager
def simulation(
    store: Callable[[], base.Store],
    now: Callable[[], float],
    owe: Callable[[Sequence[str], bytes, float], object],
    proof_of_death: Callable[[Holder], str | None],
) -> Iterator[None]:
    """Let the locks of this thread use this store and clock, and be renewed by the test alone.

    ``owe`` gets the keys, the value and the lease of an entry that must be left later. Other
    threads, such as one of an earlier test, keep the real time.
    """
    real, here = clock.now, threading.get_ident()

    def time_of_thread() -> float:
        return now() if threading.get_ident() == here else real()

    renewer = SimpleNamespace(
        keep=lambda lease: None,
        drop=lambda lease: None,
        find=lambda token, key, origin: None,
        owe=lambda keys, value, length, *new: owe(keys, value, length),
    )
    every_cache = mock.MagicMock(return_value=renewer)
    stores.open_with(lambda alias: store())
    try:
        with (
            mock.patch.object(clock, "now", time_of_thread),
            mock.patch.object(renewal.Renewers, "__getitem__", every_cache, create=True),
            mock.patch.object(liveness, "proof_of_death", proof_of_death),
        ):
            yield
    finally:
        stores.open_with(None)


@contextmanager
def renewals_that_count_from_the_reply() -> Iterator[None]:
    """Break leases: trust a renewal as if it had been sent when its reply came."""
    settle = lease.Lease.settle

    def settle_now(held: lease.Lease, _sent: float, length: float, outcome: base.Outcome) -> None:
        settle(held, clock.now(), length, outcome)

    with mock.patch.object(lease.Lease, "settle", settle_now):
        yield


@contextmanager
def losses_that_a_renewal_undoes() -> Iterator[None]:
    """Break leases: one that has ended is renewed, and then trusted again."""
    lost = property(lambda held: held.held and clock.now() >= held.deadline)
    with (
        mock.patch.object(lease.Lease, "lost", lost),
        mock.patch.object(lease.Lease, "has_ended", return_value=False),
    ):
        yield


def keep_nothing() -> None:
    """Let the threads of this process renew and leave nothing more; return when they sleep."""
    for each in renewal.renewers.values():
        each.leases.clear()
        each.owed.clear()
        each.wake()
    threads = [each for each in renewal.renewers.values() if each.thread is not None]
    idle = (math.inf, math.inf)
    wait_for(lambda: all((e.shortest, e.late_at) == idle for e in threads), "they sleep")


# == Locks, leases, renewal

# == Tasks, messages, headers

# == Options, settings, checks, keys

# == The history

# == Operators: held now, names, words, the command, the admin

# == Workers
