"""Write what happens to the locks into the database."""

from __future__ import annotations

import dataclasses
import logging
import re
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.db import models, router, transaction
from django.db.models import F
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

__all__ = ["connect", "prune", "record", "sweep"]

logger = logging.getLogger("django_singletask")

TROUBLE = frozenset({"expired", "lost", "cleared"})
COUNTED = frozenset({"skipped", "duplicate"})

SWEEPER = "django_singletask.sweep"
"""Name of the lock of the worker that sweeps."""

_unrecorded = 0
"""Events in a row that could not be written: an outage is one log line, not one a run."""


def connect() -> None:
    """Start to listen."""
    lock_event.connect(receive, sender=TaskLock, dispatch_uid="django_singletask.history")


def receive(*, event: LockEvent, **kwargs: Any) -> None:
    """Record an event; what fails here costs the row and one log line, never the task."""
    global _unrecorded
    if conf.history == "off" or (event.quiet and event.kind not in TROUBLE):
        return
    try:
        record(event)
    except SoftTimeLimitExceeded:
        raise  # it is meant for the task
    except Exception as error:
        _unrecorded += 1
        if _unrecorded == 1:
            logger.warning(
                "The history of the locks cannot be written, which does no harm to the tasks: "
                "%s of %s was not recorded (%s: %s). Has 'manage.py migrate' run? "
                "SINGLETASK_HISTORY = 'off' stops recording.",
                event.kind,
                event.key,
                type(error).__name__,
                str(error).partition("\n")[0],
            )
    else:
        if _unrecorded:
            logger.warning(
                "The history of the locks is written again; %d events were not recorded.",
                _unrecorded,
            )
        _unrecorded = 0


def record(event: LockEvent) -> None:
    """Write one event, in a savepoint of the caller's own connection."""
    from django_singletask.models import TaskLockEvent

    event = _fitted(event, TaskLockEvent)
    with transaction.atomic(using=router.db_for_write(TaskLockEvent)):
        if event.kind == "released":
            _close(event)
        elif event.kind in COUNTED:
            _count(event)
        else:
            _insert(event)


_UNSTORABLE = re.compile("[\\x00\\ud800-\\udfff]")  # PostgreSQL's text holds neither


def _fitted(event: LockEvent, model: type[models.Model]) -> LockEvent:
    """Make texts, which others wrote, and time into what the columns hold."""
    texts: dict[str, Any] = {}
    for field in model._meta.concrete_fields:
        if isinstance(field, models.CharField) and field.max_length:
            text = getattr(event, field.name)
            texts[field.name] = _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)[
                : field.max_length
            ]
    at = event.at if settings.USE_TZ else make_naive(event.at, get_default_timezone())
    return dataclasses.replace(event, at=at, **texts)


def _insert(event: LockEvent) -> None:
    from django_singletask.models import TaskLockEvent

    facts = {**vars(event)}
    del facts["quiet"]
    outcome = facts.pop("outcome") or (event.kind if event.kind in TROUBLE else "")
    if event.kind in COUNTED:
        facts["last_at"] = event.at
    TaskLockEvent.objects.create(**facts)
    if event.kind in TROUBLE and event.token:
        # The run's own word, once it ends, stands above what others saw of it.
        rows = TaskLockEvent.objects.filter(kind="acquired", token=event.token, outcome="")
        rows.update(outcome=outcome, ended_at=event.at)


def _close(event: LockEvent) -> None:
    from django_singletask.models import TaskLockEvent

    rows = TaskLockEvent.objects.filter(kind="acquired", token=event.token)
    facts = {
        "result": event.result,
        "ended_at": event.at,
        "longest_renewal_gap": event.longest_renewal_gap,
    }
    if rows.filter(outcome="").update(outcome=event.outcome, **facts):
        return
    if event.outcome == "lost":
        # That is all the run knows; who cleared the lock knew more.
        rows.update(**facts)
    elif rows.update(outcome=event.outcome, **facts):
        # The sweep took the run for gone, and was wrong.
        TaskLockEvent.objects.filter(kind="expired", token=event.token).delete()


def _count(event: LockEvent) -> None:
    from django_singletask.models import TaskLockEvent

    rows = TaskLockEvent.objects.filter(
        kind=event.kind, key=event.key, blocked_by=event.blocked_by, reason=event.reason
    )
    # Two processes may both find no row and both insert one: the count is then spread over two.
    if not event.blocked_by or not rows.update(count=F("count") + 1, last_at=event.at):
        _insert(event)


def sweep() -> None:
    """Close the open rows of locks that nobody holds any more, and prune.

    Call it again and again in one process: a row is closed when its token was not in the store
    at two looks that are at least its lease apart. One look can fall between a renewal that found
    the entry gone and took it again; and the row of a run that has just ended may be on its way.
    """
    from django_singletask.models import TaskLockEvent

    now = datetime.now(timezone.utc)
    rows = TaskLockEvent.objects.filter(kind="acquired", outcome="")
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


def prune(batch: int = 1000) -> int:
    """Delete what is older than ``SINGLETASK_HISTORY_DAYS``, in small batches; return how many.

    Open rows stay, however old.
    """
    from django_singletask.models import TaskLockEvent

    limit = django_now() - timedelta(days=conf.history_days)
    old = TaskLockEvent.objects.filter(at__lt=limit).exclude(kind="acquired", outcome="")
    deleted = 0
    while pks := list(old.order_by("at").values_list("pk", flat=True)[:batch]):
        deleted += TaskLockEvent.objects.filter(pk__in=pks).delete()[0]
    return deleted
