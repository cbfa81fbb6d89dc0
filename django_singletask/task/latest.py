"""Find out which message is the last of those that replace each other; see task/__init__.py."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, NamedTuple

from django_singletask.exceptions import LockUnavailable
from django_singletask.locks.keys import LATEST
from django_singletask.locks.ref import LockRef
from django_singletask.stores import get_store

LEASE = 24 * 60 * 60
"""Seconds; far longer than most calls are queued."""

TRIES = 100
MOST = 1000
"""How many series are kept; of the oldest ones, each message runs."""

NO_SERIES = str(0.0)
"""The name of a series is its end. Under this name, a number is noted for all calls."""

Ticket = list[Any]
"""The epoch, the number of a call, and the name of its series."""


class State(NamedTuple):
    """The content of the entry: the highest number taken, and the highest noted for each series."""

    epoch: str
    taken: int
    noted: dict[str, int]

    def encode(self) -> bytes:
        # Each value is unique, so a refused change never looks like a successful one.
        return json.dumps([*self, os.urandom(8).hex()]).encode()

    @classmethod
    def decode(cls, value: bytes) -> State:
        try:
            epoch, taken, noted, _ = json.loads(value)
            return cls(epoch, int(taken), dict(noted))
        except (ValueError, TypeError):  # something else wrote it
            return cls.new()

    @classmethod
    def new(cls) -> State:
        """Begin a new epoch."""
        return cls(os.urandom(8).hex(), 0, {})

    def latest(self, series: str) -> int:
        """Return the highest number that is noted for the calls of a series."""
        return max(self.noted.get(series, 0), self.noted.get(NO_SERIES, 0))

    def note(self, series: str, number: int) -> State:
        """Return the state with this number, too; one for all calls replaces earlier series."""
        noted = dict([*self.noted.items()][-MOST:])
        if series == NO_SERIES:
            noted = {name: last for name, last in noted.items() if last > number}
        noted[series] = number
        return self._replace(noted=noted)


def take_ticket(lock: LockRef, task: str, series: str) -> Ticket | None:
    """Take the next number; None if other calls were faster at each attempt."""
    store = get_store(lock.cache)
    key = lock.lock_key.beside(LATEST, task).key
    for _ in range(TRIES):
        entry = store.read(key)
        state = State.new()
        if entry:
            state = State.decode(entry.value)
        number = state.taken + 1
        value = state._replace(taken=number).encode()
        if entry:
            is_taken = store.replace(key, entry.value, value, LEASE)
        else:
            is_taken = not store.add(key, value, LEASE)
        if is_taken:
            return [state.epoch, number, series]
    return None


def gives_way(lock: LockRef, task: str, ticket: Any, noted_for: str = NO_SERIES) -> bool:
    """Return whether a later message replaces this one; if not, note this one.

    The producer notes it for its series, and the worker for all calls; see task/__init__.py. If the
    cache cannot be used, the call runs, and whoever takes the lock next reports it.
    """
    with suppress(LockUnavailable, TypeError, ValueError):  # another program wrote the ticket
        epoch, number, series = ticket
        key = lock.lock_key.beside(LATEST, task).key
        for _ in range(TRIES):
            entry = get_store(lock.cache).read(key)
            if not entry:
                return False
            state = State.decode(entry.value)
            if state.epoch != epoch:
                return state.latest(series) > 0
            if state.latest(series) > number:
                return True
            if state.noted.get(noted_for) == number:
                return False
            value = state.note(noted_for, number).encode()
            if get_store(lock.cache).replace(key, entry.value, value, LEASE):
                return False
    return False
