"""Write lock events into rows: insert, count and close rows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from django import db
from django.conf import settings
from django.db import models, router, transaction
from django.db.models import F
from django.utils.timezone import get_default_timezone, make_naive

from django_singletask.forks import undivided
from django_singletask.history import bulk
from django_singletask.history.queries import TaskLockEventQuerySet
from django_singletask.holder import clean
from django_singletask.models import TROUBLE, TaskLockEvent
from django_singletask.signals import LockEvent

INCORRECT_STRING = 1366
"""MySQL's code for an invalid text, which Django reports as an operational error."""

LENGTHS = {
    field.name: field.max_length
    for field in TaskLockEvent._meta.concrete_fields
    if isinstance(field, models.CharField) and field.max_length
}
"""The maximum number of characters in each text column."""


def is_outage(error: Exception) -> bool:
    """Return whether a later attempt may succeed: down, read-only, or without the table yet."""
    kinds = (db.OperationalError, db.InterfaceError, db.InternalError, db.ProgrammingError)
    return isinstance(error, kinds) and error.args[:1] != (INCORRECT_STRING,)


def write(events: Iterable[LockEvent], *, again: bool = False) -> None:
    """Write events in one transaction, or in a savepoint if the caller is in a transaction.

    ``again``: an earlier attempt failed, but may have been committed. If this raises an error of
    the database, nothing is written.
    """
    events = [_fitted(event) for event in events]
    try:
        _write(events, again)
    except (db.NotSupportedError, db.ProgrammingError):
        # Row-level security and views refuse COPY. Nothing is written yet.
        alias = _alias()
        if alias in bulk.no_copy:
            raise
        bulk.no_copy.add(alias)
        try:
            _write(events, again)
        except db.Error:
            bulk.no_copy.discard(alias)  # COPY was not the reason: the table may be missing
            raise


def _write(events: Iterable[LockEvent], again: bool) -> None:
    with undivided(db.connections[_alias()]), transaction.atomic(using=_alias()):
        batch = Batch(again)
        for event in events:
            if event.kind in TROUBLE:
                # This closes the row of a run, so write that row first.
                batch.save()
                batch = Batch(again)
                _insert(event, again)
            else:
                batch.add(event)
        batch.save()


class Batch:
    """Collect events that few statements can write.

    A run that begins and ends in one batch is one inserted row, and all skips against one holder
    are one changed row.
    """

    def __init__(self, again: bool) -> None:
        self.again = again
        self.acquired: dict[str, dict[str, Any]] = {}
        self.released: dict[str, LockEvent] = {}
        self.counted: dict[tuple[Any, ...], list[LockEvent]] = defaultdict(list)

    def add(self, event: LockEvent) -> None:
        if event.kind == "acquired":
            self.acquired[event.token] = vars(event)
        elif event.kind == "released" and event.token in self.acquired and not self.again:
            self.acquired[event.token] = {**self.acquired[event.token], **_ending(event)}
        elif event.kind == "released":
            self.released[event.token] = event
        else:
            # A skip without a known holder gets a separate row.
            holder = event.blocked_by or id(event)
            self.counted[event.kind, event.key, holder, event.reason].append(event)

    def save(self) -> None:
        if self.again:
            task_ids = {row["task_id"] for row in self.acquired.values()}
            for run in _rows().runs(self.acquired, task_ids):
                self.acquired.pop(run.token, None)
        if self.acquired:
            bulk.insert(_alias(), self.acquired.values())
        if self.released:
            _close(self.released)
        # All processes use the same order. With different orders, two of them could wait for each
        # other:
        #
        #   one:    changes a ...... waits for b
        #   other:         changes b ...... waits for a
        for _key, repeats in sorted(self.counted.items(), key=lambda item: str(item[0])):
            _count(repeats, self.again)


def _alias() -> str:
    return router.db_for_write(TaskLockEvent)


def _rows() -> TaskLockEventQuerySet:
    return TaskLockEvent.objects.primary()


def _fitted(event: LockEvent) -> LockEvent:
    changes: dict[str, Any] = {}
    for name, length in LENGTHS.items():
        text = getattr(event, name)
        if len(text) > length or not text.isprintable():
            changes[name] = clean(text, length)
    if not settings.USE_TZ:
        changes["at"] = make_naive(event.at, get_default_timezone())
    return dataclasses.replace(event, **changes) if changes else event


def _row(event: LockEvent, **facts: Any) -> TaskLockEvent:
    facts = {**vars(event), **facts}
    facts = {name: fact for name, fact in facts.items() if name not in ("quiet", "held_for")}
    return TaskLockEvent(**facts)


def _insert(event: LockEvent, again: bool) -> None:
    rows = _rows().of_tokens([event.token])
    if again and any((row.kind, row.at) == (event.kind, event.at) for row in rows):
        return
    _row(event, outcome="").save(force_insert=True)
    # Do not change a row that the run itself has closed.
    open_rows = [row.pk for row in rows if row.kind == "acquired" and not row.outcome]
    if not open_rows:
        return
    changes: dict[str, Any] = {"outcome": event.outcome or event.kind, "ended_at": event.at}
    if event.kind == "retaken":  # the run keeps running
        changes = {"reason": event.reason}
    _rows().filter(pk__in=open_rows, outcome="").update(**changes)


def _close(released: dict[str, LockEvent]) -> None:
    endings = {token: _ending(event) for token, event in released.items()}
    if bulk.close(_alias(), endings) == len(released):
        return
    rows = _rows().only("token", "kind", "outcome", "ended_at")
    for run in rows.runs(released, {event.task_id for event in released.values()}):
        event = released[run.token]
        # The sweep may have closed the row of a run that keeps its lock, with a later time.
        if run.outcome != "released" or run.ended_at > event.at:
            _close_again(run, event)


def _ending(event: LockEvent) -> dict[str, Any]:
    fields = ("outcome", "result", "reason", "longest_renewal_gap")
    return {"ended_at": event.at, **{field: getattr(event, field) for field in fields}}


def _close_again(run: TaskLockEvent, event: LockEvent) -> None:
    """Close a row again that another process, or an earlier attempt, has closed."""
    ending = _ending(event)
    if event.outcome == "lost":
        # Keep the outcome, since the process that cleared the lock knew the reason.
        del ending["outcome"]
        if run.outcome == "cleared":
            del ending["ended_at"]  # its hold ended when it was cleared
        _rows().filter(pk=run.pk).update(**ending)
        return
    _rows().filter(pk=run.pk).update(**ending)
    # If the sweep has reported the run as expired, it was wrong.
    wrong = [row.pk for row in _rows().of_tokens([run.token]) if row.kind == "expired"]
    if wrong:
        _rows().filter(pk__in=wrong).delete()


def _count(repeats: list[LockEvent], again: bool) -> None:
    """Count the calls that met one holder in one row, also from several processes."""
    first, last = repeats[0], repeats[-1]
    if not first.blocked_by:
        same = _rows().filter(at=first.at).values_list("kind", "key", "task_id")
        if not again or (first.kind, first.key, first.task_id) not in set(same):
            _row(first, last_at=last.at, outcome="").save(force_insert=True)
        return
    row = _counted(first)
    if row is None:
        try:
            with transaction.atomic(using=_alias()):
                _row(first, count=len(repeats), last_at=last.at, outcome="").save(force_insert=True)
                return
        except db.IntegrityError:
            row = _counted(first)  # another process has inserted it since
    if row is not None and not (again and row.last_at == last.at):
        _rows().filter(pk=row.pk).update(count=F("count") + len(repeats), last_at=last.at)


def _counted(event: LockEvent) -> TaskLockEvent | None:
    """Return the row that counts such calls against one holder.

    MySQL has no constraint and may have several rows: all processes use the first.
    """
    alike = (event.kind, event.key, event.reason)
    rows = _rows().blocked_by([event.blocked_by])
    rows = [row for row in rows if (row.kind, row.key, row.reason) == alike]
    return min(rows, key=lambda row: row.pk, default=None)
