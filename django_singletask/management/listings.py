"""Turn locks, history and findings into tables and JSON."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from django_singletask.history.queries import timestamp
from django_singletask.management.tables import (
    LEFT,
    LONG,
    RIGHT,
    plural,
    printable,
    table,
    width,
)
from django_singletask.operators.explain import Why
from django_singletask.operators.held import HeldLock, UsualHold, usual_holds, whose
from django_singletask.operators.names import without_defaults
from django_singletask.operators.probe import Probe
from django_singletask.operators.words import duration

if TYPE_CHECKING:
    from django_singletask.models import TaskLockEvent

__all__ = ["as_dict", "as_dicts", "findings", "held", "history", "row_as_dict", "why_as_dict"]


ID = 12
"""Letters of a task id above which it is shortened."""


def held(locks: Sequence[HeldLock]) -> list[str]:
    """Lay out locks that are held."""
    rows = [
        (
            without_defaults(lock.name),
            duration(lock.held_for),
            "-" if lock.remaining is None or lock.queued else duration(lock.remaining),
            "-" if lock.skipped is None else str(lock.skipped),
            _who(lock),
        )
        for lock in locks
    ]
    return table(
        ("LOCK", "HELD FOR", "LEASE", "SKIPPED", "HOLDER"),
        (LONG, RIGHT, RIGHT, RIGHT, LONG),
        rows,
        _notes(locks),
    )


def _who(lock: HeldLock) -> str:
    """Name the process that holds a lock, or the task id of the call that is queued."""
    holder = lock.holder
    if lock.queued:
        task_id = holder.task_id or "unknown"
        return f"queued {task_id if len(task_id) <= ID else f'{task_id[:4]}…'}"
    process = f"{holder.host}:{holder.pid}" if holder.host else "unknown"
    return process if lock.state == "held" else f"{lock.state} {process}"


def _slow(locks: Sequence[HeldLock]) -> list[tuple[UsualHold | None, bool]]:
    """Return how long each is held usually, and whether that is exceeded."""
    usual = usual_holds(locks)
    known = [usual.get(whose(lock)) if lock.state == "held" else None for lock in locks]
    return [
        (each, each is not None and each.is_exceeded_by(lock.held_for))
        for lock, each in zip(locks, known, strict=True)
    ]


def _notes(locks: Sequence[HeldLock]) -> list[str]:
    """Mark the holds that last longer than the longest of the usual ones."""
    return [
        f"(slow: usual {_largest_unit(usual.median)})" if usual and slow else ""
        for usual, slow in _slow(locks)
    ]


def _largest_unit(seconds: float) -> str:
    return duration(max(1, round(seconds))).partition(" ")[0]


COMMAND = " (manage.py locks)"
"""End of the name of who used the command: there is no room for the host as well."""
WORDS = {"put_off": "put off"}


def history(rows: Sequence[TaskLockEvent]) -> list[str]:
    """Lay out rows of the history."""
    return table(
        ("AT", "LOCK", "WHAT", "HELD", "BY"),
        (LEFT, LONG, LEFT, RIGHT, LONG),
        [
            (
                time.strftime("%m-%d %H:%M:%S", time.localtime(timestamp(row.last_at or row.at))),
                without_defaults(row.name),
                _what(row),
                _lasted(row),
                _by(row),
            )
            for row in rows
        ],
    )


def _by(row: TaskLockEvent) -> str:
    if row.actor.endswith(COMMAND):
        return row.actor.rpartition(" on ")[0]
    return row.actor or (f"{row.host}:{row.pid}" if row.host else "unknown")


def _what(row: TaskLockEvent) -> str:
    if row.kind == "acquired":
        ended = row.result if row.outcome == "released" else row.outcome
        return WORDS.get(ended, ended) or row.outcome or "held"
    return f"{row.kind} ×{row.count}" if row.count > 1 else row.kind


def _lasted(row: TaskLockEvent) -> str:
    if row.kind != "acquired" or row.ended_at is None:
        return "-"
    seconds = max(0.0, timestamp(row.ended_at) - timestamp(row.at))
    return f"{seconds:.2f}s" if seconds < 10 else duration(seconds)


def findings(probe: Probe) -> list[str]:
    """Lay out what was found out about a cache."""
    backend = probe.backend.rpartition(".")[2]
    lines = [printable(f"Cache {probe.cache!r}: {backend}, {probe.server}", width())]
    for finding in probe.findings:
        text = textwrap.wrap(printable(finding.text), width() - 11, break_on_hyphens=False)
        lines += [
            f"  {level:<7}  {line}"
            for level, line in zip_longest([finding.level], text, fillvalue="")
        ]
    warnings = sum(finding.level == "warning" for finding in probe.findings)
    if probe.fit:
        but = f", with {plural(warnings, 'warning')}" if warnings else ""
        lines.append(f"Fit to hold locks{but}.")
    return lines


def as_dict(lock: HeldLock) -> dict[str, Any]:
    """Return the facts of a lock for JSON; times in seconds."""
    holder = lock.holder
    return {
        "name": lock.name,
        "key": lock.key,
        "state": lock.state,
        "queued": lock.queued,
        "held_for": round(lock.held_for, 3),
        "remaining": None if lock.remaining is None else round(lock.remaining, 3),
        "skipped": lock.skipped,
        "token": holder.token,
        "task": holder.task,
        "task_id": holder.task_id,
        "host": holder.host,
        "pid": holder.pid,
        "since": round(holder.since, 3),
        "timeout": holder.timeout,
    }


def as_dicts(locks: Sequence[HeldLock]) -> list[dict[str, Any]]:
    """Return the facts of locks for JSON, with how long they are held usually, where known."""
    return [
        {**as_dict(lock), "usual": usual and _rounded(usual._asdict()), "slow": slow}
        for lock, (usual, slow) in zip(locks, _slow(locks), strict=True)
    ]


def _rounded(facts: dict[str, Any]) -> dict[str, Any]:
    return {n: round(fact, 3) if isinstance(fact, float) else fact for n, fact in facts.items()}


def why_as_dict(why: Why) -> dict[str, Any]:
    """Return the facts about a lock for JSON; times in seconds."""
    lock, queued = why.lock, why.queued
    return {
        "name": why.name,
        "key": why.key,
        "free": lock is None,
        "lock": lock and as_dict(lock),
        "queued": queued and as_dict(queued),
        "expired": [as_dict(expired) for expired in why.expired],
        "alive": why.alive,
        "death": why.death,
        "usual": why.usual and _rounded(why.usual._asdict()),
        "completed": why.completed and _rounded(dataclasses.asdict(why.completed)),
        "skipped": why.skipped and _rounded(dataclasses.asdict(why.skipped)),
        "duplicates": why.duplicates,
        "troubles": [_rounded(dataclasses.asdict(trouble)) for trouble in why.troubles],
        "starving": why.starving and _rounded(dataclasses.asdict(why.starving)),
        "others": why.others,
        "same_name": why.same_name,
        "no_history": why.no_history,
    }


def row_as_dict(row: TaskLockEvent) -> dict[str, Any]:
    """Return a row of the history for JSON; times as Unix times, spans in seconds."""
    times = {"at", "ended_at", "last_at"}
    facts = {field.name: getattr(row, field.name) for field in row._meta.concrete_fields}
    return {
        name: timestamp(value) if name in times and value else value
        for name, value in facts.items()
    }
