"""Turn what a store has into rows: a list of 100,000 locks keeps what is shown, and no more."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from django.utils.translation import gettext

from django_singletask.history.queries import UsualHold
from django_singletask.holder import Holder, Process, clean, describe_run
from django_singletask.locks.keys import QUEUED, lock_of_slot
from django_singletask.locks.liveness import is_stopped, proof_of_death
from django_singletask.operators.words import STATES, clock_time, process
from django_singletask.stores.base import Entry

PROCESS = attrgetter(*(field.name for field in dataclasses.fields(Process)))
RECORD = attrgetter("token", "task", "task_id", "since", "timeout", "slots")
"""What is read of a holder: of its process, which many locks share, and of the rest."""

ENOUGH = 5
"""Runs whose length says what is usual: with fewer, no run is slow."""
CLEARLY = 10.0
"""Seconds by which a slow run is longer than the usual one, at least."""


@dataclasses.dataclass(slots=True)
class HeldLock:
    """A lock that the store holds now, or what looks like one.

    ``state`` is ``"held"``; ``"dead"``, held by a process that is proven gone; ``"handed_over"``,
    left to a process that has not received it yet; ``"kept"`` by a run that has returned
    (``lock_at_least``); ``"queued"``, not a lock but the entry of a call that stops its duplicates;
    ``"blocking"``, such an entry of a call that has begun; or ``"expired"``, an open row of the
    history whose first lease is over and whose token the store no longer has. A worker's sweep
    closes the row, unless its process lives and takes the lock again, as it may when the cache has
    forgotten the lock.

    ``held_for`` and ``remaining`` are seconds, ``remaining`` None where the store cannot tell.
    ``stopped`` says that the process of the holder is seen to stand still. Each holder of a lock
    with several slots is a lock here, and ``slots_held`` counts them. ``conflicts`` counts the
    calls that met this holder (of a queued call: its duplicates); :func:`with_history` sets it and
    ``usual``, and they are None without a history.
    """

    name: str
    key: str
    state: str
    held_for: float
    remaining: float | None
    process: Process
    token: str
    task: str | None
    task_id: str | None
    since: float
    timeout: float
    slots: int
    stopped: bool = False
    slots_held: int = 1
    conflicts: int | None = None
    usual: UsualHold | None = None

    @property
    def host(self) -> str:
        return self.process.host

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def run(self) -> str:
        """The run that has the lock, and its process, in words."""
        return describe_run(self.task_id, self.host, self.pid)

    @property
    def lock_key(self) -> str:
        """The key of the lock; ``key`` is that of the slot if the lock has several."""
        return lock_of_slot(self.key)

    def mentions(self, text: str) -> bool:
        """Say whether the lock's name, task, ids or process have a text in them, in any case."""
        place = process(self.host, self.pid)
        facts = (self.name, self.task, self.task_id, self.token, self.key, place or self.host)
        return not text or any(text.lower() in fact.lower() for fact in facts if fact)

    @property
    def queued(self) -> bool:
        """Whether this is not a lock, but the entry of a call that stops its duplicates."""
        return self.state in {"queued", "blocking"}

    @property
    def left(self) -> float:
        """Seconds until an entry ends that nobody renews, by clocks if the store cannot tell."""
        left = self.timeout - self.held_for if self.remaining is None else self.remaining
        return max(0.0, left)

    @property
    def word(self) -> str:
        """The state in words, with the time at which it ends where that is known."""
        # A time within half a day needs no date.
        until = clock_time(time.time() + self.left, dated=self.left > 43_200, zone=True)
        return str(STATES[self.state]).format(until)

    @property
    def share(self) -> str:
        """How many of its slots are held, as ``2 of 3``; empty if it has only one."""
        return gettext("{} of {}").format(self.slots_held, self.slots) if self.slots > 1 else ""

    @property
    def slow(self) -> bool:
        """Whether it has been held for much longer than is usual, as far as that is known.

        Of runs that are all alike, the next is longer than the five before it in one case of six:
        so the limit is twice the longest. A second instead of a hundredth is nothing to look at.
        """
        if self.usual is None or self.usual.runs < ENOUGH:
            return False
        return self.held_for > max(2 * self.usual.longest, self.usual.median + CLEARLY)


def locks_of(entries: Iterable[tuple[str, Entry]]) -> list[HeldLock]:
    """Return entries of the store as locks. Each process is kept once, and judged once."""
    processes: dict[Any, tuple[Process, str, bool]] = {}
    now, locks = time.time(), []
    for key, entry in entries:
        holder = Holder.decode(entry.value)
        facts = PROCESS(holder)
        if facts not in processes:
            state = "dead" if proof_of_death(holder) else "held"
            processes[facts] = Process(*facts), state, is_stopped(holder)
        process, state, stopped = processes[facts]
        if holder.kept:
            state = "blocking" if key.startswith(QUEUED) else "kept"
        elif key.startswith(QUEUED):
            state = "queued"
        elif holder.token and not holder.pid:
            state = "handed_over"
        lock = lock_of(key, holder, process, state, now, entry.remaining)
        lock.stopped = stopped
        locks.append(lock)
    return locks


def lock_of(
    key: str, holder: Holder, process: Process, state: str, now: float, left: float | None = None
) -> HeldLock:
    name, held_for = holder.name or clean(key, 255), max(0.0, now - (holder.since or now))
    return HeldLock(name, key, state, held_for, left, process, *RECORD(holder))
