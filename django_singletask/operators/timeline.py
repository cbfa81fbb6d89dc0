"""Draw the history: rows of events become lanes of bars, ticks and signs, for an SVG."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_singletask.history.queries import OPEN, of_task
from django_singletask.history.writing import COUNTED, SWEEPER, TROUBLE, only_open
from django_singletask.operators.facts import TaskFacts, sum_up
from django_singletask.operators.words import (
    clock_time,
    hold_seconds,
    hold_time,
    process,
    status,
)

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_singletask.models import TaskLockEvent

__all__ = ["SPANS", "Drawing", "Lane", "Mark", "Span", "draw"]

ROWS = 1000
"""Newest events that are read; where there are more, the drawing says how far it goes back."""
LANES = 30
TROUBLES = 100
"""Newest events of each kind of trouble that are drawn also beyond ``ROWS``."""
SIGNS = {
    "expired": "M0-6 6 5H-6Z",
    "lost": "M0-7 6 0 0 7-6 0Z",
    "cleared": "M-5-5 5 5M5-5-5 5",
}
"""Paths around (0, 0): a triangle, a diamond and a cross, apart in form as in colour."""
NEAR = 0.3
"""Percent of the width: what is nearer than that to its like becomes one mark."""


class Span(NamedTuple):
    """A range that the timeline offers: ``step`` is the distance of its labels, in seconds."""

    label: str | Promise
    seconds: int
    step: int


SPANS = {
    "15m": Span(gettext_lazy("15 minutes"), 15 * 60, 3 * 60),
    "1h": Span(gettext_lazy("1 hour"), 3600, 10 * 60),
    "24h": Span(gettext_lazy("24 hours"), 86_400, 4 * 3600),
    "7d": Span(gettext_lazy("7 days"), 7 * 86_400, 86_400),
}


@dataclasses.dataclass
class Mark:
    """One thing in a lane, or several alike at one place.

    ``x`` and ``width`` are percent of the width of the lane; ``size`` is the height of a tick in
    pixels. ``shape`` is ``"bar"``, ``"tick"`` or ``"sign"``, ``state`` the code of :func:`status`.
    """

    shape: str
    state: str
    word: str
    name: str
    at: datetime
    until: datetime
    begin: float
    end: float
    rows: list[TaskLockEvent]
    number: int = 0
    when: str = ""
    text: str = ""

    @property
    def count(self) -> int:
        """How many events this is."""
        return sum(row.count for row in self.rows)

    @property
    def x(self) -> str:
        """Where it begins; a text, since templates write numbers in the user's language."""
        return f"{min(self.begin, 100 - NEAR):.2f}%"

    @property
    def width(self) -> str:
        """How wide it is, never too narrow to be seen."""
        return f"{max(self.end - self.begin, NEAR):.2f}%"

    @property
    def path(self) -> str:
        """The outline of a sign."""
        return SIGNS[self.state]

    @property
    def size(self) -> int:
        """How high a tick is: 4 pixels for one skip, 12 from some 30 on."""
        return min(12, 4 + round(math.log2(self.count) * 1.6))


@dataclasses.dataclass
class Lane:
    """The marks of one name."""

    name: str
    marks: list[Mark]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """All that the page shows. ``unread`` is the width of what lies before the rows read.

    ``legend`` has a mark of each shape that is drawn, grouped by their states.
    """

    lanes: list[Lane]
    labels: list[tuple[str, str]]
    tasks: list[TaskFacts]
    marks: list[Mark]
    legend: list[list[Mark]]
    lanes_left_out: int
    read_back_to: str
    unread: str


def draw(
    rows: QuerySet[TaskLockEvent], span: Span, *, now: datetime, name: str = "", task: str = ""
) -> Drawing:
    """Draw the last ``span`` of the history, of one lock or task if given.

    Reads a bounded number of rows, each by an index: with ten million rows as with a thousand.
    """
    start = now - timedelta(seconds=span.seconds)
    events, cut = _read(rows, start, name, task)
    marks = [mark for event in events if (mark := _mark(event, start, now)) is not None]
    tasks = sum_up([row for mark in marks for row in mark.rows], now)
    lanes, left_out = _lanes(marks)
    drawn = [mark for lane in lanes for mark in lane.marks]
    drawn.sort(key=lambda mark: mark.at, reverse=True)
    dated = span.seconds >= 86_400
    for number, mark in enumerate(drawn, start=1):
        mark.number = number
        mark.when = _when(mark, dated)
        mark.text = _text(mark)
    return Drawing(
        lanes=lanes,
        labels=_labels(start, now, span),
        tasks=tasks,
        marks=drawn,
        legend=_legend(drawn),
        lanes_left_out=left_out,
        read_back_to=clock_time(cut, dated=dated) if cut else "",
        unread=f"{_percent(cut, start, now):.2f}%" if cut else "",
    )


# Rows


def _read(
    rows: QuerySet[TaskLockEvent], start: datetime, name: str, task: str
) -> tuple[list[TaskLockEvent], datetime | None]:
    """Return the newest events, and how far they go back if that is not to the start.

    A hold that began long before the start is found by its being open, or by what it was in the
    way of; a long quiet one that has ended since only if it is among the newest rows.
    """
    wanted = {"name": name} if name else {"task": task} if task else {}
    newest = list((of_task(rows, task) if "task" in wanted else _of_name(rows, name))[:ROWS])
    found = {event.pk: event for event in newest}
    cut = newest[-1].at if len(newest) == ROWS and newest[-1].at > start else None
    # Told apart here, by name or task: their own indexes would go through all that have ended.
    more = [row for row in only_open(rows)[: OPEN if wanted else ROWS] if _is_wanted(row, wanted)]
    for kind in sorted(TROUBLE) if cut is not None else ():
        latest = rows.filter(kind=kind).order_by("-id")[: OPEN if wanted else TROUBLES]
        more += [row for row in latest if _is_wanted(row, wanted)][:TROUBLES]
    found.update((row.pk, row) for row in more)
    begun = {event.token for event in found.values() if event.kind == "acquired"}
    tokens = {
        event.blocked_by or event.token for event in found.values() if event.kind != "acquired"
    }
    missing = sorted(tokens - begun - {""})
    for first in range(0, len(missing), 500):
        # The kind is looked at here: SQLite would rather read all that were acquired.
        holders = rows.filter(token__in=missing[first : first + 500]).order_by()
        found.update((event.pk, event) for event in holders if event.kind == "acquired")
    return [event for event in found.values() if event.name != SWEEPER], cut


def _of_name(rows: QuerySet[TaskLockEvent], name: str) -> QuerySet[TaskLockEvent]:
    newest: QuerySet[TaskLockEvent] = rows.order_by("-id")
    return newest.filter(name=name) if name else newest


def _is_wanted(event: TaskLockEvent, wanted: dict[str, str]) -> bool:
    return all(getattr(event, field) == value for field, value in wanted.items())


# Marks


def _mark(event: TaskLockEvent, start: datetime, now: datetime) -> Mark | None:
    state, word = status(event)
    if event.kind == "acquired":
        shape, until = "bar", event.ended_at or now
    elif event.kind in COUNTED:
        shape, until = "tick", event.last_at or event.at
    else:
        shape, until = "sign", event.at
    # The clocks of two hosts differ: an end may lie before its beginning, or in the future.
    until = max(until, event.at)
    if until < start:
        return None
    begin, end = _percent(event.at, start, now), _percent(until, start, now)
    if shape != "bar":
        begin = end  # the last of those that are counted
    return Mark(shape, state, word, event.name, event.at, until, begin, end, [event])


def _percent(at: datetime, start: datetime, now: datetime) -> float:
    return min(100.0, max(0.0, 100 * ((at - start) / (now - start))))


def _lanes(marks: Iterable[Mark]) -> tuple[list[Lane], int]:
    """Return the lanes that matter most, by name, and how many are left out."""
    by_name: dict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_name[mark.name].append(mark)

    def weight(name: str) -> tuple[bool, bool, datetime, str]:
        of_name = by_name[name]
        states = {mark.state for mark in of_name}
        return (
            bool(states & TROUBLE),
            "held" in states,
            max(mark.until for mark in of_name),
            name,
        )

    names = sorted(by_name, key=weight, reverse=True)
    lanes = [Lane(name, _merged(by_name[name])) for name in sorted(names[:LANES])]
    return lanes, max(0, len(names) - LANES)


def _merged(marks: list[Mark]) -> list[Mark]:
    """Make one mark of those that would hide each other; signs and open holds stay alone."""
    merged: list[Mark] = []
    last: dict[tuple[str, str], Mark] = {}
    for mark in sorted(marks, key=lambda mark: (mark.begin, mark.at)):
        like = last.get((mark.shape, mark.state))
        alone = mark.shape == "sign" or mark.state == "held" or mark.end - mark.begin > NEAR
        if like is not None and not alone and mark.begin - like.begin <= NEAR:
            like.rows += mark.rows
            like.end = max(like.end, mark.end)
            like.at, like.until = min(like.at, mark.at), max(like.until, mark.until)
        else:
            merged.append(mark)
            if not alone:
                last[mark.shape, mark.state] = mark
    # Bars below, what must be seen above.
    return sorted(merged, key=lambda mark: (("bar", "tick", "sign").index(mark.shape), mark.begin))


def _legend(marks: list[Mark]) -> list[list[Mark]]:
    states: dict[str, dict[str, Mark]] = defaultdict(dict)
    for mark in marks:
        states[mark.state][mark.shape] = mark
    return [[of_shape[shape] for shape in sorted(of_shape)] for of_shape in states.values()]


# Words


def _when(mark: Mark, dated: bool) -> str:
    begin = clock_time(mark.at, dated=dated)
    is_open = mark.shape == "bar" and mark.rows[0].ended_at is None
    end = "…" if is_open else clock_time(mark.until, dated=dated)
    return begin if begin == end else f"{begin} – {end}"


def _text(mark: Mark) -> str:
    row = mark.rows[0]
    if mark.shape == "tick":
        reasons = {row.reason for row in mark.rows} - {"skip", ""}
        blockers = {row.blocked_by_task_id or row.blocked_by for row in mark.rows} - {""}
        parts = [mark.word if mark.count == 1 else f"{mark.word} × {mark.count}", *sorted(reasons)]
        if blockers:
            text = _("blocked by {}") if len(blockers) == 1 else _("blocked by {} …")
            parts.append(text.format(min(blockers)))
    elif len(mark.rows) > 1:
        holds = sorted(hold_seconds(row) for row in mark.rows)
        runs = ngettext("{} run: {}", "{} runs: {}", len(holds)).format(len(holds), mark.word)
        parts = [runs, f"{hold_time(holds[0])} – {hold_time(holds[-1])}"]
    else:
        parts = [mark.word]
        if mark.shape == "bar":
            length = hold_time(hold_seconds(row, mark.until))
            text = _("{} after {}") if row.ended_at else _("{} for {}")
            parts = [text.format(mark.word, length)]
        if row.reason:
            parts.append(row.reason)
        if row.actor:
            parts.append(_("by {}").format(row.actor))
        if row.task_id:
            parts.append(_("task {}").format(row.task_id))
        if row.host and row.pid:
            parts.append(process(row.host, row.pid))
    return ", ".join(parts)


def _labels(start: datetime, now: datetime, span: Span) -> list[tuple[str, str]]:
    """Label the round times of the range, as places and texts."""
    local = timezone.localtime(start) if timezone.is_aware(start) else start
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    at = midnight + timedelta(seconds=span.step * ((local - midnight) // _step(span) + 1))
    labels = []
    while at <= now:
        text = date_format(at, "D j" if span.step >= 86_400 else "H:i")
        labels.append((f"{_percent(at, start, now):.2f}%", text))
        at += _step(span)
    return labels


def _step(span: Span) -> timedelta:
    return timedelta(seconds=span.step)
