"""Sum up each task in a window of time, and in the window of the same length before it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.utils.translation import gettext_lazy

from django_singletask.conf import conf
from django_singletask.history.queries import OPEN, TaskLockEventQuerySet, timestamp
from django_singletask.models import COMPLETED
from django_singletask.operators.recorded import judge
from django_singletask.operators.windows import Window
from django_singletask.operators.words import hold_time

GONE = ["dead", "expired", "lost"]
"""Outcomes that count as dead or lost; nobody cleared these locks."""
NUMBERS = {
    "run": gettext_lazy("Runs"),
    "raised": gettext_lazy("Raised"),
    "trouble": gettext_lazy("Dead or lost"),
    "conflict": gettext_lazy("Conflicts"),
    "duplicate": gettext_lazy("Duplicates"),
}
TIMES = {
    "waited": gettext_lazy("Time waited"),
    "mean": gettext_lazy("Mean run"),
    "longest": gettext_lazy("Longest run"),
}
COLUMNS = {
    "task": gettext_lazy("Task"),
    **NUMBERS,
    **TIMES,
    "completed": gettext_lazy("Last completed"),
    "held": gettext_lazy("Held now"),
}
Figures = defaultdict[str, Any]
"""Numbers and seconds of a task by their columns, and by each result of its runs and calls."""


def new_figures() -> Figures:
    return defaultdict(int)


@dataclasses.dataclass
class TaskFigures:
    """What happened to a task in a window, and in the one ``before`` it.

    ``now`` also has the name of the task, the time of its last completed run in both windows, and
    how many of its holds go on.
    """

    now: Figures = dataclasses.field(default_factory=new_figures)
    before: Figures = dataclasses.field(default_factory=new_figures)

    def add(self, total: dict[str, Any]) -> None:
        """Add a sum of rows; see ``TaskLockEventQuerySet.totals_by_task()``."""
        if total["kind"] == "run" and not total["outcome"]:
            return  # a run that goes on counts in no window
        figures = self.now
        if total["is_before"]:
            figures = self.before
        figures[total["kind"]] += total["calls"]
        figures[total["result"]] += total["calls"]
        figures["waited"] += total["seconds_waited"]
        if total["outcome"] in GONE:
            figures["trouble"] += total["calls"]
        if conf.history_keeps == "trouble":
            return  # how long runs take, and when the last one completed, is not known
        if total["ends"]:
            figures["ends"] += total["ends"]
            # The clocks of two hosts differ: an end can lie before the begin.
            figures["lasted"] += max(0.0, total["lasted"].total_seconds())
            figures["mean"] = figures["lasted"] / figures["ends"]
            figures["longest"] = max(figures["longest"], total["longest"].total_seconds())
        if total["outcome"] == "released" and total["result"] in COMPLETED:
            ended_at = timestamp(total["last_end"])
            self.now["completed"] = max(self.now["completed"], ended_at)

    def add_open(self, state: str, is_current: bool) -> None:
        """Add a hold that goes on; if its holder is gone, it is trouble of a current window."""
        if state == "held":
            self.now["held"] += 1
        elif is_current:
            self.now["run"] += 1
            self.now["trouble"] += 1

    def pairs(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield the columns of which both windows have a value: code, word, and both values."""
        for column, word in NUMBERS.items():
            yield column, word, self.now[column], self.before[column]
        for column, word in TIMES.items():
            yield column, word, in_words(self.now[column]), in_words(self.before[column])


def in_words(seconds: float) -> str:
    if not seconds:
        return "-"
    return hold_time(seconds)


def per_task(rows: TaskLockEventQuerySet, window: Window, now: datetime) -> list[TaskFigures]:
    """Return the figures of each task that was active in the window or in the one before it.

    A task that holds a lock now is among them. The locks without a task are one task, "".
    """
    tasks: defaultdict[str, TaskFigures] = defaultdict(TaskFigures)
    start_before = window.before().start
    for total in rows.totals_by_task(start_before, window.start, window.until):
        tasks[total["task"]].add(total)
    holds = [row for row in rows.open()[:OPEN] if row.is_hold]
    judge(holds)
    is_current = window.end == now
    for hold in holds:
        tasks[hold.task].add_open(hold.state, is_current)
    for task, figures in tasks.items():
        figures.now["task"] = task
    return list(tasks.values())
