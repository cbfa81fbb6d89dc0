"""What the runs of each task have in common: ends, conflicts, and how long the lock was held."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from math import ceil
from typing import Any

from django.utils.translation import gettext_lazy

from django_singletask.history.queries import TaskLockEventQuerySet, sums
from django_singletask.locks.keys import QUEUED
from django_singletask.models import TROUBLE, TaskLockEvent, hold_end
from django_singletask.operators.names import WORDS
from django_singletask.operators.windows import HOUR, Window
from django_singletask.operators.words import clock_time, status

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
Ends = Counter[tuple[int, str]]
"""Numbers of calls by the step in which they began, and by their state."""


def per_task(rows: TaskLockEventQuerySet, window: Window) -> dict[str, Any]:
    """Return the facts of each task since the window's start, for the template.

    ``cut`` is a later time, if there are too many rows to sum up all of them. ``others`` has the
    numbers of runs that neither returned nor raised, by words; ``p50``, ``p95`` and ``longest``
    are the seconds that half, 95 %, and all of the newest holds do not exceed, or None. The locks
    without a task are one task, "".
    """
    recent, tasks = rows.since(window.start), []
    lanes, cut = ends_by(recent, window, BARS, "task")
    for task, ends in lanes.items():
        numbers: Counter[str] = Counter()
        for (_step, state), number in ends.items():
            numbers[state] += number
        lengths = sorted(
            max(0.0, (end - at).total_seconds())
            # Objects of so many rows would take several times as long.
            for kind, key, at, *facts in recent.of_task(task).values_list(*COLUMNS)[:NEWEST]
            if kind == "run" and facts[0] not in ("", "unguarded") and not key.startswith(QUEUED)
            if (end := hold_end(*facts))
        )
        tasks.append(
            {
                "task": task,
                "bars": bars(ends, window, BARS),
                "conflicts": numbers.pop("conflict", 0),
                "duplicates": numbers.pop("duplicate", 0),
                # What is left are runs; then, their other ends.
                "runs": numbers.total(),
                "returned": numbers.pop("returned", 0),
                "raised": numbers.pop("raised", 0),
                "other": numbers.total(),
                "others": sorted((str(WORDS[state]), number) for state, number in numbers.items()),
                **{
                    name: lengths[ceil(share * len(lengths)) - 1] if lengths else None
                    for name, share in SHARES.items()
                },
            }
        )
    return {
        "rows": tasks,
        "hours": window.rounded(BARS)[1] // HOUR,
        "start": clock_time(window.start, dated=True),
        "cut": clock_time(cut, dated=True) if cut else "",
    }


def ends_by(
    rows: TaskLockEventQuerySet, window: Window, parts: int, field: str
) -> tuple[dict[str, Ends], datetime | None]:
    """Return how the calls of each task or name ended; and a later time, if cut there."""
    totals, cut = sums(rows, *window.rounded(parts), field)
    lanes = defaultdict[str, Ends](Counter)
    for total in totals:
        lane, step, number = map(total.pop, ("lane", "slot", "number"))
        lanes[lane][int(step), status(TaskLockEvent(**total))[0]] += number
    return lanes, cut


def bars(ends: Ends, window: Window, parts: int, **filters: str) -> Iterator[dict[str, Any]]:
    """Yield a bar for each step of the window in which there was a run or a conflict.

    Places and heights are in percent; the highest bar has 100. ``query`` are the parameters of an
    address that lists what is summed up: those in ``filters`` and the time.
    """
    start, length = window.rounded(parts)
    steps = defaultdict[int, Counter[str]](Counter)
    for (step, state), number in ends.items():
        if state != "duplicate":
            look = "expired" if state in TROUBLE else state if state in LOOKS else "returned"
            steps[step][look] += number
    highest = max((looks.total() for looks in steps.values()), default=1)
    for step, looks in sorted(steps.items()):
        at = start + step * length
        part = Window(max(at, window.start), min(at + length, window.end))
        x, y, rects = window.percent(part.start), 100.0, []
        for look in filter(looks.get, LOOKS):
            height = 100 * looks[look] / highest
            y -= height
            rects.append((look, y, height))
        looks["returned"] = looks.total() - looks["conflict"]  # in words, they are all runs
        yield {
            "query": part.query(**filters),
            "rank": (False, False, part.end),
            "when": clock_time(part.start, dated=window.is_dated),
            "text": ", ".join(f"{LOOKS[look]}: {looks[look]}" for look in LOOKS if looks[look]),
            "x": x,
            "width": 0.9 * (window.percent(part.end) - x),
            "parts": rects,
        }
