"""Find the rows of the history that an operator means, and judge those that are open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.history.queries import OPEN, newest_first, reading
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
"""The maximum number of newest rows that are looked through where no index serves."""
SHOWN = ["name", "task", "task_id", "ref", "key", "host", "pid"]
"""Columns whose content an operator may type."""
LISTED = 1000
"""The maximum number of rows of a window, or with a code, in a list: more take too long."""
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

    What happened in the window comes first, and then what only went on through it. Without
    selectors, all rows are meant. ``what`` is a key of ``WORDS``. The second value is False if
    older rows may be meant that were not looked at. Old rows are found with the history off, too.
    Raises :class:`NoHistory`.
    """
    window = (since, until)
    history = TaskLockEvent.objects.newest()
    with reading(even_if_off=True):
        parts, complete = meant(history, selectors, what, window, limit)
        rows = {row for part in parts for row in part[:limit]}
    if selectors:
        # MySQL also finds names that differ in case, in accents, or in spaces at their end.
        rows = {row for row in rows if any(_is_row_of(each, row) for each in selectors)}
    newest = newest_first(rows, since, until)[:limit]
    judge(newest)
    return newest, complete


def meant(
    rows: Any, selectors: Sequence[Selector], what: str, window: Window, limit: int
) -> tuple[list[Any], bool]:
    """Return parts of the rows, of which the newest are what :func:`find` finds among them."""
    if not selectors:
        return _parts(rows, what, window)
    found = [_find(rows, selector, what, window, limit) for selector in selectors]
    parts = [part for each, _complete in found for part in each]
    return parts, all(complete for _parts, complete in found)


def _find(
    rows: Any, selector: Selector, what: str, window: Window, limit: int
) -> tuple[list[Any], bool]:
    """Return parts of the rows that a selector means, and whether they are all that it means.

    They are found by indexes, or else among the newest rows.
    """
    if selector.is_pattern:
        return _scan(rows, selector, what, window, limit)
    parts: list[Any] = []
    is_whole = True
    for indexed in _indexed(rows, selector):
        some_parts, complete = _parts(indexed, what, window)
        parts += some_parts
        if not complete:
            is_whole = False
    if selector.recorded_keys or selector.tasks or any(part.exists() for part in parts):
        return parts, is_whole
    return _scan(rows, selector, what, window, limit)


def _indexed(rows: Any, selector: Selector) -> list[Any]:
    """Return the rows with the text as task, name, task id or token: an index serves each."""
    by_task = [rows.of_task(task) for task in selector.tasks]
    by_name = rows.named(selector.name)
    by_id = rows.filter(task_id=selector.text).newest()
    by_token = rows.filter(ref=selector.text).newest()
    return [*by_task, by_name, by_id, by_token]


def _scan(
    rows: Any, selector: Selector, what: str, window: Window, limit: int
) -> tuple[list[Any], bool]:
    """Look through the newest rows of each part for those that a selector means."""
    parts, complete = _parts(rows, what, window)
    pks: list[int] = []
    for part in parts:
        newest, is_whole = part.cut_after(SCANNED)
        if part.query.order_by[0] == "task":
            # Since a time, PostgreSQL would read the rows of all tasks to keep those of this one.
            newest = part
        shown = newest.values_list("pk", *SHOWN, named=True)[:SCANNED]
        selected = [row.pk for row in shown if _is_row_of(selector, row)]
        pks += selected[:limit]
        if not is_whole:
            complete = False
    return [TaskLockEvent.objects.filter(pk__in=pks).newest()], complete


def _is_row_of(selector: Selector, row: Any) -> bool:
    texts = (row.task_id, row.ref, row.key, row.host, process(row))
    return selector.fits(row.name, row.task, *texts)


def _parts(rows: Any, what: str, window: Window) -> tuple[list[Any], bool]:
    """Return the parts of the rows that are meant, each the newest first.

    The second value is False if not all rows were looked at.
    """
    if not what:
        return _within(rows, window), True
    if what in COUNTED:
        return _within(rows.of_state(what).newest(), window), True
    if what in OF_CALLS:
        return _with_result(rows.of_state("conflict").newest(), what, window)
    if what in RESULTS:
        return _with_result(rows, what, window)
    if what == ANY_TROUBLE:
        return _in_state(rows, [*TROUBLE, RETAKEN], window)
    return _in_state(rows, [what], window)


def _with_result(rows: Any, result: str, window: Window) -> tuple[list[Any], bool]:
    """Return the parts of the rows with a result; without an index, only the newest are read."""
    newest, *others = _within(rows, window)
    newest, complete = newest.cut_after(SCANNED)
    parts = [newest, *others[:-1]]  # the last of a window's parts are open holds without a result
    # Calls have the outcome "". A run with trouble is found by its outcome, not by its result.
    ended_so = {"result": result, "outcome__in": ("", "released")}
    return [part.filter(**ended_so) for part in parts], complete


def _in_state(rows: Any, codes: list[str], window: Window) -> tuple[list[Any], bool]:
    """Return the parts of the runs with one of these outcomes, or retaken; and the open holds.

    An open hold has no outcome yet: the store says whether it is held, dead or expired. The second
    value says whether all open holds were looked at.
    """
    parts = [part for code in codes for part in _within(rows.of_trouble(code), window)]
    open_rows = _within(rows.open(), window)[-1]  # of a window the last part are the open holds
    judged = list(open_rows[:OPEN])
    judge(judged)
    pks = [row.pk for row in judged if row.state in codes]
    parts.append(TaskLockEvent.objects.filter(pk__in=pks).newest())
    return parts, len(judged) < OPEN


def _within(rows: Any, window: Window) -> list[Any]:
    """Return the parts of a window: all rows, if it has neither a begin nor an end."""
    if window == ALWAYS:
        return [rows]
    since, until = window
    if since is None:
        since = django_now() - timedelta(seconds=LONGEST)
    return list(rows.parts_within(since, until))


def judge(rows: Iterable[TaskLockEvent]) -> None:
    """Set the state of the open holds among the rows, by what the store has now.

    A hold that the store does not have is expired if its first lease is over. Otherwise its state
    stays as it is. A lock that was left to a receiver has no other state until that is noticed.
    """
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
        if row.was_left:
            row.state = "handed_over"
        elif row.token in states:
            row.state = states[row.token]
        elif is_over(row):
            row.state = "expired"
