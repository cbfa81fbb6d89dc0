"""The history in the admin: a list of events that can be deleted, but neither added nor changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from django_singletask.admin.pages import (
    WINDOW,
    OperatorPages,
    or_unreadable,
    unbroken,
    window_form,
)
from django_singletask.models import TaskLockEvent
from django_singletask.operators.held import judge
from django_singletask.operators.names import locks_of
from django_singletask.operators.windows import SPANS, window_of
from django_singletask.operators.words import (
    clock_time,
    hold_seconds,
    process,
    reason,
    status,
    witness,
)
from django_singletask.task.base import import_tasks, singleton_tasks
from django_singletask.templatetags.singletask import long_id, task_id

TASKS = 100
"""Tasks of the history that the filter offers; each costs a query."""


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


def moment(field: str, label: Any) -> Callable[[Any, TaskLockEvent], SafeString]:
    """Return a column with a time to the second, which the admin's own format leaves out.

    A line may break between the date and the time of day.
    """

    @admin.display(description=label)
    def show(_admin: Any, event: TaskLockEvent) -> SafeString:
        at = getattr(event, field)
        parts = clock_time(at, dated=True).split() if at else ["-"]
        return format_html_join(" ", "<span>{}</span>", [(part,) for part in parts])

    return show


class EventList(ChangeList):
    """A page of events that knows the rows of the runs which blocked them."""

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Let the index of the states serve the filters for kind and outcome."""
        rows: Any = super().get_queryset(request, exclude_parameters)
        return rows.of_state(request.GET.get("kind__exact"), request.GET.get("outcome__exact"))

    def get_results(self, request: HttpRequest) -> None:
        """Look up all these runs at once, by their tokens."""
        super().get_results(request)
        self.is_filtered = bool(self.query.strip() or self.get_filters_params())
        # Only if these differ, Django says how many results there are, and offers to show all.
        self.full_result_count = None if self.is_filtered else self.result_count
        events = self.result_list = list(self.result_list)
        judge(events)
        rows: Any = self.root_queryset
        runs = rows.runs({event.blocked_by for event in events})
        pks = {run.token: run.pk for run in runs}
        for event in events:
            event.blocker_pk = pks.get(event.blocked_by)


@admin.register(TaskLockEvent)
class TaskLockEventAdmin(OperatorPages):
    """List what happened to the locks, the latest first."""

    change_list_template = "django_singletask/events.html"
    # The sidebars of the admin leave room for four columns.
    list_display = ("when", "lock", "what", "run")
    list_display_links = ("lock",)
    list_filter = (WindowFilter, "kind", "outcome", TaskFilter)
    search_fields = ("^name", "=task_id")
    search_help_text = _("A task, the beginning of a lock's name, a call, or a whole task id.")
    paginator = UncountedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    ordering = ("-id",)
    sortable_by = ()
    fieldsets = (
        (None, {"fields": ("name", "kind", "outcome", "result", "reason", "retaken")}),
        (pgettext_lazy("lock", "Run"), {"fields": ("task", "task_id", "host", "pid")}),
        (_("Time"), {"fields": ("when", "ended", "held_for", "timeout", "longest_renewal_gap")}),
        (_("Noticed"), {"fields": ("noticed", "actor")}),
        (_("Conflict"), {"fields": ("blocked_by_task_id", "holder", "count", "last")}),
        (_("Lock"), {"fields": ("cache", "key", "token")}),
    )

    class Media:
        css = {"all": ("django_singletask/admin.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return EventList

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """Order the events of one task as their index does, which has the latest first, too."""
        task = request.GET.get(TaskFilter.parameter_name)
        return ("task", *self.ordering) if task else self.ordering

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Search by an index, neither splitting the text at spaces nor ignoring case."""
        text = search_term.strip()
        if not text:
            return queryset, False
        # The name of a task can be its last parts.
        end, parenthesis, arguments = text.partition("(")
        tasks = [task for task in known_tasks() if f".{task}".endswith(f".{end.strip()}")]
        calls = [text, *(f"{task}({arguments}" for task in tasks if parenthesis)]
        # A call can also be written with its defaults, or with positional arguments.
        names = {lock.name for call in calls for lock in locks_of(call)}
        return queryset.search(calls, names, () if parenthesis else tasks), False

    @partial(or_unreadable, "events")
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        form = window_form(request, timezone.now())
        task = request.GET.get("task", "")
        form["only"] = f"&{urlencode({'task': task})}" if task else ""
        form["timeline_url"] = self.url("timeline")
        context = {**self.common_context("events"), **form, **(extra_context or {})}
        return super().changelist_view(request, context)

    change_view = or_unreadable("events", OperatorPages.change_view)
    delete_view = or_unreadable("events", OperatorPages.delete_view)
    history_view = or_unreadable("events", OperatorPages.history_view)

    def response_delete(self, request: HttpRequest, obj_display: str, obj_id: int) -> HttpResponse:
        """Go back to the history; Django goes to the index if the user may not change events."""
        response: HttpResponse = super().response_delete(request, obj_display, obj_id)
        if isinstance(response, HttpResponseRedirect) and self.has_view_permission(request):
            return HttpResponseRedirect(self.url("events"))
        return response

    # Columns of the list and fields of an event

    when = moment("at", _("at"))
    ended = moment("ended_at", _("ended at"))
    noticed = moment("noticed_at", _("noticed at"))
    last = moment("last_at", _("last at"))

    @admin.display(description=_("lock"))
    def lock(self, event: TaskLockEvent) -> SafeString:
        return format_html('<bdi class="singletask-lock">{}</bdi>', event.name)

    @admin.display(description=_("what happened"))
    def what(self, event: TaskLockEvent) -> SafeString:
        """Say how the hold ended, or what became of calls, how often, why, and who noticed it."""
        state, word = status(event)
        if event.count > 1:
            word = f"{word} × {event.count}"
        if event.hold_ended_at is not None:
            word = _("{} after {}").format(word, self.held_for(event))
        retaken = _("retaken × {}").format(event.retaken) if event.retaken else ""
        blocker = event.blocked_by_task_id or event.blocked_by
        if blocker:
            link = self.link(blocker, getattr(event, "blocker_pk", None))
            blocker = format_html(str(_("blocked by {}")), link)
        badge = '<span class="singletask-state singletask-{}">{}</span>{}'
        return format_html(
            badge, state, word, lines(reason(event), blocker, witness(event), retaken)
        )

    @admin.display(description=_("token"))
    def token(self, event: TaskLockEvent) -> str:
        return event.token or "-"

    @admin.display(description=_("blocked by"))
    def holder(self, event: TaskLockEvent) -> str:
        """Write the token of the run that blocked the event, with a link to its row."""
        runs = TaskLockEvent.objects.runs([event.blocked_by])
        return self.link(event.blocked_by or "-", runs[0].pk if runs else None)

    def link(self, text: str, pk: int | None) -> str:
        if pk is None:
            return long_id(text)
        return format_html('<a href="{}">{}</a>', self.url("change", pk), long_id(text))

    @admin.display(description=_("held for"))
    def held_for(self, event: TaskLockEvent) -> str:
        return "-" if event.hold_ended_at is None else unbroken(hold_seconds(event))

    @admin.display(description=_("run"))
    def run(self, event: TaskLockEvent) -> SafeString:
        shown = task_id(event.task_id) if event.task_id else ""
        return lines(shown, process(event.host, event.pid)) or SafeString("-")


def lines(*texts: str) -> SafeString:
    return format_html_join(
        "", '<div class="singletask-line">{}</div>', [(text,) for text in texts if text]
    )
