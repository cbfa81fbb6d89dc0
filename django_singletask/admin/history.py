"""The locks in the admin: the history, read-only; pages.py has what it stands beside."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import Min, Q, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from django_singletask.admin.pages import OperatorPages
from django_singletask.conf import conf
from django_singletask.history.queries import of_task
from django_singletask.models import TaskLockEvent
from django_singletask.operators.answers import holder_row, recorded_tasks
from django_singletask.operators.names import locks_of
from django_singletask.operators.words import (
    clock_time,
    hold_seconds,
    hold_time,
    process,
    status,
)
from django_singletask.task.registered import import_tasks, singleton_tasks

__all__ = ["TaskLockEventAdmin"]

Choices = Sequence[tuple[str, Any]]
Rows = QuerySet[TaskLockEvent]


class SinceFilter(admin.SimpleListFilter):
    """The last 15 minutes, hour, day or week."""

    title = _("time")
    parameter_name = "since"
    late = datetime.timedelta(hours=1)
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
        if span is None:
            return queryset
        start = timezone.now() - span
        # Rows are written nearly in the order of their times, and the ids are what the indexes
        # of the other filters end with. Many rows, and an hour before, since "nearly" is not
        # "always": what a process kept during an outage of the database comes late.
        rows = TaskLockEvent.objects.using(queryset.db).filter(at__gte=start - self.late)
        first = rows.order_by("at").values("pk")[:1000].aggregate(first=Min("pk"))["first"]
        found: Rows = queryset.filter(at__gte=start, pk__gte=first or 0)
        return found


class TaskFilter(admin.SimpleListFilter):
    """The registered tasks, and those that the history knows beside them."""

    title = _("task")
    parameter_name = "task"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:
        """Offer the tasks that take locks, or did."""
        import_tasks()
        tasks = set(singleton_tasks())
        tasks.update(recorded_tasks(int(time.monotonic() // 60)))
        return [(name, name) for name in sorted(tasks)]

    def queryset(self, request: HttpRequest, queryset: Rows) -> Rows:
        """Keep the events of one task."""
        return of_task(queryset, str(self.value())) if self.value() else queryset


class UncountedPaginator(Paginator):  # type: ignore[type-arg]
    """Count the rows up to a limit only: counting millions takes seconds."""

    limit = 5000
    has_more = False

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most ``limit``, and note whether there are more."""
        rows: Any = self.object_list
        number: int = rows[: self.limit + 1].count()
        self.has_more = number > self.limit
        return min(number, self.limit)


class EventList(ChangeList):
    """A page of events that knows the rows of those who were in the way."""

    def get_results(self, request: HttpRequest) -> None:
        """Look up the holders of one page in one query, by their tokens."""
        super().get_results(request)
        self.is_filtered = bool(self.query.strip() or self.get_filters_params())
        if not self.is_filtered or self.paginator.has_more:
            # Or Django offers to show all, or takes the limit for the number of results.
            self.full_result_count = self.result_count
        events = self.result_list = list(self.result_list)
        tokens = {event.blocked_by for event in events} - {""}
        rows = self.root_queryset.filter(token__in=tokens).order_by() if tokens else []
        # Told apart here: SQLite would rather read all that were acquired.
        holders = {row.token: row.pk for row in rows if row.kind == "acquired"}
        for event in events:
            event.holder_pk = holders.get(event.blocked_by)


@admin.register(TaskLockEvent)
class TaskLockEventAdmin(OperatorPages):
    """List what happened to the locks, the latest first."""

    change_list_template = "django_singletask/events.html"
    list_display = ("when", "lock", "what", "run")
    list_display_links = ("lock",)
    list_filter = (SinceFilter, "kind", "outcome", TaskFilter)
    search_fields = ("^name", "=task_id")
    search_help_text = _("The beginning of a lock's name, a whole call, or a whole task id.")
    frequent = 5000
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
        (_("Conflict"), {"fields": ("blocked_by_task_id", "holder", "count", "last")}),
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

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list that finds the holders."""
        return EventList

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show the list under the tabs, or say that the history cannot be read."""
        # A NUL, which no value has, is an error to PostgreSQL.
        if any("\0" in value for _name, values in request.GET.lists() for value in values):
            return HttpResponseRedirect(self.url("events"))
        request.current_app = self.admin_site.name
        context = {
            "title": _("History"),
            "tabs": self.tabs("events"),
            "history_is_off": conf.history == "off",
            **(extra_context or {}),
        }
        return self.or_unreadable("events", super().changelist_view, request, context)

    def change_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show an event, or say that the history cannot be read."""
        return self.or_unreadable("events", super().change_view, request, *args, **kwargs)

    def delete_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Delete an event, or say that the history cannot be read."""
        return self.or_unreadable("events", super().delete_view, request, *args, **kwargs)

    def history_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        """Show what users did to an event, or say that the history cannot be read."""
        return self.or_unreadable("events", super().history_view, request, *args, **kwargs)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """Order the events of one task as their index does; they are the latest first alike."""
        task = request.GET.get(TaskFilter.parameter_name)
        return ("task", *self.ordering) if task else self.ordering

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: int) -> HttpResponse:
        """Go back to the history: Django would leave for the index, as nobody changes events."""
        response: HttpResponse = super().response_delete(request, obj_display, obj_id)
        if isinstance(response, HttpResponseRedirect) and self.has_view_permission(request):
            return HttpResponseRedirect(self.url("events"))
        return response

    def get_search_results(
        self, request: HttpRequest, queryset: Rows, search_term: str
    ) -> tuple[Rows, bool]:
        """Search in a way that an index serves.

        The admin's own search takes names apart at their spaces and compares in upper case.
        """
        term = search_term.strip()
        if not term:
            return queryset, False
        begins = _begins(connections[queryset.db].vendor, term)
        rows = TaskLockEvent.objects.using(queryset.db).order_by().values_list("pk", flat=True)
        found = list(rows.filter(begins)[: self.frequent + 1])
        # A call as the command prints it, and as people write it, is short of its defaults.
        if names := {lock.name for lock in locks_of(term)} - {term}:
            found += rows.filter(name__in=names)[: self.frequent + 1]
        if len(found) > self.frequent:
            # To sort so many takes long: the newest are found sooner by reading from the newest on.
            return queryset.filter(Q(name__startswith=term) | Q(name__in=names)), False
        # As a list: by the condition itself PostgreSQL would look for a few names in all rows.
        found += rows.filter(task_id=term)[: self.frequent]
        return queryset.filter(pk__in=found), False

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
        state, word = status(event)
        if event.count > 1:
            word = f"{word} × {event.count}"
        if event.kind == "acquired" and event.ended_at is not None:
            word = str(_("{} after {}")).format(word, self.held_for(event))
        reason = "" if event.reason == "skip" else event.reason  # "skipped" says as much
        return format_html(
            '<span class="singletask-state singletask-{}">{}</span>{}',
            state,
            word,
            _lines(
                reason,
                self.blocker(event),
                str(_("by {}")).format(event.actor) if event.actor else "",
            ),
        )

    def blocker(self, event: TaskLockEvent) -> str:
        """Name who was in the way, with a link to its row where that is known."""
        blocker = event.blocked_by_task_id or event.blocked_by
        if not blocker:
            return ""
        pk = getattr(event, "holder_pk", None)
        if pk is not None:
            blocker = format_html('<a href="{}">{}</a>', self.url("change", pk), blocker)
        return format_html(str(_("blocked by {}")), blocker)

    @admin.display(description=_("blocked by"))
    def holder(self, event: TaskLockEvent) -> str:
        """Give the token of who was in the way, with a link to its row."""
        row = holder_row(event.blocked_by)
        if row is None:
            return event.blocked_by or "-"
        return format_html('<a href="{}">{}</a>', self.url("change", row.pk), row.token)

    @admin.display(description=_("held for"))
    def held_for(self, event: TaskLockEvent) -> str:
        """Say how long the run had the lock."""
        if event.kind != "acquired" or event.ended_at is None:
            return "-"
        text = hold_time(hold_seconds(event))
        return text.replace(" ", "\N{NO-BREAK SPACE}")

    @admin.display(description=_("run"))
    def run(self, event: TaskLockEvent) -> SafeString:
        """Say which run it was, and in which process."""
        return _lines(event.task_id, process(event.host, event.pid)) or SafeString("-")


def _begins(vendor: str, term: str) -> Q:
    """Return the condition that a name begins with a term, such that an index serves it."""
    if vendor == "mysql":
        return Q(name__istartswith=term)  # its case-sensitive comparison knows no index
    if vendor == "sqlite":
        # Its LIKE knows none either. Nothing that a name holds comes after this character.
        return Q(name__gte=term, name__lt=f"{term}\U0010ffff")
    return Q(name__startswith=term)


def _time(at: datetime.datetime | None) -> SafeString:
    # The admin's own format of a time leaves out the seconds.
    if at is None:
        return SafeString("-")
    date, _space, time = clock_time(at, dated=True).partition(" ")
    return format_html("<span>{}</span> <span>{}</span>", date, time)


def _lines(*texts: str) -> SafeString:
    filled = [(text,) for text in texts if text]
    return format_html_join("", '<div class="singletask-line">{}</div>', filled)
