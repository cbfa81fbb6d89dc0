"""What the runs of each task have in common: ends, conflicts, and how long the lock was held."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, timedelta
from math import ceil
from typing import Any

from django_singletask.history.queries import TaskLockEventQuerySet
from django_singletask.history.sums import task_sums
from django_singletask.models import TaskLockEvent
from django_singletask.operators.windows import SPANS, Window, to_utc
from django_singletask.operators.words import clock_time, hold_seconds, status

RANGES = {span: SPANS[span].label for span in ("24h", "7d")}
"""The spans of the timeline that can be summed up."""
NEWEST = 5000
"""Newest rows of a task, at most, of whose runs p50 and p95 are told."""
BARS = 42
"""Bars of a chart at most; then a bar is an hour, or four."""


def chart_of(span: str, now: datetime) -> tuple[Window, timedelta]:
    """Return the window of a chart, from and to a round time, and the length of a bar."""
    before, step = Window.past(span, now).rounded(BARS)
    start = to_utc(before) + step  # in UTC a day on which the clock is set is as long
    return Window(start, start + SPANS[span].length), step


def per_task(
    rows: TaskLockEventQuerySet, window: Window, step: timedelta
) -> tuple[list[dict[str, Any]], datetime | None]:
    """Return the facts of each task since the window's start, and a later time if cut there.

    ``p50``, ``p95``, ``longest`` and ``lease`` are in seconds, or None. ``others`` has the numbers
    of runs that neither returned nor raised, by words, and ``bars`` what draws a chart. The locks
    without a task are one task, "".
    """
    sums, cut = task_sums(rows, window.start, step)
    recent = rows.since(window.start)
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for total in sums:
        tasks[total["task"]].append(total)
    facts = [
        {
            "task": task,
            "bars": _bars(totals, window, step),
            **_facts(totals),
            **_percentiles(recent.of_task(task)),
        }
        for task, totals in tasks.items()
    ]
    return facts, cut


def _facts(totals: list[dict[str, Any]]) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    longest = None
    for total in totals:
        kinds[total["kind"]] += total["number"]
        if total["kind"] == "run":
            ends[total["outcome"], total["result"]] += total["number"]
            if total["longest"] is not None:
                longest = max(longest or 0.0, total["longest"])
    numbers = {"returned": 0, "raised": 0}
    others: Counter[str] = Counter()
    for (outcome, result), number in ends.items():
        state, word = status(TaskLockEvent(kind="run", outcome=outcome, result=result))
        of = numbers if state in numbers else others
        of[state if of is numbers else word] += number
    return {
        "runs": kinds["run"],
        **numbers,
        "other": others.total(),
        "others": sorted(others.items()),
        "conflicts": kinds["conflict"],
        "duplicates": kinds["duplicate"],
        "longest": longest,
        "lease": max((t["lease"] for t in totals if t["kind"] == "run"), default=None),
    }


def _percentiles(rows: TaskLockEventQuerySet) -> dict[str, float | None]:
    """Return the holds that half, and 95 %, of the newest holds do not exceed."""
    newest = rows.only("outcome", "key", "at", "ended_at", "noticed_at")[:NEWEST]
    holds = sorted(hold_seconds(row) for row in newest if row.hold_ended_at)
    shares = {"p50": 0.5, "p95": 0.95}
    if not holds:
        return dict.fromkeys(shares)
    return {name: holds[ceil(share * len(holds)) - 1] for name, share in shares.items()}


def _bars(totals: list[dict[str, Any]], window: Window, step: timedelta) -> list[dict[str, Any]]:
    """Return bars of runs, and of conflicts on top of them: places and heights are in percent."""
    runs: Counter[int] = Counter()
    conflicts: Counter[int] = Counter()
    for total in totals:
        if total["kind"] != "duplicate":
            counter = runs if total["kind"] == "run" else conflicts
            counter[int(total["slot"])] += total["number"]
    scale = 100 / max((runs + conflicts).values(), default=1)
    return [
        {
            "at": clock_time(window.start + slot * step, dated=True),
            "runs": runs[slot],
            "conflicts": conflicts[slot],
            "x": window.percent(window.start + slot * step),
            "parts": [
                ("returned", 100 - scale * runs[slot], scale * runs[slot]),
                ("conflict", 100 - scale * (runs + conflicts)[slot], scale * conflicts[slot]),
            ],
        }
        for slot in sorted(runs | conflicts)
    ]
