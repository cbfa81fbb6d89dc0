"""Record when each process trusted its locks, and find two that trusted one lock at a time.

`record` makes a process note what happens to its leases, one line an event, in a file of its own.
All times are of the host's boot clock, by which the package counts its leases too:

    taken      the store has granted the lease, which is trusted until ``until``
    trusted    a renewal has moved ``until``
    lost       the process has noticed that the lease is lost
    released   just before the request that gives the lock back
    began, ended, fenced       what the body notes: see `body`
    conflict, retaken, dead    events of the package
    killed     just before a process is killed: see `kill`
    forgot     a store is back, and has no entry of the time before

`Recording` reads the files. A holder trusts its lock from ``taken`` until the first of: its release
begins, it notices the loss, the last ``until`` passes, it is killed.

The idea is that of Jepsen's lock tests: each process writes down what it saw, and a checker that
knows nothing of the lock judges the whole afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from django_singletask import LockLost, TaskLock, clock

# Not by tests/inside.py: a process begins its recording before it can import models.
from django_singletask.locks import lease as leases
from django_singletask.signals import LockEvent, lock_event

FOLDER = "SINGLETASK_TEST_INTERVALS"
"""The environment variable with the folder of the recording."""

Line = dict[str, Any]
Span = tuple[float, float]


# Recording


class Shield:
    """Let no soft time limit strike while a change of a lease is noted, but right after it.

    Otherwise a note could be missing. Other threads get no soft time limit.
    """

    depth = 0
    waiting: tuple[Any, ...] | None = None
    handler: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.depth += 1
            if signal.getsignal(signal.SIGUSR1) != self.strike:
                self.handler = signal.signal(signal.SIGUSR1, self.strike)

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self.depth -= 1
            if self.waiting and not self.depth:
                waiting, self.waiting = self.waiting, None
                self.handler(*waiting)

    def strike(self, *arguments: Any) -> None:
        if self.depth:
            self.waiting = arguments
        else:
            self.handler(*arguments)


SHIELD = Shield()


def note(event: str, **facts: Any) -> None:
    """Append one line, in one write, to the file of this process; ``at`` is now by default."""
    line = json.dumps({"event": event, "at": clock.now(), "pid": os.getpid(), **facts})
    file = Path(os.environ[FOLDER], f"{os.getpid()}.jsonl")
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def record() -> None:
    """Note from now on what happens to the leases of this process and of its forks."""
    leases.Lease.__setattr__ = set_and_note  # type: ignore[assignment, method-assign]
    leases.Lease.lose = note_and_lose  # type: ignore[assignment, method-assign]
    lock_event.connect(note_event)


def set_and_note(lease: leases.Lease, name: str, value: Any) -> None:
    """Set an attribute of a lease; note it if the holder trusts the lease for another time now.

    Do not read ``lost``, which itself can change the lease. The time is taken before the attribute
    is set, so before a request that gives the lock back.
    """
    if name == "__dict__":  # the lease and its twin get common attributes: nothing changes
        object.__setattr__(lease, name, value)
        return
    with SHIELD:
        at, before = clock.now(), lease.deadline if lease.held else None
        object.__setattr__(lease, name, value)
        after = lease.deadline if lease.held else None
        if after != before:
            note_lease(lease, "released" if after is None else "trusted" if before else "taken", at)


def note_and_lose(lease: leases.Lease, *args: Any, **kwargs: Any) -> None:
    with SHIELD:
        if lease.held:
            note_lease(lease, "lost", clock.now())
    lose(lease, *args, **kwargs)


lose = leases.Lease.lose


def note_lease(lease: leases.Lease, event: str, at: float) -> None:
    if not lease.ref.silent and lease.holder.pid == os.getpid():
        name, token, until = lease.ref.name, lease.token, lease.deadline
        note(event, lock=name, token=token, sent=lease.renewed_at, until=until, **{"at": at})


def note_event(event: LockEvent, **kwargs: Any) -> None:
    if event.kind == "conflict":
        note("conflict", lock=event.name, blocked_by=event.blocked_by)
    elif event.kind in ("retaken", "dead"):
        note(event.kind, lock=event.name, token=event.token)


@contextmanager
def body(lock: TaskLock, task_id: str | None = None) -> Iterator[None]:
    """Note when the body under a lock begins and ends."""
    facts = {"lock": lock.name, "token": lock.token, "task_id": task_id}
    try:
        with SHIELD:
            note("began", **facts)
        yield
    finally:
        with SHIELD:
            note("ended", **facts)


def fence(lock: TaskLock) -> None:
    """Note the fencing token of a held lock; memcached, which can lose a counter, has none."""
    with suppress(NotImplementedError, LockLost):
        note("fenced", lock=lock.name, token=lock.token, number=lock.fencing_token())


def kill(*pids: int) -> None:
    """Kill processes; note the time before, since by a later time another can have their locks."""
    for pid in pids:
        note("killed", victim=pid)
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.kill(pid, signal.SIGKILL)


# Reading


class Hold:
    """One acquisition of a lock: when its holder trusted it, and when the body ran.

    ``lines`` are those of this acquisition, and ``kills`` the times of the kills of its pid.
    ``killed`` is infinite for a process that lived on.
    """

    def __init__(self, lines: list[Line], kills: list[float]) -> None:
        self.taken, self.sent = lines[0]["at"], lines[0]["sent"]
        self.lock, self.token, self.pid = (lines[0][name] for name in ("lock", "token", "pid"))
        # A process can take a lock between the time of its kill, as noted, and the signal.
        killed = [max(at, self.taken) for at in kills if at > self.taken - 1]
        self.killed = min(killed, default=math.inf)
        self.steps = [line for line in lines if "until" in line]
        notes = {line["event"]: line for line in lines}
        self.task_id = notes.get("began", {}).get("task_id")
        self.fence = notes.get("fenced", {}).get("number")
        self.body: list[Span] = []
        if "began" in notes:
            end = notes["ended"]["at"] if "ended" in notes else self.killed
            self.body = [(notes["began"]["at"], end)]
        self.ended_by = ""
        self.trusted = self._spans()

    def __str__(self) -> str:
        return f"process {self.pid} (token {self.token[:8]})"

    def _spans(self) -> list[Span]:
        """Return when the holder trusted the lock: once, unless a deadline passed in between."""
        spans: list[Span] = []
        for step, then in pairwise([*self.steps, {"event": "killed", "at": math.inf}]):
            if step["event"] not in ("taken", "trusted"):
                break  # it is lost or released, for good
            ends = {"its deadline": step["until"], then["event"]: then["at"]}
            ends["killed"] = min(self.killed, ends.get("killed", math.inf))
            self.ended_by = min(ends, key=ends.__getitem__)
            if spans and spans[-1][1] == step["at"]:
                spans[-1] = (spans[-1][0], ends[self.ended_by])
            elif ends[self.ended_by] > step["at"]:
                spans.append((step["at"], ends[self.ended_by]))
        return spans

    @property
    def renewals(self) -> list[Span]:
        """When each renewal was sent, and when its reply had come."""
        return [
            (step["sent"], step["at"])
            for before, step in pairwise(self.steps)
            if step["event"] == "trusted" and step["sent"] != before["sent"]
        ]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Two holds of one lock at the same time; ``first`` was taken first."""

    first: Hold
    second: Hold
    start: float
    end: float


class Recording:
    """What the processes of one recording noted, in the order of time."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in whole_lines(file)]
        self.lines: list[Line] = sorted(lines, key=lambda line: line["at"])
        self._by_event: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            self._by_event[line["event"]].append(line)
        kills: dict[int, list[float]] = defaultdict(list)
        for line in self.of("killed"):
            kills[line["victim"]].append(line["at"])
        acquisitions: dict[tuple[str, str, int], list[list[Line]]] = defaultdict(list)
        for line in self.lines:
            if "token" in line:
                of_same = acquisitions[line["lock"], line["token"], line["pid"]]
                if line["event"] == "taken":
                    of_same.append([])
                if of_same:
                    of_same[-1].append(line)
        self.holds = [
            Hold(of_one, kills[pid])
            for (_lock, _token, pid), of_same in acquisitions.items()
            for of_one in of_same
        ]
        self.holds.sort(key=lambda hold: hold.taken)

    @classmethod
    def here(cls) -> Recording:
        """Return what was recorded so far."""
        return cls(Path(os.environ[FOLDER]))

    def of(self, event: str) -> list[Line]:
        return self._by_event[event]

    def both_trusted(self) -> list[Overlap]:
        """Return the pairs of holders that trusted one lock at the same time."""
        return self._overlaps(lambda hold: hold.trusted)

    def both_ran(self) -> list[Overlap]:
        """Return the pairs of bodies that ran at the same time, trusting their lock or not."""
        return self._overlaps(lambda hold: hold.body)

    def _overlaps(self, spans: Callable[[Hold], list[Span]]) -> list[Overlap]:
        pairs: dict[tuple[Hold, Hold], Overlap] = {}
        by_lock: dict[str, list[tuple[float, float, Hold]]] = defaultdict(list)
        for hold in self.holds:
            by_lock[hold.lock] += [(start, end, hold) for start, end in spans(hold)]
        for all_of_lock in by_lock.values():
            going_on: list[tuple[float, Hold]] = []
            for start, end, hold in sorted(all_of_lock, key=lambda span: span[:2]):
                going_on = [other for other in going_on if other[0] > start]
                for other_end, other in going_on:
                    if other is not hold:
                        first, second = sorted([other, hold], key=lambda hold: hold.taken)
                        overlap = Overlap(first, second, start, min(end, other_end))
                        pairs.setdefault((first, second), overlap)
                going_on.append((end, hold))
        return sorted(pairs.values(), key=lambda overlap: overlap.start)

    def is_forgotten(self, overlap: Overlap) -> bool:
        """Say whether a store that forgot its entries explains why two trusted one lock.

        It does not if the first holder has renewed its lease since then:

          store:    down ---- back, empty
          first:                          renewal sent ---- reply: it has the lock again
          second:         taken: explained                            taken: a fault of the lock
        """
        first, second = overlap.first, overlap.second
        return any(
            first.sent <= line["at"]
            and second.taken >= line["since"]
            and not any(
                line["at"] < sent and reply <= second.sent for sent, reply in first.renewals
            )
            for line in self.of("forgot")
        )

    def beside_one(self) -> int:
        """Return with how many others, at most, a holder shared a lock that the store forgot."""
        others: dict[Hold, set[Hold]] = defaultdict(set)
        for overlap in filter(self.is_forgotten, self.both_trusted()):
            others[overlap.first].add(overlap.second)
        return max(map(len, others.values()), default=0)

    def faults(self) -> list[str]:
        """Say in words what a lock must never do; a store that forgot is no fault of the lock."""
        overlaps = [pair for pair in self.both_trusted() if not self.is_forgotten(pair)]
        return [self.words(overlap) for overlap in overlaps] + self.wrong_fences()

    def words(self, overlap: Overlap) -> str:
        return (
            f"{overlap.first.lock}: {self.trust_of(overlap.first)}, and "
            f"{self.trust_of(overlap.second)}: both {self.period((overlap.start, overlap.end))}"
        )

    def trust_of(self, hold: Hold) -> str:
        periods = " and ".join(map(self.period, hold.trusted))
        return f"{hold} trusted it {periods} ({hold.ended_by})"

    def period(self, span: Span) -> str:
        return f"from {self.seconds(span[0])} to {self.seconds(span[1])}"

    def wrong_fences(self) -> list[str]:
        """Say which fencing tokens are not greater than those of earlier holders."""
        wrong = []
        greatest: dict[str, Hold] = {}
        for hold in self.holds:
            if hold.fence is None:
                continue
            before = greatest.setdefault(hold.lock, hold)
            if before is hold or hold.fence > before.fence:
                greatest[hold.lock] = hold
                continue
            wrong.append(
                f"{hold.lock}: {hold}, which took it at {self.seconds(hold.taken)}, has fencing "
                f"token {hold.fence}, but {before} had {before.fence} at "
                f"{self.seconds(before.taken)}"
            )
        return wrong

    def seconds(self, at: float) -> str:
        return f"{at - self.lines[0]['at']:.3f} s"

    def longest_block(self) -> float:
        """Return the longest time in seconds for which the lock of a killed process blocked."""
        killed = {hold.token: hold.killed for hold in self.holds}
        blocks: list[float] = [
            line["at"] - killed.get(line["blocked_by"], math.inf) for line in self.of("conflict")
        ]
        return max([0.0, *blocks])


def whole_lines(file: Path) -> list[str]:
    """Return the lines of a file; a process that was killed can have written half a line."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
