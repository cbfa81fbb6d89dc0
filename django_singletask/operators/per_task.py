"""What the runs of each task have in common: ends, skips, and how long the lock was held."""

from __future__ import annotations

import dataclasses
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from django_singletask.history.queries import TaskLockEventQuerySet
from django_singletask.history.sums import middle, sums_since
from django_singletask.models import TaskLockEvent
from django_singletask.operators.timeline import SPANS
from django_singletask.operators.words import clock_time, status

__all__ = ["STEPS", "TaskFacts", "per_task"]

STEPS = {"24h": timedelta(hours=1), "7d": timedelta(hours=6)}
"""The spans of the timeline that can be summed up, and what one bar of a chart stands for."""


@dataclasses.dataclass
class TaskFacts:
    """The sums of a task, or of all locks without a task; ``p50`` … ``lease`` are in seconds."""

    task: str
    runs: int = 0
    returned: int = 0
    raised: int = 0
    skipped: int = 0
    duplicates: int = 0
    longest: float = -1
    lease: float = 0
    others: Counter[str] = dataclasses.field(default_factory=Counter)
    buckets: Counter[float] = dataclasses.field(default_factory=Counter)
    runs_in: Counter[int] = dataclasses.field(default_factory=Counter)
    skips_in: Counter[int] = dataclasses.field(default_factory=Counter)

    def add(self, total: dict[str, Any]) -> None:
        kind, number, slot = total["kind"], total["number"], int(total["slot"])
        if kind == "duplicate":
            self.duplicates += number
        elif kind == "skipped":
            self.skipped += number
            self.skips_in[slot] += number
        elif kind == "acquired":
            self.runs += number
            self.runs_in[slot] += number
            self.lease = max(self.lease, total["lease"])
            if total["longest"] is not None:
                self.longest = max(self.longest, total["longest"])
                self.buckets[total["bucket"]] += number
            facts = {field: total[field] for field in ("kind", "outcome", "result")}
            state, word = status(TaskLockEvent(**facts))
            if state in ("returned", "raised"):
                setattr(self, state, getattr(self, state) + number)
            else:
                self.others[word] += number

    @property
    def other(self) -> int:
        return self.others.total()

    @property
    def p50(self) -> float:
        return self.percentile(0.5)

    @property
    def p95(self) -> float:
        return self.percentile(0.95)

    def percentile(self, share: float) -> float:
        """Return the hold that this share of the holds do not exceed, or -1 without holds."""
        left = share * self.buckets.total()
        for bucket in sorted(self.buckets):
            left -= self.buckets[bucket]
            if left <= 0:
                return min(middle(bucket), self.longest)
        return -1

    def bars(self, start: datetime, step: timedelta, slots: int) -> list[dict[str, Any]]:
        """Return what draws a chart of the runs, and above them the skips, in a square of 100 %."""
        highest = max((self.runs_in + self.skips_in).values(), default=1)
        return [
            {
                "at": clock_time(start + slot * step, dated=True),
                "runs": self.runs_in[slot],
                "skips": self.skips_in[slot],
                "x": f"{100 * slot / slots:.2f}%",
                "run_height": f"{100 * self.runs_in[slot] / highest:.2f}%",
                "run_y": f"{100 - 100 * self.runs_in[slot] / highest:.2f}%",
                "skip_height": f"{100 * self.skips_in[slot] / highest:.2f}%",
                "skip_y": f"{100 - 100 * (self.runs_in + self.skips_in)[slot] / highest:.2f}%",
            }
            for slot in sorted(self.runs_in | self.skips_in)
        ]


def per_task(
    rows: TaskLockEventQuerySet, span: str, *, now: datetime
) -> tuple[list[TaskFacts], datetime, datetime | None]:
    """Return the facts of each task, the round time they begin at, and a later one if cut there."""
    step = STEPS[span]
    local = timezone.localtime(now) if timezone.is_aware(now) else now
    midnight = local.replace(hour=0, minute=0, second=0, microsecond=0)
    start = midnight + step * ((local - midnight) // step + 1) - SPANS[span].length
    sums, cut = sums_since(rows, start, step)
    tasks: dict[str, TaskFacts] = {}
    for total in sums:
        tasks.setdefault(total["task"], TaskFacts(total["task"])).add(total)
    return list(tasks.values()), start, cut
