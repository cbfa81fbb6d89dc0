"""The history in the admin: a list of events that can be deleted, but neither added nor changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from django_singletask.admin.filters import (
    TaskFilter,
    UncountedPaginator,
    WindowFilter,
    known_tasks,
    window_form,
)
from django_singletask.admin.held import HeldPages
from django_singletask.admin.pages import OperatorPages, View, or_unreadable, unbroken
from django_singletask.admin.per_task import PerTaskPage
from django_singletask.admin.timeline import TimelinePage
from django_singletask.models import TaskLockEvent
from django_singletask.operators.held import judge
from django_singletask.operators.names import locks_of
from django_singletask.operators.words import clock_time, hold_seconds, process, status
from django_singletask.templatetags.singletask import long_id, task_id


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
        task_ids = {event.blocked_by_task_id for event in events}
        runs = rows.runs({event.blocked_by for event in events}, task_ids)
        pks = {run.token: run.pk for run in runs}
        for event in events:
            event.blocker_pk = pks.get(event.blocked_by)


@admin.register(TaskLockEvent)
class TaskLockEventAdmin(HeldPages, TimelinePage, PerTaskPage):
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
        (None, {"fields": ("name", "kind", "outcome", "result", "reason")}),
        (pgettext_lazy("lock", "Run"), {"fields": ("task", "task_id", "host", "pid")}),
        (_("Time"), {"fields": ("when", "ended", "held_for", "timeout", "longest_renewal_gap")}),
        (_("Conflict"), {"fields": ("blocked_by_task_id", "holder", "count", "last")}),
        (_("Lock"), {"fields": ("cache", "key", "token", "actor")}),
    )

    class Media:
        css = {"all": ("django_singletask/admin.css",)}

    def views(self) -> list[tuple[str, str, View]]:
        """Put what is held now first; the history has a separate address."""
        return [
            # The admin's index and breadcrumbs link to the page of this name.
            ("", "changelist", self.held_view),
            ("history/", "events", self.changelist_view),
            ("timeline/", "timeline", self.timeline_view),
            ("per-task/", "per_task", self.per_task_view),
            ("clear/", "clear", self.clear_view),
        ]

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
    last = moment("last_at", _("last at"))

    @admin.display(description=_("lock"))
    def lock(self, event: TaskLockEvent) -> SafeString:
        return format_html('<bdi class="singletask-lock">{}</bdi>', event.name)

    @admin.display(description=_("what happened"))
    def what(self, event: TaskLockEvent) -> SafeString:
        """Say how the hold ended, or what else happened, how often, why and by whom."""
        state, word = status(event)
        if event.count > 1:
            word = f"{word} × {event.count}"
        if event.kind == "acquired" and event.ended_at is not None:
            word = _("{} after {}").format(word, self.held_for(event))
        reason = "" if event.reason == "skip" else event.reason  # "skipped" says as much
        blocker = event.blocked_by_task_id or event.blocked_by
        if blocker:
            link = self.link(blocker, getattr(event, "blocker_pk", None))
            blocker = format_html(str(_("blocked by {}")), link)
        actor = event.actor and _("by {}").format(event.actor)
        badge = '<span class="singletask-state singletask-{}">{}</span>{}'
        return format_html(badge, state, word, lines(reason, blocker, actor))

    @admin.display(description=_("blocked by"))
    def holder(self, event: TaskLockEvent) -> str:
        """Write the token of the run that blocked the event, with a link to its row."""
        runs = TaskLockEvent.objects.runs([event.blocked_by], [event.blocked_by_task_id])
        return self.link(event.blocked_by or "-", runs[0].pk if runs else None)

    def link(self, text: str, pk: int | None) -> str:
        if pk is None:
            return long_id(text)
        return format_html('<a href="{}">{}</a>', self.url("change", pk), long_id(text))

    @admin.display(description=_("held for"))
    def held_for(self, event: TaskLockEvent) -> str:
        if event.kind != "acquired" or event.ended_at is None:
            return "-"
        return unbroken(hold_seconds(event))

    @admin.display(description=_("run"))
    def run(self, event: TaskLockEvent) -> SafeString:
        shown = task_id(event.task_id) if event.task_id else ""
        return lines(shown, process(event.host, event.pid)) or SafeString("-")


def lines(*texts: str) -> SafeString:
    return format_html_join(
        "", '<div class="singletask-line">{}</div>', [(text,) for text in texts if text]
    )
