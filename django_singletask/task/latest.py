"""Find out which message is the last of those that replace each other; see task/__init__.py."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from django_singletask.exceptions import LockUnavailable
from django_singletask.locks.keys import LATEST
from django_singletask.locks.ref import LockRef
from django_singletask.stores import get_store
from django_singletask.task.header import Header

# Series (on_duplicate="replace" with unique_for)
#
# A series is the calls that replace each other until one is received, or until the end that its
# first call has written. A later call starts at the end if its own time is later. Two producers
# that find it over begin one new series:
#
#   producer A: reads S1: over   writes S2
#   producer B: reads S1: over               refused   reads S2: belongs to it
#
# The same happens if a worker receives the last call in between. If the end passes between taking a
# number and publishing, or the clock of B is a second ahead, A's call gives way to B's, which is
# newer. The call before it was the last that was published in time, and is remembered:
#
#   producer A: takes 2 in S1   sleeps ............................................. publishes
#   producer B:                          the end   takes 3 in S2, remembers 1   publishes, notes 3
#
# While the last call of an earlier series waits for a worker, no further series begins. Otherwise
# busy workers would have a call of each series to run, with old arguments:
#
#   producer:  last of S1 |  S2 ...................................... |
#   worker:     busy with other tasks ............ runs the last of S1   runs the last of S2
#
# A producer that is killed after it has taken a number has not noted it, so the call before it
# runs. If the cache loses the entry, the next call begins a new series.

LEASE = 24 * 60 * 60
"""Seconds; far longer than most calls are queued."""

TRIES = 100


Ticket = list[Any]
"""The epoch, and the number of a call."""


class State(NamedTuple):
    """The content of the entry: the highest numbers, and the series.

    ``received`` is the highest number that a worker has received. ``end`` is the end of the last
    series, as a Unix time of a producer (0: it has none). ``lasts`` are the last numbers of the
    series before it.
    """

    epoch: str
    taken: int = 0
    noted: int = 0
    received: int = 0
    end: float = 0.0
    lasts: Sequence[int] = ()

    def encode(self) -> bytes:
        # Each value is unique, so a refused change never looks like a successful one.
        return json.dumps([*self, os.urandom(8).hex()]).encode()

    @classmethod
    def decode(cls, value: bytes) -> State:
        try:
            epoch, *numbers, end, lasts, _ = json.loads(value)
            taken, noted, received = map(int, numbers)
            return cls(epoch, taken, noted, received, float(end), [*map(int, lasts)])
        except (ValueError, TypeError):  # something else wrote it
            return cls.new()

    @classmethod
    def new(cls) -> State:
        """Begin a new epoch."""
        return cls(os.urandom(8).hex())

    def take(self, header: Header, length: float | None) -> State:
        """Return the state after this call has taken a number, in the last series or in a new one.

        A series is over at its end, or when all calls are received. Its ``length`` counts from the
        sending of its first call, or from the start of a call that starts later than that.
        """
        state = self._replace(taken=self.taken + 1)
        if length is None:
            return state._replace(end=0.0)
        is_late = header.delay >= length
        begin = header.due
        if not is_late:
            begin -= header.delay
        is_open = False
        if self.taken > self.received:
            is_open = self.end > max(begin, time.time())
        # Workers that are busy have one call to run, and one series after it: not more.
        is_behind_another = any(last > self.received for last in self.lasts)
        if is_open or (is_behind_another and not is_late):
            # No call waits longer for the end of a series that a late call has begun.
            return state._replace(end=min(self.end, begin + length))
        lasts = {*self.lasts, self.noted, self.received}
        if is_late:  # it must not replace a call that is being published, and starts before
            lasts.add(self.taken)
        lasts = {last for last in lasts if last >= self.received}
        return state._replace(end=begin + length, lasts=sorted(lasts))


def take_number(lock: LockRef, header: Header, length: float | None) -> State | None:
    """Take the next number, and return the state; None if others were faster at each attempt."""
    store = get_store(lock.cache)
    key = lock.beside(LATEST).key
    for _ in range(TRIES):
        entry = store.read(key)
        if entry:
            state = State.decode(entry.value).take(header, length)
            is_taken = store.replace(key, entry.value, state.encode(), LEASE)
        else:
            state = State.new().take(header, length)
            is_taken = not store.add(key, state.encode(), LEASE)
        if is_taken:
            return state
    return None


def gives_way(lock: LockRef, ticket: Any, *, is_sent: bool = False) -> bool:
    """Return whether a later call replaces this one; if not, note this one.

    The producer notes that ``is_sent``, and a worker that it is received; see task/__init__.py. If
    the cache cannot be used, the call runs, and whoever takes the lock next reports it.
    """
    with suppress(LockUnavailable, TypeError, ValueError):  # another program wrote the ticket
        epoch, number = ticket
        store = get_store(lock.cache)
        key = lock.beside(LATEST).key
        for _ in range(TRIES):
            entry = store.read(key)
            if not entry:
                return False
            state = State.decode(entry.value)
            if state.epoch != epoch:
                return state.noted > 0
            if number < state.received:
                return True
            if number < state.noted and number not in state.lasts:
                return True
            if number == state.received:
                return False
            if is_sent:
                state = state._replace(noted=number)
            else:
                state = state._replace(received=number)
            if store.replace(key, entry.value, state.encode(), LEASE):
                return False
    return False
