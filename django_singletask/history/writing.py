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
from django.db import IntegrityError, models, router, transaction
from django.db.models import Case, F, Value, When
from django.utils.timezone import get_default_timezone, make_aware, make_naive

from django_singletask.history.queries import SWEEPER, TaskLockEventQuerySet
from django_singletask.holder import Holder
from django_singletask.locks import clock
from django_singletask.locks.address import Address
from django_singletask.locks.keys import LockKey
from django_singletask.locks.liveness import proof_of_death
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores import get_store

if TYPE_CHECKING:
    from django_singletask.models import TaskLockEvent

__all__ = ["SWEEPER", "old_rows", "only_open", "prune", "sweep", "write"]

logger = logging.getLogger("django_singletask")

TROUBLE = frozenset({"expired", "lost", "cleared"})
COUNTED = frozenset({"skipped", "duplicate"})

BATCH = 500
"""Rows a statement: SQLite takes so many parameters."""


def write(events: Iterable[LockEvent], *, again: bool = False) -> None:
    """Write events in one transaction, in a savepoint if the caller is in one.

    ``again`` says that an attempt failed whose commit may have come through all the same. Raises
    the errors of the database; then nothing of it is written.
    """
    with transaction.atomic(using=router.db_for_write(_model())):
        batch = Batch(again)
        for event in events:
            event = _fitted(event, _model())
            if event.kind in TROUBLE:
                # It closes the row of a run, which must be there.
                batch.save()
                batch = Batch(again)
                _insert(event, again)
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
        if self.again and self.acquired:
            for token, kind in (
                _objects().filter(token__in=list(self.acquired)).values_list("token", "kind")
            ):
                if kind == "acquired":
                    self.acquired.pop(token, None)
        if self.acquired:
            _objects().bulk_create(self.acquired.values(), batch_size=BATCH)
        _close(self.released)
        # In one order in all processes: two that count the same rows in different orders would
        # each wait for what the other has changed.
        for _what, repeats in sorted(self.counted.items(), key=lambda item: str(item[0])):
            _count(repeats, self.again)


def _objects() -> TaskLockEventQuerySet:
    return _model().objects.primary()


_UNSTORABLE = re.compile("[\\x00\\ud800-\\udfff]")  # PostgreSQL's text holds neither


def _fitted(event: LockEvent, model: type[models.Model]) -> LockEvent:
    """Make texts, which others wrote, and time into what the columns hold."""
    changed: dict[str, Any] = {}
    for name, length in _lengths(model):
        text = getattr(event, name)
        # What is printable holds none of these, and that is quick to say.
        if len(text) > length or not text.isprintable():
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


def _model() -> type[TaskLockEvent]:
    from django_singletask.models import TaskLockEvent

    return TaskLockEvent


def _row(event: LockEvent, **facts: Any) -> TaskLockEvent:
    facts = {**vars(event), **facts}
    del facts["quiet"]
    return _model()(**facts)


# Rows are looked up by one indexed column, and the rest is looked at here: with two conditions
# SQLite and MySQL may take the index that has half of all rows.


def _insert(event: LockEvent, again: bool) -> None:
    outcome = event.outcome or event.kind
    rows = list(_objects().filter(token=event.token)) if event.token else []
    if again and any((row.kind, row.at) == (event.kind, event.at) for row in rows):
        return
    _row(event, outcome="").save(force_insert=True)
    # The run's own word, once it ends, stands above what others saw of it.
    mine = [row.pk for row in rows if row.kind == "acquired" and not row.outcome]
    if mine:
        _objects().filter(pk__in=mine, outcome="").update(outcome=outcome, ended_at=event.at)


def _close(events: list[LockEvent]) -> None:
    for start in range(0, len(events), BATCH):
        part = {event.token: event for event in events[start : start + BATCH]}
        fields = ("pk", "token", "kind", "outcome")
        open_rows: dict[tuple[Any, ...], list[tuple[int, LockEvent]]] = {}
        for pk, token, kind, outcome in (
            _objects().filter(token__in=list(part)).values_list(*fields)
        ):
            event = part[token]
            if kind == "acquired" and not outcome:
                alike = (event.outcome, *_ending(event).values())
                open_rows.setdefault(alike, []).append((pk, event))
            elif kind == "acquired":
                _close_again(pk, event)
        for group in open_rows.values():
            _close_alike(group)


def _close_alike(group: list[tuple[int, LockEvent]]) -> None:
    field: Any = _model()._meta.get_field("ended_at")
    ends = [When(pk=pk, then=Value(event.at)) for pk, event in group]
    first = group[0][1]
    _objects().filter(pk__in=[pk for pk, _event in group]).update(
        outcome=first.outcome, ended_at=Case(*ends, output_field=field), **_ending(first)
    )


def _ending(event: LockEvent) -> dict[str, Any]:
    return {name: getattr(event, name) for name in ("result", "reason", "longest_renewal_gap")}


def _close_again(pk: int, event: LockEvent) -> None:
    """Close a row that others have closed meanwhile; it may as well be closed by this event."""
    facts = {"ended_at": event.at, **_ending(event)}
    if event.outcome == "lost":
        # That is all the run knows; who cleared the lock knew more.
        _objects().filter(pk=pk).update(**facts)
        return
    _objects().filter(pk=pk).update(outcome=event.outcome, **facts)
    # The sweep took the run for gone, and was wrong.
    rows = _objects().filter(token=event.token).values_list("pk", "kind")
    wrong = [other for other, kind in rows if kind == "expired"]
    if wrong:
        _objects().filter(pk__in=wrong).delete()


def _count(repeats: list[LockEvent], again: bool) -> None:
    """Count what met one holder in one row, however many processes met it."""
    first, last = repeats[0], repeats[-1]
    if not first.blocked_by:
        same = _objects().filter(at=first.at).values_list("kind", "key", "task_id")
        if not again or (first.kind, first.key, first.task_id) not in set(same):
            _row(first, last_at=last.at, outcome="").save(force_insert=True)
        return
    if _raise_count(repeats, again):
        return
    try:
        with transaction.atomic(using=router.db_for_write(_model())):
            _row(first, count=len(repeats), last_at=last.at, outcome="").save(force_insert=True)
    except IntegrityError:
        # Another process has inserted it since the look.
        _raise_count(repeats, again)


def _raise_count(repeats: list[LockEvent], again: bool) -> bool:
    first, last = repeats[0], repeats[-1]
    fields = ("pk", "kind", "key", "reason", "last_at")
    rows = _objects().filter(blocked_by=first.blocked_by).order_by("pk").values_list(*fields)
    for pk, kind, key, reason, last_at in rows:
        # MySQL knows no such constraint, and may have several: one of them counts.
        if (kind, key, reason) == (first.kind, first.key, first.reason):
            if not again or last_at != last.at:
                _objects().filter(pk=pk).update(count=F("count") + len(repeats), last_at=last.at)
            return True
    return False


def only_open(rows: Any) -> TaskLockEventQuerySet:
    # Of before, until its last caller uses the method.
    return rows.open()


def sweep() -> None:
    """Close the open rows of locks that nobody holds any more, and prune.

    Call it again and again in one process: a row is closed when its token was not in the store
    at two looks that are at least its lease apart. One look can fall between a renewal that found
    the entry gone and took it again; and the row of a run that has just ended may be on its way.
    """
    now = datetime.now(timezone.utc)
    still_open, down = set(), {}
    for row in _objects().open().iterator():
        still_open.add(row.pk)
        over = _aware(row.at) + timedelta(seconds=row.timeout) <= now
        if over and row.cache in settings.CACHES and row.cache not in down:
            try:
                _look_after(row, now)
            except Exception as error:
                # A cache that is down, or holds no locks any more, keeps no other from its turn.
                down[row.cache] = error
                logger.warning("The rows of the cache %r are not swept: %s", row.cache, error)
    for pk in _missed.keys() - still_open:
        del _missed[pk]
    prune(limit=SWEPT)


SWEPT = 50_000
"""Rows that one sweep deletes at most: the next is soon."""


def _look_after(row: TaskLockEvent, now: datetime) -> None:
    entry = get_store(row.cache).read(row.key)
    holder = Holder.decode(entry.value) if entry is not None else None
    if holder is not None and holder.token == row.token:
        _missed.pop(row.pk, None)
        how = proof_of_death(holder)
        if how is not None:
            Address(row.cache, LockKey(row.name, row.key)).bury(row.token, how)
    elif clock.now() - _missed.setdefault(row.pk, clock.now()) >= row.timeout:
        del _missed[row.pk]
        _expire(row, now)


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
    lock_event.send_robust(sender=LockEvent, event=event)


def _aware(at: datetime) -> datetime:
    return at if settings.USE_TZ else make_aware(at, get_default_timezone())


def old_rows(older_than: float | None = None) -> TaskLockEventQuerySet:
    # Of before, until its last caller uses the method.
    return _objects().older_than(older_than)


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
    old, deleted = _objects().older_than(older_than).order_by("at"), 0
    rest = old
    while batch := batch if limit is None else min(batch, limit - deleted):
        rows = list(rest.values_list("pk", "at", "token")[:batch])
        if not rows:
            break
        # Before runs go the calls that met them: without them these came to nothing, for who
        # looks meanwhile, or after the last batch of this time.
        tokens = [token for _pk, _at, token in rows if token]
        met = _objects().filter(blocked_by__in=tokens).order_by().values_list("pk", flat=True)
        first = list(met[:batch])
        deleted += _objects().filter(pk__in=first or [row[0] for row in rows]).delete()[0]
        if progress is not None:
            progress(deleted)
        # PostgreSQL's index still holds the deleted: do not pass by them each time.
        rest = old.filter(at__gte=rows[0 if first else -1][1])
    return deleted
