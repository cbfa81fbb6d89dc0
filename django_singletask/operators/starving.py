"""Find the locks that starve: their calls come to nothing again and again, and none completes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.history.queries import NEWEST, OPEN, ago, need_begins, reading
from django_singletask.models import COUNTED, TaskLockEvent
from django_singletask.operators.names import Selector

HOUR = 3600.0
OTHER_REASONS = {
    "redelivery",  # a message came twice and met its own first run: there is no other call
    "retry",  # it met its own earlier try
    "kept",  # with unique_until="expiry", the call was stopped by one that has begun, as is meant
}
"""Reasons of calls that came to nothing although their lock does not starve."""
FEW = 20
"""Newest rows of a name that nearly always have its last completed run among them."""


@dataclasses.dataclass(frozen=True)
class Starving:
    """A lock whose calls find it held, or are stopped as duplicates, while none completes.

    ``conflicts`` counts these calls. The other numbers are seconds before now: ``unmet`` is the
    first of these calls, ``last_conflict`` the last one, and ``since_completed`` the end of the
    last completed run. It is None if the newest rows of the name have no such run.
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


def starving(longer_than: float = HOUR, selectors: Collection[Selector] = ()) -> list[Starving]:
    """List the locks that have starved for ``longer_than`` seconds, the longest first.

    With ``selectors``, list only the locks that one of them selects, also those whose last call is
    long ago. Raises :class:`NoHistory`.
    """
    need_begins()
    with reading():
        names = _suspects(longer_than)
        for selector in selectors:
            names.add(selector.name)
            for task in selector.tasks:
                rows = TaskLockEvent.objects.of_task(task)[:NEWEST]
                names.update(row.name for row in rows if row.is_counted)
        found = [starvation(name, _since_completed(name), longer_than) for name in names]
    hungry = [state for state in found if state is not None]
    if selectors:
        hungry = [s for s in hungry if any(each.fits(s.name, s.task) for each in selectors)]
    return sorted(hungry, key=lambda state: (-state.unmet, state.name))


def starvation(
    name: str, newest: Sequence[TaskLockEvent], longer_than: float = HOUR
) -> Starving | None:
    """Return how a lock starves, or None if it does not.

    A lock starves if its calls have come to nothing for ``longer_than`` seconds, and calls still
    come. ``newest`` are the rows of its name, the newest first.
    """
    completed = [row for row in newest if row.is_completed]
    ended_at = None
    if completed:
        ended_at = completed[0].ended_at
    calls = _unmet_calls(newest, completed, ended_at)
    if not calls:
        return None

    # The lock starves since the first of these calls, but not since before its last completed run.
    began_at = min(row.at for row in calls)
    since_completed = None
    if ended_at:
        began_at = max(began_at, ended_at)
        since_completed = ago(ended_at)
    since_first = ago(began_at)
    since_last = ago(max(row.end for row in calls))
    conflicts = sum(row.count for row in calls)

    # The first rule: the calls have come to nothing for long enough.
    span = since_first - since_last
    if span < longer_than:
        return None

    # The second rule: calls still come. Of a lock that is called once a day, the last call can be
    # older than the limit. It is no longer called if the last call is two days old.
    usual_pause = span / max(1, conflicts - 1)
    if since_last > max(longer_than, 2 * usual_pause):
        return None

    task = next((row.task for row in calls if row.task), "")
    return Starving(name, task, conflicts, since_completed, since_first, since_last)


def _unmet_calls(
    newest: Sequence[TaskLockEvent], completed: Sequence[TaskLockEvent], ended_at: datetime | None
) -> list[TaskLockEvent]:
    """Return the rows of calls that came to nothing, and after which no run has completed."""
    calls = [row for row in newest if row.is_counted and row.reason not in OTHER_REASONS]
    # A call that was blocked by a run which has completed came before the end of that run, even if
    # the clocks of the two hosts say otherwise.
    tokens = {row.token for row in completed}
    calls = [row for row in calls if row.blocked_by not in tokens]
    if conf.history_keeps == "trouble":
        # A run that has completed has no row, so only a run that still holds the lock is known not
        # to have completed.
        open_tokens = {row.ref for row in newest if not row.outcome}
        calls = [row for row in calls if row.blocked_by in open_tokens]
    if ended_at:
        calls = [row for row in calls if row.end > ended_at]
    return calls


def _since_completed(name: str) -> list[TaskLockEvent]:
    """Return the newest rows of a name, at least to its last completed run."""
    rows = TaskLockEvent.objects.named(name)
    newest = list(rows[:FEW])
    if len(newest) == FEW and not any(row.is_completed for row in newest):
        newest = list(rows[:NEWEST])
    return newest


def _suspects(longer_than: float) -> set[str]:
    """Return the names of locks that may starve, without a query for each name."""
    rows = TaskLockEvent.objects.all()
    # Calls that met a hold that is still open. Only the hold leads to them if a busy site has more
    # newer conflicts than are read.
    open_tokens = rows.open().values_list("ref", flat=True)[:OPEN]
    calls = rows.calls_blocked_by(open_tokens)
    # Recent calls, whatever they met. An hour is added for short limits: a lock that is called less
    # often than that can starve, too.
    since = django_now() - timedelta(seconds=longer_than + HOUR)
    for kind in COUNTED:
        newest = rows.of_state(kind)[:NEWEST]
        calls += [row for row in newest if row.end >= since]
    # Not the calls that met a run which has completed since.
    blockers = rows.runs(row.blocked_by for row in calls)
    completed = {run.token for run in blockers if run.is_completed}
    return {row.name for row in calls if row.blocked_by not in completed}
