"""Rows of the history as runs of the past would have left them."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

from django.conf import settings
from django.utils.timezone import get_default_timezone, make_naive

from django_singletask.conf import conf
from django_singletask.locks.keys import name_key
from django_singletask.models import TaskLockEvent

__all__ = ["before_now", "keep_history_in", "ran", "row", "skipped"]


def keep_history_in(settings: Any, alias: str) -> None:
    """Let the history be written to one of the databases, and read from it; empty it."""
    router = {"db_for_read": lambda *_, **__: alias, "db_for_write": lambda *_, **__: alias}
    settings.DATABASE_ROUTERS = [type("Router", (), router)()]
    TaskLockEvent.objects.all().delete()


def before_now(seconds: float) -> datetime:
    """Return the time that was so many seconds ago, by the clock that tests can stop."""
    at = datetime.fromtimestamp(time.time(), timezone.utc) - timedelta(seconds=seconds)
    return at if settings.USE_TZ else make_naive(at, get_default_timezone())


def row(kind: str, ago: float = 0, *, name: str = "nightly", **facts: Any) -> TaskLockEvent:
    """Write what happened ``ago`` seconds before now."""
    at = before_now(ago)
    key = facts.pop("key", None) or name_key(name).key
    facts = {"kind": kind, "name": name, "key": key, "at": at, "cache": conf.cache, **facts}
    return TaskLockEvent.objects.create(**facts)


def ran(ago: float, lasted: float = 1, **facts: Any) -> TaskLockEvent:
    """Write a run that was completed ``ago`` seconds before now."""
    ended_at = before_now(ago)
    facts = {"outcome": "released", "result": "returned", "ended_at": ended_at, **facts}
    return row("acquired", ago + lasted, **facts)


def skipped(first: float, last: float | None = None, count: int = 1, **facts: Any) -> TaskLockEvent:
    """Write calls that were skipped, from ``first`` to ``last`` seconds before now."""
    last_at = before_now(first if last is None else last)
    facts = {"kind": "skipped", "reason": "skip", "last_at": last_at, "count": count, **facts}
    return row(facts.pop("kind"), first, **facts)
