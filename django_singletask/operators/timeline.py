"""Draw a window of the history for an SVG: a lane for each lock, with a mark for each thing.

A hold is a bar, calls that one holder blocked are a tick, and trouble is a sign.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from django_singletask.history.queries import OPEN, TaskLockEventQuerySet
from django_singletask.models import RETAKEN, TROUBLE, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.recorded import judge
from django_singletask.operators.windows import Window
from django_singletask.operators.words import WORDS

ROWS = 1000
"""Rows that are drawn at most, the newest ones; and open holds beside them."""
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
    """A bar, a tick or a sign. Places and sizes are in percent of the lane."""

    event: TaskLockEvent
    shape: str
    state: str
    text: str
    when: str
    x: float
    width: float
    y: float = 9
    height: float = 47

    @property
    def path(self) -> str:
        """The path of a sign, which has no rectangle."""
        if self.shape == "sign":
            return SIGNS[self.state]
        return ""


@dataclasses.dataclass
class Drawn:
    """An event in the window, and its marks."""

    event: TaskLockEvent
    window: Window
    text: str
    begin: datetime
    end: datetime
    marks: list[Mark] = dataclasses.field(default_factory=list)

    @property
    def state(self) -> str:
        return words.status(self.event)

    @property
    def when(self) -> str:
        return self.time_of(self.begin, self.end)

    def time_of(self, begin: datetime, end: datetime) -> str:
        times = dict.fromkeys(map(self.window.clock_time, (begin, end)))
        return " – ".join(times)

    def add(
        self, shape: str, state: str, text: str, begin: datetime, end: datetime, **size: float
    ) -> None:
        """Add a mark, unless it lies outside the window."""
        if not self.window.meets(begin, end):
            return
        left = self.window.percent(begin)
        if shape == "tick":
            left = self.window.percent(end)
        x = min(left, 100 - NARROW)  # no part of a mark lies beyond the edge
        width = max(self.window.percent(end) - x, NARROW)
        when = self.time_of(begin, end)
        self.marks.append(Mark(self.event, shape, state, text, when, x, width, **size))


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

    ``lanes`` are the marks of each lock, by its name. If there are more than ``most`` rows,
    ``drawn_since`` is the time since which all are drawn. ``event`` is drawn in any case.
    """
    newest, drawn_since = newest_rows(rows, window, name, task)
    chosen = [*newest]
    if event is not None:
        chosen.append(event)
    if drawn_since is not None:
        chosen += open_holds(rows, window, name, task)
    chosen = list(dict.fromkeys(chosen))
    judge(chosen)
    locks: dict[str, list[TaskLockEvent]] = defaultdict(list)
    for row in chosen:
        locks[row.name].append(row)
    ranks = {lock: max(map(rank, events)) for lock, events in locks.items()}
    shown = sorted(ranks, key=ranks.__getitem__, reverse=True)[:LANES]
    drawn = [draw_event(row, window, now) for lock in sorted(shown) for row in locks[lock]]
    lanes: dict[str, list[Mark]] = defaultdict(list)
    for each in drawn:
        lanes[each.event.name] += each.marks
    return {
        "lanes": {lock: signs_last(marks) for lock, marks in lanes.items()},
        "lanes_left_out": len(locks) - len(shown),
        "labels": list(window.labels()),
        "drawn": sorted(drawn, key=lambda each: each.end, reverse=True),
        "legend": legend([mark for marks in lanes.values() for mark in marks]),
        "most": ROWS,
        **shorter_windows(window, drawn_since),
    }


def newest_rows(
    rows: TaskLockEventQuerySet, window: Window, name: str, task: str
) -> tuple[list[TaskLockEvent], datetime | None]:
    """Return the newest rows of the window; and since when these are all, if there are more."""
    if name:
        rows = rows.named(name)
    elif task:
        rows = rows.of_task(task)
    newest = list(rows.within(window.start, window.until, ROWS + 1))
    if len(newest) <= ROWS:
        return newest, None
    left_out = newest.pop()
    if left_out.happened_at < window.start:  # it is an open hold, which is drawn in any case
        return newest, window.start
    return newest, newest[-1].happened_at


def open_holds(
    rows: TaskLockEventQuerySet, window: Window, name: str, task: str
) -> list[TaskLockEvent]:
    """Return the holds of a lock or a task, or all, that go on now and began before the end.

    They are compared here: by their indexes, a database would read all the rows of a lock to find
    the few that are open.
    """
    found = []
    for row in rows.open().filter(at__lte=window.end)[:OPEN]:
        if name in ("", row.name) and task in ("", row.task):
            found.append(row)
    return found[:ROWS]


def shorter_windows(window: Window, drawn_since: datetime | None) -> dict[str, Any]:
    """Return the window of which all rows are drawn, and the part before it, if rows are missing.

    ``drawn_since`` then is written as a time.
    """
    if drawn_since is None or not window.start < drawn_since < window.end:
        return {}
    return {
        "drawn_since": window.clock_time(drawn_since),
        "later": Window(drawn_since, window.end),
        "earlier": Window(window.start, drawn_since),
    }


def rank(event: TaskLockEvent) -> tuple[Any, ...]:
    """Return how important it is to see an event: trouble, what is held, and then the newest."""
    is_trouble = event.retaken > 0 or words.status(event) in TROUBLE
    return is_trouble, is_open(event), event.happened_at


def signs_last(marks: list[Mark]) -> list[Mark]:
    """Return the marks of a lane in the order in which they are drawn: no bar hides a sign."""
    return sorted(marks, key=lambda mark: mark.shape == "sign")


def legend(marks: list[Mark]) -> list[tuple[str, str, str, str]]:
    """Return each look of a mark, with its word, shape and path."""
    return sorted({(mark.state, str(WORDS[mark.state]), mark.shape, mark.path) for mark in marks})


def is_open(event: TaskLockEvent) -> bool:
    return event.is_hold and not event.outcome


def draw_event(event: TaskLockEvent, window: Window, now: datetime) -> Drawn:
    """Return the marks of an event that lie in the window.

    The clocks of two hosts differ: a hold may seem to end before it begins, or in the future.
    """
    end = event.end
    if is_open(event) and event.hold_ended_at is None:
        end = now
    end = max(end, event.at)
    state = words.status(event)
    text = words.headline(event, end)
    facts = facts_of(event)
    drawn = Drawn(event, window, join(text, retaken(event), *facts), event.at, end)
    if event.is_counted:
        height = min(36, 12 + 5 * math.log2(event.count))
        drawn.add("tick", state, join(text, *facts), event.at, end, y=64, height=height)
    elif event.is_hold:
        drawn.add("bar", state, join(text, *facts), event.at, end)
    if event.retaken_at is not None:
        at = event.retaken_at
        drawn.add("sign", RETAKEN, join(retaken(event), *facts), at, at)
    if state in TROUBLE:
        at = noticed(event, end)
        drawn.add("sign", state, join(words.word(event), *facts), at, at)
    return drawn


def noticed(event: TaskLockEvent, end: datetime) -> datetime:
    """Return when trouble was noticed; a fixed lease ended when its time was over."""
    if event.noticed_at is None or event.outlived_fixed_lease:
        return end
    return max(event.noticed_at, event.at)


def retaken(event: TaskLockEvent) -> str:
    if not event.retaken:
        return ""
    return _("retaken × {}").format(event.retaken)


def facts_of(event: TaskLockEvent) -> list[str]:
    """Return why something happened, who noticed it, and which run or call it is about."""
    facts = [words.reason(event), words.witness(event)]
    blocker = event.blocked_by_task_id
    if not blocker:
        blocker = event.blocked_by
    if blocker:
        facts.append(_("blocked by {}").format(blocker))
    if event.task_id:
        facts.append(_("task {}").format(event.task_id))
    facts.append(words.process(event.host, event.pid))
    return facts


def join(*texts: str) -> str:
    return ", ".join(filter(None, texts))
