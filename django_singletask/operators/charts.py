"""Draw the history for an SVG: a lane for each lock; and what the runs of each task have in common.

In a lane is a bar for each hold, and a sign for trouble; if these are too many, and for each task,
there are bars of sums.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_singletask.history.queries import OPEN, TaskLockEventQuerySet, sums
from django_singletask.locks.keys import QUEUED
from django_singletask.models import RETAKEN, TROUBLE, TaskLockEvent, hold_end
from django_singletask.operators import words
from django_singletask.operators.recorded import judge
from django_singletask.operators.windows import DAY, HOUR, Window
from django_singletask.operators.words import WORDS

ROWS = 1000
"""Newest events that are drawn one by one. If there are more, the drawing has their sums."""
LANES = 30
BUCKETS = 60
"""Bars of sums in a lane at most."""
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
NARROW = 0.3
"""Width of a mark, in percent, that can still be seen."""
NEWEST = 5000
"""Newest rows of a task, at most, of whose runs p50, p95 and the longest are told."""
BARS = 42
"""Bars of a chart at most; then a bar is an hour, or four."""
LOOKS = {
    "returned": gettext_lazy("runs"),
    "raised": gettext_lazy("raised"),
    "expired": gettext_lazy("trouble"),
    "conflict": gettext_lazy("conflicts"),
}
"""The parts of a bar, from below, and their words. A run is in one of the first three."""
COLUMNS = ("kind", "key", "at", "outcome", "ended_at", "noticed_at")
SHARES = {"p50": 0.5, "p95": 0.95, "longest": 1}
Ends = dict[int, Counter[str]]
"""Numbers of calls by the step in which they began, and by their state."""
Lanes = dict[str, list[dict[str, Any]]]
"""The marks of each lock, or of each task."""


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

    ``lanes`` are the marks of each lock, by its name, which is their ``field``. If there are too
    many events to draw each, ``summed`` is the length of the steps that are summed up; then the
    lanes are tasks, unless a lock or a task is chosen. ``read_back_to`` is empty if all events of
    the window were read; else ``unread`` is the width of the part before that time. The number of
    rows that are read has a limit, and an index finds each of them. ``event`` is drawn in any case.
    """
    newest = _choose(rows.since(window.start, window.until), name, task)
    events = list(newest[: ROWS + 1])
    is_summed = len(events) > ROWS
    single = _one_by_one(rows, window, events, name, task)
    if event:
        single = [event, *single]
    single = [*dict.fromkeys(single)]
    judge(single)
    field = "name"
    if is_summed and not (name or task):
        field = "task"
    lanes: Lanes = defaultdict(list)
    for row in single:
        lanes[getattr(row, field)] += marks_of(row, window, now, is_summed)
    labels = _important(lanes)
    if field == "name":
        labels += [row.name for row in events]
        newest = newest.filter(name__in=[*dict.fromkeys(labels)][:LANES])
    sums = {"summed": "", "read_back_to": "", "unread": ""}
    if is_summed:
        sums |= _add_sums(lanes, newest, window, field)
    important = _important(lanes)
    drawn = {label: lanes[label] for label in sorted(important[:LANES])}
    marks = [mark for lane in drawn.values() for mark in lane if "event" in mark]
    return {
        "lanes": drawn,
        "field": field,
        "lanes_left_out": len({*labels, *important}) - len(drawn),
        "labels": list(window.labels()),
        "marks": sorted(marks, key=lambda mark: mark["event"].at, reverse=True),
        "legend": _legend(marks, is_summed),
        "most": ROWS,
        **sums,
    }


def _choose(rows: TaskLockEventQuerySet, name: str, task: str) -> TaskLockEventQuerySet:
    if name:
        return rows.named(name)
    if task:
        return rows.of_task(task)
    return rows.newest()


def _one_by_one(
    rows: TaskLockEventQuerySet, window: Window, events: list[TaskLockEvent], name: str, task: str
) -> list[TaskLockEvent]:
    """Return what is drawn one by one: what is open and what is trouble, or all if it is little."""
    parts = [(rows.open().filter(at__lte=window.end), ROWS)]
    found: list[TaskLockEvent] = []
    # A run whose trouble or end lies in the window may have begun before.
    start = window.start - DAY
    if len(events) > ROWS:
        inside = rows.since(start, window.until)
        parts += [(inside.of_trouble(trouble), TROUBLES) for trouble in SIGNS]
    else:
        found += [*events, *_choose(rows.since(start, window.start), name, task)[:ROWS]]
    for part, limit in parts:
        most = limit
        if name or task:
            # They are compared here: by their indexes, the database would read all the rows of a
            # lock to find the few that are open or trouble.
            most = OPEN
        meant = [row for row in part[:most] if name in ("", row.name) and task in ("", row.task)]
        found += meant[:limit]
    return found


def _add_sums(
    lanes: Lanes, rows: TaskLockEventQuerySet, window: Window, field: str
) -> dict[str, str]:
    """Add the bars of sums to their lanes; say how long a step is, and how far back they go."""
    ends_of, cut = ends_by(rows, window, BUCKETS, field)
    parameter = "q"
    if field == "task":
        parameter = "task"
    for label, ends in ends_of.items():
        filters = {}
        if label:
            filters[parameter] = label
        lanes[label] += bars(ends, window, BUCKETS, **filters)
    _start, step = window.rounded(BUCKETS)
    facts = {"summed": words.duration(step.total_seconds())}
    if cut:
        facts["read_back_to"] = window.clock_time(cut)
        facts["unread"] = f"{window.percent(cut):.2f}%"
    return facts


def _legend(marks: list[dict[str, Any]], is_summed: bool) -> list[tuple[str, str, str, str]]:
    """Return each look of a mark, with its word, shape and path."""
    looks = {(mark["state"], mark["shape"], mark["path"]) for mark in marks}
    legend = {(look, str(WORDS[look]), *shape) for look, *shape in looks}
    if is_summed:
        legend |= {(look, str(word), "bar", "") for look, word in LOOKS.items()}
    return sorted(legend)


def _important(lanes: Lanes) -> list[str]:
    """Return the lanes with marks: those with trouble, those that are held, the last used."""
    ranks = {label: max(mark["rank"] for mark in marks) for label, marks in lanes.items() if marks}
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


def marks_of(
    event: TaskLockEvent, window: Window, now: datetime, is_summed: bool
) -> Iterator[dict[str, Any]]:
    """Yield the marks of an event, unless it ended before the window.

    Blocked calls are a tick, a run is a bar, and what let another one work at the same time is a
    sign on it. If there are sums, only an open hold has a bar of its own. ``x`` and ``width``, and
    the places and heights of ``parts``, are in percent of the lane.
    """
    is_open = event.is_hold and not event.outcome
    state = words.status(event)
    # The clocks of two hosts differ: a hold may seem to end before it begins, or in the future.
    end = event.end
    if is_open:
        end = now
    end = max(end, event.at)
    noticed_at = max(event.noticed_at or end, event.at)
    facts = [words.reason(event), words.witness(event)]
    blocker = event.blocked_by_task_id or event.blocked_by
    if blocker:
        facts.append(_("blocked by {}").format(blocker))
    if event.task_id:
        facts.append(_("task {}").format(event.task_id))
    facts.append(words.process(event.host, event.pid))
    looks = []
    if event.is_counted:
        part = (state, 64, min(36, 12 + 5 * math.log2(event.count)))
        looks.append(("tick", state, headline(event), event.at, end, [part]))
    if is_open or (event.is_hold and not is_summed):
        looks.append(("bar", state, headline(event, end), event.at, end, [(state, 9, 47)]))
    if event.retaken:  # when that was is not recorded
        text = _("retaken × {}").format(event.retaken)
        looks.append(("sign", RETAKEN, text, event.at, end, []))
    if event.outcome in TROUBLE:
        looks.append(("sign", state, words.word(event), noticed_at, noticed_at, []))
    for shape, look, text, start, until, parts in looks:
        if until < window.start:
            continue
        times = dict.fromkeys(map(window.clock_time, (start, until)))
        x = window.percent(until)
        path = ""
        if shape == "bar":
            x = window.percent(start)
        elif shape == "sign":
            path = SIGNS[look]
        yield {
            "event": event,
            "shape": shape,
            "state": look,
            "text": ", ".join(filter(None, [text, *facts])),
            "when": " – ".join(times),
            "x": min(x, 100 - NARROW),  # no part of a mark lies beyond the edge
            "width": max(window.percent(until) - x, NARROW),
            "parts": parts,
            "path": path,
            "rank": (shape == "sign", is_open, until),
        }


def headline(event: TaskLockEvent, until: datetime | None = None) -> str:
    """Say what happened and how often, or how a hold ended and after which time.

    Of a hold that goes on, ``until`` is now.
    """
    word = words.word(event)
    if event.count > 1:
        word = f"{word} × {event.count}"
    if event.hold_ended_at:
        return _("{} after {}").format(word, words.lasted(event))
    if until:
        return _("{} for {}").format(word, words.lasted(event, until))
    return word


def per_task(rows: TaskLockEventQuerySet, window: Window) -> dict[str, Any]:
    """Return the facts of each task since the window's start, for the template.

    ``cut`` is a later start, if there are too many rows to sum up all of them. ``held`` counts the
    runs that have not ended, and ``others`` those that ended but neither returned nor raised, by
    words. ``p50``, ``p95`` and ``longest`` are the seconds that half, 95 %, and all of the newest
    holds do not exceed, or None. The locks without a task are one task, "".
    """
    recent = rows.since(window.start)
    tasks = []
    lanes, cut = ends_by(recent, window, BARS, "task")
    for task, ends in lanes.items():
        numbers: Counter[str] = sum(ends.values(), Counter())
        others = numbers.copy()
        for state in ("conflict", "duplicate", "returned", "raised", "held"):
            del others[state]
        tasks.append(
            {
                "task": task,
                "bars": bars(ends, window, BARS),
                "conflicts": numbers["conflict"],
                "duplicates": numbers["duplicate"],
                "runs": numbers.total() - numbers["conflict"] - numbers["duplicate"],
                "returned": numbers["returned"],
                "raised": numbers["raised"],
                "held": numbers["held"],
                "other": others.total(),
                "others": sorted((str(WORDS[state]), number) for state, number in others.items()),
                **_spans(recent.of_task(task)),
            }
        )
    return {
        "rows": tasks,
        "hours": window.rounded(BARS)[1] // HOUR,
        "start": window.start,
        "cut": cut,
    }


def _spans(rows: TaskLockEventQuerySet) -> dict[str, float | None]:
    """Return the seconds that each of ``SHARES`` of the newest holds do not exceed."""
    lengths = []
    # Objects of so many rows would take several times as long.
    for kind, key, at, *ends in rows.values_list(*COLUMNS)[:NEWEST]:
        end = hold_end(*ends)
        # When the hold of a run that expired has ended is not known, only a time before which.
        is_known = end and ends[0] not in ("", "unguarded", "expired")
        if is_known and kind == "run" and not key.startswith(QUEUED):
            lengths.append(max(0.0, (end - at).total_seconds()))
    if not lengths:
        return dict.fromkeys(SHARES)
    lengths.sort()
    return {name: lengths[math.ceil(share * len(lengths)) - 1] for name, share in SHARES.items()}


def ends_by(
    rows: TaskLockEventQuerySet, window: Window, parts: int, field: str
) -> tuple[dict[str, Ends], datetime | None]:
    """Return how the calls of each task or name ended; and a later time, if cut there."""
    totals, cut = sums(rows, *window.rounded(parts), field)
    lanes = defaultdict[str, Ends](lambda: defaultdict(Counter))
    for total in totals:
        lane, step, number = map(total.pop, ("lane", "slot", "number"))
        lanes[lane][int(step)][words.status(TaskLockEvent(**total))] += number
    return lanes, cut


def bars(ends: Ends, window: Window, parts: int, **filters: str) -> Iterator[dict[str, Any]]:
    """Yield a bar for each step of the window in which there was a run or a conflict.

    Places and heights are in percent; the highest bar has 100. ``query`` are the parameters of an
    address that lists what is summed up: those in ``filters`` and the time.
    """
    start, length = window.rounded(parts)
    steps = defaultdict[int, Counter[str]](Counter)
    for step, states in ends.items():
        for state in states.keys() - {"duplicate"}:
            look = "returned"
            if state in TROUBLE:
                look = "expired"
            elif state in LOOKS:
                look = state
            steps[step][look] += states[state]
    highest = max((looks.total() for looks in steps.values()), default=1)
    for step, looks in sorted(steps.items()):
        at = start + step * length
        part = Window(max(at, window.start), min(at + length, window.end))
        x = window.percent(part.start)
        y = 100.0
        rects = []
        for look in filter(looks.get, LOOKS):
            height = 100 * looks[look] / highest
            y -= height
            rects.append((look, y, height))
        looks["returned"] = looks.total() - looks["conflict"]  # in words, they are all runs
        yield {
            "query": part.query(**filters),
            "rank": (False, False, part.end),
            "when": window.clock_time(part.start),
            "text": ", ".join(f"{LOOKS[look]}: {looks[look]}" for look in LOOKS if looks[look]),
            "x": x,
            "width": 0.9 * (window.percent(part.end) - x),
            "parts": rects,
        }
