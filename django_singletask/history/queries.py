"""Ask the history: how long a lock is held, what happened to it, what is open.

Every question reads at most so many of the newest rows, by an index: with ten million rows it takes
as long as with ten thousand. What the planner of a database must be told for that is said here.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.db import Error, connections, models, router, transaction
from django.utils.timezone import get_default_timezone, is_naive, make_aware
from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.locks.keys import QUEUED
from django_singletask.stores.base import PREFIX
from django_singletask.stores.database import is_busy, is_missing

if TYPE_CHECKING:
    from django_singletask.models import TaskLockEvent

__all__ = [
    "BATCH",
    "FREQUENT",
    "NEWEST",
    "OPEN",
    "SWEEPER",
    "TOKENS",
    "NoHistory",
    "TaskLockEventQuerySet",
    "UsualHold",
    "ago",
    "reading",
    "remedy",
    "timestamp",
]

SWEEPER = "django_singletask.sweep"
"""Name of the lock of the worker that sweeps; it is no lock of the project."""

NEWEST = 1000
"""Rows that are looked at: of a task, of a name, or at the beginning of a time window."""
OPEN = 5000
"""Open rows that are looked at: holds that go on, or whose end nobody reported."""
RUNS = 100
"""Runs at most whose length says what is usual."""
FREQUENT = 5000
"""Rows that a search sorts at most; of more, it reads the newest."""
LATE = timedelta(hours=1)
"""How late a row may be written: a process keeps its events while the database is away."""
# Conditions of indexes: SQLite must find them in a statement, without parameters.
TOKENS = "(task_id = '' OR NOT (outcome = 'released'))"
COUNTED = "kind IN ('skipped', 'duplicate') AND NOT (blocked_by = '')"
BATCH = 500
"""Values in one condition: SQLite takes no more than 999 in older versions."""


class NoHistory(Exception):
    """The history is off, or cannot be read."""


@contextmanager
def reading(*, even_if_off: bool = False) -> Iterator[None]:
    """Raise :class:`NoHistory` if the history is off, or if the block finds it unreadable.

    ``even_if_off`` lets the block read the rows that were written before it was switched off. In a
    transaction the block has a savepoint: else PostgreSQL refuses all statements after a failure.
    """
    if conf.history == "off" and not even_if_off:
        raise NoHistory("SINGLETASK_HISTORY = 'off': nothing is known of what was.")
    alias = router.db_for_read(apps.get_model("django_singletask", "TaskLockEvent"))
    in_transaction = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if in_transaction else nullcontext():
            yield
    except Error as error:
        reason = str(error).partition("\n")[0]
        raise NoHistory(f"The history cannot be read: {reason}.{remedy(error)}") from error


def remedy(error: Exception) -> str:
    """Say what to do about a failed statement of the history, as far as the error tells."""
    if is_missing(error):
        return " Has 'manage.py migrate' run?"
    cure = "'transaction_mode': 'IMMEDIATE', a longer 'timeout' and WAL"
    where = "as 'The history' in the documentation shows"
    return f" Give the SQLite file {cure}, {where}." if is_busy(error) else ""


@dataclasses.dataclass(frozen=True)
class UsualHold:
    """How long the last runs had their lock: seconds, and the number of runs that says so."""

    median: float
    longest: float
    runs: int


class TaskLockEventQuerySet(models.QuerySet["TaskLockEvent"]):
    """The rows of the history, narrowed in ways that an index serves; a list is read at once."""

    def primary(self) -> TaskLockEventQuerySet:
        """Read where the rows are written: a replica may not have them yet."""
        return self.using(router.db_for_write(self.model))

    def newest(self) -> TaskLockEventQuerySet:
        return self.order_by("-id")

    def open(self) -> TaskLockEventQuerySet:
        """Keep the rows of holds that have not ended, as far as is known.

        They are in the order of their index. With any other order PostgreSQL may read the whole
        table, since it takes "acquired" and "no outcome" for independent conditions.
        """
        rows = self.filter(kind="acquired", outcome="")
        if connections[self.db].vendor == "sqlite":
            # Many rows meet the condition: else an index of one column looks better to SQLite.
            rows = self.extra(where=["likely(kind = 'acquired') AND likely(outcome = '')"])
        return rows.order_by("key")

    def of_kind(self, kind: str) -> TaskLockEventQuerySet:
        return self.of_state(kind, None).newest()

    def of_state(self, kind: str | None, outcome: str | None) -> TaskLockEventQuerySet:
        """Keep the rows of a kind and with an outcome; None means any.

        Open and released runs are so many that the newest are soon found without an index.
        """
        state = {"kind": kind, "outcome": outcome}
        rows = self.filter(**{field: each for field, each in state.items() if each is not None})
        where = ["NOT (kind = 'acquired')"] if kind not in (None, "acquired") else []
        where += (
            ["NOT (outcome IN ('', 'released'))"] if outcome not in (None, "", "released") else []
        )
        return rows.extra(where=where) if connections[self.db].vendor == "sqlite" else rows

    def of_task(self, task: str) -> TaskLockEventQuerySet:
        """Keep the rows of a task, the newest first.

        In the order of their index, and as a range: for ``task = …`` PostgreSQL may go back through
        the ids, though a task that has made many rows may have made none of the last millions.
        """
        return self.filter(task__gte=task, task__lte=task).order_by("task", "-id")

    def named(self, *names: str) -> TaskLockEventQuerySet:
        """Keep the rows of locks with one of these names, the newest first."""
        return self.filter(name__in=set(names)).newest()

    def named_like(self, beginning: str) -> TaskLockEventQuerySet:
        """Keep the rows whose name begins with a text."""
        vendor = connections[self.db].vendor
        if vendor == "mysql":
            # Its case-sensitive comparison uses no index.
            return self.filter(name__istartswith=beginning)
        if vendor == "sqlite":
            # Its LIKE uses no index either. No character of a name comes after this one.
            return self.filter(name__gte=beginning, name__lt=f"{beginning}\U0010ffff")
        return self.filter(name__startswith=beginning)

    def since(self, start: datetime) -> TaskLockEventQuerySet:
        """Keep what began at ``start`` or later; this asks the database for the first id.

        Rows are written nearly in the order of their times, but a process keeps its events while
        the database is away. So the lowest id is looked for among many rows, from an hour earlier.
        """
        later = self.model.objects.using(self.db).filter(at__gte=start - LATE)
        first = later.order_by("at").values("pk")[:NEWEST].aggregate(low=models.Min("pk"))["low"]
        return self.filter(at__gte=start, pk__gte=first or 0)

    def older_than(self, seconds: float | None = None) -> TaskLockEventQuerySet:
        """Keep what ended earlier (default: ``SINGLETASK_HISTORY_DAYS``), so no open rows."""
        seconds = conf.history_days * 86_400 if seconds is None else seconds
        since = django_now() - timedelta(seconds=seconds)
        old = self.filter(at__lt=since).exclude(kind="acquired", outcome="")
        return old.exclude(ended_at__gte=since).exclude(last_at__gte=since)

    def search(self, text: str, names: Collection[str] = ()) -> TaskLockEventQuerySet:
        """Keep rows whose name begins with a text or is in ``names``, or that have its task id."""
        rows = self.model.objects.using(self.db).order_by()
        ids = list(rows.named_like(text).values_list("pk", flat=True)[: FREQUENT + 1])
        ids += rows.filter(name__in=names).values_list("pk", flat=True)[: FREQUENT + 1]
        if len(ids) > FREQUENT:
            # To sort so many takes long: it is quicker to read from the newest on.
            return self.filter(models.Q(name__startswith=text) | models.Q(name__in=names))
        # A list of ids: with the condition itself PostgreSQL would look for few names in all rows.
        ids += rows.filter(task_id=text).values_list("pk", flat=True)[:FREQUENT]
        return self.filter(pk__in=ids)

    def of_tokens(self, tokens: Iterable[str]) -> list[TaskLockEvent]:
        """Return the rows of these tokens, but for runs of tasks that gave their lock back.

        Rows are looked up by one column, and Python looks at the rest: with two conditions SQLite
        and MySQL may use the index of the other column.
        """
        return self._among("token", tokens, where=[TOKENS])

    def runs(self, tokens: Iterable[str], task_ids: Iterable[str] = ()) -> list[TaskLockEvent]:
        """Return the rows of the runs that have, or had, these tokens.

        Those of tasks that gave their lock back are found only if ``task_ids`` has their task ids:
        an index of all tokens would be as large as that of all task ids.
        """
        rows = self.of_tokens(tokens := set(tokens))
        rows += [row for row in self._among("task_id", task_ids) if row.token in tokens]
        return [row for row in dict.fromkeys(rows) if row.kind == "acquired"]

    def blocked_by(self, tokens: Iterable[str]) -> list[TaskLockEvent]:
        """Return the skips, and the duplicates, that holders with these tokens caused."""
        return self._among("blocked_by", tokens, where=[COUNTED])

    def counts_behind(self, tokens: Iterable[str]) -> list[tuple[str, str, int]]:
        """Return kind, token and count of the rows about calls that met one of these holders."""
        return self._among("blocked_by", tokens, "kind", "blocked_by", "count", where=[COUNTED])

    def still_open(self, ids: Iterable[int]) -> list[TaskLockEvent]:
        """Return the rows with these ids, without those that have been closed meanwhile."""
        return [row for row in self._among("pk", ids) if not row.outcome]

    def _among(self, field: str, values: Iterable[Any], *columns: str, where: Any = ()) -> Any:
        wanted = [value for value in dict.fromkeys(values) if value]
        batches = (wanted[start : start + BATCH] for start in range(0, len(wanted), BATCH))
        rows = self.extra(where=where).order_by()
        found = (rows.filter(**{f"{field}__in": batch}) for batch in batches)
        return [row for rows in found for row in (rows.values_list(*columns) if columns else rows)]

    def name_of_key(self, key: str) -> str:
        """Return the name that belongs to a key, among the newest rows of its task, or "".

        No index has the keys, but a key begins with the task, or with the name of the lock.
        """
        slug = key.removeprefix(QUEUED).removeprefix(PREFIX).rpartition(":")[0]
        for rows in (self.of_task(slug), self.named(slug)):
            for name, other in rows.values_list("name", "key")[:NEWEST]:
                if other == key:
                    return str(name)
        return ""

    def task_names(self, limit: int) -> list[str]:
        # DISTINCT would read the whole table, or its index.
        rows, tasks = self.order_by("task").values_list("task", flat=True), [""]
        while len(tasks) <= limit and (after := rows.filter(task__gt=tasks[-1]).first()):
            tasks.append(after)
        return tasks[1:]

    def usual_hold(self, name: str, task: str = "") -> UsualHold | None:
        """Say how long the last hundred runs of a task had their lock, or of a name without a task.

        Only runs that returned count: beside a run that hung until it was stopped, and raised, the
        next that hangs would not be slow. None without such runs or without a history.
        """
        rows = self.of_task(task) if task else self.named(name)
        fields = rows.values_list("outcome", "result", "at", "ended_at")
        try:
            with reading():
                holds = [
                    max(0.0, (ended_at - at).total_seconds())
                    for outcome, result, at, ended_at in fields[:NEWEST]
                    if (outcome, result) == ("released", "returned") and ended_at is not None
                ][:RUNS]
        except NoHistory:
            return None
        return UsualHold(statistics.median(holds), max(holds), len(holds)) if holds else None


def ago(at: datetime | None) -> float:
    """Return how many seconds ago a time of the history was, by the clock of this host."""
    return 0.0 if at is None else max(0.0, time.time() - timestamp(at))


def timestamp(at: datetime) -> float:
    """Return the Unix time of a time of the history, which is naive without ``USE_TZ``."""
    return (make_aware(at, get_default_timezone()) if is_naive(at) else at).timestamp()
