"""Find the rows of the history that an operator means, and judge those that are open."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.history.queries import FREQUENT, OPEN, reading
from django_singletask.holder import Holder
from django_singletask.locks.liveness import proof_of_death
from django_singletask.log import logger
from django_singletask.models import (
    COUNTED,
    OF_CALLS,
    RESULTS,
    RETAKEN,
    TROUBLE,
    TaskLockEvent,
    is_over,
)
from django_singletask.operators.names import Selector
from django_singletask.operators.words import ANY_TROUBLE, LONGEST, process
from django_singletask.stores import get_store

SCANNED = 20_000
"""Newest rows, at most, among which those are looked for that no index serves."""
Window = tuple[datetime | None, datetime | None]
ALWAYS: Window = (None, None)
Found = tuple[list[TaskLockEvent], bool]


def find(
    selectors: Sequence[Selector] = (),
    *,
    limit: int = 50,
    what: str = "",
    since: datetime | None = None,
    until: datetime | None = None,
) -> tuple[list[TaskLockEvent], bool]:
    """Return the newest rows that a window of time has, and that one of the selectors means.

    Without selectors, all rows are meant. ``what`` is a key of ``WORDS``. The second value is False
    if older rows may be meant that nobody looked at. Old rows are found with the history off, too.
    Raises :class:`NoHistory`.
    """
    window = (since, until)
    with reading(even_if_off=True):
        if selectors:
            parts = [_find(selector, what, window, limit) for selector in selectors]
        else:
            parts = [_read(TaskLockEvent.objects.newest(), what, window, limit)]
    rows = {row for part, _complete in parts for row in part}
    newest = sorted(rows, key=attrgetter("happened_at", "pk"), reverse=True)[:limit]
    judge(newest)
    return newest, all(complete for _part, complete in parts)


def _find(selector: Selector, what: str, window: Window, limit: int) -> Found:
    """Find rows by the indexes of names, tasks and ids; others among the newest rows."""
    history = TaskLockEvent.objects
    if not selector.is_pattern:
        text = selector.text
        indexed = [history.of_task(task) for task in selector.tasks]
        indexed.append(history.named(selector.name))
        indexed += [history.filter(task_id=text).newest(), history.filter(ref=text).newest()]
        parts = [_read(rows, what, window, limit) for rows in indexed]
        found = [row for part, _complete in parts for row in part]
        if found:
            return found, all(complete for _part, complete in parts)
    scanned, complete = _scan(history.newest(), *window)
    facts = scanned.values_list("pk", "name", "task", "task_id", "ref", "key", "host", "pid")
    pks = []
    for pk, *texts, host, pid in facts:
        if selector.fits(*texts, host, process(host, pid)):
            pks.append(pk)
    found, all_seen = _read(history.filter(pk__in=pks).newest(), what, ALWAYS, limit)
    return found, complete and all_seen


def _read(rows: Any, what: str, window: Window, limit: int) -> Found:
    rows, complete = of_what(rows, what, *window)
    return list(rows[:limit]), complete


def of_what(
    rows: Any, what: str, since: datetime | None = None, until: datetime | None = None
) -> tuple[Any, bool]:
    """Keep the rows that a window has, with this code of ``WORDS``; the newest, if they are many.

    The second value is False if not all rows were looked at: no index serves the result of a run or
    call, so only the newest rows are looked at for it.
    """
    if not what:
        return _in_window(rows, since, until), True
    if what in RESULTS:
        if what in OF_CALLS:
            rows = rows.of_state("conflict")
        rows, complete = _scan(rows, since, until)
        return rows.filter(result=what, outcome__in=("", "released")), complete
    if what in COUNTED:
        return _in_window(rows.of_state(what).newest(), since, until), True
    codes = [what]
    if what == ANY_TROUBLE:
        codes = [*TROUBLE, RETAKEN]
    return _of_runs(rows, codes, since, until)


def _of_runs(
    rows: Any, codes: Collection[str], since: datetime | None, until: datetime | None
) -> tuple[Any, bool]:
    """Keep the runs whose hold ended in one of these ways; an open hold may have, too."""
    open_rows = _in_window(rows.open(), since, until)[:OPEN]
    judge(open_rows)
    pks = [row.pk for row in open_rows if row.state in codes]
    for code in codes:
        ended = _in_window(rows.of_trouble(code), since, until)
        pks += ended.values_list("pk", flat=True)[:FREQUENT]
    return TaskLockEvent.objects.filter(pk__in=pks).newest(), len(open_rows) < OPEN


def _in_window(
    rows: Any, since: datetime | None, until: datetime | None, limit: int = FREQUENT
) -> Any:
    if since is None:
        if until is None:
            return rows
        since = django_now() - timedelta(seconds=LONGEST)
    return rows.within(since, until, limit)


def _scan(rows: Any, since: datetime | None, until: datetime | None) -> tuple[Any, bool]:
    """Return the newest rows, and whether a window has no others."""
    scanned: tuple[Any, bool] = _in_window(rows, since, until, SCANNED + 1).newest_of_them(SCANNED)
    return scanned


def judge(rows: Iterable[TaskLockEvent]) -> None:
    """Set the state of open holds of the history, which the store knows."""
    rows = [row for row in rows if row.kind == "run" and not row.outcome]
    if not rows:
        return
    try:
        entries = get_store(conf.cache).read_many([row.key for row in rows])
    except Exception as error:  # each cache client has errors of its own
        logger.warning("The states of open holds are not known: %s", error)
        return
    states = {}
    for entry in entries.values():
        holder = Holder.decode(entry.value)
        states[holder.token] = "held"
        if proof_of_death(holder):
            states[holder.token] = "dead"
    for row in rows:
        if row.token in states:
            row.state = states[row.token]
        elif is_over(row):
            row.state = "expired"
