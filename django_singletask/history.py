"""Write what happens to the locks into the database."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.db import models, router, transaction
from django.db.models import F
from django.utils.timezone import get_default_timezone, make_naive

from django_singletask.conf import conf
from django_singletask.locks import TaskLock
from django_singletask.signals import LockEvent, lock_event

__all__ = ["connect", "record"]

logger = logging.getLogger("django_singletask")

TROUBLE = frozenset({"expired", "lost", "cleared"})
COUNTED = frozenset({"skipped", "duplicate"})

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
    if event.outcome == "lost":
        # That is all the run knows; who cleared the lock knew more.
        rows.filter(outcome="").update(outcome="lost")
    else:
        facts["outcome"] = event.outcome
    rows.update(**facts)


def _count(event: LockEvent) -> None:
    from django_singletask.models import TaskLockEvent

    rows = TaskLockEvent.objects.filter(
        kind=event.kind, key=event.key, blocked_by=event.blocked_by, reason=event.reason
    )
    # Two processes may both find no row and both insert one: the count is then spread over two.
    if not event.blocked_by or not rows.update(count=F("count") + 1, last_at=event.at):
        _insert(event)
