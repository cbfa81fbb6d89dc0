"""Draw the history for an SVG: a lane for each lock, a bar for each hold, a sign for trouble."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _

from django_singletask.history.queries import OPEN, TaskLockEventQuerySet
from django_singletask.models import RETAKEN, TROUBLE, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.held import judge
from django_singletask.operators.names import WORDS
from django_singletask.operators.per_task import LOOKS, bars, ends_by
from django_singletask.operators.windows import DAY, Window

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

    ``lanes`` are the marks of each lock, by its name. If there are too many events to draw each,
    ``summed`` is the length of the steps that are summed up; then the lanes are tasks, unless a
    lock or a task is chosen. ``read_back_to`` is empty if all events of the window were read; else
    ``unread`` is the width of the part before that time. The number of rows that are read has a
    limit, and an index finds each of them. ``event`` is drawn in any case.
    """

    def chosen(rows: TaskLockEventQuerySet) -> TaskLockEventQuerySet:
        return rows.named(name) if name else rows.of_task(task) if task else rows.newest()

    newest, cut = chosen(rows.since(window.start, window.until)), None
    events = list(newest[: ROWS + 1])
    is_summed = len(events) > ROWS
    by_task = is_summed and not (name or task)
    field = "task" if by_task else "name"
    # However many others there are, what is open and what is trouble is drawn one by one.
    alone = [(rows.open().filter(at__lte=window.end), ROWS)]
    single = [event] if event else []
    if is_summed:
        # A run whose trouble lies in the window may have begun before.
        inside = rows.since(window.start - DAY, window.until)
        alone += [(inside.of_trouble(trouble), TROUBLES) for trouble in sorted(SIGNS)]
    else:
        single += [*events, *chosen(rows.since(window.start - DAY, window.start))[:ROWS]]
    for part, limit in alone:
        # The name and the task are compared here: by their indexes, the database would read all
        # the rows of a lock to find the few that are open or trouble.
        read = part[: OPEN if name or task else limit]
        single += [row for row in read if name in ("", row.name) and task in ("", row.task)][:limit]
    judge(single := [*dict.fromkeys(single)])
    lanes = defaultdict[str, list[dict[str, Any]]](list)
    for row in single:
        lanes[getattr(row, field)] += marks_of(row, window, now, is_summed)
    labels = _important(lanes)
    if not by_task:
        labels += [row.name for row in events]
        newest = newest.filter(name__in=[*dict.fromkeys(labels)][:LANES])
    if is_summed:
        sums, cut = ends_by(newest, window, BUCKETS, field)
        for label, ends in sums.items():
            filters = {"task" if by_task else "q": label} if label else {}
            lanes[label] += bars(ends, window, BUCKETS, **filters)
    important = _important(lanes)
    drawn = {label: lanes[label] for label in sorted(important[:LANES])}
    marks = [mark for lane in drawn.values() for mark in lane if "event" in mark]
    legend = {
        (mark["state"], str(WORDS[mark["state"]]), mark["shape"], mark["path"]) for mark in marks
    }
    if is_summed:
        legend |= {(look, str(word), "bar", "") for look, word in LOOKS.items()}
    return {
        "lanes": drawn,
        "by_task": by_task,
        "lanes_left_out": len({*labels, *important}) - len(drawn),
        "labels": list(window.labels()),
        "marks": sorted(marks, key=lambda mark: mark["event"].at, reverse=True),
        "legend": sorted(legend),
        "most": ROWS,
        "summed": words.duration(window.rounded(BUCKETS)[1].total_seconds()) if is_summed else "",
        "read_back_to": words.clock_time(cut, dated=window.is_dated) if cut else "",
        "unread": f"{window.percent(cut):.2f}%" if cut else "",
    }


def _important(lanes: dict[str, list[dict[str, Any]]]) -> list[str]:
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
    state, word = words.status(event)
    # The clocks of two hosts differ: a hold may seem to end before it begins, or in the future.
    end = max(now if is_open else event.end, event.at)
    noticed_at = max(event.noticed_at or end, event.at)
    blocker = event.blocked_by_task_id or event.blocked_by
    facts = [
        words.reason(event),
        words.witness(event),
        blocker and _("blocked by {}").format(blocker),
        event.task_id and _("task {}").format(event.task_id),
        words.process(event.host, event.pid),
    ]
    looks = []
    if event.is_counted:
        looks.append(("tick", state, headline(event), event.at, end))
    if is_open or (event.is_hold and not is_summed):
        looks.append(("bar", state, headline(event, end), event.at, end))
    if event.retaken:  # when that was is not recorded
        looks.append(("sign", RETAKEN, _("retaken × {}").format(event.retaken), event.at, end))
    if event.outcome in TROUBLE:
        looks.append(("sign", state, word, noticed_at, noticed_at))
    parts = {"bar": (9, 47), "tick": (64, min(36, 12 + 5 * math.log2(event.count)))}
    for shape, look, text, start, until in looks:
        clock = [words.clock_time(at, dated=window.is_dated) for at in (start, until)]
        x = window.percent(start if shape == "bar" else until)
        if until >= window.start:
            yield {
                "event": event,
                "shape": shape,
                "state": look,
                "text": ", ".join(filter(None, [text, *facts])),
                "when": " – ".join(dict.fromkeys(clock)),
                "x": min(x, 100 - NARROW),  # no part of a mark lies beyond the edge
                "width": max(window.percent(until) - x, NARROW),
                "parts": [(look, *parts[shape])] if shape in parts else [],
                "path": SIGNS[look] if shape == "sign" else "",
                "rank": (shape == "sign", is_open, until),
            }


def headline(event: TaskLockEvent, until: datetime | None = None) -> str:
    """Say what happened and how often, or how a hold ended and after which time.

    Of a hold that goes on, ``until`` is now.
    """
    word = words.status(event)[1]
    if event.count > 1:
        word = f"{word} × {event.count}"
    if event.hold_ended_at or until:
        text = _("{} after {}") if event.hold_ended_at else _("{} for {}")
        word = text.format(word, words.hold_time(words.hold_seconds(event, until)))
    return word
