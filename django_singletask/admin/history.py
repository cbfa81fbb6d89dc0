"""The list of events: its filters, how it counts, and what it knows of each row."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from django_singletask.operators.held import judge
from django_singletask.operators.names import (
    NOT_RECORDED,
    SCANNED,
    WORDS,
    of_what,
    recorded_tasks,
)
from django_singletask.operators.windows import window_of
from django_singletask.task.base import import_tasks, singleton_tasks

WINDOW = ["range", "from", "to"]
"""What can name a window in an address; it has a form above the list."""


class TaskFilter(admin.SimpleListFilter):
    """Offer the tasks that take locks, and those that did according to the history."""

    title = _("task")
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, name) for name in known_tasks()]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.of_task(str(self.value())) if self.value() else queryset


def known_tasks() -> list[str]:
    """Return the tasks that take locks, and those that did according to the history."""
    import_tasks()
    return sorted({*singleton_tasks(), *tasks_of_history(int(time.monotonic() // 60))})


@lru_cache(maxsize=1)
def tasks_of_history(minute: int) -> list[str]:
    """Return the first tasks of the history; ``minute`` makes the cache ask once a minute."""
    return recorded_tasks()


class WhatFilter(admin.SimpleListFilter):
    """Offer what can have become of a run or a call."""

    title = _("what happened")
    parameter_name = "what"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(WORDS.items())

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset  # EventList narrows it to the window first


class UncountedPaginator(Paginator):  # type: ignore[type-arg]
    """Count the rows up to a limit only: to count millions of rows takes seconds."""

    limit = 5000

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most ``limit``; ``has_more`` says if there are more."""
        rows: Any = self.object_list
        number: int = rows[: self.limit + 1].count()
        self.has_more = number > self.limit
        return min(number, self.limit)


class EventList(ChangeList):
    """A page of events that knows the rows of the runs which blocked them."""

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        found = super().get_filters_params(params)
        return {name: value for name, value in found.items() if name not in WINDOW}

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        """Order the events of one task as their index does, which has the latest first, too."""
        return list(queryset.query.order_by)

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Keep what the window and the filter for what happened leave."""
        rows: Any = super().get_queryset(request, exclude_parameters)
        self.window, _problem = window_of(request.GET, timezone.now())
        if self.window:
            rows = rows.since(self.window.start, self.window.until)
        what = request.GET.get(WhatFilter.parameter_name, "")
        rows, is_whole = of_what(rows, what if what in WORDS else "")
        if not is_whole:
            text = _("Only the newest {} rows were searched: choose a time, a task or a lock.")
            messages.info(request, text.format(number_format(SCANNED, force_grouping=True)))
        return rows

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        is_filtered = self.query.strip() or self.get_filters_params() or self.window
        # Only if these differ, Django says how many results there are, and offers to show all.
        self.full_result_count = None if is_filtered else self.result_count
        events = self.result_list = list(self.result_list)
        judge(events)
        if not events and self.query.strip():
            messages.info(request, NOT_RECORDED)
        rows: Any = self.root_queryset
        pks = {run.token: run.pk for run in rows.runs(event.blocked_by for event in events)}
        for event in events:
            event.blocker_pk = pks.get(event.blocked_by)
