"""Find rows of the history by what an operator asks, each time by an index or among few rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from django.utils.timezone import now as django_now

from django_singletask.history.queries import FREQUENT, TOKENS, reading
from django_singletask.models import TaskLockEvent

SCANNED = 20_000
"""Newest rows, at most, among which those are looked for that no index serves."""


class Found(NamedTuple):
    """Rows, the newest first; ``complete`` is False if older rows may fit that nobody looked at."""

    rows: list[TaskLockEvent]
    complete: bool


def fits(name: str, pattern: str) -> bool:
    """Say whether a name fits a pattern, in which ``*`` stands for any text."""
    if "*" not in pattern:
        return name == pattern
    return fnmatchcase(name, re.sub(r"[\[?]", r"[\g<0>]", pattern))


def find(
    conditions: Iterable[Mapping[str, Any]] = ({},), *, limit: int = 50, **facts: Any
) -> Found:
    """Return the newest rows that meet one of the conditions, and have all the facts.

    Conditions and facts are columns of the history and their values (None leaves a fact out),
    ``like`` (a pattern for the name) and ``since`` (seconds before now). Old rows are found with
    the history off, too. Raises :class:`NoHistory`.
    """
    facts = {name: fact for name, fact in facts.items() if fact is not None}
    with reading(even_if_off=True):
        parts = [_find(limit, **{**facts, **condition}) for condition in conditions]
    rows = {row.pk: row for part in parts for row in part.rows}
    newest = sorted(rows, reverse=True)[:limit]
    return Found([rows[pk] for pk in newest], all(part.complete for part in parts))


def _find(limit: int, **facts: Any) -> Found:
    history, task, since = TaskLockEvent.objects.all(), facts.pop("task", ""), facts.pop("since", 0)
    like, result = facts.pop("like", "*"), facts.pop("result", "")
    rows = history.of_task(task) if task else history.newest()
    rows = rows.of_state(facts.pop("kind", None), facts.pop("outcome", None)).filter(**facts)
    if "token" in facts:
        rows = rows.extra(where=[TOKENS])  # else no index serves it
    if since:
        rows = rows.since(django_now() - timedelta(seconds=since))
    if not result and like == "*":
        return Found(list(rows[:limit]), True)
    if start := like.partition("*")[0]:
        named = history.order_by().named_like(start).values_list("pk", flat=True)
        ids = list(named[: FREQUENT + 1])
        rows = rows.filter(pk__in=ids) if len(ids) <= FREQUENT else rows
    seen = list(rows.values_list("pk", "name", "result")[:SCANNED])
    meant = [pk for pk, name, ended in seen if fits(name, like) and result in ("", ended)][:limit]
    complete = len(seen) < SCANNED or len(meant) == limit
    return Found(list(history.newest().filter(pk__in=meant)), complete)
