"""Draw a window of the history for an SVG: a lane for each lock, with a mark for each thing.

A hold is a bar, calls that one holder blocked are a tick, and trouble is a sign.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from datetime import datetime
from functools import cached_property
from typing import Any

from django.utils.translation import gettext as _

from django_singletask.history.queries import TaskLockEventQuerySet
from django_singletask.models import RETAKEN, TROUBLE, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.recorded import judge
from django_singletask.operators.windows import Window
from django_singletask.operators.words import WORDS

ROWS = 1000
"""Rows of what happened that are drawn at most, and as many of what goes on after the window."""
LANES = 30
SIGNS = {
    "dead": "M0-6 6 5H-6Z",
    "expired": "M0 6 6-5H-6Z",
    "lost": "M0-7 6 0 0 7-6 0Z",
    "retaken": "M-5-5H5V5H-5Z",
    "cleared": "M-5-5 5 5M5-5-5 5",
    "unguarded": "M-5 0A5 5 0 1 0 5 0 5 5 0 1 0-5 0Z",
}
"""Paths around (0, 0): triangles, diamond, square, cross and circle differ not only in colour."""
NARROW = 0.3
"""Width of a mark, in percent, that can still be seen."""


@dataclasses.dataclass
class Mark:
    """A bar, a tick or a sign; its place and its width are in percent of the lane."""

    shape: str
    state: str
    when: str
    x: float
    width: float

    @property
    def path(self) -> str:
        if self.shape == "sign":
            return SIGNS[self.state]
        return ""


@dataclasses.dataclass
class Drawn:
    """An event of the window, and its marks."""

    event: TaskLockEvent
    window: Window
    end: datetime
    marks: list[Mark] = dataclasses.field(default_factory=list)

    @property
    def state(self) -> str:
        return words.status(self.event)

    @property
    def when(self) -> str:
        return self.clock_times(self.event.at, self.end)

    @cached_property
    def text(self) -> str:
        """What happened, why, who noticed it, and which run or call it is about."""
        event = self.event
        texts = [words.headline(event, self.end), words.reason(event), words.witness(event)]
        if event.retaken:
            texts.append(_("retaken × {}").format(event.retaken))
        blocker = event.blocked_by_task_id
        if not blocker:
            blocker = event.blocked_by
        if blocker:
            texts.append(_("blocked by {}").format(blocker))
        if event.task_id:
            texts.append(_("task {}").format(event.task_id))
        texts.append(words.process(event))
        return ", ".join(filter(None, texts))

    @property
    def height(self) -> float:
        """The height of a tick, in percent of the lane, which grows with the number of calls."""
        height = 12 + 5 * math.log2(self.event.count)
        return min(36, height)

    def clock_times(self, begin: datetime, end: datetime) -> str:
        begin_time = self.window.clock_time(begin)
        end_time = self.window.clock_time(end)
        if begin_time == end_time:
            return begin_time
        return f"{begin_time} – {end_time}"

    def add(self, shape: str, state: str, begin: datetime, end: datetime) -> None:
        """Add a mark, unless it lies outside the window.

        In a window until now, a host whose clock is ahead has marks after its end: at the edge.
        """
        until = self.window.until
        if end < self.window.start or (until is not None and begin > until):
            return
        when = self.clock_times(begin, end)
        if shape == "tick":
            begin = end  # a tick stands where the last of the calls came
        x = min(self.window.percent(begin), 100 - NARROW)  # no mark lies beyond the edge
        width = max(self.window.percent(end) - x, NARROW)
        self.marks.append(Mark(shape, state, when, x, width))


def draw(
    rows: TaskLockEventQuerySet,
    window: Window,
    *,
    now: datetime,
    name: str = "",
    task: str = "",
    event: TaskLockEvent | None = None,
) -> dict[str, Any]:
    """Draw a window of the history, of all locks, of one lock or of one task, for the template.

    ``lanes`` are the events of each lock, by its name. ``event`` is drawn in any case. If more than
    ``most`` events happened in the window, ``drawn_since`` says since when they are all drawn; and
    if more go on after it, ``more_go_on`` is true.
    """
    if name:
        rows = rows.named(name)
    elif task:
        rows = rows.of_task(task)
    chosen, left_out = newest_rows(rows, window)
    if event is not None:
        chosen.append(event)  # by_name() takes each row once
    locks = by_name(chosen)
    # A lock is as important as its most important event.
    by_rank = sorted(locks, key=lambda lock: max(map(rank, locks[lock])), reverse=True)
    lanes = {}
    for lock in sorted(by_rank[:LANES]):
        lanes[lock] = [draw_event(row, window, now) for row in locks[lock]]
    drawn = [each for lane in lanes.values() for each in lane]
    labels = list(window.labels())
    newest_first = sorted(drawn, key=lambda each: each.end, reverse=True)
    return {
        "lanes": lanes,
        "lanes_left_out": len(locks) - len(lanes),
        "labels": labels,
        "drawn": newest_first,
        "legend": legend(drawn),
        "most": ROWS,
        **left_out,
    }


def newest_rows(
    rows: TaskLockEventQuerySet, window: Window
) -> tuple[list[TaskLockEvent], dict[str, Any]]:
    """Return the rows to draw, and what the template says if some are left out.

    What went on has its own share, so that nothing is left out for it that happened in the window.
    Open holds come first in that share, however long ago they began.
    """
    happened, *others = rows.parts_within(window.start, window.until)
    newest = list(happened[: ROWS + 1])
    went_on = [row for part in reversed(others) for row in part[: ROWS + 1]]
    left_out: dict[str, Any] = {"more_go_on": len(went_on) > ROWS}
    if len(newest) > ROWS:
        newest.pop()
        left_out |= shorter_windows(window, newest[-1].happened_at)
    return [*newest, *went_on[:ROWS]], left_out


def shorter_windows(window: Window, drawn_since: datetime) -> dict[str, Any]:
    """Return the part of the window in which all rows are drawn, and the part before it.

    ``drawn_since`` is written as a time. It may be that of all rows: then there are no parts.
    """
    since = window.clock_time(drawn_since)
    if not window.start < drawn_since < window.end:
        return {"drawn_since": since}
    return {
        "drawn_since": since,
        "later": Window(drawn_since, window.end),
        "earlier": Window(window.start, drawn_since),
    }


def by_name(rows: list[TaskLockEvent]) -> dict[str, list[TaskLockEvent]]:
    """Return the rows of each lock, each of them once, with their states."""
    each_once = list(dict.fromkeys(rows))
    judge(each_once)
    locks = defaultdict(list)
    for row in each_once:
        locks[row.name].append(row)
    return locks


def rank(event: TaskLockEvent) -> tuple[Any, ...]:
    """Return how important an event is: first trouble, then what is held, then the newest."""
    return bool(event.troubles), words.status(event) in words.STATES, event.happened_at


def legend(drawn: list[Drawn]) -> list[tuple[str, str, str, str]]:
    """Return each look of a mark, with its word, shape and path."""
    marks = [mark for each in drawn for mark in each.marks]
    looks = {(mark.state, str(WORDS[mark.state]), mark.shape, mark.path) for mark in marks}
    return sorted(looks)


def draw_event(event: TaskLockEvent, window: Window, now: datetime) -> Drawn:
    """Return the marks of an event that lie in the window.

    The clocks of two hosts differ: a hold may seem to end before it begins, or in the future.
    """
    end = event.end
    if event.is_hold and event.hold_ended_at is None:
        end = now
    end = max(end, event.at)
    drawn = Drawn(event, window, end)
    if event.is_counted:
        drawn.add("tick", drawn.state, event.at, end)
    elif event.is_hold:
        drawn.add("bar", drawn.state, event.at, end)
    if event.retaken_at is not None:
        drawn.add("sign", RETAKEN, event.retaken_at, event.retaken_at)
    if drawn.state in TROUBLE:
        noticed_at = end
        if event.noticed_at is not None and not event.outlived_fixed_lease:
            noticed_at = max(event.noticed_at, event.at)
        drawn.add("sign", drawn.state, noticed_at, noticed_at)
    return drawn
