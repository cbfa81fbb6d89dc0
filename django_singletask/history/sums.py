"""Sum the history up in the database: in one query, which means the same on each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import F, FloatField, Func, Max, Sum, Value
from django.db.models.functions import Floor, Greatest, Ln

from django_singletask.history.queries import SWEEPER, TaskLockEventQuerySet

__all__ = ["MOST", "WIDTH", "middle", "sums_since"]

MOST = 200_000
"""Rows that are summed up at most, the newest, by their ids."""
WIDTH = 1.1
"""How much longer the longest hold of a bucket is than its shortest."""
SHORTEST = 0.001
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
    """The whole part of a number that is not negative."""

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        # Its floor() is Django's, in Python: a call for each row takes as long as all the rest.
        return super().as_sql(compiler, connection, template="CAST(%(expressions)s AS integer)")


def sums_since(
    rows: TaskLockEventQuerySet, start: datetime, step: timedelta
) -> tuple[Iterable[dict[str, Any]], datetime | None]:
    """Return the sums of what began since ``start``, and from when on if that is later.

    Each sum has the ``number`` of events of a task that agree in kind, outcome and result, in the
    ``slot`` (the number of steps since the start) and in the ``bucket`` of how long the lock was
    held; and the ``longest`` hold and ``lease`` among them.
    """
    newest = rows.newest()
    left_out = (newest.values_list("pk", flat=True).first() or 0) - MOST
    cut = newest.filter(pk__lte=left_out).values_list("at", flat=True).first()
    held = Seconds(F("ended_at"), F("at"))
    sums = (
        rows.since(start)
        .filter(pk__gt=left_out)
        .exclude(name=SWEEPER)
        .order_by()
        .values("task", "kind", "outcome", "result")
        .annotate(
            slot=Whole(Seconds(F("at"), Value(start)) / step.total_seconds()),
            bucket=Whole(Ln(Greatest(held, Value(SHORTEST)) / SHORTEST) / math.log(WIDTH)),
            number=Sum("count"),
            longest=Max(held),
            lease=Max("timeout"),
        )
    )
    return sums, cut if cut is not None and cut > start else None


def middle(bucket: float) -> float:
    """Return how long the holds of a bucket are: none of them differs by more than 5 %."""
    return float(SHORTEST * WIDTH ** (bucket + 0.5))
