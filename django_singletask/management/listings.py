"""Turn locks, history and findings into tables and JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from django_singletask.history.queries import timestamp
from django_singletask.management.tables import LEFT, NAME, RIGHT, printable, table, width
from django_singletask.models import TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.probe import Probe
from django_singletask.operators.rows import HeldLock

COMMAND = " (manage.py locks)"
"""End of the actor's name if it was this command."""


def lock_table(locks: Sequence[HeldLock]) -> Iterator[str]:
    return table(
        ("LOCK", "HELD FOR", "LEASE", "SKIPPED", "HOLDER"),
        (NAME, RIGHT, RIGHT, RIGHT, LEFT),
        [
            (
                lock.name,
                words.duration(lock.held_for),
                _lease(lock),
                "-" if lock.skipped is None else str(lock.skipped),
                _holder(lock),
            )
            for lock in locks
        ],
        map(_note, locks),
    )


ENDING = {"kept", "blocking"}
"""States without a process, which end at a time that a note says."""


def _lease(lock: HeldLock) -> str:
    if lock.state in ENDING:
        return words.duration(lock.left)
    return "-" if lock.remaining is None or lock.queued else words.duration(lock.remaining)


def _note(lock: HeldLock) -> str:
    notes = [lock.word if lock.state in ENDING else "", lock.share, "stopped" * lock.stopped]
    if lock.usual and lock.slow:
        median = round(lock.usual.median)
        usual = words.duration(median).partition(" ")[0] if median else "<1s"
        notes.append(f"slow: usual {usual}")
    return " ".join(f"({note})" for note in notes if note)


def _holder(lock: HeldLock) -> str:
    """Name the process that holds a lock, or the task id of the call that is queued."""
    if lock.state in ENDING:
        return "-"
    if lock.queued:
        name = f"{lock.task_id[:4]}…" if lock.task_id else "unknown"
    else:
        name = words.process(lock.host, lock.pid) or lock.host or "unknown"
    return name if lock.state == "held" else f"{lock.word} {name}"


def history_table(rows: Sequence[TaskLockEvent]) -> Iterator[str]:
    # Two of them where a switch to or from summer time lies between the rows.
    zones = {words.clock_time(row.at, zone=True).partition(" ")[2] for row in rows}
    return table(
        (f"AT ({'/'.join(sorted(zones))})", "LOCK", "WHAT", "HELD", "BY"),
        (LEFT, NAME, LEFT, RIGHT, LEFT),
        [
            (
                _day_and_time(row.at),
                row.name,
                _what(row),
                _held(row),
                # Nor for the host of somebody who used the command.
                row.actor.rpartition(" on ")[0]
                if row.actor.endswith(COMMAND)
                else row.actor or words.process(row.host, row.pid) or row.host or "unknown",
            )
            for row in rows
        ],
        map(_history_note, rows),
    )


def _day_and_time(at: datetime) -> str:
    """Leave the year out: there is no room for it."""
    return words.clock_time(at, dated=True).partition("-")[2]


def _history_note(row: TaskLockEvent) -> str:
    """Say why a lock was cleared, or when the last of several calls was skipped."""
    if row.count > 1 and row.last_at:
        return f"(last {_day_and_time(row.last_at)})"
    return f"({printable(row.reason, width() - 6)})" if row.kind == "cleared" and row.reason else ""


def _held(row: TaskLockEvent) -> str:
    if row.ended_at is None:
        return "-"
    # Of a run that expired only the time at which a sweep noticed it is known.
    return "≤" * (row.outcome == "expired") + words.hold_time(words.hold_seconds(row))


def _what(row: TaskLockEvent) -> str:
    """Say what a row is about, and why a run was skipped, unless by the policy ``skip``."""
    is_told = row.kind == "skipped" and row.reason not in ("", "skip")
    because = f": {row.reason}" if is_told else ""
    return f"{words.status(row)[1]}{because}" + (f" ×{row.count}" if row.count > 1 else "")


def probe_report(probe: Probe) -> list[str]:
    backend = probe.backend.rpartition(".")[2]
    lines = [printable(f"Cache {probe.cache!r}: {backend}, {probe.server}", width())]
    for finding in probe.findings:
        lines += textwrap.wrap(
            printable(finding.text),
            width(),
            initial_indent=f"  {finding.level:<7}  ",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
        )
    warnings = sum(finding.level == "warning" for finding in probe.findings)
    if probe.fit:
        but = f", with {words.plural(warnings, 'warning')}" if warnings else ""
        lines.append(f"Fit to hold locks{but}.")
    return lines


def json_rows(rows: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of a JSON array, with a line for each row."""
    for number, row in enumerate(rows):
        yield f"{',' if number else '['}{to_json(row)}"
    yield "]" if rows else "[]"


def to_json(data: Any, **layout: Any) -> str:
    """Write JSON in which only what could steer a terminal, or what it lacks, is escaped."""
    ascii_only = "utf" not in str(getattr(sys.stdout, "encoding", "utf-8")).lower()
    text = json.dumps(data, default=as_json, ensure_ascii=ascii_only, **layout)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def as_json(fact: Any) -> Any:
    """Return what JSON has for a fact that ``json`` does not know by itself.

    Times become Unix times, and spans seconds.
    """
    if isinstance(fact, datetime):
        return round(timestamp(fact), 3)
    digits = 6 if isinstance(fact, Probe) else 3  # a lock is taken in less than a millisecond
    names: Iterable[str] = LOCK
    if isinstance(fact, TaskLockEvent):
        names = (field.name for field in fact._meta.concrete_fields)
    elif not isinstance(fact, HeldLock):
        names = vars(fact)
    facts = ((name, getattr(fact, name)) for name in names)
    return {name: round(x, digits) if isinstance(x, float) else x for name, x in facts}


LOCK = (
    *("name", "key", "slots", "slots_held", "state", "queued", "held_for", "remaining"),
    *("skipped", "usual", "slow", "stopped"),
    *("token", "task", "task_id", "host", "pid", "since", "timeout"),
)
