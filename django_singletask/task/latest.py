"""Find out which message is the last of those that replace each other."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, NamedTuple

from django_singletask.exceptions import LockUnavailable
from django_singletask.locks.keys import LATEST
from django_singletask.locks.ref import LockRef
from django_singletask.stores import get_store

# Of identical queued calls, the last runs (on_duplicate="replace")
#
# An entry next to the lock counts the calls. Each call takes the next number when it is sent,
# publishes its message with that number, and then notes the number in the entry. A delivery ends
# if a higher number is noted. A noted number has a message in the queue, so no work is lost. A
# call that others wait for, or whose body has begun, has a number, but no later call replaces it.
#
#   producer A: takes 1, publishes A, notes 1
#   producer B:                          takes 2, publishes B, notes 2
#   worker:                                                          A: 2 is noted -> ends   B runs
#
# If B's producer is killed before it notes 2, A is the highest: no harm, and B notes 2 when it is
# delivered. Noting 1 after 2 changes nothing. In another order the last call can be lost:
#
#   producer B: notes 2, killed                A: 2 is noted -> ends             no call is left
#
# The number must be taken before publishing; otherwise the older of two simultaneous calls could
# win. If the cache loses the entry, a new epoch begins: a number that is noted in it belongs to a
# later call than every message of the old epoch.

LEASE = 24 * 60 * 60
"""Seconds; far longer than most calls are queued."""

TRIES = 100


Ticket = list[Any]
"""The epoch, and the number of a call."""


class State(NamedTuple):
    """The content of the entry: the highest number taken, and the highest number noted."""

    epoch: str
    taken: int
    noted: int

    def encode(self) -> bytes:
        # Each value is unique, so a refused change never looks like a successful one.
        return ":".join(map(str, (*self, os.urandom(8).hex()))).encode()

    @classmethod
    def decode(cls, value: bytes) -> State:
        try:
            epoch, taken, noted, _ = value.decode().split(":")
            return cls(epoch, int(taken), int(noted))
        except ValueError:  # something else wrote it
            return cls(os.urandom(8).hex(), 0, 0)


def take_ticket(lock: LockRef, task: str) -> Ticket | None:
    """Take the next number; None if other calls were faster at each attempt."""
    store, key = get_store(lock.cache), lock.lock_key.beside(LATEST, task).key
    for _ in range(TRIES):
        entry = store.read(key)
        state = State.decode(entry.value if entry else b"")
        value = state._replace(taken=state.taken + 1).encode()
        if entry:
            taken = store.replace(key, entry.value, value, LEASE)
        else:
            taken = not store.add(key, value, LEASE)
        if taken:
            return [state.epoch, state.taken + 1]
    return None


def gives_way(lock: LockRef, task: str, ticket: Any) -> bool:
    """Return whether a later message is noted; if not, note this one, which is published.

    If the cache cannot be used, the call runs, and whoever takes the lock next reports it.
    """
    with suppress(LockUnavailable, TypeError, ValueError):  # another program wrote the ticket
        (epoch, number), key = ticket, lock.lock_key.beside(LATEST, task).key
        for _ in range(TRIES):
            entry = get_store(lock.cache).read(key)
            if not entry:
                return False
            state = State.decode(entry.value)
            if state.epoch != epoch:
                return state.noted > 0
            if state.noted >= number:
                return bool(state.noted > number)
            value = state._replace(noted=number).encode()
            if get_store(lock.cache).replace(key, entry.value, value, LEASE):
                return False
    return False
