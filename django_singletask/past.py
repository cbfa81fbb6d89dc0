"""Ask the history about one lock: how long it is held, when it was completed, who starves.

Every question reads at most so many of the newest rows, by an index whose order is that of the
ids: with ten million rows an answer takes as long as with ten thousand.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import Error
from django.utils.timezone import get_default_timezone, is_naive, make_aware
from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.history import COUNTED, SWEEPER, only_open

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from django_singletask.models import TaskLockEvent

__all__ = ["NoHistory", "Starving", "UsualHold", "find", "starving", "usual_hold"]

RUNS = 100
"""Runs whose length counts as usual."""
NEWEST = 1000
"""Rows of a task or of a name that are looked at."""
FEW = 20
"""Rows of a name among which its last completed run is nearly always."""
SUSPECTS = 50
"""Names that are looked at, one query each."""
OPEN = 5000
"""Open rows that are looked at: holds that go on, or of which nobody knows the end."""
ENOUGH = 5
"""Runs that say what is usual: fewer make none slow."""
HOUR = 3600.0
RECENT = 24 * HOUR
"""Seconds: who has not been skipped for that long (and the time asked for) is not looked at."""
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


@dataclasses.dataclass(frozen=True)
class Starving:
    """A lock whose calls are skipped, or found to be duplicates, and of which none completes.

    ``skipped`` counts them since the last completed run; ``since_completed`` is how many seconds
    ago that was (None: not within the last rows of the name), ``unmet`` how long ago the first of
    these calls was made, ``last_skip`` the last.
    """

    name: str
    task: str
    skipped: int
    since_completed: float | None
    unmet: float
    last_skip: float

    def lasts(self, longer_than: float, times: int | None = None) -> bool:
        """Say whether it goes on for so long, or for so many calls, and is still called."""
        lasted = self.unmet - self.last_skip
        patience = HOUR if longer_than == math.inf else longer_than
        between = lasted / max(1, self.skipped - 1)
        return (lasted >= longer_than or (times is not None and self.skipped >= times)) and (
            self.last_skip <= max(patience, 2 * between)
        )


def rows() -> QuerySet[TaskLockEvent]:
    """Return the rows of the history; raises :class:`NoHistory` if it is off."""
    if conf.history == "off":
        raise NoHistory("SINGLETASK_HISTORY = 'off': nothing is known of what was.")
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

    Only runs that gave it back themselves count. None if there are none or no history.
    """
    try:
        newest = of_task(rows(), task) if task else rows().filter(name=name)
        fields = newest.values_list("kind", "outcome", "at", "ended_at")[:NEWEST]
        holds = [
            max(0.0, (ended_at - at).total_seconds())
            for kind, outcome, at, ended_at in fields
            if (kind, outcome) == ("acquired", "released") and ended_at is not None
        ][:RUNS]
    except (NoHistory, Error):
        return None
    return UsualHold(statistics.median(holds), max(holds), len(holds)) if holds else None


def find(
    *,
    names: Sequence[str] | None = None,
    task: str | None = None,
    kind: str | None = None,
    outcome: str | None = None,
    since: float | None = None,
    limit: int = 50,
) -> list[TaskLockEvent]:
    """Return the newest rows that fit, the newest first; ``since`` is in seconds before now.

    Of no name at all (``()``) there is none. Raises :class:`NoHistory`.
    """
    found = rows() if task is None else of_task(rows(), task)
    if names is not None:
        found = found.filter(name__in=set(names))
    for field, value in (("kind", kind), ("outcome", outcome)):
        if value is not None:
            found = found.filter(**{field: value})
    if since is not None:
        found = found.filter(at__gte=django_now() - timedelta(seconds=since))
    try:
        return list(found[:limit])
    except Error as error:
        raise unreadable(error) from error


def names_of(key: str) -> list[str]:
    """Return the name that belongs to a key, from the newest rows of its task.

    No index holds the keys, but a key begins with the task, or with the name of the lock. Raises
    :class:`NoHistory`.
    """
    slug = key.rpartition(":")[0].removeprefix("singletask:").removeprefix("@queued:")
    try:
        for found in (of_task(rows(), slug), rows().filter(name=slug)):
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


# Who starves?
#
# A lock starves from the first call that was skipped after its last completed run to the last, for
# as long as no run completes and the calls go on. So a nightly task that meets itself once does not
# starve since yesterday, nor one that was skipped once, or for hours, and is not called any more:
#
#   completed                    skipped skipped          skipped   now
#   ----|---------(no calls)--------|-------|----------------|-------|
#       since_completed ............................................
#                                   unmet ..........................
#                                   at least the limit ......|       |
#                                            last_skip ..............: the limit, or twice the usual
#                                                            time between two calls, at most
#
# The names are found in the newest skips and troubles, and in the skips against open holds: a
# hold that lasts for days has one row of skips, as old as itself.


def starving(longer_than: float, *, times: int | None = None) -> list[Starving]:
    """List the locks whose calls come to nothing, the most patient first.

    Those whose calls came to nothing for ``longer_than`` seconds (``math.inf``: none), and those
    that were skipped ``times`` in a row (None: none). Who is not called any more is left out: by
    the usual time between two of its calls, or after a day and ``longer_than``. Raises
    :class:`NoHistory`.
    """
    window = RECENT + (0 if longer_than == math.inf else longer_than)
    try:
        suspects = _suspects(django_now() - timedelta(seconds=window))
        states = [starvation(name, _since_completed(name)) for name in suspects]
    except Error as error:
        raise unreadable(error) from error
    hungry = [
        state
        for state in states
        if state is not None and state.last_skip <= window and state.lasts(longer_than, times)
    ]
    return sorted(hungry, key=lambda state: (-state.unmet, state.name))


def starvation(name: str, newest: Sequence[TaskLockEvent]) -> Starving | None:
    """Say how a lock has fared since its last completed run; None if no call was skipped since.

    ``newest`` are its rows, the newest first.
    """
    completed = next((row for row in newest if is_completed(row)), None)
    ended_at = completed.ended_at if completed is not None else None
    # A call that met such a run came before its end, whatever the clock of its own host says.
    done = {row.token for row in newest if row.token and is_completed(row)}
    skips = [
        row
        for row in newest
        if row.kind in COUNTED
        # A message that met its own first run is no other call.
        and row.reason != "redelivery"
        and row.blocked_by not in done
        and (ended_at is None or (row.last_at or row.at) > ended_at)
    ]
    if not skips:
        return None
    first = min(max(row.at, ended_at) if ended_at else row.at for row in skips)
    return Starving(
        name=name,
        task=next((row.task for row in skips if row.task), ""),
        skipped=sum(row.count for row in skips),
        since_completed=None if ended_at is None else ago(ended_at),
        unmet=ago(first),
        last_skip=ago(max(row.last_at or row.at for row in skips)),
    )


def _since_completed(name: str) -> list[TaskLockEvent]:
    """Return the newest rows of a name, at least to its last completed run."""
    newest = last_rows(name, FEW)
    if len(newest) == FEW and not any(map(is_completed, newest)):
        newest = last_rows(name)
    return newest


def _suspects(since: datetime) -> list[str]:
    """Return names that were skipped since then, as far as is seen without a query for each."""
    last: dict[str, datetime] = {}
    for name, at in _skips():
        last[name] = max(at, last.get(name, at))
    done = rows().filter(kind="acquired").values_list("name", "outcome", "result", "ended_at")
    for name, outcome, result, ended_at in done[:NEWEST]:
        if outcome == "released" and result in DONE and name in last and ended_at >= last[name]:
            del last[name]
    last.pop(SWEEPER, None)
    return [name for name, at in last.items() if at >= since][:SUSPECTS]


def _skips() -> Iterator[tuple[str, datetime]]:
    # The ones most likely to starve first: only so many are looked at.
    tokens = [token for token in open_rows().values_list("token", flat=True) if token]
    for start in range(0, len(tokens), 500):
        part = tokens[start : start + 500]
        # The kind is looked at there: SQLite would rather read all that were skipped.
        yield from _times(rows().filter(blocked_by__in=part).order_by(), COUNTED)
    for kind in ("expired", "lost", "cleared", *sorted(COUNTED)):
        yield from _times(rows().filter(kind=kind)[:NEWEST], {kind})


def _times(found: Any, kinds: Collection[str]) -> list[tuple[str, datetime]]:
    return [
        (name, last_at or at)
        for name, at, last_at, kind in found.values_list("name", "at", "last_at", "kind")
        if kind in kinds
    ]


def open_rows() -> QuerySet[TaskLockEvent]:
    """Return the rows of holds that have not ended, as far as is known.

    Ordered by the key: that is the order of the index that holds only these. Any other order lets
    PostgreSQL read the whole table, since it takes "acquired" and "no outcome" for independent.
    """
    first: QuerySet[TaskLockEvent] = only_open(rows())[:OPEN]
    return first
