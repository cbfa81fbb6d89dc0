"""The history in the admin: read-only."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import cache
from typing import Any

from celery import current_app
from django.contrib import admin
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.module_loading import autodiscover_modules
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from django_singletask.models import TaskLockEvent
from django_singletask.registry import duration
from django_singletask.task import SingletonTask

__all__ = ["TaskLockEventAdmin"]

Choices = Sequence[tuple[str, Any]]
Rows = QuerySet[TaskLockEvent]


class SinceFilter(admin.SimpleListFilter):
    """The last 15 minutes, hour, day or week."""

    title = _("time")
    parameter_name = "since"
    spans = {
        "15m": (_("Past 15 minutes"), datetime.timedelta(minutes=15)),
        "1h": (_("Past hour"), datetime.timedelta(hours=1)),
        "24h": (_("Past 24 hours"), datetime.timedelta(hours=24)),
        "7d": (_("Past 7 days"), datetime.timedelta(days=7)),
    }

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:
        """Offer the spans."""
        return [(value, label) for value, (label, _span) in self.spans.items()]

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        """Keep what is younger."""
        _label, span = self.spans.get(str(self.value()), (None, None))
        return queryset if span is None else queryset.filter(at__gte=timezone.now() - span)


class TaskFilter(admin.SimpleListFilter):
    """The registered tasks; asking the table for its tasks would read all of it."""

    title = _("task")
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:
        """Offer the tasks that use this package."""
        import_tasks()
        tasks = current_app.tasks.items()
        return [(name, name) for name, task in sorted(tasks) if isinstance(task, SingletonTask)]

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        """Keep the events of one task."""
        return queryset.filter(task=self.value()) if self.value() else queryset


@cache
def import_tasks() -> None:
    """Import the tasks of all apps: a web process may have met none of them yet."""
    autodiscover_modules("tasks")


class UncountedPaginator(Paginator):  # type: ignore[type-arg]
    """Count the rows up to a limit only: counting millions takes seconds."""

    limit = 10_000

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most ``limit``."""
        rows: Any = self.object_list
        number: int = rows[: self.limit].count()
        return number


@admin.register(TaskLockEvent)
class TaskLockEventAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """List what happened to the locks, the latest first."""

    list_display = ("when", "lock", "what", "run")
    list_display_links = ("lock",)
    list_filter = (SinceFilter, "kind", "outcome", TaskFilter)
    search_fields = ("^name", "=task_id")
    search_help_text = _("The beginning of a lock's name, or a whole task id.")
    paginator = UncountedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ()
    fieldsets = (
        (None, {"fields": ("name", "kind", "outcome", "result", "reason")}),
        (_("Run"), {"fields": ("task", "task_id", "host", "pid")}),
        (_("Time"), {"fields": ("when", "ended", "held_for", "timeout", "longest_renewal_gap")}),
        (_("Conflict"), {"fields": ("blocked_by_task_id", "blocked_by", "count", "last")}),
        (_("Lock"), {"fields": ("cache", "key", "token", "actor")}),
    )

    class Media:
        css = {"all": ("django_singletask/admin.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody writes history by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody rewrites history."""
        return False

    def get_search_results(
        self, request: HttpRequest, queryset: Rows, search_term: str
    ) -> tuple[Rows, bool]:
        """Search in a way that an index serves.

        The admin's own search takes names apart at their spaces and compares in upper case.
        """
        term = search_term.strip()
        if not term:
            return queryset, False
        # MySQL's case-sensitive comparison is the one that knows no index.
        mysql = connections[queryset.db].vendor == "mysql"
        begins = Q(name__istartswith=term) if mysql else Q(name__startswith=term)
        return queryset.filter(begins | Q(task_id=term)), False

    # Four columns: between the sidebars of the admin there is room for no more.

    @admin.display(description=_("at"))
    def when(self, event: TaskLockEvent) -> SafeString:
        """Give the time to the second; it may take two lines."""
        return _time(event.at)

    @admin.display(description=_("ended at"))
    def ended(self, event: TaskLockEvent) -> SafeString:
        """Give the end of a hold to the second."""
        return _time(event.ended_at)

    @admin.display(description=_("last at"))
    def last(self, event: TaskLockEvent) -> SafeString:
        """Give the time of the last of the counted events to the second."""
        return _time(event.last_at)

    @admin.display(description=_("lock"))
    def lock(self, event: TaskLockEvent) -> SafeString:
        """Give the name, which may be long."""
        return format_html('<span class="singletask-lock">{}</span>', event.name)

    @admin.display(description=_("what happened"))
    def what(self, event: TaskLockEvent) -> SafeString:
        """Say how the hold ended, or what else happened, how often, why and by whom."""
        text: Any
        if event.kind != "acquired":
            text = event.get_kind_display()
        elif not event.outcome:
            text = _("held")
        elif event.outcome == "released" and event.result:
            text = event.get_result_display()
        else:
            text = event.get_outcome_display()
        if event.count > 1:
            text = f"{text} × {event.count}"
        if event.kind == "acquired" and event.ended_at is not None:
            text = _("{} after {}").format(text, self.held_for(event))
        blocker = event.blocked_by_task_id or event.blocked_by
        reason = "" if event.reason == "skip" else event.reason  # "skipped" says as much
        return _lines(
            str(text),
            reason,
            _("blocked by {}").format(blocker) if blocker else "",
            _("by {}").format(event.actor) if event.actor else "",
        )

    @admin.display(description=_("held for"))
    def held_for(self, event: TaskLockEvent) -> str:
        """Say how long the run had the lock."""
        if event.kind != "acquired" or event.ended_at is None:
            return "-"
        seconds = max(0, (event.ended_at - event.at).total_seconds())
        text = f"{seconds:.2f}s" if seconds < 10 else duration(seconds)
        return text.replace(" ", "\N{NO-BREAK SPACE}")

    @admin.display(description=_("run"))
    def run(self, event: TaskLockEvent) -> SafeString:
        """Say which run it was, and in which process."""
        process = f"{event.host}:{event.pid}" if event.host else ""
        return _lines(event.task_id, process)


def _time(at: datetime.datetime | None) -> SafeString:
    # The admin's own format of a time leaves out the seconds.
    if at is None:
        return SafeString("-")
    local = timezone.localtime(at) if timezone.is_aware(at) else at
    date, time = date_format(local, "Y-m-d"), date_format(local, "H:i:s")
    return format_html("<span>{}</span> <span>{}</span>", date, time)


def _lines(*texts: str) -> SafeString:
    filled = [(text,) for text in texts if text]
    lines = format_html_join("", '<div class="singletask-line">{}</div>', filled)
    return lines or SafeString("-")
