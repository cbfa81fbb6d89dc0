"""Find the rows of the history that an operator means, and judge those that are open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from django.utils.timezone import now as django_now
from django.utils.translation import gettext_lazy as _

from django_singletask.conf import conf
from django_singletask.history.queries import FREQUENT, OPEN, reading
from django_singletask.holder import Holder
from django_singletask.locks.liveness import proof_of_death
from django_singletask.log import logger
from django_singletask.models import COUNTED, OF_CALLS, RESULTS, TaskLockEvent, is_over
from django_singletask.operators.words import LONGEST
from django_singletask.stores import get_store

SCANNED = 20_000
"""Newest rows, at most, among which those are looked for that no index serves."""
NOT_RECORDED = _(
    "A task id must be whole, and of the calls that a holder blocks only the first is recorded: "
    "look for the others in the log of the worker."
)


def regex(text: str) -> str:
    return re.sub(r"\\\*|…", ".*", re.escape(text))


def find(
    conditions: Iterable[Mapping[str, Any]] = ({},),
    *,
    limit: int = 50,
    what: str = "",
    since: datetime | None = None,
    until: datetime | None = None,
) -> tuple[list[TaskLockEvent], bool]:
    """Return the newest rows that meet one of the conditions, and began in this time.

    They are those that were added last, sorted by their times: no index has these for each
    condition, and the row of a queued call that was cleared is added long after its time. The
    second value is False if older rows may fit that nobody looked at.

    Conditions are columns of the history and their values, and ``like``, a pattern for the name.
    ``what`` is a key of ``WORDS``. Old rows are found with the history off, too. Raises
    :class:`NoHistory`.
    """
    with reading(even_if_off=True):
        history = TaskLockEvent.objects.all()
        if since or until:
            if since is None:
                since = django_now() - timedelta(seconds=LONGEST)
            history = history.since(since, until)
        parts = [_find(history, what, limit, **condition) for condition in conditions]
    rows = {row for part, _complete in parts for row in part}
    newest = sorted(rows, key=attrgetter("pk"), reverse=True)[:limit]
    newest.sort(key=attrgetter("at"), reverse=True)
    judge(newest)
    return newest, all(complete for _part, complete in parts)


def _find(
    rows: Any, what: str, limit: int, task: str = "", like: str = "*", **facts: Any
) -> tuple[list[Any], bool]:
    if task:
        rows = rows.of_task(task)
    rows = rows.filter(**facts)
    start = re.split("[*…]", like)[0]
    if start:
        rows_of_names = TaskLockEvent.objects.order_by().named_like(start)
        ids = list(rows_of_names.values_list("pk", flat=True)[: FREQUENT + 1])
        if len(ids) <= FREQUENT:
            rows = rows.filter(pk__in=ids)
    rows, complete = of_what(rows, what)
    if like == "*":
        return list(rows[:limit]), complete
    rows, all_seen = rows.newest_of_them(SCANNED)
    return list(rows.filter(name__regex=f"^{regex(like)}$")[:limit]), complete and all_seen


def of_what(rows: Any, what: str) -> tuple[Any, bool]:
    """Keep the rows with this code of ``WORDS``; say whether older rows were left out.

    No index serves the result of a run or call, so only the newest rows are looked at for it.
    """
    if what in RESULTS:
        if what in OF_CALLS:
            rows = rows.of_state("conflict")
        rows, all_seen = rows.newest_of_them(SCANNED)
        return rows.filter(result=what, outcome__in=("", "released")), all_seen
    if what in COUNTED:
        return rows.of_state(what), True
    if what in {"held", "dead", "expired"}:  # an open hold can be any of these
        open_rows = list(rows.open()[:OPEN])
        judge(open_rows)
        pks = [row.pk for row in open_rows if row.state == what]
        closed = rows.of_trouble(what)
        complete = len(open_rows) < OPEN
        if pks:
            closed, all_seen = closed.newest_of_them(SCANNED)
            pks += closed.values_list("pk", flat=True)
            return rows.filter(pk__in=pks), complete and all_seen
        return closed, complete
    if what:
        rows = rows.of_trouble(what)
    return rows, True


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
