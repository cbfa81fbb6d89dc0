"""Draw the history for an SVG: a lane for each lock, a bar for each hold, a sign for trouble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from datetime import datetime
from itertools import chain, islice
from typing import Any
from urllib.parse import urlencode

from django_singletask.history.queries import OPEN, SWEEPER, TaskLockEventQuerySet
from django_singletask.history.sums import lane_sums
from django_singletask.models import TROUBLE, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.held import judge
from django_singletask.operators.marks import NEAR, Lane, Mark
from django_singletask.operators.windows import BUCKETS, DAY, Window, to_utc

ROWS = 1000
"""Newest events that are drawn one by one. If there are more, the drawing has their sums."""
LANES = 30
TROUBLES = 200
"""Newest events of each kind of trouble that are drawn, one by one, together with sums."""


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
    events = [each for each in dict.fromkeys([*events, *single]) if each.name != SWEEPER]
    judge(events)
    marks = filter(None, (_mark_of(event, window, now) for event in events))
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
    return list(dict.fromkeys(event.name for event in alone if event.name != SWEEPER))


def _single(
    rows: TaskLockEventQuerySet, window: Window, with_trouble: bool, name: str, task: str
) -> Iterator[TaskLockEvent]:
    """Return the events that are drawn one by one, however many others there are."""
    inside = rows.since(window.start, window.until)
    parts = [(rows.open().filter(at__lte=window.end), ROWS)]
    if with_trouble:
        parts += [(inside.of_kind(kind), TROUBLES) for kind in sorted(TROUBLE)]
    for part, limit in parts:
        # The name and the task are compared here: by their indexes, the database would read all
        # the rows of a lock to find the few that are open or trouble.
        read = part[: OPEN if name or task else limit]
        fitting = (each for each in read if name in ("", each.name) and task in ("", each.task))
        yield from islice(fitting, limit)


def _blockers(rows: TaskLockEventQuerySet, events: Iterable[TaskLockEvent]) -> list[TaskLockEvent]:
    """Return the runs that blocked these calls, or that had this trouble."""
    begun = {event.token for event in events if event.kind == "acquired"}
    others = [event for event in events if event.kind != "acquired"]
    tokens = {event.blocked_by or event.token for event in others}
    task_ids = {event.blocked_by_task_id or event.task_id for event in others}
    return rows.runs(tokens - begun, task_ids)


def _mark_of(event: TaskLockEvent, window: Window, now: datetime) -> Mark | None:
    """Return the mark of an event, or None if it ended before the window."""
    if event.kind == "acquired":
        shape, until = "bar", event.ended_at or now
    elif event.is_counted:
        shape, until = "tick", event.last_at or event.at
    else:
        shape, until = "sign", event.at
    # The clocks of two hosts differ: a hold may seem to end before it begins, or in the future.
    until = max(until, event.at)
    if until < window.start:
        return None
    end = window.percent(until)
    x = window.percent(event.at) if shape == "bar" else end
    return Mark(shape, *words.status(event), event.at, until, x, max(end - x, NEAR), [event])


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
        if event.kind in TROUBLE or event.name == SWEEPER:
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
        has_trouble = any(mark.state in TROUBLE for mark in marks)
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
    begin = words.clock_time(mark.at, dated=window.is_dated)
    end = "…" if mark.is_open else words.clock_time(mark.until, dated=window.is_dated)
    return begin if begin == end else f"{begin} – {end}"
