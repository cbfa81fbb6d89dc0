"""Know the last of the messages that conflict (``"rerun"``) or replace each other."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from django_singletask.locks.address import Address
from django_singletask.locks.keys import LATEST
from django_singletask.stores import Store, get_store

__all__ = ["State", "Ticket", "gives_way", "is_superseded", "take_ticket"]

logger = logging.getLogger("django_singletask")

# Of all that conflict, the last runs
#
# An entry beside the lock counts those that meet a conflict. Each takes the next number, then
# publishes its message again with that number, then notes it. A message that is back gives way to
# a higher number that is noted, and to no other: what is noted has a message, so the work is not
# lost whoever gives way.
#
#   holder: ..... runs ......................................................... frees
#   B:        takes 1, publishes B', notes 1      B' is back: 2 is noted -> ends
#   C:           takes 2, publishes C', notes 2                    C' is back: the highest -> runs
#
# Killed or asleep before it has noted 2, C leaves B the highest: no harm, and C' notes itself when
# it is back. Noting 2 after 3 changes nothing. In another order the last can be lost:
#
#   C: notes 2, killed                  B' is back: 2 is noted -> ends        nobody is left
#
# and with no number before the message, B and C that meet one holder at the same time could end
# with the older one. A cache that forgets the entry begins a new epoch: what is noted in it met
# its conflict later than every message of the one before.
#
# Of equal calls that are queued, the last runs (on_duplicate="replace")
#
# Each call takes its number when it is sent, and keeps it in retries that its body has not sent. A
# call for which others wait, or whose body has begun, gives way to no other; its number is noted
# all the same. If it meets a conflict ("rerun"), it takes no second number: a call that is newer
# would give way to that.
#
#   producer A: takes 1, publishes A, notes 1
#   producer B:                          takes 2, publishes B, notes 2
#   worker:                                                          A: 2 is noted -> ends   B runs

LEASE = 24 * 60 * 60
"""Seconds: far longer than a hop, and than most runs."""

TRIES = 100


class Ticket(NamedTuple):
    """The number under which a message met its conflict."""

    epoch: str
    number: int


class State(NamedTuple):
    """What the entry says: the highest number taken, and the highest noted."""

    epoch: str
    taken: int
    noted: int

    def encode(self) -> bytes:
        # No two are the same, so a swap that was refused is never taken for one that was made.
        return ":".join(map(str, (*self, os.urandom(8).hex()))).encode()

    @classmethod
    def decode(cls, value: bytes) -> State:
        try:
            epoch, taken, noted, _ = value.decode().split(":")
            return cls(epoch, int(taken), int(noted))
        except ValueError:  # something else wrote it
            return cls(os.urandom(8).hex(), 0, 0)


def take_ticket(lock: Address, task: str) -> Ticket | None:
    """Take the next number; None if others were faster all the time."""
    store, key = _entry(lock, task)
    for _ in range(TRIES):
        entry = store.read(key)
        state = State.decode(b"" if entry is None else entry.value)
        state = state._replace(taken=state.taken + 1)
        value = state.encode()
        if entry is not None:
            taken = store.replace(key, entry.value, value, LEASE)
        else:
            there = store.add(key, value, LEASE)
            taken = there is None or there.value == value
        if taken:
            return Ticket(state.epoch, state.taken)
    return None


def gives_way(lock: Address, task: str, ticket: Ticket) -> bool:
    """Say whether a later message is noted; if none is, note this one, which is published."""
    try:
        return is_superseded(*_entry(lock, task), ticket)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        # In doubt each message runs.
        logger.exception("%s: it is not known whether a later call waits for it.", lock)
        return False


def _entry(lock: Address, task: str) -> tuple[Store, str]:
    """Return store and key of the entry beside a lock that counts the messages of a task."""
    return get_store(lock.cache), lock.lock_key.beside(LATEST, task).key


def is_superseded(store: Store, key: str, ticket: Ticket) -> bool:
    for _ in range(TRIES):
        entry = store.read(key)
        if entry is None:
            return False
        state = State.decode(entry.value)
        if state.epoch != ticket.epoch:
            return state.noted > 0
        if state.noted >= ticket.number:
            return state.noted > ticket.number
        value = state._replace(noted=ticket.number).encode()
        if store.replace(key, entry.value, value, LEASE):
            return False
    return False
