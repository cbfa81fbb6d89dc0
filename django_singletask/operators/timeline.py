"""Draw the history for an SVG: a lane for each lock, a bar for each hold, a sign for trouble."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_singletask.history.queries import OPEN, TaskLockEventQuerySet
from django_singletask.history.sums import lane_sums
from django_singletask.models import RETAKEN, HoldOutcome, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.held import judge
from django_singletask.operators.windows import BUCKETS, DAY, Window, to_utc

ROWS = 1000
"""Newest events that are drawn one by one. If there are more, the drawing has their sums."""
LANES = 30
TROUBLES = 200
"""Newest events of each kind of trouble that are drawn, one by one, together with sums."""
SIGNS = {
    "dead": "M0-6 6 5H-6Z",
    "expired": "M0 6 6-5H-6Z",
    "lost": "M0-7 6 0 0 7-6 0Z",
    "retaken": "M-5-5H5V5H-5Z",
    "cleared": "M-5-5 5 5M5-5-5 5",
    "unguarded": "M-5 0A5 5 0 1 0 5 0 5 5 0 1 0-5 0Z",
}
"""Paths around (0, 0): triangles, diamond, square, cross and circle differ not only in colour."""
NEAR = 0.3
"""Percent of the width: marks of one kind that are nearer to each other become one mark."""


class Lane(NamedTuple):
    """What a line of the drawing is about; ``field`` is ``"name"``, of a lock, or ``"task"``."""

    label: str
    field: str

    @classmethod
    def of(cls, event: TaskLockEvent, by_task: bool) -> Lane:
        return cls(event.task, "task") if by_task and event.task else cls(event.name, "name")


@dataclasses.dataclass
class Mark:
    """One event in a lane, several of one shape and state at nearly the same place, or a sum.

    ``shape`` is ``"bar"`` for a hold, ``"tick"`` for blocked calls, ``"sign"`` for trouble.
    ``state`` and ``word`` are those of :func:`status`. ``x`` and ``width`` are percent of the width
    of the lane; ``width`` is never too small to be seen. A bar that sums up ``runs`` is as high as
    the ``share`` of the time for which they had the lock, on top of the share ``below``.
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
    runs: int = 0
    seconds: float = 0.0
    share: float = 1.0
    below: float = 0.0
    query: str = ""

    @property
    def is_open(self) -> bool:
        return self.shape == "bar" and not self.events[0].outcome

    @property
    def count(self) -> int:
        return sum(event.count for event in self.events)

    @property
    def path(self) -> str:
        return SIGNS[self.state]

    @property
    def height(self) -> int:
        """Return the height in pixels: of a tick 4 for one call, 12 from about 30 calls on."""
        if self.shape == "tick":
            return min(12, 4 + round(math.log2(self.count) * 1.6))
        return max(2, round(16 * self.share))

    @property
    def y(self) -> int:
        return 24 if self.shape == "tick" else 21 - round(16 * self.below) - self.height

    @cached_property
    def text(self) -> str:
        event = self.events[0]
        if self.shape == "tick":
            # Of a sum they are not known.
            reasons = {words.reason(event) for event in self.events if not self.query} - {""}
            blockers = {event.blocked_by_task_id or event.blocked_by for event in self.events}
            several = len(blockers - {""}) > 1
            blocked = _("blocked by {} …") if several else _("blocked by {}")
            blocker = min(filter(None, blockers), default="")
            word = self.word if self.count == 1 else f"{self.word} × {self.count}"
            parts = [word, *sorted(reasons), blocker and blocked.format(blocker)]
        elif self.runs or len(self.events) > 1:
            if self.runs:
                lengths = _("held for {} in all").format(words.hold_time(round(self.seconds, 1)))
            else:
                holds = sorted(words.hold_seconds(event) for event in self.events)
                lengths = f"{words.hold_time(holds[0])} – {words.hold_time(holds[-1])}"
            count = self.runs or len(self.events)
            runs = ngettext("{} run: {}", "{} runs: {}", count).format(count, self.word)
            parts = [runs, lengths]
        else:
            word = self.word
            if self.shape == "sign" and event.retaken > 1 and self.state == RETAKEN:
                word = f"{word} × {event.retaken}"
            if self.shape == "bar":
                text = _("{} after {}") if event.hold_ended_at else _("{} for {}")
                word = text.format(word, words.hold_time(words.hold_seconds(event, self.until)))
            task = event.task_id and _("task {}").format(event.task_id)
            facts = [event.reason, words.witness(event), task]
            parts = [word, *facts, words.process(event.host, event.pid)]
        return ", ".join(filter(None, parts))


def draw(
    rows: TaskLockEventQuerySet, window: Window, *, now: datetime, name: str = "", task: str = ""
) -> dict[str, Any]:
    """Draw a window of the history, of all locks, of one lock or of one task.

    Returns what the template needs. ``marks`` has the marks of single events, the newest first.
    ``summed`` is the length of the buckets if there are too many events to draw each; then the
    lanes are tasks, unless a lock or a task is chosen. ``read_back_to`` is empty if all events of
    the window were read; else ``unread`` is the width of the part before that time.

    The number of rows that are read has a limit, and an index finds each of them, so that it takes
    no longer with ten million rows than with a thousand.
    """
    inside = rows.since(window.start, window.until)
    newest = _narrowed(inside, name, task)
    events = list(newest[: ROWS + 1])
    is_summed, cut, sums = len(events) > ROWS, None, list[Mark]()
    by_task = is_summed and not (name or task)
    single, names = list(_single(rows, window, is_summed, name, task)), list[str]()
    if is_summed:
        used = inside.of_task("")[:ROWS] if by_task else events
        names = _names(chain(reversed(single), used), by_task)
        sums, cut = _sums(newest, window, by_task, names[:LANES])
        events = []
    else:
        earlier = _narrowed(rows.since(window.start - DAY, window.start), name, task)[:ROWS]
        events += [each for each in earlier if each.end > window.start]
        events += _blockers(rows, events)
    events = list(dict.fromkeys([*events, *single]))
    judge(events)
    marks = chain.from_iterable(_marks_of(event, window, now, is_summed) for event in events)
    lanes, lanes_left_out = _lanes([*marks, *sums], by_task)
    lanes_left_out += len({*names[LANES:]}.difference(each.name for each in events))
    drawn = sorted(chain(*lanes.values()), key=lambda mark: mark.at, reverse=True)
    for number, mark in enumerate(drawn, start=1):
        mark.number, mark.when = number, _when(mark, window)
    legend = {(mark.state, mark.word, mark.shape): mark for mark in drawn}
    return {
        "lanes": lanes,
        "lanes_left_out": lanes_left_out,
        "labels": list(window.labels()),
        "marks": [mark for mark in drawn if not mark.query],
        "legend": [legend[look] for look in sorted(legend)],
        "most": ROWS,
        "summed": words.compact(window.rounded(BUCKETS)[1].total_seconds()) if is_summed else "",
        "read_back_to": words.clock_time(cut, dated=window.is_dated) if cut else "",
        "unread": f"{window.percent(cut):.2f}%" if cut else "",
    }


def _narrowed(rows: TaskLockEventQuerySet, name: str, task: str) -> TaskLockEventQuerySet:
    return rows.named(name) if name else rows.of_task(task) if task else rows.newest()


def _names(events: Iterable[TaskLockEvent], by_task: bool) -> list[str]:
    """Return the names of the locks that have a lane each: a task has one for all its locks."""
    alone = (event for event in events if not (by_task and event.task))
    return list(dict.fromkeys(event.name for event in alone))


def _single(
    rows: TaskLockEventQuerySet, window: Window, with_trouble: bool, name: str, task: str
) -> Iterator[TaskLockEvent]:
    """Return the events that are drawn one by one, however many others there are."""
    # A run whose trouble lies in the window may have begun before.
    inside = rows.since(window.start - DAY, window.until)
    parts = [(rows.open().filter(at__lte=window.end), ROWS)]
    if with_trouble:
        parts += [(inside.of_trouble(each), TROUBLES) for each in sorted(SIGNS)]
    for part, limit in parts:
        # The name and the task are compared here: by their indexes, the database would read all
        # the rows of a lock to find the few that are open or trouble.
        read = part[: OPEN if name or task else limit]
        fitting = (each for each in read if name in ("", each.name) and task in ("", each.task))
        yield from islice(fitting, limit)


def _blockers(rows: TaskLockEventQuerySet, events: Iterable[TaskLockEvent]) -> list[TaskLockEvent]:
    """Return the other runs that blocked these calls."""
    blockers = {event.blocked_by for event in events if event.is_counted}
    return rows.runs(blockers - {event.token for event in events})


def _marks_of(
    event: TaskLockEvent, window: Window, now: datetime, is_summed: bool
) -> Iterator[Mark]:
    """Yield the marks of an event, unless it ended before the window.

    A run is a bar, and what let another one work at the same time is a sign on it. If bars are
    summed up, only those of open holds are single.
    """
    looks = [("tick", *words.status(event))] if event.is_counted else []
    if event.is_hold and not (is_summed and event.outcome):
        looks.append(("bar", *words.status(event)))
    labels = {RETAKEN: _("retaken"), **dict(HoldOutcome.choices)}
    looks += [("sign", trouble, str(labels[trouble])) for trouble in event.troubles]
    for shape, state, word in looks:
        until = event.end if event.outcome or event.is_counted else now
        if shape == "sign" and state != RETAKEN and event.noticed_at:
            until = event.noticed_at
        # The clocks of two hosts differ: a hold may seem to end before it begins, or in the future.
        until = max(until, event.at)
        end = window.percent(until)
        x = window.percent(event.at) if shape == "bar" else end
        if until >= window.start:
            yield Mark(shape, state, word, event.at, until, x, max(end - x, NEAR), [event])


def _sums(
    rows: TaskLockEventQuerySet, window: Window, by_task: bool, names: Collection[str]
) -> tuple[list[Mark], datetime | None]:
    """Return the marks of the sums, and from when on they count if not from the beginning."""
    base, step = window.rounded(BUCKETS)
    base, length = to_utc(base), step.total_seconds()
    sums, cut = lane_sums(rows, base, window.end, step, by_task=by_task, names=names)
    marks: dict[tuple[Lane, int, str], Mark] = {}
    for each in sums:
        facts = {field: each[field] for field in ("task", "kind", "outcome", "result")}
        event = TaskLockEvent(name=each["lane"], count=0, **facts)
        if event.outcome == "unguarded":
            continue
        first = int(each["first"])
        last = min(max(int(each["last"]), first), (window.end - base) // step)
        for slot in [last] if event.is_counted else range(first, last + 1):
            # What began in an earlier step, or ends in a later one, fills this one.
            begun = each["began"] if slot == first else each["number"] * slot * length
            ended = each["ended"] if slot == last else each["number"] * (slot + 1) * length
            if slot > first and ended - begun < each["number"] / 100:
                continue  # it ended with the step before
            key = Lane.of(event, by_task), slot, words.status(event)[0]
            if key not in marks:
                at = max(base + slot * step, window.start)
                marks[key] = _sum_mark(event, window, at, base + (slot + 1) * step, key[0])
            marks[key].runs += each["number"]
            marks[key].seconds += max(0.0, ended - begun)
            marks[key].events[0].count += each["calls"]
    totals, below = defaultdict[Any, float](float), defaultdict[Any, float](float)
    bars = {key: mark for key, mark in marks.items() if mark.shape == "bar"}
    for (lane, slot, _state), mark in bars.items():
        totals[lane, slot] += mark.seconds
    for (lane, slot, _state), mark in sorted(bars.items()):
        # Locks of one task can be held at the same time, together for longer than the step is.
        mark.share = mark.seconds / max(totals[lane, slot], (mark.until - mark.at).total_seconds())
        mark.below = below[lane, slot]
        below[lane, slot] += mark.share
    return list(marks.values()), cut


def _sum_mark(
    event: TaskLockEvent, window: Window, at: datetime, until: datetime, lane: Lane
) -> Mark:
    until = min(until, window.end)
    x, shape = window.percent(at), "tick" if event.is_counted else "bar"
    width = max(window.percent(until) - x - NEAR / 3, NEAR)
    chosen = {"task" if lane.field == "task" else "q": lane.label, "kind__exact": event.kind}
    query = f"{urlencode(chosen)}&{Window(at, until).query}"
    return Mark(shape, *words.status(event), at, until, x, width, [event], query=query)


def _lanes(marks: Iterable[Mark], by_task: bool) -> tuple[dict[Lane, list[Mark]], int]:
    """Return the most important lanes, ordered by name, and how many are left out.

    Locks with trouble come first, then locks that are held, then those that were used last.
    """
    by_lane: dict[Lane, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_lane[Lane.of(mark.events[0], by_task)].append(mark)

    def importance(lane: Lane) -> tuple[bool, bool, datetime, Lane]:
        marks = by_lane[lane]
        has_trouble = any(mark.state in SIGNS for mark in marks)
        is_held = any(mark.is_open for mark in marks)
        return has_trouble, is_held, max(mark.until for mark in marks), lane

    chosen = sorted(by_lane, key=importance, reverse=True)[:LANES]
    return {lane: _merged(by_lane[lane]) for lane in sorted(chosen)}, len(by_lane) - len(chosen)


def _merged(marks: list[Mark]) -> list[Mark]:
    """Make one mark of those that would hide each other; signs, open holds and sums stay single."""
    result: list[Mark] = []
    last: dict[tuple[str, str], Mark] = {}
    for mark in sorted(marks, key=lambda mark: (mark.x, mark.at)):
        before = last.get((mark.shape, mark.state))
        single = mark.shape == "sign" or mark.is_open or mark.query or mark.width > NEAR
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


def _when(mark: Mark, window: Window) -> str:
    # A sign stands where its trouble was noticed, except for "retaken", whose time is not recorded.
    is_moment = mark.shape == "sign" and mark.state != RETAKEN
    begin = words.clock_time(mark.until if is_moment else mark.at, dated=window.is_dated)
    end = "…" if mark.is_open else words.clock_time(mark.until, dated=window.is_dated)
    return begin if begin == end else f"{begin} – {end}"
