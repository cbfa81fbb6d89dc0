"""What the runs of each task have in common: ends, skips, and how long the lock was held."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, timedelta
from typing import Any

from django_singletask.history.queries import TaskLockEventQuerySet
from django_singletask.history.sums import middle, task_sums
from django_singletask.models import TaskLockEvent
from django_singletask.operators.windows import SPANS, Window, to_utc
from django_singletask.operators.words import clock_time, status

RANGES = {span: SPANS[span].label for span in ("24h", "7d")}
"""The spans of the timeline that can be summed up."""
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
    tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for total in sums:
        if total["kind"] in ("acquired", "skipped", "duplicate"):
            tasks[total["task"]].append(total)
    facts = [
        {"task": task, "bars": _bars(totals, window, step), **_facts(totals)}
        for task, totals in tasks.items()
    ]
    return facts, cut


def _facts(totals: list[dict[str, Any]]) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    holds: Counter[float] = Counter()
    longest = None
    for total in totals:
        kinds[total["kind"]] += total["number"]
        if total["kind"] == "acquired":
            ends[total["outcome"], total["result"]] += total["number"]
            if total["longest"] is not None:
                holds[total["bucket"]] += total["number"]
                longest = max(longest or 0.0, total["longest"])
    numbers = {"returned": 0, "raised": 0}
    others: Counter[str] = Counter()
    for (outcome, result), number in ends.items():
        state, word = status(TaskLockEvent(kind="acquired", outcome=outcome, result=result))
        of = numbers if state in numbers else others
        of[state if of is numbers else word] += number
    return {
        "runs": kinds["acquired"],
        **numbers,
        "other": others.total(),
        "others": sorted(others.items()),
        "skipped": kinds["skipped"],
        "duplicates": kinds["duplicate"],
        "p50": _percentile(holds, 0.5, longest),
        "p95": _percentile(holds, 0.95, longest),
        "longest": longest,
        "lease": max((t["lease"] for t in totals if t["kind"] == "acquired"), default=None),
    }


def _percentile(holds: Counter[float], share: float, longest: float | None) -> float | None:
    """Return the hold that this share of the holds do not exceed."""
    left = share * holds.total()
    for bucket in sorted(holds):
        left -= holds[bucket]
        if left <= 0:
            return min(middle(bucket), longest or 0.0)
    return None


def _bars(totals: list[dict[str, Any]], window: Window, step: timedelta) -> list[dict[str, Any]]:
    """Return bars of runs, and of skips on top of them: places and heights are in percent."""
    runs: Counter[int] = Counter()
    skips: Counter[int] = Counter()
    for total in totals:
        if total["kind"] != "duplicate":
            counter = runs if total["kind"] == "acquired" else skips
            counter[int(total["slot"])] += total["number"]
    scale = 100 / max((runs + skips).values(), default=1)
    return [
        {
            "at": clock_time(window.start + slot * step, dated=True),
            "runs": runs[slot],
            "skips": skips[slot],
            "x": window.percent(window.start + slot * step),
            "parts": [
                ("returned", 100 - scale * runs[slot], scale * runs[slot]),
                ("skipped", 100 - scale * (runs + skips)[slot], scale * skips[slot]),
            ],
        }
        for slot in sorted(runs | skips)
    ]
