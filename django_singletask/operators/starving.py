"""Find the locks that starve: their calls are skipped again and again, and none completes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from django.db import Error
from django.db.models import Max, Q
from django.utils.timezone import now as django_now

from django_singletask.history.queries import (
    DONE,
    NEWEST,
    ago,
    is_completed,
    last_rows,
    of_task,
    open_rows,
    rows,
    unreadable,
)
from django_singletask.history.writing import BATCH, COUNTED, SWEEPER, TROUBLE

if TYPE_CHECKING:
    from django_singletask.models import TaskLockEvent

__all__ = ["HOUR", "Starving", "starvation", "starving", "who_starves"]

FEW = 20
"""Rows of a name among which its last completed run is nearly always."""
SUSPECTS = 100
"""Names that are looked at, one query each, if none are asked for."""
NEAR = 20_000
"""Rows of all names among which the last completed runs of many are looked for at once."""
HOUR = 3600.0
RECENT = 24 * HOUR
"""Seconds: who has not been skipped for that long (and the time asked for) is not looked at."""


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
# The names are found in the newest skips, and in the skips against open holds and those that ended
# in trouble: a hold that lasts for days has one row of skips, as old as itself.


def starving(longer_than: float, *, times: int | None = None) -> list[Starving]:
    """List the locks whose calls come to nothing, the most patient first.

    Those whose calls came to nothing for ``longer_than`` seconds (``math.inf``: none), and those
    that were skipped ``times`` in a row (None: none). Who is not called any more is left out: by
    the usual time between two of its calls, or after a day and ``longer_than``. Raises
    :class:`NoHistory`.
    """
    return who_starves(longer_than, times=times)[0]


def who_starves(
    longer_than: float,
    *,
    times: int | None = None,
    names: Collection[str] = (),
    task: str | None = None,
) -> tuple[list[Starving], int]:
    """Do as :func:`starving`, and return how many other names there was no time to look at.

    Of ``names`` each is looked at, of a ``task`` those that are among its newest rows too.
    """
    window = RECENT + (0 if longer_than == math.inf else longer_than)
    try:
        suspects = list(names) or _suspects(django_now() - timedelta(seconds=window), task)
        looked_at = suspects if names else suspects[:SUSPECTS]
        states = [starvation(name, _since_completed(name)) for name in looked_at]
    except Error as error:
        raise unreadable(error) from error
    hungry = [
        state
        for state in states
        if state is not None
        and task in (None, state.task)
        and state.last_skip <= window
        and state.lasts(longer_than, times)
    ]
    return (
        sorted(hungry, key=lambda state: (-state.unmet, state.name)),
        len(suspects) - len(looked_at),
    )


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


def _suspects(since: datetime, task: str | None) -> list[str]:
    """Return names that were skipped since then, as far as is seen without a query for each."""
    skips = [skip for skip in _skips(since, task) if skip[1] >= since and skip[0] != SWEEPER]
    met_completed = _completed({token for _name, _at, token in skips if token})
    last: dict[str, datetime] = {}
    for name, at, token in skips:
        if token not in met_completed:
            last[name] = max(at, last.get(name, at))
    done = _last_completed(list(last))
    return [name for name, at in last.items() if name not in done or done[name] < at]


def _skips(since: datetime, task: str | None) -> Iterator[tuple[str, datetime, str]]:
    # The ones most likely to starve first: only so many are looked at.
    tokens = list(open_rows().values_list("token", flat=True))
    for kind in sorted(TROUBLE):
        ended = rows().filter(kind=kind).values_list("token", "at")[:NEWEST]
        tokens += [token for token, at in ended if at >= since]
    holders = list(dict.fromkeys(filter(None, tokens)))
    found = [
        rows().filter(blocked_by__in=holders[start : start + BATCH]).order_by()
        for start in range(0, len(holders), BATCH)
    ]
    found += [rows().filter(kind=kind)[:NEWEST] for kind in sorted(COUNTED, reverse=True)]
    if task is not None:
        found.append(of_task(rows(), task)[:NEWEST])
    for part in found:
        # The kind is looked at here: SQLite would rather read all that were skipped.
        for name, kind, whose, at, last_at, token in part.values_list(
            "name", "kind", "task", "at", "last_at", "blocked_by"
        ):
            if kind in COUNTED and task in (None, whose):
                yield name, last_at or at, token


def _completed(tokens: Collection[str]) -> set[str]:
    """Return the tokens of runs that were completed."""
    done: set[str] = set()
    whole = list(tokens)
    for start in range(0, len(whole), BATCH):
        found = rows().filter(token__in=whole[start : start + BATCH]).order_by()
        found = found.only("token", "kind", "outcome", "result")
        done.update(row.token for row in found if is_completed(row))
    return done


def _last_completed(names: Sequence[str]) -> dict[str, datetime]:
    """Return when names were last completed, of those that were among the newest rows."""
    newest = rows().values_list("id", flat=True).first() if names else None
    completed = Q(kind="acquired", outcome="released", result__in=DONE)
    done: dict[str, datetime] = {}
    for start in range(0, len(names), BATCH):
        found = rows().filter(name__in=names[start : start + BATCH], id__gt=(newest or 0) - NEAR)
        # Only the name and the id find the rows: SQLite would rather read all that returned.
        ended = found.order_by().values("name").annotate(ended=Max("ended_at", filter=completed))
        done.update((name, at) for name, at in ended.values_list("name", "ended") if at)
    return done
