"""Ask the history: how long a lock is held, what happened to it, what is open.

The newest rows are those in which something happened last. Every question reads at most so many of
them, by an index: with ten million rows it takes as long as with ten thousand. What the planner of
a database must be told for that is said here.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.db import Error, connections, models, router, transaction
from django.db.models import Count, F, Max, Q, Sum
from django.utils.timezone import get_default_timezone, is_naive, make_aware
from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.locks.keys import QUEUED
from django_singletask.log import in_words
from django_singletask.stores.database import trouble
from django_singletask.stores.keys import PREFIX

NEWEST = 1000
"""The maximum number of rows that are read of a task, or of a name."""
OPEN = 5000
"""The maximum number of open rows that are read; a hold is open until its end is reported."""
RUNS = 100
"""The maximum number of runs whose length says what is usual."""
DAY = timedelta(days=1)
HAPPENED = ("happened_at", "ended_at", "noticed_at", "retaken_at")
"""Times of what happened to a row after its begin, the last one first."""
# Conditions of partial indexes. A database uses such an index only if the statement repeats its
# condition, and SQLite finds it there only without parameters.
STATE = "NOT (outcome = 'released')"
BLOCKED = "NOT (kind = 'run')"
BATCH = 500
"""The maximum number of values in one condition; older versions of SQLite allow 999."""


class Microseconds(models.Func):
    """A time of SQLite as a number; only the difference of two such numbers is of use."""

    template = "86400e6 * julianday(%(expressions)s)"
    output_field = models.FloatField()  # pyright: ignore[reportAssignmentType]


ONLY_TROUBLE = "SINGLETASK_HISTORY_KEEPS = 'trouble': runs without trouble are not kept."
NO_BEGINS = (
    "SINGLETASK_HISTORY_KEEPS = 'trouble' with SINGLETASK_HISTORY = 'inline': no row says which "
    "runs go on. Set SINGLETASK_HISTORY = 'background', or SINGLETASK_HISTORY_KEEPS = 'all'."
)


class NoHistory(Exception):
    """The history is off, or cannot be read."""


@contextmanager
def reading(*, even_if_off: bool = False) -> Iterator[None]:
    """Raise :class:`NoHistory` if the history is off, or if the block cannot read it.

    ``even_if_off``: the block may read rows from before the history was switched off. In a
    transaction the block gets a savepoint, since PostgreSQL refuses all statements after an error.
    """
    if conf.history == "off" and not even_if_off:
        raise NoHistory("SINGLETASK_HISTORY = 'off': no history is recorded.")
    alias = router.db_for_read(apps.get_model("django_singletask", "TaskLockEvent"))
    savepoint: AbstractContextManager[Any] = nullcontext()
    if connections[alias].in_atomic_block:
        savepoint = transaction.atomic(using=alias)
    try:
        with savepoint:
            yield
    except Error as error:
        text = f"The history cannot be read: {in_words(error)}.{remedy(error)}"
        raise NoHistory(text) from error


def need_begins() -> None:
    """Raise :class:`NoHistory` if runs leave no row while they go on."""
    if conf.history_keeps == "trouble" and conf.history == "inline":
        raise NoHistory(NO_BEGINS)


def remedy(error: Exception) -> str:
    """Return what to do about a failed statement of the history, or "" if the error shows nothing.

    The text follows another sentence, so it begins with a space.
    """
    what = trouble(error)
    if what in {"table", "column"}:
        return (
            " Run 'manage.py migrate'. 'Deploying' in the documentation says what to do first if "
            "the table is that of an earlier version."
        )
    if what == "busy":
        return (
            " Give the SQLite file 'transaction_mode': 'IMMEDIATE', a longer 'timeout' and WAL, as "
            "'The history' in the documentation shows."
        )
    return ""


@dataclasses.dataclass(frozen=True)
class UsualHold:
    """How long the last runs held their lock, in seconds, and the number of these runs."""

    median: float
    longest: float
    runs: int


class TaskLockEventQuerySet(models.QuerySet[Any]):
    """The rows of the history; each filter uses an index, and methods with a list read at once."""

    def primary(self) -> TaskLockEventQuerySet:
        """Read from the database that is written, since a replica may be behind."""
        return self.using(router.db_for_write(self.model))

    def newest(self) -> TaskLockEventQuerySet:
        return self.order_by("-happened_at")

    def cut_after(self, most: int) -> tuple[TaskLockEventQuerySet, bool]:
        """Keep about ``most`` rows, the newest; return them, and whether no other row is left.

        The rows must be in an order in which the newest are first.
        """
        times = list(self.values_list("happened_at", flat=True)[most - 1 : most + 1])
        if len(times) < 2:
            return self, True
        # All rows of the last time are kept, so they can be some more than ``most``.
        return self.filter(happened_at__gte=times[0]), False

    def open(self) -> TaskLockEventQuerySet:
        """Keep the rows of holds whose end is not reported, in the order of their index.

        The outcome is compared by ``<=``. For ``outcome = ''`` PostgreSQL may read the whole table,
        from the newest row: it treats the conditions as independent, so it expects many such rows.
        """
        rows = self.filter(kind="run", outcome__lte="").extra(where=[STATE])
        return rows.order_by("outcome", "-happened_at")  # type: ignore[return-value]

    def of_state(self, kind: str, outcome: str = "") -> TaskLockEventQuerySet:
        """Keep the rows of a kind with this outcome; calls have the outcome "".

        The index of kinds and outcomes has only the rows that fulfil ``STATE``.
        """
        rows = self.filter(kind=kind, outcome=outcome)
        if outcome == "released":
            # Released runs are not in that index. They are so many that the newest are found soon.
            return rows
        return rows.extra(where=[STATE])  # type: ignore[return-value]

    def of_trouble(self, trouble: str) -> TaskLockEventQuerySet:
        """Keep the runs with an outcome, or those that took their lock again, the newest first."""
        if trouble == "retaken":
            return self.filter(retaken_at__isnull=False).order_by("-retaken_at")
        return self.of_state("run", trouble).newest()

    def of_task(self, task: str) -> TaskLockEventQuerySet:
        """Keep the rows of a task, the newest first.

        The range of one task makes PostgreSQL use the index of task and time. With ``task = …`` it
        may read the rows of all tasks instead, from the newest one. That takes long if the task has
        no row among the last millions.
        """
        return self.filter(task__gte=task, task__lte=task).order_by("task", "-happened_at")

    def named(self, *names: str) -> TaskLockEventQuerySet:
        """Keep the rows of locks with one of these names, the newest first."""
        return self.filter(name__in=names).newest()

    def parts_within(self, start: datetime, end: datetime | None) -> list[TaskLockEventQuerySet]:
        """Return the rows whose time meets a window, in parts, each the newest first.

        The time of a row is from its begin to the last thing that happened, and that of an open
        hold goes on. Without an ``end`` so does the window. The parts are asked one by one, each by
        an index: for all of them together, a database would read all rows since ``start``.

            a row:  begins ................ the last thing happens, or nothing yet
            window:             |       |
            (a)         ----------x     |                happened in it
            (b)         ------------------------x        went on after it
            (c)         --------------------------...    is open

        A row of (b) is found only if it began at most a day before the window.
        """
        happened = self.filter(happened_at__gte=start).newest()
        open_rows = self.open()
        if end is None:
            return [happened, open_rows]
        went_on = self.filter(at__gte=start - DAY, at__lt=end, happened_at__gte=end)
        # In the order of ``at`` PostgreSQL uses the index of both times. Otherwise it may read the
        # whole table: it treats the times as independent, so it expects many such rows.
        return [
            happened.filter(happened_at__lt=end),
            went_on.order_by("-at"),
            open_rows.filter(at__lt=end),
        ]

    def newest_of(
        self,
        parts: Iterable[TaskLockEventQuerySet],
        limit: int,
        start: datetime | None,
        end: datetime | None,
    ) -> TaskLockEventQuerySet:
        """Return the first rows of the parts of a window in the order of :func:`newest_first`.

        They are ``limit`` rows at most; of each part at most as many are read. A window with an end
        has a start.
        """
        rows: set[Any] = set()
        for part in parts:
            rows.update(part.values_list("pk", "at", *HAPPENED, named=True)[:limit])
        pks = [row.pk for row in newest_first(rows, start, end)[:limit]]
        # They are found again by their ids alone: with the other conditions as well, PostgreSQL
        # might choose a slow plan.
        found: TaskLockEventQuerySet = self.model.objects.using(self.db).filter(pk__in=pks)
        if end is None:
            return found.newest()
        times = []
        for column in HAPPENED:
            in_window = Q(**{f"{column}__gte": start, f"{column}__lt": end})
            times.append(models.When(in_window, then=column))
        # What did not happen in the window has no such time, and comes last, by its begin.
        happened = models.Case(*times)
        return found.order_by(happened.desc(nulls_last=True), "-at")

    def older_than(self, seconds: float) -> TaskLockEventQuerySet:
        """Keep the rows in which nothing happened for so many seconds, but no open hold."""
        cutoff = django_now() - timedelta(seconds=seconds)
        return self.filter(happened_at__lt=cutoff).exclude(kind="run", outcome="")

    def totals_by_task(
        self, start: datetime, middle: datetime, end: datetime | None
    ) -> Iterable[dict[str, Any]]:
        """Sum up the rows of which the last thing happened at ``start`` or later, before ``end``.

        Each total is of the rows that agree in task, kind, outcome and result, and in whether they
        happened before ``middle``. ``lasted`` is a sum of the runs that reported their end. A
        queued call that was cleared is no run, and is left out.
        """
        rows = self.filter(happened_at__gte=start)
        if end is not None:
            rows = rows.filter(happened_at__lt=end)
        # In this order, since to compare the key of each row takes a tenth of the whole time.
        rows = rows.exclude(Q(outcome="cleared") & Q(key__startswith=QUEUED)).order_by()
        length: Any = F("ended_at") - F("at")
        if connections[self.db].vendor == "sqlite":
            # For each row, Django's subtraction would call a function in Python.
            between = Microseconds("ended_at") - Microseconds("at")
            length = models.ExpressionWrapper(between, models.DurationField())
        is_before = Q(happened_at__lt=middle)
        groups = rows.values("task", "kind", "outcome", "result", is_before=is_before)
        totals: Iterable[dict[str, Any]] = groups.annotate(
            calls=Sum("count"),
            seconds_waited=Sum("waited"),
            ends=Count("ended_at"),
            lasted=Sum(length),
            longest=Max(length),
            last_end=Max("ended_at"),
        )
        return totals

    def runs(self, tokens: Iterable[str]) -> list[Any]:
        """Return the rows of the runs with these tokens."""
        return self._among("ref", tokens)

    def calls_blocked_by(self, tokens: Iterable[str]) -> list[Any]:
        """Return the rows of the calls that holders with these tokens blocked."""
        return self._among("blocked_by", tokens, where=[BLOCKED])

    def _among(self, field: str, values: Iterable[str], where: Sequence[str] = ()) -> list[Any]:
        wanted = [value for value in dict.fromkeys(values) if value]
        rows = self.extra(where=where).order_by()
        found: list[Any] = []
        for start in range(0, len(wanted), BATCH):
            batch = wanted[start : start + BATCH]
            found += rows.filter(**{f"{field}__in": batch})
        return found

    def name_of_key(self, key: str) -> str:
        """Return the name that belongs to a key, or "" if the newest rows do not have the key.

        A key is a prefix, the task or the lock's name, a colon and a hash. There is no index of
        keys, so the rows of that task, or of that name, are read.
        """
        readable = key.removeprefix(QUEUED).removeprefix(PREFIX)
        task_or_name = readable.rpartition(":")[0]
        for rows in (self.of_task(task_or_name), self.named(task_or_name)):
            for other, name in rows.values_list("key", "name")[:NEWEST]:
                if other == key:
                    return str(name)
        return ""

    def task_names(self, limit: int) -> list[str]:
        # DISTINCT would read the whole index.
        rows = self.order_by("task").values_list("task", flat=True)
        tasks: list[str] = []
        last: str | None = ""
        while len(tasks) < limit:
            last = rows.filter(task__gt=last).first()
            if last is None:
                break
            tasks.append(last)
        return tasks

    def usual_hold(self, name: str, task: str | None = None) -> UsualHold | None:
        """Return how long the last runs of a task, or of a name without a task, held their lock.

        Only runs whose body returned are counted. Otherwise a run that hung until it was stopped
        would make the next run that hangs look normal. Return None without such runs, without a
        history, and if it keeps only trouble.
        """
        if conf.history_keeps == "trouble":
            return None
        rows = self.named(name)
        if task:
            rows = self.of_task(task)
        newest = rows.values_list("outcome", "result", "at", "ended_at")[:NEWEST]
        lengths = []
        with suppress(NoHistory), reading():
            for outcome, result, at, ended_at in newest:
                if outcome == "released" and result == "returned":
                    lengths.append(max(0.0, (ended_at - at).total_seconds()))
        if not lengths:
            return None
        lengths = lengths[:RUNS]
        return UsualHold(statistics.median(lengths), max(lengths), len(lengths))


def newest_first(rows: Iterable[Any], start: datetime | None, end: datetime | None) -> list[Any]:
    """Sort rows of a window: what happened in it, and then what only went on.

    So none of the former is cut off for the latter, however much goes on. What went on is sorted by
    its begin, which may be in the window.
    """

    def place(row: Any) -> tuple[bool, datetime, int]:
        if end is None:
            return True, row.happened_at, row.pk
        for column in HAPPENED:
            at = getattr(row, column)
            if at is not None and at < end and (start is None or at >= start):
                return True, at, row.pk
        return False, row.at, row.pk

    return sorted(rows, key=place, reverse=True)


def ago(at: datetime) -> float:
    """Return the age of a time of the history in seconds, by the clock of this host."""
    return max(0.0, time.time() - timestamp(at))


def timestamp(at: datetime) -> float:
    """Return the Unix time of a time of the history, which is naive without ``USE_TZ``."""
    if is_naive(at):
        at = make_aware(at, get_default_timezone())
    return at.timestamp()
