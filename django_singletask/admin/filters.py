"""The filters of the history, and its paginator; queries.py knows how an index serves them."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from django_singletask.models import TaskLockEvent
from django_singletask.operators.timeline import SPANS
from django_singletask.task.base import import_tasks, singleton_tasks

__all__ = ["TASKS", "SinceFilter", "TaskFilter", "UncountedPaginator", "recorded_tasks"]

TASKS = 100
"""Tasks of the history that the filter offers; each costs a query."""


class SinceFilter(admin.SimpleListFilter):
    """Offer the time spans of the timeline."""

    title = _("time")
    parameter_name = "since"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(value, _("Past {}").format(span.label)) for value, span in SPANS.items()]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        span = SPANS.get(str(self.value()))
        return queryset.since(timezone.now() - span.length) if span else queryset


class TaskFilter(admin.SimpleListFilter):
    """Offer the tasks that take locks, and those that did according to the history."""

    title = _("task")
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        import_tasks()
        tasks = {*singleton_tasks(), *recorded_tasks(int(time.monotonic() // 60))}
        return [(name, name) for name in sorted(tasks)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.of_task(str(self.value())) if self.value() else queryset


@lru_cache(maxsize=1)
def recorded_tasks(minute: int) -> list[str]:
    """Return the first tasks of the history; ``minute`` makes the cache ask once a minute."""
    tasks: list[str] = TaskLockEvent.objects.task_names(TASKS)
    return tasks


class UncountedPaginator(Paginator):  # type: ignore[type-arg]
    """Count the rows up to a limit only: to count millions of rows takes seconds."""

    limit = 5000
    has_more = False

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most ``limit``; ``has_more`` says if there are more."""
        rows: Any = self.object_list
        number: int = rows[: self.limit + 1].count()
        self.has_more = number > self.limit
        return min(number, self.limit)
