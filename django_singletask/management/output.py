"""What the command prints: tables, facts and JSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any

from django_singletask.history.queries import timestamp
from django_singletask.holder import clean
from django_singletask.models import RETAKEN, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.held import HeldLock
from django_singletask.operators.starving import Starving


def width() -> int | None:
    """Return the columns of the terminal, 80 at least; None where there is none."""
    return max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, name: int, right: Collection[int] = ()
) -> Iterator[str]:
    """Lay out rows below their heads, and yield the lines; without rows there are none.

    On a terminal, the column ``name`` and the last one are cut in the middle where there is no
    room; otherwise nothing is cut. The columns ``right`` are aligned to the right.
    """
    # There may be very many rows, and most need no cleaning.
    lines = [row if "".join(row).isprintable() else [*map(clean, row)] for row in rows]
    if not lines:
        return
    lines.insert(0, heads)
    widths, last = [max(map(len, column)) for column in zip(*lines, strict=True)], len(heads) - 1
    if room := width():
        for column, least in ((name, 24), (last, 8), (name, 10)):
            fitting = room - (sum(widths) - widths[column] + 2 * last)
            widths[column] = min(widths[column], max(least, fitting))
        lines = [[*map(cut, line, widths)] for line in lines]
    form = "  ".join(f"{{:{'>' if n in right else '<'}{wide}}}" for n, wide in enumerate(widths))
    for line in lines:
        yield form.format(*line).rstrip()


def cut(text: str, width: int) -> str:
    """Cut the middle out of a text that is too wide; of a call, first the modules.

    The names of two locks differ at their ends, as those of two pods do.
    """
    if len(text) <= width:
        return text
    task, parenthesis, _arguments = text.partition("(")
    if parenthesis and (modules := task.rfind(".") + 1):
        text = f"…{text[min(modules, len(text) - width + 1) :]}"
    head = (width - 1) // 2
    return text if len(text) <= width else f"{text[:head]}…{text[head + 1 - width :]}"


def lock_table(locks: Iterable[HeldLock]) -> Iterator[str]:
    heads = ("LOCK", "STATE", "HELD FOR", "LEASE", "CONFLICTS", "HOLDER")
    return table(heads, map(_lock_cells, locks), name=0, right=(2, 3, 4))


def _lock_cells(lock: HeldLock) -> tuple[str, ...]:
    conflicts = "-" if lock.conflicts is None else str(lock.conflicts)
    return (
        lock.name,
        f"{lock.condition} ({lock.share})" if lock.share else lock.condition,
        words.duration(lock.held_for),
        words.duration(None if lock.queued else lock.remaining),
        f"{conflicts} ({lock.waiting} waiting)" if lock.waiting else conflicts,
        (lock.queued and lock.task_id) or words.place(lock, "unknown"),
    )


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
    what, by, held = words.word(row), words.place(row, "unknown"), "-"
    if row.kind == "conflict":
        what += f" {words.reason(row)}"
    what += f", {RETAKEN}" * bool(row.retaken) + f" ×{row.count}" * (row.count > 1)
    if row.hold_ended_at is not None:
        # Of a run that expired only the time at which a sweep noticed it is known.
        held = "≤" * (row.outcome == "expired") + words.lasted(row)
    if row.outcome == "cleared":
        # There is no room for the host of somebody who used the command.
        by = re.sub(r" on \S+ \(manage\.py locks\)$", "", row.actor)
        by += f": {row.reason}" if row.reason else ""
    # There is no room for the year.
    return words.clock_time(row.at, dated=True).partition("-")[2], row.name, what, held, by


def fact_lines(name: str, state: str, known: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for a lock or a cache, and one for each fact with its label."""
    yield clean(f"{name}: {state}")
    for label, text in filter(itemgetter(1), known):
        yield f"  {label:<9}  {clean(text)}"


VERSION = 2
"""Of the keys of the JSON: it grows when a key goes, or gets another meaning."""
LOCK = (
    *("name", "key", "slots", "slots_held", "state", "queued", "held_for", "remaining"),
    *("conflicts", "waiting", "usual", "slow", "stopped"),
    *("token", "task", "task_id", "host", "pid", "since", "timeout"),
)
ROW = [field.name for field in TaskLockEvent._meta.concrete_fields if field.name != "ref"]
SHOWN = {HeldLock: LOCK, TaskLockEvent: [*ROW, "token"]}
"""What JSON has of these; of other facts it has all."""


def to_json(known: dict[str, Any]) -> str:
    """Write an object in which only what could steer a terminal, or what it lacks, is escaped."""
    ascii_only = "utf" not in str(getattr(sys.stdout, "encoding", "utf-8")).lower()
    text = json.dumps({"version": VERSION, **known}, default=as_json, ensure_ascii=ascii_only)
    return re.sub("[^ -~]", lambda c: c[0] if c[0].isprintable() else json.dumps(c[0])[1:-1], text)


def as_json(fact: Any) -> Any:
    """Return what JSON has for a fact that ``json`` does not know by itself.

    Times become Unix times, and spans seconds.
    """
    if isinstance(fact, datetime):
        return round(timestamp(fact), 3)
    values = ((name, getattr(fact, name)) for name in SHOWN.get(type(fact), vars(fact)))
    return {name: round(x, 6) if isinstance(x, float) else x for name, x in values}
