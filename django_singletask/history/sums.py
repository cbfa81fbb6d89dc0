"""Sum up the history in one query, with the same result on each database."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, Count, F, FloatField, Func, Max, Q, Sum, Value, When
from django.db.models.functions import Coalesce, Floor, Least

from django_singletask.history.queries import TaskLockEventQuerySet
from django_singletask.locks.keys import QUEUED

MOST = 200_000
"""The maximum number of rows in a sum: the newest, by their ids."""
TINY = 0.001
"""Seconds: SQLite is not exact, and a round time must not fall into the step before."""
KNOWN = Coalesce("ended_at", "noticed_at")
END = Case(
    When(outcome__in=("", "unguarded"), then=None),
    When(outcome="cleared", then=Least(KNOWN, "noticed_at")),
    default=KNOWN,
)
"""When a hold ended, as :attr:`TaskLockEvent.hold_ended_at` has it."""
SECONDS = {
    "postgresql": {
        "template": "EXTRACT(EPOCH FROM (%(expressions)s))::float8",
        "arg_joiner": " - ",
    },
    "mysql": {"template": "(-TIMESTAMPDIFF(MICROSECOND, %(expressions)s) / 1e6)"},
    "sqlite": {
        "template": "(86400.0 * (julianday(%(expressions)s)))",
        "arg_joiner": ") - julianday(",
    },
}


class Seconds(Func):
    """The seconds until a time from another one: ``Seconds(end, start)``."""

    arity = 2
    output_field = FloatField()

    def as_sql(self, compiler: Any, connection: Any, *args: Any, **context: Any) -> Any:
        return super().as_sql(compiler, connection, **SECONDS[connection.vendor])


class Whole(Floor):
    """The whole part of a number."""

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        # Django's floor() for SQLite is in Python, which would double the time of the query.
        return super().as_sql(compiler, connection, template="CAST(%(expressions)s AS integer)")


def task_sums(
    rows: TaskLockEventQuerySet, start: datetime, step: timedelta
) -> tuple[Iterable[dict[str, Any]], datetime | None]:
    """Return sums of the events since ``start``, and the first time if that is later.

    Each sum has the ``number`` of a task's events with the same kind, outcome, result and ``slot``
    (steps since the start), and their ``longest`` hold and ``lease``.
    """
    rows, cut = _newest(rows)
    sums = (
        rows.since(start)
        .order_by()
        .values("task", "kind", "outcome", "result")
        .annotate(
            slot=_slot(Seconds("at", Value(start)), step),
            number=Sum("count"),
            longest=Max(Seconds(END, "at")),
            lease=Max("timeout"),
        )
    )
    return sums, cut if cut is not None and cut > start else None


def lane_sums(
    rows: TaskLockEventQuerySet,
    start: datetime,
    end: datetime,
    step: timedelta,
    *,
    by_task: bool,
    names: Collection[str],
) -> tuple[Iterable[dict[str, Any]], datetime | None]:
    """Return the sums of the newest of these rows, and from when on if there are more of them.

    Each sum has the ``number`` of events of a task (if ``by_task``) or else of one of the ``names``
    that agree in kind, outcome, result, and in the steps since ``start`` in which they begin and
    end; the ``count`` of calls; and the sums of when they ``began`` and ``ended``, in seconds. What
    ends after ``end`` counts as if it ended then.
    """
    named = Q(name__in=names)
    rows, cut = _newest(rows.filter(named | ~Q(task="") if by_task else named))
    lane = Case(When(task="", then=F("name")), default=Value("")) if by_task else F("name")
    began = Seconds("at", Value(start))
    last = Seconds(Coalesce(END, "last_at", "at"), Value(start))
    ended = Least(last, Value((end - start).total_seconds()))
    sums = (
        rows.exclude(kind="run", outcome="")
        .order_by()
        .values("task", "kind", "outcome", "result", lane=lane)
        .annotate(
            first=_slot(began, step),
            last=_slot(ended, step),
            number=Count("pk"),
            calls=Sum("count"),
            began=Sum(began),
            ended=Sum(ended),
        )
    )
    return sums, cut


def _newest(rows: TaskLockEventQuerySet) -> tuple[TaskLockEventQuerySet, datetime | None]:
    """Return the newest of these rows, and the time of the first if there are more.

    A queued call that was cleared is no run.
    """
    # Rows are counted up to the limit: ids have gaps.
    left_out = rows.order_by("-pk").values_list("pk", flat=True)[MOST : MOST + 1].first()
    if left_out is None:
        return rows.exclude(kind="run", key__startswith=QUEUED), None
    rows = rows.filter(pk__gt=left_out).exclude(kind="run", key__startswith=QUEUED)
    return rows, rows.order_by("pk").values_list("at", flat=True).first()


def _slot(seconds: Any, step: timedelta) -> Whole:
    return Whole((seconds + TINY) / step.total_seconds())
