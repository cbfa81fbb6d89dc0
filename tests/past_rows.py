"""Rows of the history as runs of the past would have left them."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.utils.timezone import get_default_timezone, make_naive

from django_singletask.models import OUTCOMES, TaskLockEvent
from tests.entries import key_of

__all__ = ["before_now", "keep_history_in", "new", "ran", "row", "save", "skipped"]

RESULTS = {
    **dict.fromkeys(["requeue", "redelivery", "retry"], "waiting"),
    **dict.fromkeys(["raise", "wait"], "failed"),
}
"""What became of calls with another reason than to be skipped."""
TROUBLE = {*OUTCOMES} - {"released"}


def keep_history_in(settings: Any, alias: str) -> None:
    """Let the history be written to one of the databases, and read from it; empty it."""
    router = {"db_for_read": lambda *_, **__: alias, "db_for_write": lambda *_, **__: alias}
    settings.DATABASE_ROUTERS = [type("Router", (), router)()]
    TaskLockEvent.objects.all().delete()


def before_now(seconds: float) -> datetime:
    """Return the time that was so many seconds ago, by the clock that tests can stop."""
    at = datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=seconds)
    return at if settings.USE_TZ else make_naive(at, get_default_timezone())


def row(kind: str, ago: float = 0, *, name: str = "nightly", **facts: Any) -> TaskLockEvent:
    """Write what began ``ago`` seconds before now; of a trouble this is when it was noticed, too.

    ``token`` is that of a run; a run without one gets any.
    """
    at = before_now(ago)
    key = facts.pop("key", None) or key_of(name)
    token = facts.pop("token", "") or uuid.uuid4().hex
    facts = {"kind": kind, "name": name, "key": key, "at": at, **facts}
    facts.setdefault("cache", settings.SINGLETASK_CACHE)
    if facts.get("outcome") in TROUBLE:
        facts.setdefault("noticed_at", at)
    if facts.get("retaken"):
        facts.setdefault("retaken_at", at)
    if facts.get("blocked_by"):
        token = f"{facts['blocked_by']}:{facts.get('reason', '')}:{facts.get('result', '')}"
    return save(**{"ref": token, **facts})


def save(**facts: Any) -> TaskLockEvent:
    """Write a row of the history with these columns."""
    written = new(**facts)
    written.save()
    return written


def new(**facts: Any) -> TaskLockEvent:
    """Return a row that is not written yet; ``happened_at`` follows from its other times."""
    row = TaskLockEvent(**facts)
    times = [row.at, row.last_at, row.ended_at, row.noticed_at, row.retaken_at]
    row.happened_at = max(filter(None, times))
    return row


def ran(ago: float, lasted: float = 1, **facts: Any) -> TaskLockEvent:
    """Write a run whose hold ended ``ago`` seconds before now; without a result others noticed."""
    end = before_now(ago)
    facts = {"outcome": "released", "result": "returned", **facts}
    times = {"ended_at": end if facts["result"] else None}
    if facts["outcome"] in TROUBLE:
        times["noticed_at"] = end
    return row("run", ago + lasted, **{**times, **facts})


def skipped(first: float, last: float | None = None, count: int = 1, **facts: Any) -> TaskLockEvent:
    """Write calls that met one holder, from ``first`` to ``last`` seconds before now.

    They were skipped, unless their ``kind`` or ``reason`` says something else.
    """
    last_at = before_now(first if last is None else last)
    facts = {"kind": "conflict", "reason": "skip", "last_at": last_at, "count": count, **facts}
    result = RESULTS.get(facts["reason"], "skipped") if facts["kind"] == "conflict" else ""
    return row(facts.pop("kind"), first, **{"result": result, **facts})
