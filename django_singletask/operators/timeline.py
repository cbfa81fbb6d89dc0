"""Draw the history for an SVG: a lane for each lock, a bar for each hold, a sign for trouble."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import NamedTuple

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_singletask.history.queries import OPEN, SWEEPER, TaskLockEventQuerySet
from django_singletask.models import TROUBLE, TaskLockEvent
from django_singletask.operators.marks import Mark, mark_of, merged, percent
from django_singletask.operators.words import clock_time, duration, hold_seconds, hold_time

__all__ = ["LANES", "ROWS", "SPANS", "TROUBLES", "draw"]

ROWS = 1000
"""Newest events that are read. If there are more, the drawing says how far back it goes."""
LANES = 30
TROUBLES = 100
"""Newest events of each kind of trouble that are drawn even if they are not among ``ROWS``."""


class Span(NamedTuple):
    """A time span that the pages offer; ``step`` is the distance between the timeline's labels."""

    label: str | Promise
    length: timedelta
    step: timedelta


DAY = timedelta(days=1)
SPANS = {
    "15m": Span(_("15 minutes"), timedelta(minutes=15), timedelta(minutes=3)),
    "1h": Span(_("1 hour"), timedelta(hours=1), timedelta(minutes=10)),
    "24h": Span(_("24 hours"), DAY, timedelta(hours=4)),
    "7d": Span(_("7 days"), 7 * DAY, DAY),
}


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """What the runs of a task, or of a lock without a task, have in common.

    ``field`` says which of the two ``label`` names: ``"task"`` or ``"name"``.
    """

    label: str
    field: str
    runs: int
    median: str
    longest: str
    lease: str
    of_lease: str
    skipped: int
    skip_rate: str
    trouble: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """All that the page shows.

    ``lanes`` has the marks of each name, ``legend`` one mark for each shape of each state.
    ``read_back_to`` is empty if all events of the time span were read; else ``unread`` is the width
    of the part before that time.
    """

    lanes: dict[str, list[Mark]]
    labels: list[tuple[str, str]]
    tasks: list[TaskFacts]
    marks: list[Mark]
    legend: list[list[Mark]]
    lanes_left_out: int
    read_back_to: str
    unread: str


def draw(
    rows: TaskLockEventQuerySet, span: Span, *, now: datetime, name: str = "", task: str = ""
) -> Drawing:
    """Draw the last ``span`` of the history, of all locks, of one lock or of one task.

    The number of rows that are read has a limit, and an index finds each of them, so that it takes
    no longer with ten million rows than with a thousand.
    """
    start = now - span.length
    events, cut = _read(rows, start, name, task)
    marks = [mark for event in events if (mark := mark_of(event, start, now)) is not None]
    tasks = _sum_up([mark.events[0] for mark in marks], now)
    lanes, lanes_left_out = _lanes(marks)
    drawn = sorted(chain(*lanes.values()), key=lambda mark: mark.at, reverse=True)
    legend: dict[str, dict[str, Mark]] = defaultdict(dict)
    for number, mark in enumerate(drawn, start=1):
        mark.number, mark.when = number, _when(mark, dated=span.length >= DAY)
        legend[mark.state][mark.shape] = mark
    return Drawing(
        lanes=lanes,
        labels=_labels(start, now, span.step),
        tasks=tasks,
        marks=drawn,
        legend=[[by_shape[shape] for shape in sorted(by_shape)] for by_shape in legend.values()],
        lanes_left_out=lanes_left_out,
        read_back_to=clock_time(cut, dated=span.length >= DAY) if cut else "",
        unread=f"{percent(cut, start, now):.2f}%" if cut else "",
    )


def _read(
    rows: TaskLockEventQuerySet, start: datetime, name: str, task: str
) -> tuple[list[TaskLockEvent], datetime | None]:
    """Return the events, and the time of the oldest of ``ROWS`` events if that is after the start.

    A hold that began before that time is found if it is open or if it blocked a call that is drawn.
    """
    newest = rows.named(name) if name else rows.of_task(task) if task else rows.newest()
    events = list(newest[:ROWS])
    cut = events[-1].at if len(events) == ROWS and events[-1].at > start else None
    older = [(rows.open(), ROWS)]
    if cut is not None:
        older += [(rows.of_kind(kind), TROUBLES) for kind in sorted(TROUBLE)]
    for part, limit in older:
        # The name and the task are compared here: by their indexes, the database would read all
        # the rows of a lock to find the few that are open or trouble.
        read = part[: OPEN if name or task else limit]
        fitting = (event for event in read if name in ("", event.name) and task in ("", event.task))
        events += islice(fitting, limit)
    begun = {event.token for event in events if event.kind == "acquired"}
    tokens = {event.blocked_by or event.token for event in events if event.kind != "acquired"}
    events += rows.runs(tokens - begun)
    return [event for event in dict.fromkeys(events) if event.name != SWEEPER], cut


def _lanes(marks: Iterable[Mark]) -> tuple[dict[str, list[Mark]], int]:
    """Return the most important lanes, ordered by name, and how many are left out.

    Locks with trouble come first, then locks that are held, then those that were used last.
    """
    by_name: dict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_name[mark.name].append(mark)

    def importance(name: str) -> tuple[bool, bool, datetime, str]:
        states = {mark.state for mark in by_name[name]}
        last = max(mark.until for mark in by_name[name])
        return bool(states & TROUBLE), "held" in states, last, name

    names = sorted(by_name, key=importance, reverse=True)
    lanes = {name: merged(by_name[name]) for name in sorted(names[:LANES])}
    return lanes, len(names) - len(lanes)


def _when(mark: Mark, *, dated: bool) -> str:
    begin = clock_time(mark.at, dated=dated)
    is_open = mark.shape == "bar" and mark.events[0].ended_at is None
    end = "…" if is_open else clock_time(mark.until, dated=dated)
    return begin if begin == end else f"{begin} – {end}"


def _labels(start: datetime, now: datetime, step: timedelta) -> list[tuple[str, str]]:
    """Return the places and the texts of the round times between start and now."""
    local = timezone.localtime(start) if timezone.is_aware(start) else start
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    at = midnight + step * ((local - midnight) // step + 1)
    labels = []
    while at <= now:
        text = date_format(at, "D j" if step >= DAY else "H:i")
        labels.append((f"{percent(at, start, now):.2f}%", text))
        at += step
    return labels


def _sum_up(events: Iterable[TaskLockEvent], now: datetime) -> list[TaskFacts]:
    groups: dict[str, list[TaskLockEvent]] = defaultdict(list)
    for event in events:
        groups[event.task or event.name].append(event)
    return [_facts(label, of_label, now) for label, of_label in sorted(groups.items())]


def _facts(label: str, events: Sequence[TaskLockEvent], now: datetime) -> TaskFacts:
    runs = [event for event in events if event.kind == "acquired"]
    holds = [hold_seconds(run, now) for run in runs]
    skipped = sum(event.count for event in events if event.kind == "skipped")
    calls = len(runs) + skipped
    longest = max(holds, default=0.0)
    lease = max((run.timeout for run in runs), default=0.0)
    return TaskFacts(
        label=label,
        field="task" if events[0].task else "name",
        runs=len(runs),
        median=hold_time(statistics.median(holds)) if holds else "-",
        longest=hold_time(longest) if holds else "-",
        lease=duration(lease) if lease else "-",
        of_lease=f"{longest / lease:.1f} ×" if lease and longest >= lease / 10 else "",
        skipped=skipped,
        skip_rate=f"{100 * skipped / calls:.0f} %" if calls else "-",
        # One event can leave several rows: a run whose lock is cleared finds it lost, and its
        # entry of unique_until="finish" is cleared with the lock. All these rows have its token.
        trouble=len({event.token or event.pk for event in events if event.kind in TROUBLE}),
    )
