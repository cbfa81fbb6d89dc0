"""What the command prints: tables, facts and JSON."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from django.utils import timezone

from django_singletask.history.queries import timestamp
from django_singletask.holder import clean
from django_singletask.models import RETAKEN, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.explain import Fact
from django_singletask.operators.held import HeldLock
from django_singletask.operators.names import last_part
from django_singletask.operators.starving import Starving


def width() -> int | None:
    """Return the columns of the terminal, 80 at least; None where there is none."""
    if not sys.stdout.isatty():
        return None
    return max(80, shutil.get_terminal_size().columns)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    name: int,
    right: Collection[int],
    spare: int | None = None,
) -> Iterator[str]:
    """Lay out rows below their heads, and yield the lines; without rows there are none.

    On a terminal a table that is too wide is made to fit: see :func:`fit`. Otherwise nothing is
    cut. The columns ``right`` are aligned to the right.
    """
    columns: dict[int, list[str]] = {}
    for number, cells in enumerate(zip(*rows, strict=True)):
        columns[number] = [heads[number], *map(clean, cells)]
    room = width()
    if columns and room is not None:
        fit(columns, room, name, spare)
    for number, column in columns.items():
        wide = widest(column)
        if number in right:
            columns[number] = [text.rjust(wide) for text in column]
        else:
            columns[number] = [text.ljust(wide) for text in column]
    for line in zip(*columns.values(), strict=True):
        yield "  ".join(line).rstrip()


def widest(column: Iterable[str]) -> int:
    return max(map(len, column))


def fit(columns: dict[int, list[str]], room: int, name: int, spare: int | None) -> None:
    """Make columns fit into so much room.

    The modules of the names go first, then the column ``spare``. Then the names are cut to 24
    characters, the last column to 8, and the names again to 10, each as far as that is needed.
    """
    if excess(columns, room) > 0:
        head, *names = columns[name]
        columns[name] = [head, *without_modules(names)]
    if excess(columns, room) > 0 and spare is not None:
        del columns[spare]
    last = max(columns)
    too_much = excess(columns, room)
    widths = {number: widest(column) for number, column in columns.items()}
    for number, least in ((name, 24), (last, 8), (name, 10)):
        can_go = widths[number] - least
        goes = min(too_much, can_go)
        if goes > 0:
            widths[number] -= goes
            too_much -= goes
    columns[name] = shorten(columns[name], widths[name])
    columns[last] = [cut_last(text, widths[last]) for text in columns[last]]


def excess(columns: dict[int, list[str]], room: int) -> int:
    """Return by how many characters the columns, and the gaps between them, are too wide."""
    gaps = 2 * len(columns) - 2
    return sum(map(widest, columns.values())) + gaps - room


def cut_last(text: str, width: int) -> str:
    """Cut the end of words, and the middle of an address or an id, if they are too wide."""
    if len(text) > width and " " in text:
        return f"{text[: width - 1]}…"
    return cut(text, width)


def without_modules(names: Sequence[str]) -> list[str]:
    """Return the names without their modules, except where two of them would look the same."""
    owners = Counter(map(last_part, set(names)))
    shown = []
    for name in names:
        part = last_part(name)
        if part == name or owners[part] > 1:
            shown.append(name)
        else:
            shown.append(f"…{part}")
    return shown


def common_length(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def shorten(texts: Sequence[str], width: int) -> list[str]:
    """Cut the middle out of texts that are too wide, but not what distinguishes two of them."""
    # A text differs from all others where it differs from its neighbours in the alphabet.
    ordered = sorted({*texts})
    differs_at = dict.fromkeys(ordered, 0)
    for one, other in pairwise(ordered):
        common = common_length(one, other)
        differs_at[one] = max(common, differs_at[one])
        differs_at[other] = common
    return [cut(text, width, differs_at[text]) for text in texts]


def cut(text: str, width: int, differs_at: int = 0) -> str:
    """Cut the middle out of a text that is too wide, and keep the character ``differs_at``."""
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    end = len(text) - (width - 1 - head)
    if differs_at < head or differs_at >= end:
        return f"{text[:head]}…{text[end:]}"
    # Of the beginning a third is enough, and the difference stands in the middle of the rest.
    head = width // 3
    rest = width - head - 2
    start = differs_at - rest // 2
    if start <= head:
        return f"{text[: width - 1]}…"
    if start + rest >= len(text) - 1:
        return f"{text[:head]}…{text[-rest - 1 :]}"
    return f"{text[:head]}…{text[start : start + rest]}…"


def lock_table(locks: Iterable[HeldLock]) -> Iterator[str]:
    heads = ("STATE", "LOCK", "HELD FOR", "LEASE", "CONFLICTS", "HOLDER")
    return table(heads, map(_lock_cells, locks), name=1, right=(2, 3, 4), spare=3)


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
    if lock.usual is not None and lock.state == "slow":
        holder += f" (usual {words.duration(lock.usual.median)})"
    conflicts = "-"
    if lock.conflicts is not None:
        conflicts = str(lock.conflicts)
    if lock.waiting:
        conflicts += f" ({lock.waiting} waiting)"
    return state, lock.name, words.duration(lock.held_for), lease, conflicts, holder


def starving_table(states: Sequence[Starving]) -> Iterator[str]:
    heads = ("LOCK", "CONFLICTS", "STARVING FOR", "LAST CONFLICT", "COMPLETED")
    rows = []
    for state in states:
        starved = words.duration(state.unmet)
        last_conflict = words.duration(state.last_conflict)
        completed = words.duration(state.since_completed)
        rows.append((state.name, str(state.conflicts), starved, last_conflict, completed))
    return table(heads, rows, name=0, right=(1, 2, 3, 4))


def history_table(rows: Sequence[TaskLockEvent]) -> Iterator[str]:
    # Two of them where a switch to or from summer time lies between the rows.
    zones = {words.clock_time(row.at, zone=True).partition(" ")[2] for row in rows}
    heads = (f"BEGAN ({'/'.join(sorted(zones))})", "ENDED", "LOCK", "WHAT", "HELD", "BY")
    yield from table(heads, map(_row_cells, rows), name=2, right=(0, 1, 4), spare=4)


def _row_cells(row: TaskLockEvent) -> tuple[str, ...]:
    """Say what a row is about, what became of a call, and who cleared the lock, or had it."""
    what = words.word(row)
    if row.kind == "conflict":
        what = words.reason(row)
    if row.count > 1:
        what += f" ×{row.count}"
    if row.retaken_at:
        what += f", {RETAKEN}"
    held = "-"
    if row.hold_ended_at is not None:
        held = words.lasted(row)
    by = words.place(row, "unknown")
    if row.outcome == "cleared":
        # There is no room for the host of somebody who used the command.
        by = re.sub(r" on \S+ \(manage\.py locks\)$", "", row.actor)
        if row.reason:
            by += f": {row.reason}"
    began = _short_time(row.at, timezone.now())
    ended = words.end_time(row, lambda at: _short_time(at, row.at))
    return began, ended, row.name, what, held, by


def _short_time(at: datetime, beside: datetime) -> str:
    """Write a time, with its date if the time ``beside`` it has another date."""
    text = words.clock_time(at, dated=True)
    date, _space, clock = text.partition(" ")
    if words.clock_time(beside, dated=True).startswith(date):
        return clock
    return text.partition("-")[2]  # there is no room for the year


def fact_lines(name: str, state: str, known: Iterable[Fact]) -> Iterator[str]:
    """Yield a line for a lock or a cache, and one for each fact with its label."""
    yield clean(f"{name}: {state}")
    for fact in known:
        if fact.text:
            yield f"  {fact.label:<9}  {clean(fact.text)}"


def gauges(states: dict[str, int], hungry: Sequence[Starving] | None) -> Iterator[str]:
    """Yield the lines that Prometheus reads; the codes of states need no escapes."""
    yield "# HELP singletask_locks Locks and queued calls, by state."
    yield "# TYPE singletask_locks gauge"
    for state, number in states.items():
        yield f'singletask_locks{{state="{state}"}} {number}'
    if hungry is not None:
        yield "# HELP singletask_locks_starving Locks that have starved for an hour or more."
        yield "# TYPE singletask_locks_starving gauge"
        yield f"singletask_locks_starving {len(hungry)}"


VERSION = 3
"""The version of the JSON: it grows when a key goes, or gets another meaning."""
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
    "met",
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
"""The attributes of these that JSON has; of other objects it has all."""


def to_json(known: dict[str, Any]) -> str:
    """Write JSON, and escape only what could steer a terminal, or what the terminal lacks."""
    ascii_only = "utf" not in str(getattr(sys.stdout, "encoding", "utf-8")).lower()
    text = json.dumps({"version": VERSION, **known}, default=as_json, ensure_ascii=ascii_only)
    for character in {*text}:
        if not character.isprintable():
            text = text.replace(character, json.dumps(character)[1:-1])
    return text


def as_json(known: Any) -> Any:
    """Return what JSON has for an object that ``json`` does not know by itself.

    A time becomes a Unix time. Another object becomes its attributes, with rounded numbers.
    """
    if isinstance(known, datetime):
        return round(timestamp(known), 3)
    names = SHOWN.get(type(known), vars(known))
    values = {name: getattr(known, name) for name in names}
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = round(value, 6)
    return values
