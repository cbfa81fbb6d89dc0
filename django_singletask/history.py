"""Write what happens to the locks into the database."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import IntegrityError, connections, models, router, transaction
from django.db.models import Case, F, Value, When
from django.utils.timezone import get_default_timezone, make_aware, make_naive
from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.keys import LockKey
from django_singletask.liveness import Holder, proof_of_death
from django_singletask.locks import TaskLock
from django_singletask.renewal import clock
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores import get_store

if TYPE_CHECKING:
    from django_singletask.models import TaskLockEvent

__all__ = ["old_rows", "prune", "sweep", "write"]

logger = logging.getLogger("django_singletask")

TROUBLE = frozenset({"expired", "lost", "cleared"})
COUNTED = frozenset({"skipped", "duplicate"})

SWEEPER = "django_singletask.sweep"
"""Name of the lock of the worker that sweeps."""

BATCH = 500
"""Rows a statement: SQLite takes so many parameters."""


def write(events: Iterable[LockEvent], *, again: bool = False) -> None:
    """Write events in one transaction, in a savepoint if the caller is in one.

    ``again`` says that an attempt failed whose commit may have come through all the same. Raises
    the errors of the database; then nothing of it is written.
    """
    from django_singletask.models import TaskLockEvent

    with transaction.atomic(using=router.db_for_write(TaskLockEvent)):
        batch = Batch(again)
        for event in events:
            event = _fitted(event, TaskLockEvent)
            if event.kind in TROUBLE:
                # It closes the row of a run, which must be there.
                batch.save()
                batch = Batch(again)
                _insert(event)
            else:
                batch.add(event)
        batch.save()


class Batch:
    """Gather what can be written with few statements.

    A run that ends in the batch in which it began is one row inserted, and any number of skips
    against one holder is one row changed.
    """

    def __init__(self, again: bool) -> None:
        self.again = again
        self.acquired: dict[str, TaskLockEvent] = {}
        self.released: list[LockEvent] = []
        self.counted: dict[tuple[Any, ...], list[LockEvent]] = {}

    def add(self, event: LockEvent) -> None:
        if event.kind == "acquired":
            self.acquired[event.token] = _row(event)
        elif event.kind == "released" and event.token in self.acquired and not self.again:
            row = self.acquired[event.token]
            row.outcome, row.ended_at = event.outcome, event.at
            for name, value in _ending(event).items():
                setattr(row, name, value)
        elif event.kind == "released":
            self.released.append(event)
        else:
            # Without a holder there is nothing to count against.
            holder = event.blocked_by or id(event)
            what = (event.kind, event.key, holder, event.reason)
            self.counted.setdefault(what, []).append(event)

    def save(self) -> None:
        from django_singletask.models import TaskLockEvent

        if self.again and self.acquired:
            there = TaskLockEvent.objects.filter(kind="acquired", token__in=list(self.acquired))
            for token in there.values_list("token", flat=True):
                del self.acquired[token]
        if self.acquired:
            TaskLockEvent.objects.bulk_create(self.acquired.values(), batch_size=BATCH)
        _close(self.released)
        for repeats in self.counted.values():
            _count(repeats)


_UNSTORABLE = re.compile("[\\x00\\ud800-\\udfff]")  # PostgreSQL's text holds neither


def _fitted(event: LockEvent, model: type[models.Model]) -> LockEvent:
    """Make texts, which others wrote, and time into what the columns hold."""
    changed: dict[str, Any] = {}
    for name, length in _lengths(model):
        text = getattr(event, name)
        if len(text) > length or _UNSTORABLE.search(text):
            changed[name] = _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)[:length]
    if not settings.USE_TZ:
        changed["at"] = make_naive(event.at, get_default_timezone())
    return dataclasses.replace(event, **changed) if changed else event


@cache
def _lengths(model: type[models.Model]) -> list[tuple[str, int]]:
    return [
        (field.name, field.max_length)
        for field in model._meta.concrete_fields
        if isinstance(field, models.CharField) and field.max_length
    ]


def _row(event: LockEvent, **facts: Any) -> TaskLockEvent:
    from django_singletask.models import TaskLockEvent

    facts = {**vars(event), **facts}
    del facts["quiet"]
    return TaskLockEvent(**facts)


def _insert(event: LockEvent) -> None:
    from django_singletask.models import TaskLockEvent

    outcome = event.outcome or event.kind
    _row(event, outcome="").save(force_insert=True)
    if event.token:
        # The run's own word, once it ends, stands above what others saw of it.
        rows = TaskLockEvent.objects.filter(kind="acquired", token=event.token, outcome="")
        rows.update(outcome=outcome, ended_at=event.at)


def _close(events: list[LockEvent]) -> None:
    from django_singletask.models import TaskLockEvent

    alike: dict[tuple[Any, ...], list[LockEvent]] = {}
    for event in events:
        alike.setdefault((event.outcome, *_ending(event).values()), []).append(event)
    field: Any = TaskLockEvent._meta.get_field("ended_at")
    for group in alike.values():
        for start in range(0, len(group), BATCH):
            part = group[start : start + BATCH]
            ends = [When(token=event.token, then=Value(event.at)) for event in part]
            open_rows = TaskLockEvent.objects.filter(
                kind="acquired", token__in=[event.token for event in part], outcome=""
            )
            closed = open_rows.update(
                outcome=part[0].outcome,
                ended_at=Case(*ends, output_field=field),
                **_ending(part[0]),
            )
            if closed != len(part):
                for event in part:
                    _close_again(event)


def _ending(event: LockEvent) -> dict[str, Any]:
    return {name: getattr(event, name) for name in ("result", "reason", "longest_renewal_gap")}


def _close_again(event: LockEvent) -> None:
    """Close a row that others have closed meanwhile; it may as well be closed by this event."""
    from django_singletask.models import TaskLockEvent

    rows = TaskLockEvent.objects.filter(kind="acquired", token=event.token)
    facts = {"ended_at": event.at, **_ending(event)}
    if event.outcome == "lost":
        # That is all the run knows; who cleared the lock knew more.
        rows.update(**facts)
    elif rows.update(outcome=event.outcome, **facts):
        # The sweep took the run for gone, and was wrong.
        TaskLockEvent.objects.filter(kind="expired", token=event.token).delete()


def _count(repeats: list[LockEvent]) -> None:
    """Count what met one holder in one row, however many processes met it."""
    from django_singletask.models import TaskLockEvent

    first, last = repeats[0], repeats[-1]
    row = _row(first, count=len(repeats), last_at=last.at, outcome="")
    rows = TaskLockEvent.objects.filter(
        kind=first.kind, key=first.key, blocked_by=first.blocked_by, reason=first.reason
    )
    more = {"count": F("count") + len(repeats), "last_at": last.at}
    if first.blocked_by and rows.update(**more):
        return
    try:
        with transaction.atomic(using=router.db_for_write(TaskLockEvent)):
            row.save(force_insert=True)
    except IntegrityError:
        # Another process has inserted it between the two statements.
        rows.update(**more)


def only_open(rows: models.QuerySet[TaskLockEvent]) -> models.QuerySet[TaskLockEvent]:
    """Return those of these rows whose hold goes on, in the order of their index."""
    found: models.QuerySet[TaskLockEvent] = rows.filter(kind="acquired", outcome="")
    if connections[rows.db].vendor == "sqlite":
        # It has to read the condition of the index in the statement, and to be told that many
        # rows meet it: else an index of one column looks better.
        found = rows.extra(where=["likely(kind = 'acquired') AND likely(outcome = '')"])
    ordered: models.QuerySet[TaskLockEvent] = found.order_by("key")
    return ordered


def sweep() -> None:
    """Close the open rows of locks that nobody holds any more, and prune.

    Call it again and again in one process: a row is closed when its token was not in the store
    at two looks that are at least its lease apart. One look can fall between a renewal that found
    the entry gone and took it again; and the row of a run that has just ended may be on its way.
    """
    from django_singletask.models import TaskLockEvent

    now = datetime.now(timezone.utc)
    # In the order of the index that holds only these: else PostgreSQL may read the whole table.
    rows = TaskLockEvent.objects.filter(kind="acquired", outcome="").order_by("key")
    still_open = set()
    for row in rows.iterator():
        still_open.add(row.pk)
        if (
            _aware(row.at) + timedelta(seconds=row.timeout) > now
            or row.cache not in settings.CACHES
        ):
            continue
        entry = get_store(row.cache).read(row.key)
        holder = Holder.decode(entry.value) if entry is not None else None
        if holder is not None and holder.token == row.token:
            _missed.pop(row.pk, None)
            how = proof_of_death(holder)
            if how is not None:
                TaskLock(LockKey(row.name, row.key), cache=row.cache).bury(row.token, how)
        elif clock() - _missed.setdefault(row.pk, clock()) >= row.timeout:
            del _missed[row.pk]
            _expire(row, now)
    for pk in _missed.keys() - still_open:
        del _missed[pk]
    prune()


_missed: dict[int, float] = {}
"""When an open row's token was first not found in the store."""


def _expire(row: TaskLockEvent, now: datetime) -> None:
    logger.warning("%s: the lease of a run on %s:%s ended unreleased.", row.key, row.host, row.pid)
    event = LockEvent(
        kind="expired",
        name=row.name,
        key=row.key,
        at=now,
        cache=row.cache,
        task=row.task,
        task_id=row.task_id,
        token=row.token,
        host=row.host,
        pid=row.pid,
        timeout=row.timeout,
        reason="its lease ended unreleased",
    )
    lock_event.send_robust(sender=TaskLock, event=event)


def _aware(at: datetime) -> datetime:
    return at if settings.USE_TZ else make_aware(at, get_default_timezone())


def old_rows(older_than: float | None = None) -> models.QuerySet[TaskLockEvent]:
    """Return the rows that :func:`prune` deletes; open ones stay, however old."""
    from django_singletask.models import TaskLockEvent

    seconds = conf.history_days * 86_400 if older_than is None else older_than
    # Not from a replica, where what is deleted is still to be seen.
    there = TaskLockEvent.objects.using(router.db_for_write(TaskLockEvent))
    old = there.filter(at__lt=django_now() - timedelta(seconds=seconds))
    rows: models.QuerySet[TaskLockEvent] = old.exclude(kind="acquired", outcome="")
    return rows


def prune(
    batch: int = 1000,
    *,
    older_than: float | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Delete what is older than ``older_than`` seconds (default ``SINGLETASK_HISTORY_DAYS``).

    In small batches, each a transaction of its own; at most ``limit`` rows. ``progress`` is
    called after each with the number of rows deleted so far, which is what is returned.
    """
    from django_singletask.models import TaskLockEvent

    old, deleted = old_rows(older_than).order_by("at"), 0
    rest = old
    while batch := batch if limit is None else min(batch, limit - deleted):
        rows = list(rest.values_list("pk", "at")[:batch])
        if not rows:
            break
        deleted += TaskLockEvent.objects.filter(pk__in=[pk for pk, _at in rows]).delete()[0]
        if progress is not None:
            progress(deleted)
        # PostgreSQL's index still holds the deleted: do not pass by them each time.
        rest = old.filter(at__gte=rows[-1][1])
    return deleted
