"""Find out which message is the last of those that replace each other; see task/__init__.py."""

from __future__ import annotations

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
            return cls.new()

    @classmethod
    def new(cls) -> State:
        """Begin a new epoch."""
        return cls(os.urandom(8).hex(), 0, 0)


def take_ticket(lock: LockRef, task: str) -> Ticket | None:
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
            return [state.epoch, number]
    return None


def gives_way(lock: LockRef, task: str, ticket: Any) -> bool:
    """Return whether a later message is noted; if not, note this one, which is published.

    If the cache cannot be used, the call runs, and whoever takes the lock next reports it.
    """
    with suppress(LockUnavailable, TypeError, ValueError):  # another program wrote the ticket
        epoch, number = ticket
        key = lock.lock_key.beside(LATEST, task).key
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
