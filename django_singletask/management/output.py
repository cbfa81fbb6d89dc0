"""What the command prints: tables, facts and JSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from django_singletask.history.queries import timestamp
from django_singletask.holder import clean
from django_singletask.models import RETAKEN, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.explain import Fact
from django_singletask.operators.held import HeldLock
from django_singletask.operators.starving import Starving


def width() -> int | None:
    """Return the columns of the terminal, 80 at least; None where there is none."""
    if not sys.stdout.isatty():
        return None
    return max(80, shutil.get_terminal_size().columns)


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, name: int, right: Collection[int] = ()
) -> Iterator[str]:
    """Lay out rows below their heads, and yield the lines; without rows there are none.

    On a terminal, the column ``name`` and the last one are cut in the middle where there is no
    room; otherwise nothing is cut. The columns ``right`` are aligned to the right.
    """
    lines = [[*map(clean, row)] for row in rows]
    if not lines:
        return
    lines.insert(0, [*heads])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = width()
    if room is not None:
        last = len(heads) - 1
        for column, least in ((name, 24), (last, 8), (name, 10)):
            others = sum(widths) - widths[column] + 2 * last
            widths[column] = min(widths[column], max(least, room - others))
        lines = [[*map(cut, line, widths)] for line in lines]
    for line in lines:
        cells = [text.ljust(wide) for text, wide in zip(line, widths, strict=True)]
        for column in right:
            cells[column] = line[column].rjust(widths[column])
        yield "  ".join(cells).rstrip()


def cut(text: str, width: int) -> str:
    """Cut the middle out of a text that is too wide; of a call, first the modules.

    The names of two locks differ at their ends, as those of two pods do.
    """
    if len(text) <= width:
        return text
    task, parenthesis, _arguments = text.partition("(")
    modules = task.rfind(".") + 1
    if parenthesis and modules:
        text = f"…{text[min(modules, len(text) - width + 1) :]}"
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[head + 1 - width :]}"


def lock_table(locks: Iterable[HeldLock]) -> Iterator[str]:
    heads = ("LOCK", "STATE", "HELD FOR", "LEASE", "CONFLICTS", "HOLDER")
    return table(heads, map(_lock_cells, locks), name=0, right=(2, 3, 4))


def _lock_cells(lock: HeldLock) -> tuple[str, ...]:
    state = lock.word
    if lock.share:
        state += f" ({lock.share})"
    lease = words.duration(lock.remaining)
    holder = words.place(lock, "unknown")
    if lock.queued:
        lease = "-"
        if lock.task_id:
            holder = lock.task_id
    conflicts = "-"
    if lock.conflicts is not None:
        conflicts = str(lock.conflicts)
    if lock.waiting:
        conflicts += f" ({lock.waiting} waiting)"
    return lock.name, state, words.duration(lock.held_for), lease, conflicts, holder


def starving_table(states: Sequence[Starving]) -> Iterator[str]:
    heads = ("LOCK", "CONFLICTS", "STARVING FOR", "LAST CONFLICT", "COMPLETED")
    rows = (
        (
            state.name,
            str(state.conflicts),
            *map(words.duration, (state.unmet, state.last_conflict, state.since_completed)),
        )
        for state in states
    )
    return table(heads, rows, name=0, right=(1, 2, 3, 4))


def history_table(rows: Sequence[TaskLockEvent]) -> Iterator[str]:
    # Two of them where a switch to or from summer time lies between the rows.
    zones = {words.clock_time(row.at, zone=True).partition(" ")[2] for row in rows}
    heads = (f"AT ({'/'.join(sorted(zones))})", "LOCK", "WHAT", "HELD", "BY")
    yield from table(heads, map(_row_cells, rows), name=1, right=(3,))


def _row_cells(row: TaskLockEvent) -> tuple[str, ...]:
    """Say what a row is about, what became of a call, and who cleared the lock, or had it."""
    what = words.word(row)
    if row.kind == "conflict":
        what += f" {words.reason(row)}"
    if row.retaken:
        what += f", {RETAKEN}"
    if row.count > 1:
        what += f" ×{row.count}"
    held = "-"
    if row.hold_ended_at is not None:
        held = words.lasted(row)
        # If a renewed lease expired, only the time at which a sweep noticed it is known.
        if row.outcome == "expired" and not row.fixed:
            held = f"≤{held}"
    by = words.place(row, "unknown")
    if row.outcome == "cleared":
        # There is no room for the host of somebody who used the command.
        by = re.sub(r" on \S+ \(manage\.py locks\)$", "", row.actor)
        if row.reason:
            by += f": {row.reason}"
    # There is no room for the year.
    return words.clock_time(row.at, dated=True).partition("-")[2], row.name, what, held, by


def fact_lines(name: str, state: str, known: Iterable[Fact]) -> Iterator[str]:
    """Yield a line for a lock or a cache, and one for each fact with its label."""
    yield clean(f"{name}: {state}")
    for fact in known:
        if fact.text:
            yield f"  {fact.label:<9}  {clean(fact.text)}"


def gauges(states: dict[str, int], starving: int | None) -> Iterator[str]:
    """Yield the lines that Prometheus reads; the codes of states need no escapes."""
    yield "# HELP singletask_locks Locks and queued calls, by state."
    yield "# TYPE singletask_locks gauge"
    for state, number in states.items():
        yield f'singletask_locks{{state="{state}"}} {number}'
    if starving is not None:
        yield "# HELP singletask_locks_starving Locks that have starved for an hour or more."
        yield "# TYPE singletask_locks_starving gauge"
        yield f"singletask_locks_starving {starving}"


VERSION = 2
"""Of the keys of the JSON: it grows when a key goes, or gets another meaning."""
LOCK = (
    "name",
    "key",
    "slots",
    "slots_held",
    "state",
    "alive",
    "death",
    "queued",
    "held_for",
    "remaining",
    "conflicts",
    "waiting",
    "usual",
    "token",
    "task",
    "task_id",
    "host",
    "pid",
    "since",
    "timeout",
)
ROW = [field.name for field in TaskLockEvent._meta.concrete_fields if field.name != "ref"]
SHOWN = {HeldLock: LOCK, TaskLockEvent: [*ROW, "token"]}
"""What JSON has of these; of other facts it has all."""


def to_json(known: dict[str, Any]) -> str:
    """Write an object in which only what could steer a terminal, or what it lacks, is escaped."""
    ascii_only = "utf" not in str(getattr(sys.stdout, "encoding", "utf-8")).lower()
    text = json.dumps({"version": VERSION, **known}, default=as_json, ensure_ascii=ascii_only)
    for character in {*text}:
        if not character.isprintable():
            text = text.replace(character, json.dumps(character)[1:-1])
    return text


def as_json(fact: Any) -> Any:
    """Return what JSON has for a fact that ``json`` does not know by itself.

    Times become Unix times, and spans seconds.
    """
    if isinstance(fact, datetime):
        return round(timestamp(fact), 3)
    names = SHOWN.get(type(fact), vars(fact))
    values = {name: getattr(fact, name) for name in names}
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = round(value, 6)
    return values
