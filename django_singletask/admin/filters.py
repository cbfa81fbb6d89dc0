"""The filters of the history, and its paginator; queries.py knows how an index serves them."""

from __future__ import annotations

import time
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.contrib import admin, messages
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from django_singletask.models import TaskLockEvent
from django_singletask.operators.windows import SPANS, window_of
from django_singletask.task.base import import_tasks, singleton_tasks

WINDOW = ["range", "from", "to"]
"""What can name a window in an address."""
TASKS = 100
"""Tasks of the history that the filter offers; each costs a query."""


def window_form(request: HttpRequest, now: datetime) -> dict[str, Any]:
    """Return what the form for a window needs; a wrong window of the address is a message."""
    window, problem = window_of(request.GET, now)
    if problem:
        messages.warning(request, problem)
    others = [pair for pair in request.GET.items() if pair[0] not in (*WINDOW, "p")]
    return {"window": window, "others": others}


class WindowFilter(admin.SimpleListFilter):
    """Offer the time spans of the timeline; a form above the list offers any other window."""

    title = _("time")
    parameter_name = "range"

    def __init__(self, request: HttpRequest, params: Any, *args: Any) -> None:
        self.window, _problem = window_of(request.GET, timezone.now())
        super().__init__(request, params, *args)
        for name in WINDOW:
            params.pop(name, None)

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(value, _("Past {}").format(span.label)) for value, span in SPANS.items()]

    def choices(self, changelist: Any) -> Any:
        """Leave out the window of the form from the links to other windows."""
        for choice, span in zip(super().choices(changelist), ("", *SPANS), strict=True):
            query = changelist.get_query_string({"range": span} if span else {}, WINDOW)
            chosen = span == (self.window.span if self.window else "")
            yield {**choice, "query_string": query, "selected": chosen}

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        window = self.window
        return queryset.since(window.start, window.until) if window else queryset


class TaskFilter(admin.SimpleListFilter):
    """Offer the tasks of the project and of the history."""

    title = _("task")
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, name) for name in known_tasks()]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.of_task(str(self.value())) if self.value() else queryset


def known_tasks() -> list[str]:
    """Return the tasks that take locks, and those that did according to the history."""
    import_tasks()
    return sorted({*singleton_tasks(), *recorded_tasks(int(time.monotonic() // 60))})


@lru_cache(maxsize=1)
def recorded_tasks(minute: int) -> list[str]:
    """Return the first tasks of the history; ``minute`` makes the cache ask once a minute."""
    tasks: list[str] = TaskLockEvent.objects.task_names(TASKS)
    return tasks


class AtLeast(int):
    """A number that says that there are more."""

    def __str__(self) -> str:
        return f"{number_format(int(self), force_grouping=True)}+"


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
        if not self.has_more:
            return number
        # With this setting Django itself would group the digits, and the sign with them.
        return self.limit if settings.USE_THOUSAND_SEPARATOR else AtLeast(self.limit)
