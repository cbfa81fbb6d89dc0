"""Sum up the events of each task."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django_singletask.history.writing import TROUBLE
from django_singletask.operators.words import duration, hold_seconds, hold_time

if TYPE_CHECKING:
    from django_singletask.models import TaskLockEvent

__all__ = ["TaskFacts", "sum_up"]


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """What the runs of a task, or of a lock without one, have in common.

    ``field`` says which of the two it is, ``"task"`` or ``"name"``.
    """

    label: str
    field: str
    runs: int
    median: str
    longest: str
    lease: str
    of_lease: str
    skipped: int
    skip_rate: str
    trouble: int


def sum_up(events: Sequence[TaskLockEvent], now: datetime) -> list[TaskFacts]:
    """Sum up events by task."""
    groups: dict[str, list[TaskLockEvent]] = defaultdict(list)
    for event in events:
        groups[event.task or event.name].append(event)
    return [_facts(label, groups[label], now) for label in sorted(groups)]


def _facts(label: str, events: Sequence[TaskLockEvent], now: datetime) -> TaskFacts:
    runs = [event for event in events if event.kind == "acquired"]
    holds = [hold_seconds(run, now) for run in runs]
    skipped = sum(event.count for event in events if event.kind == "skipped")
    lease = max((run.timeout for run in runs), default=0.0)
    facts: dict[str, Any] = {"median": "-", "longest": "-", "of_lease": "", "skip_rate": "-"}
    if holds:
        facts["median"] = hold_time(statistics.median(holds))
        facts["longest"] = hold_time(max(holds))
        if lease and max(holds) >= lease / 10:
            facts["of_lease"] = f"{max(holds) / lease:.1f} ×"
    if holds or skipped:
        facts["skip_rate"] = f"{100 * skipped / (skipped + len(holds)):.0f} %"
    return TaskFacts(
        label=label,
        field="task" if events[0].task else "name",
        runs=len(runs),
        lease=duration(lease) if lease else "-",
        skipped=skipped,
        # A run that is cleared learns that its lock is lost; and one that is unique until it has
        # finished is cleared with its entry. All these rows have its token.
        trouble=len({event.token or event.pk for event in events if event.kind in TROUBLE}),
        **facts,
    )
