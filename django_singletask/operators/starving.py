"""Find the locks that starve: their calls come to nothing again and again, and none completes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import chain

from django.utils.timezone import now as django_now

from django_singletask.history.queries import NEWEST, OPEN, ago, reading
from django_singletask.models import COUNTED, TaskLockEvent
from django_singletask.operators.names import Selector

HOUR = 3600.0
FEW = 20
"""Newest rows of a name that nearly always have its last completed run among them."""


@dataclasses.dataclass(frozen=True)
class Starving:
    """A lock whose calls find it held, or are stopped as duplicates, while none completes.

    ``conflicts`` counts these calls. Seconds before now: ``since_completed`` is the end of the last
    completed run (None: not within the newest rows of the name), ``unmet`` the first of these
    calls, ``last_conflict`` the last.
    """

    name: str
    task: str
    conflicts: int
    since_completed: float | None
    unmet: float
    last_conflict: float


# Who starves?
#
# A lock starves from the first call that found it held after its last completed run to the last
# such call, as long as no run completes and the calls go on. So a nightly task that meets itself
# once has not starved since yesterday. Nor does a task starve that met its lock once, or for hours,
# and is no longer called:
#
#   completed                    conflict conflict        conflict  now
#   ----|---------(no calls)--------|-------|----------------|-------|
#       since_completed ............................................
#                                   unmet ..........................
#                                   at least the limit ......|       |
#                                            last_conflict ..: at most the limit, or twice
#                                                              the usual time between two calls
#
# Looked at are the names with a conflict within the last hour and the limit, and those with one
# behind a hold that is still open: a busy site may have more new conflicts than are read. If the
# holder has completed since, the name is left out.


def starving(longer_than: float = HOUR, selectors: Collection[Selector] = ()) -> list[Starving]:
    """List the locks that starve, those first that have starved for longest.

    They have starved for ``longer_than`` seconds. Those that ``selectors`` name are looked at
    whenever they were called. Raises :class:`NoHistory`.
    """
    with reading():
        suspects = _suspects(longer_than)
        for each in selectors:
            of_tasks = chain(*(TaskLockEvent.objects.of_task(task)[:NEWEST] for task in each.tasks))
            suspects |= {each.name, *(row.name for row in of_tasks if row.is_counted)}
        found = (starvation(name, _since_completed(name), longer_than) for name in suspects)
        hungry = [*filter(None, found)]
    if selectors:
        hungry = [s for s in hungry if any(each.fits(s.name, s.task) for each in selectors)]
    return sorted(hungry, key=lambda state: (-state.unmet, state.name))


def starvation(
    name: str, newest: Sequence[TaskLockEvent], longer_than: float = HOUR
) -> Starving | None:
    """Say how a lock starves; None unless it has for so long, and is still called.

    ``newest`` are its rows, the newest first.
    """
    ended_at = next((row.ended_at for row in newest if row.is_completed), None)
    tokens = {row.token for row in newest if row.is_completed}
    # A message that met its own first run is no other call; a call that was stopped although the
    # one before it has begun (unique_until="expiry") is not meant to run.
    met = [row for row in newest if row.is_counted and row.reason not in {"redelivery", "kept"}]
    # A call that met a completed run came before the end of that run, whatever the clock of the
    # caller's host says.
    met = [row for row in met if row.blocked_by not in tokens]
    if ended_at:
        met = [row for row in met if row.end > ended_at]
    if not met:
        return None
    began_at = min(row.at for row in met)
    since_completed = None
    if ended_at:
        began_at = max(began_at, ended_at)
        since_completed = ago(ended_at)
    unmet = ago(began_at)
    last = ago(max(row.end for row in met))
    lasted = unmet - last
    count = sum(row.count for row in met)
    between_two = lasted / max(1, count - 1)
    if lasted < longer_than or last > max(longer_than, 2 * between_two):
        return None
    task = next((row.task for row in met if row.task), "")
    return Starving(name, task, count, since_completed, unmet, last)


def _since_completed(name: str) -> list[TaskLockEvent]:
    """Return the newest rows of a name, at least to its last completed run."""
    rows = TaskLockEvent.objects.named(name)
    newest = list(rows[:FEW])
    if len(newest) == FEW and not any(row.is_completed for row in newest):
        newest = list(rows[:NEWEST])
    return newest


def _suspects(longer_than: float) -> set[str]:
    """Return the names that may starve, without a query for each name."""
    rows = TaskLockEvent.objects.all()
    since = django_now() - timedelta(seconds=HOUR + longer_than)
    newest = [r for kind in COUNTED for r in rows.of_state(kind)[:NEWEST]]
    met = rows.blocked_by(rows.open().values_list("ref", flat=True)[:OPEN])
    met += [row for row in newest if row.end >= since]
    runs = rows.runs({row.blocked_by for row in met})
    completed = {row.token for row in runs if row.is_completed}
    return {row.name for row in met if row.blocked_by not in completed}
