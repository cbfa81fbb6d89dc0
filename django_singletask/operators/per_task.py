"""Sum up each task in a window of time, and in the window of the same length before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.utils.translation import gettext_lazy

from django_singletask.history.queries import OPEN, TaskLockEventQuerySet
from django_singletask.models import COMPLETED, COUNTED, TROUBLE
from django_singletask.operators import words
from django_singletask.operators.recorded import judge
from django_singletask.operators.windows import Window

NUMBERS = {
    "runs": gettext_lazy("Runs"),
    "failed": gettext_lazy("Raised"),
    "trouble": gettext_lazy("Dead or lost"),
    "conflicts": gettext_lazy("Conflicts"),
    "duplicates": gettext_lazy("Duplicates"),
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


@dataclasses.dataclass
class Figures:
    """What happened to the runs and calls of a task in one window. Durations are in seconds.

    A run or a call belongs to the window in which the last thing happened to it; a hold that goes
    on belongs to none. ``mean`` and ``longest`` are of the runs that reported their end.
    """

    runs: int = 0
    failed: int = 0
    trouble: int = 0
    conflicts: int = 0
    duplicates: int = 0
    waited: float = 0.0
    ends: int = 0
    lasted: float = 0.0
    longest: float = 0.0
    completed: datetime | None = None

    @property
    def mean(self) -> float:
        return self.lasted / max(1, self.ends)

    def add(self, total: dict[str, Any]) -> None:
        """Add a sum of rows; see ``TaskLockEventQuerySet.totals_by_task()``."""
        if total["kind"] in COUNTED:
            self.add_calls(total)
        elif total["outcome"]:
            self.add_runs(total)

    def add_calls(self, total: dict[str, Any]) -> None:
        self.waited += total["seconds_waited"]
        if total["kind"] == "conflict":
            self.conflicts += total["calls"]
        else:
            self.duplicates += total["calls"]

    def add_runs(self, total: dict[str, Any]) -> None:
        self.waited += total["seconds_waited"]
        self.runs += total["calls"]
        if total["result"] == "raised":
            self.failed += total["calls"]
        if total["outcome"] in TROUBLE:
            self.trouble += total["calls"]
        else:
            self.trouble += total["retaking_runs"]
        if total["ends"]:
            self.ends += total["ends"]
            self.lasted += total["lasted"].total_seconds()
            self.longest = max(self.longest, total["longest"].total_seconds())
        if total["outcome"] == "released" and total["result"] in COMPLETED:
            self.completed = max(filter(None, [self.completed, total["last_end"]]), default=None)


@dataclasses.dataclass
class TaskFigures:
    """A task in a window, and in the one before it; ``held`` counts its runs that go on now."""

    task: str
    now: Figures = dataclasses.field(default_factory=Figures)
    before: Figures = dataclasses.field(default_factory=Figures)
    held: int = 0

    @property
    def completed(self) -> datetime | None:
        if self.now.completed is None:
            return self.before.completed
        return self.now.completed

    def pairs(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield the columns that have two values, their words, and both values as texts."""
        for column, word in NUMBERS.items():
            yield column, word, getattr(self.now, column), getattr(self.before, column)
        for column, word in TIMES.items():
            now = seconds(getattr(self.now, column))
            yield column, word, now, seconds(getattr(self.before, column))

    def rank(self, column: str) -> tuple[Any, ...]:
        """Return what the tasks are sorted by: a column, and among equals the trouble."""
        figures: Any = self.now
        if column in ("task", "completed", "held"):
            figures = self
        value = getattr(figures, column)
        return value is not None, value, self.now.trouble, self.now.failed, self.now.runs


def seconds(number: float) -> str:
    if not number:
        return "-"
    return words.hold_time(number)


def per_task(rows: TaskLockEventQuerySet, window: Window, now: datetime) -> list[TaskFigures]:
    """Return the figures of each task with something in the two windows, or with a lock held now.

    The locks without a task are one task, "". An open hold whose process is dead, or whose lease
    has expired, is trouble of a window that lasts until now.
    """
    tasks: dict[str, TaskFigures] = {}
    before = window.before()
    for total in rows.totals_by_task(before.start, window.start, window.until):
        task = total["task"]
        both = tasks.setdefault(task, TaskFigures(task))
        if total["is_before"]:
            both.before.add(total)
        else:
            both.now.add(total)
    holds = [row for row in rows.open()[:OPEN] if row.is_hold]
    judge(holds)
    for hold in holds:
        both = tasks.setdefault(hold.task, TaskFigures(hold.task))
        if hold.state == "held":
            both.held += 1
        elif window.end == now:
            both.now.runs += 1
            both.now.trouble += 1
    return list(tasks.values())
