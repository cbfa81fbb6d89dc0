"""The marks of the timeline: what one event, or several alike, look like and what they say."""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime
from functools import cached_property

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_singletask.models import TaskLockEvent
from django_singletask.operators.words import hold_seconds, hold_time, process, status

__all__ = ["SIGNS", "Mark", "mark_of", "merged", "percent"]

SIGNS = {
    "expired": "M0-6 6 5H-6Z",
    "lost": "M0-7 6 0 0 7-6 0Z",
    "cleared": "M-5-5 5 5M5-5-5 5",
}
"""Paths around (0, 0): a triangle, a diamond and a cross differ in form, not only in colour."""
NEAR = 0.3
"""Percent of the width: marks of one kind that are nearer to each other become one mark."""
SHAPES = ("bar", "tick", "sign")
"""In the order in which they are drawn: a sign covers a bar."""


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
    def name(self) -> str:
        """Return the name of the lock."""
        return self.events[0].name

    @property
    def count(self) -> int:
        """Return the number of events."""
        return sum(event.count for event in self.events)

    @property
    def path(self) -> str:
        """Return the outline of a sign."""
        return SIGNS[self.state]

    @property
    def size(self) -> int:
        """Return the height of a tick in pixels: 4 for one skip, 12 from about 30 skips on."""
        return min(12, 4 + round(math.log2(self.count) * 1.6))

    @cached_property
    def text(self) -> str:
        """Return what happened, as one line."""
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
            holds = sorted(hold_seconds(event) for event in self.events)
            runs = ngettext("{} run: {}", "{} runs: {}", len(holds)).format(len(holds), self.word)
            parts = [runs, f"{hold_time(holds[0])} – {hold_time(holds[-1])}"]
        else:
            word = self.word
            if self.shape == "bar":
                text = _("{} after {}") if event.ended_at else _("{} for {}")
                word = text.format(word, hold_time(hold_seconds(event, self.until)))
            actor = event.actor and _("by {}").format(event.actor)
            task = event.task_id and _("task {}").format(event.task_id)
            parts = [word, event.reason, actor, task, process(event.host, event.pid)]
        return ", ".join(filter(None, parts))


def mark_of(event: TaskLockEvent, start: datetime, now: datetime) -> Mark | None:
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
    end = percent(until, start, now)
    x = percent(event.at, start, now) if shape == "bar" else end
    return Mark(shape, *status(event), event.at, until, x, max(end - x, NEAR), [event])


def percent(at: datetime, start: datetime, now: datetime) -> float:
    """Return the place of a time between the start (0) and now (100)."""
    return min(100.0, max(0.0, 100 * ((at - start) / (now - start))))


def merged(marks: list[Mark]) -> list[Mark]:
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
    return sorted(result, key=lambda mark: (SHAPES.index(mark.shape), mark.x))
