"""Ask the history: how long a lock is held, what happened to it, what is open.

Every question reads at most so many of the newest rows, by an index whose order is that of the
ids: with ten million rows an answer takes as long as with ten thousand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from django.db import Error
from django.utils.timezone import get_default_timezone, is_naive, make_aware
from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.history.writing import only_open

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_singletask.models import TaskLockEvent

__all__ = [
    "NoHistory",
    "UsualHold",
    "find",
    "usual_hold",
]

RUNS = 100
"""Runs whose length counts as usual."""
NEWEST = 1000
"""Rows of a task or of a name that are looked at."""
OPEN = 5000
"""Open rows that are looked at: holds that go on, or of which nobody knows the end."""
ENOUGH = 5
"""Runs that say what is usual: fewer make none slow."""
DONE = ("returned", "raised")


class NoHistory(Exception):
    """The history is off, or cannot be read."""


class UsualHold(NamedTuple):
    """How long the last runs had their lock: seconds, and the number of runs that says so."""

    median: float
    longest: float
    runs: int

    def is_exceeded_by(self, held_for: float) -> bool:
        """Say whether a hold is slow, as far as these runs are enough to tell."""
        # What is shorter than a second reads as 0s, and is not worth a look.
        return self.runs >= ENOUGH and held_for > max(self.longest, 1)


def rows() -> QuerySet[TaskLockEvent]:
    """Return the rows of the history; raises :class:`NoHistory` if it is off."""
    if conf.history == "off":
        raise NoHistory("SINGLETASK_HISTORY = 'off': nothing is known of what was.")
    return stored()


def stored() -> QuerySet[TaskLockEvent]:
    """Return the rows of the history, those too that were written before it was switched off."""
    from django_singletask.models import TaskLockEvent

    found: QuerySet[TaskLockEvent] = TaskLockEvent.objects.order_by("-id")
    return found


def unreadable(error: Error) -> NoHistory:
    """Return the error that says why the history cannot be read."""
    reason = str(error).partition("\n")[0]
    return NoHistory(f"The history cannot be read: {reason}. Has 'manage.py migrate' run?")


def last_rows(name: str, limit: int = NEWEST) -> list[TaskLockEvent]:
    """Return the newest rows of a name, the newest first; raises :class:`NoHistory`."""
    try:
        return list(rows().filter(name=name)[:limit])
    except Error as error:
        raise unreadable(error) from error


def usual_hold(name: str, task: str = "") -> UsualHold | None:
    """Say how long the last hundred runs of a task had their lock, or those of a name without one.

    Only runs that returned count: one that hung until it was stopped has raised, and the next to
    hang would not be slow beside it. None if there are none or no history.
    """
    try:
        newest = of_task(rows(), task) if task else rows().filter(name=name)
        fields = newest.values_list("outcome", "result", "at", "ended_at")[:NEWEST]
        holds = [
            max(0.0, (ended_at - at).total_seconds())
            for outcome, result, at, ended_at in fields
            if (outcome, result) == ("released", "returned") and ended_at is not None
        ][:RUNS]
    except (NoHistory, Error):
        return None
    return UsualHold(statistics.median(holds), max(holds), len(holds)) if holds else None


def find(
    *,
    names: Sequence[str] | None = None,
    task_ids: Sequence[str] | None = None,
    task: str | None = None,
    kind: str | None = None,
    outcome: str | None = None,
    since: float | None = None,
    limit: int = 50,
) -> list[TaskLockEvent]:
    """Return the newest rows that fit, the newest first; ``since`` is in seconds before now.

    Of no name at all (``()``) there is none. Old rows are found with the history off, too. Raises
    :class:`NoHistory` if it cannot be read.
    """
    found = stored() if task is None else of_task(stored(), task)
    for field, among in (("name", names), ("task_id", task_ids)):
        if among is not None:
            found = found.filter(**{f"{field}__in": set(among)})
    for field, value in (("kind", kind), ("outcome", outcome)):
        if value is not None:
            found = found.filter(**{field: value})
    if since is not None:
        found = found.filter(at__gte=django_now() - timedelta(seconds=since))
    try:
        return list(found[:limit])
    except Error as error:
        raise unreadable(error) from error


def names_of_key(key: str) -> list[str]:
    """Return the name that belongs to a key, from the newest rows of its task.

    No index holds the keys, but a key begins with the task, or with the name of the lock. Raises
    :class:`NoHistory`.
    """
    slug = key.rpartition(":")[0].removeprefix("singletask:").removeprefix("@queued:")
    try:
        for found in (of_task(stored(), slug), stored().filter(name=slug)):
            for name, other in found.values_list("name", "key")[:NEWEST]:
                if other == key:
                    return [name]
    except Error as error:
        raise unreadable(error) from error
    return []


def of_task(rows: QuerySet[TaskLockEvent], task: str) -> QuerySet[TaskLockEvent]:
    """Return those of a task among these rows, the newest first, in the order of its index alone.

    For ``task = …`` PostgreSQL may go back through the ids instead, and does not know that a task
    which made many rows made none of the last millions.
    """
    found = rows.filter(task__gte=task, task__lte=task)
    ordered: QuerySet[TaskLockEvent] = found.order_by("task", "-id")
    return ordered


def is_completed(row: TaskLockEvent) -> bool:
    """Say whether a run had the lock and came to its end, be that an error of its own."""
    return row.kind == "acquired" and row.outcome == "released" and row.result in DONE


def ago(at: datetime | None) -> float:
    """Return how many seconds ago a time of the history was, by the clock of this host."""
    return 0.0 if at is None else max(0.0, time.time() - timestamp(at))


def timestamp(at: datetime) -> float:
    """Return the Unix time of a time of the history, which is naive without ``USE_TZ``."""
    return (make_aware(at, get_default_timezone()) if is_naive(at) else at).timestamp()


def open_rows() -> QuerySet[TaskLockEvent]:
    """Return the rows of holds that have not ended, as far as is known.

    Ordered by the key: that is the order of the index that holds only these. Any other order lets
    PostgreSQL read the whole table, since it takes "acquired" and "no outcome" for independent.
    """
    first: QuerySet[TaskLockEvent] = only_open(rows())[:OPEN]
    return first
