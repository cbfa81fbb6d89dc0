"""Draw the history for an SVG: a lane for each lock, a bar for each hold, a sign for trouble."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_singletask.history.queries import OPEN, SWEEPER, TaskLockEventQuerySet
from django_singletask.models import TROUBLE, TaskLockEvent
from django_singletask.operators import words

__all__ = ["LANES", "ROWS", "SIGNS", "SPANS", "TROUBLES", "draw"]

ROWS = 1000
"""Newest events that are read. If there are more, the drawing says how far back it goes."""
LANES = 30
TROUBLES = 100
"""Newest events of each kind of trouble that are drawn even if they are not among ``ROWS``."""
SIGNS = {
    "expired": "M0-6 6 5H-6Z",
    "lost": "M0-7 6 0 0 7-6 0Z",
    "retaken": "M-5-5H5V5H-5Z",
    "cleared": "M-5-5 5 5M5-5-5 5",
    "unguarded": "M-5 0A5 5 0 1 0 5 0 5 5 0 1 0-5 0Z",
}
"""Paths around (0, 0): triangle, diamond, square, cross and circle differ not only in colour."""
NEAR = 0.3
"""Percent of the width: marks of one kind that are nearer to each other become one mark."""


class Span(NamedTuple):
    """A time span that the pages offer; ``step`` is the distance between the timeline's labels."""

    label: str | Promise
    length: timedelta
    step: timedelta


DAY = timedelta(days=1)
SPANS = {
    "15m": Span(gettext_lazy("15 minutes"), timedelta(minutes=15), timedelta(minutes=3)),
    "1h": Span(gettext_lazy("1 hour"), timedelta(hours=1), timedelta(minutes=10)),
    "24h": Span(gettext_lazy("24 hours"), DAY, timedelta(hours=4)),
    "7d": Span(gettext_lazy("7 days"), 7 * DAY, DAY),
}


@dataclasses.dataclass
class Mark:
    """One event in a lane, or several events of one shape and state at nearly the same place.

    ``shape`` is ``"bar"`` for a hold, ``"tick"`` for skips and duplicates, ``"sign"`` for trouble.
    ``state`` and ``word`` are those of :func:`status`. ``x`` and ``width`` are percent of the width
    of the lane; ``width`` is never too small to be seen.
    """

    shape: str
    state: str
    word: str
    at: datetime
    until: datetime
    x: float
    width: float
    events: list[TaskLockEvent]
    number: int = 0
    when: str = ""

    @property
    def count(self) -> int:
        return sum(event.count for event in self.events)

    @property
    def path(self) -> str:
        return SIGNS[self.state]

    @property
    def size(self) -> int:
        """Return the height of a tick in pixels: 4 for one skip, 12 from about 30 skips on."""
        return min(12, 4 + round(math.log2(self.count) * 1.6))

    @cached_property
    def text(self) -> str:
        event = self.events[0]
        if self.shape == "tick":
            reasons = {event.reason for event in self.events} - {"skip"}
            blockers = {event.blocked_by_task_id or event.blocked_by for event in self.events}
            several = len(blockers - {""}) > 1
            blocked = _("blocked by {} …") if several else _("blocked by {}")
            blocker = min(filter(None, blockers), default="")
            word = self.word if self.count == 1 else f"{self.word} × {self.count}"
            parts = [word, *sorted(reasons), blocker and blocked.format(blocker)]
        elif len(self.events) > 1:
            holds = sorted(words.hold_seconds(event) for event in self.events)
            runs = ngettext("{} run: {}", "{} runs: {}", len(holds)).format(len(holds), self.word)
            parts = [runs, f"{words.hold_time(holds[0])} – {words.hold_time(holds[-1])}"]
        else:
            word = self.word
            if self.shape == "bar":
                text = _("{} after {}") if event.ended_at else _("{} for {}")
                word = text.format(word, words.hold_time(words.hold_seconds(event, self.until)))
            actor = event.actor and _("by {}").format(event.actor)
            task = event.task_id and _("task {}").format(event.task_id)
            parts = [word, event.reason, actor, task, words.process(event.host, event.pid)]
        return ", ".join(filter(None, parts))


def draw(
    rows: TaskLockEventQuerySet, span: Span, *, now: datetime, name: str = "", task: str = ""
) -> dict[str, Any]:
    """Draw the last ``span`` of the history, of all locks, of one lock or of one task.

    Returns what the template needs. ``lanes`` has the marks of each name, ``marks`` has all marks,
    the newest first, ``legend`` one mark for each state and shape, ``labels`` the places and
    texts of the round times. ``read_back_to`` is empty if all events of the time span were read;
    else ``unread`` is the width of the part before that time.

    The number of rows that are read has a limit, and an index finds each of them, so that it takes
    no longer with ten million rows than with a thousand.
    """
    start = now - span.length
    events, cut = _read(rows, start, name, task)
    marks = [mark for event in events if (mark := _mark_of(event, start, now)) is not None]
    lanes, lanes_left_out = _lanes(marks)
    drawn = sorted(chain(*lanes.values()), key=lambda mark: mark.at, reverse=True)
    legend: dict[tuple[str, str], Mark] = {}
    for number, mark in enumerate(drawn, start=1):
        mark.number, mark.when = number, _when(mark, dated=span.length >= DAY)
        legend[mark.state, mark.shape] = mark
    return {
        "lanes": lanes,
        "lanes_left_out": lanes_left_out,
        "labels": _labels(start, now, span.step),
        "marks": drawn,
        "legend": [legend[look] for look in sorted(legend)],
        "read_back_to": words.clock_time(cut, dated=span.length >= DAY) if cut else "",
        "unread": f"{_percent(cut, start, now):.2f}%" if cut else "",
    }


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
    others = [event for event in events if event.kind != "acquired"]
    tokens = {event.blocked_by or event.token for event in others}
    task_ids = {event.blocked_by_task_id or event.task_id for event in others}
    events += rows.runs(tokens - begun, task_ids)
    return [event for event in dict.fromkeys(events) if event.name != SWEEPER], cut


def _mark_of(event: TaskLockEvent, start: datetime, now: datetime) -> Mark | None:
    """Return the mark of an event, or None if it ended before the start."""
    if event.kind == "acquired":
        shape, until = "bar", event.ended_at or now
    elif event.is_counted:
        shape, until = "tick", event.last_at or event.at
    else:
        shape, until = "sign", event.at
    # The clocks of two hosts differ: a hold may seem to end before it begins, or in the future.
    until = max(until, event.at)
    if until < start:
        return None
    end = _percent(until, start, now)
    x = _percent(event.at, start, now) if shape == "bar" else end
    return Mark(shape, *words.status(event), event.at, until, x, max(end - x, NEAR), [event])


def _percent(at: datetime, start: datetime, now: datetime) -> float:
    return min(100.0, max(0.0, 100 * ((at - start) / (now - start))))


def _lanes(marks: Iterable[Mark]) -> tuple[dict[str, list[Mark]], int]:
    """Return the most important lanes, ordered by name, and how many are left out.

    Locks with trouble come first, then locks that are held, then those that were used last.
    """
    by_name: dict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_name[mark.events[0].name].append(mark)

    def importance(name: str) -> tuple[bool, bool, datetime, str]:
        states = {mark.state for mark in by_name[name]}
        last = max(mark.until for mark in by_name[name])
        return bool(states & TROUBLE), "held" in states, last, name

    names = sorted(by_name, key=importance, reverse=True)
    lanes = {name: _merged(by_name[name]) for name in sorted(names[:LANES])}
    return lanes, len(names) - len(lanes)


def _merged(marks: list[Mark]) -> list[Mark]:
    """Make one mark of those that would hide each other; signs and open holds stay single."""
    result: list[Mark] = []
    last: dict[tuple[str, str], Mark] = {}
    for mark in sorted(marks, key=lambda mark: (mark.x, mark.at)):
        before = last.get((mark.shape, mark.state))
        single = mark.shape == "sign" or mark.state == "held" or mark.width > NEAR
        if before is not None and not single and mark.x - before.x <= NEAR:
            before.events += mark.events
            before.width = max(before.width, mark.x + mark.width - before.x)
            before.at, before.until = min(before.at, mark.at), max(before.until, mark.until)
        else:
            result.append(mark)
            if not single:
                last[mark.shape, mark.state] = mark
    for mark in result:
        # No part of a mark lies beyond the edge.
        mark.x = min(mark.x, 100 - NEAR)
        mark.width = min(mark.width, 100 - mark.x)
    # What is drawn later covers what was drawn before: a sign is seen on a bar.
    return sorted(result, key=lambda mark: (mark.shape == "sign", mark.x))


def _when(mark: Mark, *, dated: bool) -> str:
    begin = words.clock_time(mark.at, dated=dated)
    is_open = mark.shape == "bar" and mark.events[0].ended_at is None
    end = "…" if is_open else words.clock_time(mark.until, dated=dated)
    return begin if begin == end else f"{begin} – {end}"


def _labels(start: datetime, now: datetime, step: timedelta) -> list[tuple[str, str]]:
    """Return the places and the texts of the round times between start and now."""
    local = timezone.localtime(start) if timezone.is_aware(start) else start
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    at = midnight + step * ((local - midnight) // step + 1)
    labels = []
    while at <= now:
        text = date_format(at, "D j" if step >= DAY else "H:i")
        labels.append((f"{_percent(at, start, now):.2f}%", text))
        at += step
    return labels
