"""Find the rows of the history that an operator means, and judge those that are open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import islice
from operator import attrgetter
from typing import Any

from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.history.queries import OPEN, reading
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
SHOWN = ["host", "pid", "name", "task", "task_id", "ref", "key"]
"""Columns of which an operator may type what they have."""
LISTED = 1000
"""Rows of a window, or with a code, that a list shows at most: more take too long."""
Window = tuple[datetime | None, datetime | None]
ALWAYS: Window = (None, None)


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
    history = TaskLockEvent.objects.newest()
    with reading(even_if_off=True):
        parts, complete = meant(history, selectors, what, (since, until), limit)
        rows = {row for part in parts for row in part[:limit]}
    newest = sorted(rows, key=attrgetter("happened_at", "pk"), reverse=True)[:limit]
    judge(newest)
    return newest, complete


def meant(
    rows: Any, selectors: Sequence[Selector], what: str, window: Window, limit: int
) -> tuple[list[Any], bool]:
    """Return parts of the rows; the newest of them are what :func:`find` would find among these."""
    if not selectors:
        return _parts(rows, what, window)
    found = [_find(rows, selector, what, window, limit) for selector in selectors]
    parts = [part for each, _complete in found for part in each]
    return parts, all(complete for _parts, complete in found)


def _find(
    rows: Any, selector: Selector, what: str, window: Window, limit: int
) -> tuple[list[Any], bool]:
    """Find rows by the indexes of names, tasks and ids; others among the newest rows."""
    if not selector.is_pattern:
        text = selector.text
        indexed = [rows.of_task(task) for task in selector.tasks]
        indexed.append(rows.named(selector.name))
        indexed += [rows.filter(task_id=text).newest(), rows.filter(ref=text).newest()]
        found = [_parts(each, what, window) for each in indexed]
        parts = [part for each, _complete in found for part in each]
        if rows.newest_of(parts, LISTED).exists():
            return parts, all(complete for _parts, complete in found)
    parts, complete = _parts(rows, what, window)
    pks: list[int] = []
    for part in parts:
        newest, all_seen = part.newest_of_them(SCANNED)
        if part.query.order_by[0] == "task":
            # Since a time, PostgreSQL would read the rows of all tasks, and keep those of this one.
            newest = part
        shown = newest.values_list("pk", *SHOWN)[:SCANNED]
        selected = (pk for pk, *texts in shown if _is_meant(selector, *texts))
        pks += islice(selected, limit)
        if not all_seen:
            complete = False
    return [TaskLockEvent.objects.filter(pk__in=pks).newest()], complete


def _is_meant(selector: Selector, host: str, pid: int, *texts: str) -> bool:
    return selector.fits(*texts, host, process(host, pid))


def _parts(rows: Any, what: str, window: Window) -> tuple[list[Any], bool]:
    """Return the parts of the rows that are meant, each the newest first; and whether it is all.

    No index serves the result of a run or call, so only the newest rows are looked at for it.
    """
    if not what:
        return _within(rows, window), True
    if what in COUNTED:
        return _within(rows.of_state(what).newest(), window), True
    if what in RESULTS:
        if what in OF_CALLS:
            rows = rows.of_state("conflict").newest()
        newest, *others = _within(rows, window)
        newest, complete = newest.newest_of_them(SCANNED)
        parts = [newest, *others[:-1]]  # the last one are open holds, which have no result
        ended_so = {"result": what, "outcome__in": ("", "released")}
        return [part.filter(**ended_so) for part in parts], complete
    codes = [what]
    if what == ANY_TROUBLE:
        codes = [*TROUBLE, RETAKEN]
    parts = [part for code in codes for part in _within(rows.of_trouble(code), window)]
    # An open hold can be held, dead or expired.
    [*_others, open_rows] = _within(rows.open(), window)
    judged = list(open_rows[:OPEN])
    judge(judged)
    pks = [row.pk for row in judged if row.state in codes]
    return [*parts, TaskLockEvent.objects.filter(pk__in=pks).newest()], len(judged) < OPEN


def _within(rows: Any, window: Window) -> list[Any]:
    """Return the parts of a window: all rows, if it has neither a begin nor an end."""
    if window == ALWAYS:
        return [rows]
    since, until = window
    if since is None:
        since = django_now() - timedelta(seconds=LONGEST)
    return list(rows.parts_within(since, until))


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
