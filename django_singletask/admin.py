"""The pages of the admin: what is held now, the history, the timeline, and the tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from copy import copy
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext_lazy

from django_singletask.conf import conf
from django_singletask.history.queries import NoHistory, reading
from django_singletask.holder import clean
from django_singletask.models import COUNTED, OF_CALLS, RETAKEN, TROUBLE, TaskLockEvent
from django_singletask.operators import held, words
from django_singletask.operators.explain import facts, why
from django_singletask.operators.held import HeldLock, cannot_ask
from django_singletask.operators.names import NOT_RECORDED, Selector, recorded_tasks
from django_singletask.operators.per_task import COLUMNS, per_task
from django_singletask.operators.probe import at_stake
from django_singletask.operators.recorded import ALWAYS, LISTED, SCANNED, judge, meant
from django_singletask.operators.starving import Starving, starving
from django_singletask.operators.timeline import draw
from django_singletask.operators.windows import HOUR, SPANS, Window, window_of
from django_singletask.task.base import import_tasks, singleton_tasks
from django_singletask.templatetags.singletask import breakable, long_id, moment, task_id

__all__ = ["TaskLockEventAdmin"]

WINDOW = ["range", "from", "to"]
"""What can name a window in an address; it has a form above the list."""
TABS = {
    "changelist": gettext_lazy("Held now"),
    "events": pgettext_lazy("page", "History"),
    "timeline": gettext_lazy("Timeline"),
    "per_task": gettext_lazy("Per task"),
}
SHOWN = 100
"""Locks on a page of what is held."""
ORDERS = {"name": "name", "state": "", "held": "held_for", "conflicts": "conflicts"}
"""What the columns are sorted by."""
NOTES = {
    "held": gettext_lazy(
        "This frees only the lock. The task keeps running, and a second copy can start at the same "
        "time."
    ),
    "dead": gettext_lazy(
        "A process that held a lock is dead. If you do nothing, the next call on its host or the "
        "end of the lease frees the lock."
    ),
    "handed_over": gettext_lazy(
        "No process has this lock: it was handed over, and waits for its receiver. If you clear "
        "the lock, the receiver gets LockLost."
    ),
    "queued": gettext_lazy(
        "Until a queued call runs, identical calls are stopped when they are sent. Forget it if "
        "its message is lost, for example because the queue was purged. If the broker still has "
        "the message, the call runs together with identical calls that are sent before that."
    ),
}
"""What it means to clear a lock in a state whose word does not say so."""
EVENTS: Any = copy(TaskLockEvent._meta)
"""The names of the rows of the history, wherever Django counts or deletes them."""
EVENTS.verbose_name_plural = gettext_lazy("lock events")
CALLS = [*COUNTED, *OF_CALLS]
"""What can become of calls, in the order in which it is offered."""
TROUBLES = [words.ANY_TROUBLE, *TROUBLE, RETAKEN]
RUNS = [code for code in words.WORDS if code not in (*CALLS, *TROUBLES)]
View = Callable[..., HttpResponse]


def attempt(ask: Callable[..., Any], *args: Any, otherwise: Any) -> tuple[Any, str]:
    """Return the answer of the cache or the history; or ``otherwise``, and why there is none."""
    try:
        return ask(*args), ""
    except Exception as error:  # each cache client has errors of its own
        return otherwise, cannot_ask(error)


def for_viewers(view: View) -> View:
    """Return a view that needs the permission to view, and says if there is no history to read."""

    @wraps(view)
    def guarded(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        if not self.has_view_permission(request):
            raise PermissionDenied
        if "%00" in request.META.get("QUERY_STRING", ""):
            # PostgreSQL refuses a NUL character, and no row has one.
            return HttpResponseRedirect(request.path)
        try:
            with reading(even_if_off=True):
                return view(self, request, *args, **kwargs)
        except NoHistory as error:
            return self.render(request, "page", trouble=cannot_ask(error))

    return guarded


class TaskFilter(admin.SimpleListFilter):
    """Offer the tasks that take locks, and those that did according to the history."""

    title = gettext_lazy("task")
    parameter_name = "task"

    def groups(self) -> dict[str, list[tuple[str, Any]]]:
        return {"": self.lookup_choices}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        import_tasks()
        tasks = {*singleton_tasks(), *tasks_of_history(int(time.monotonic() // 60))}
        return [(name, name) for name in sorted(tasks)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if not self.value():
            return queryset
        return queryset.of_task(self.value())


@lru_cache(maxsize=1)
def tasks_of_history(minute: int) -> list[str]:
    """Return the first tasks of the history; ``minute`` makes the cache ask once a minute."""
    return recorded_tasks()


class WhatFilter(admin.SimpleListFilter):
    """Offer what can have become of a run or a call."""

    title = gettext_lazy("what happened")
    parameter_name = "what"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return list(words.WORDS.items())

    def groups(self) -> dict[str, list[tuple[str, Any]]]:
        """Return the words in groups."""
        groups = {_("Trouble"): TROUBLES, _("Runs"): RUNS, _("Calls"): CALLS}
        named = {}
        for label, codes in groups.items():
            named[label] = [(code, words.WORDS[code]) for code in codes]
        return named

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset  # EventList asks for it together with the window


class UncountedPaginator(Paginator):  # type: ignore[type-arg]
    """Count the rows up to a limit only: to count millions of rows takes seconds."""

    limit = LISTED

    @cached_property
    def count(self) -> int:
        """Return the number of rows, at most ``limit``; ``has_more`` says if there are more."""
        rows: Any = self.object_list
        number: int = rows[: self.limit + 1].count()
        self.has_more: bool = number > self.limit
        return min(number, self.limit)


class EventList(ChangeList):
    """A page of events that knows the rows of the runs which blocked them."""

    def get_filters_params(self, params: Any = None) -> dict[str, Any]:
        found = super().get_filters_params(params)
        return {name: value for name, value in found.items() if name not in WINDOW}

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        """Order the events of one task as their index does, which has the newest first, too."""
        return list(queryset.query.order_by)

    def get_filters(self, request: HttpRequest) -> Any:
        """Keep the filters for the form above the list: beside it, they take the room of names."""
        filters, _has_filters, *others = super().get_filters(request)
        return filters, False, *others

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Keep what the search, the window and the filter for what happened leave."""
        rows: Any = super().get_queryset(request, exclude_parameters)
        self.form: dict[str, Any] = window_form(request, timezone.now())
        chosen = {TaskFilter.parameter_name, WhatFilter.parameter_name, "p"}
        self.unfiltered = [pair for pair in request.GET.items() if pair[0] not in chosen]
        what = request.GET.get(WhatFilter.parameter_name, "")  # pyright: ignore[reportCallIssue, reportArgumentType]
        if what not in words.WORDS:
            what = ""
        times = ALWAYS
        window = self.form["window"]
        if window:
            times = (window.start, window.until)
        self.searched: str = self.query.strip()
        selectors = selectors_of(self.searched)
        parts, is_whole = meant(rows, selectors, what, times, LISTED + 1)
        if not is_whole:
            text = _("Only the newest {} rows were searched: choose a time, a task or a lock.")
            messages.info(request, text.format(number_format(SCANNED, force_grouping=True)))
        return rows.newest_of(parts, LISTED + 1, *times)

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.opts = EVENTS
        # Only if these differ, Django says how many results there are, and offers to show all.
        self.full_result_count = self.result_count
        if self.searched or self.get_filters_params() or self.form["window"]:
            self.full_result_count = None
        events = list(self.result_list)
        self.result_list = events
        judge(events)
        if not events and self.searched:
            messages.info(request, NOT_RECORDED)
        rows: Any = self.root_queryset
        pks = {run.token: run.pk for run in rows.runs(event.blocked_by for event in events)}
        for event in events:
            event.blocker_pk = pks.get(event.blocked_by)


@admin.register(TaskLockEvent)
class TaskLockEventAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Show what the store holds now, and free it; list and draw what happened to the locks.

    The events can be deleted, but neither added nor changed.
    """

    change_list_template = "django_singletask/events.html"
    delete_selected_confirmation_template = "django_singletask/delete.html"
    list_display = ("began", "ended", "lock", "what", "run")
    list_display_links = ("lock",)
    list_filter = (WhatFilter, TaskFilter)
    search_fields = ("name",)  # without any, Django shows no form
    search_help_text = gettext_lazy("Lock, task, id, token, host or process, or a pattern with *")
    paginator = UncountedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    ordering = ("-happened_at",)
    sortable_by = ()

    class Media:
        css = {"all": ("django_singletask/admin.css",)}

    def __init__(self, model: Any, admin_site: Any) -> None:
        super().__init__(model, admin_site)
        self.opts = EVENTS

    def get_urls(self) -> list[URLPattern]:
        """Put what is held now first; the history has a separate address."""
        pages = [
            # The admin's index and breadcrumbs link to the page of this name.
            ("", "changelist", self.held_view),
            ("history/", "events", self.changelist_view),
            ("timeline/", "timeline", self.timeline_view),
            ("per-task/", "per_task", self.per_task_view),
            ("clear/", "clear", self.clear_view),
        ]
        view = self.admin_site.admin_view
        paths = [path(route, view(show), name=self.url_name(page)) for route, page, show in pages]
        return [*paths, *super().get_urls()]

    def url_name(self, page: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"

    def url(self, page: str, *args: Any) -> str:
        """Return the address of a page on the admin site of this ModelAdmin."""
        return reverse(f"admin:{self.url_name(page)}", args=args, current_app=self.admin_site.name)

    def context(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the templates of all pages need."""
        context = self.admin_site.each_context(request)
        for page in (*TABS, "clear"):
            context[f"{page}_url"] = self.url(page)
        tabs = {self.url(page): label for page, label in TABS.items()}
        context["title"] = tabs.get(request.path, "")
        context["tabs"] = [(url, label, url == request.path) for url, label in tabs.items()]
        context["history_is_off"] = conf.history == "off"
        context["keeps_only_trouble"] = conf.history_keeps == "trouble"
        context["opts"] = self.model._meta
        context["sheets"] = ("admin/css/changelists.css", "django_singletask/admin.css")
        context["may_clear"] = self.has_clear_permission(request)
        return context

    def render(self, request: HttpRequest, template: str, **context: Any) -> TemplateResponse:
        context = self.context(request) | context
        return TemplateResponse(request, f"django_singletask/{template}.html", context)

    # Permissions

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_clear_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may clear locks, which needs the permission to view, too."""
        if not request.user.has_perm(f"{self.opts.app_label}.clear_lock"):  # pyright: ignore[reportAttributeAccessIssue]
            return False
        return self.has_view_permission(request)

    # What is held now

    @for_viewers
    def held_view(self, request: HttpRequest) -> HttpResponse:
        """List the locks that are held, as the store knows them at this moment."""
        searched = request.GET.get("q", "").strip()
        order, column, headings = sorting(request.GET.get("o", ""), ORDERS, "-state")
        hungry, unknown = attempt(starving, otherwise=())
        locks, trouble = attempt(list_locks, searched, hungry, otherwise=[])
        # list_locks() has sorted them by state, the worst first.
        if order == "state":
            locks.reverse()
        elif column != "state":
            is_descending = order != column
            sort_locks(locks, column, backwards=is_descending)
        page = Paginator(locks, SHOWN).get_page(request.GET.get("p"))
        refreshes = request.GET.get("refresh") == "10"
        of_all = {}
        if not searched:
            of_all = {"dead": held.count_states(locks)["dead"], "at_stake": at_stake(locks)}
        shown = held.add_conflicts([*page.object_list])
        response = self.render(
            request,
            "changelist",
            locks=shown,
            summary=held.summary(locks),
            page=page,
            query=request.GET,
            searched=searched,
            orders=headings,
            refreshes=refreshes,
            trouble=trouble,
            starving=hungry,
            unknown=unknown,
            cache=conf.cache,
            **of_all,
        )
        if refreshes:
            response["Refresh"] = "10"
        return response

    def clear_view(self, request: HttpRequest) -> HttpResponse:
        """Ask, then free locks if the holders that were shown still have them.

        ``lock`` is a key with a token. ``dead`` means all locks of dead processes.
        """
        if not self.has_clear_permission(request):
            raise PermissionDenied
        query = request.GET
        if request.method == "POST":
            query = request.POST
        asked = query.getlist("lock")
        back_to_list = HttpResponseRedirect(self.url("changelist"))
        if "dead" in query:
            asked = []
            locks, trouble = attempt(dead_locks, otherwise=[])
        elif asked:
            locks, trouble = attempt(locks_named, asked, otherwise=[])
        else:
            messages.warning(request, _("No lock was named: choose here which one to clear."))
            return back_to_list
        if trouble:
            messages.error(request, trouble)
            return back_to_list
        is_confirmed = "reason" in request.POST  # only the form that asks sends a reason
        if locks and not is_confirmed:
            return self.ask_to_clear(request, locks, asked)
        # If no lock is left, this frees none, and tells the user so.
        self.clear_locks(request, locks, {key_of(text) for text in asked})
        return back_to_list

    def clear_locks(self, request: HttpRequest, locks: list[HeldLock], asked: set[str]) -> None:
        """Free locks, and tell the user which keys of ``asked`` were not freed.

        ``asked`` is empty if the user asked for the locks of all dead processes. A holder may have
        changed since the locks were read: the store decides.
        """
        actor = request.user.get_username()
        reason = clean(request.POST.get("reason", "").strip(), 255)
        freed, refused = held.clear_all(locks, actor=actor, reason=reason)
        self.report_cleared(request, freed, reason)
        missing = asked - {lock.key for lock in locks}
        gone = refused.pop(held.GONE, [])
        missing |= {lock.key for lock in gone}
        for why_not, kept in refused.items():
            names = words.few([lock.name for lock in kept])
            messages.error(request, f"{names}: {why_not}")
        if missing:
            text = _(
                "Not freed: {}. The holder that was shown no longer has the lock: it was released "
                "or cleared, or another run has taken it; a queued call has started."
            )
            messages.warning(request, text.format(words.few(sorted(missing))))
        elif not locks:
            messages.warning(request, _("No process that holds a lock is dead."))

    def ask_to_clear(
        self, request: HttpRequest, locks: list[HeldLock], asked: list[str]
    ) -> HttpResponse:
        """Show who holds the locks, and a form that frees them."""
        held.add_states(locks)
        states = {lock.state for lock in locks}
        if states & held.RUNNING:
            states.add("held")
        is_queued = states <= {"queued", "blocking"}
        title = _("Clear these locks?")
        if is_queued:
            title = _("Forget these calls?")
        running = locks[0].task_id
        stop = ""
        if running and len(locks) == 1 and states & {"held", "queued"}:
            stop = words.stop_command(running, queued=is_queued)
        notes = [note for state, note in NOTES.items() if state in states]
        return self.render(
            request,
            "clear",
            title=title,
            locks=locks,
            notes=notes,
            is_queued=is_queued,
            asked=asked,
            stop=stop,
        )

    def report_cleared(self, request: HttpRequest, locks: list[HeldLock], reason: str) -> None:
        """Tell the user and the admin's own log; the locks themselves tell the history."""
        read = reading(even_if_off=True)(TaskLockEvent.objects.runs)
        runs, _trouble = attempt(read, [lock.token for lock in locks], otherwise=())
        pks = {run.token: run.pk for run in runs}
        for lock in locks:
            event = TaskLockEvent(name=lock.name, outcome="cleared", pk=pks.get(lock.token))
            text = _("Cleared the lock {}, held by {}, token {}.").format(
                lock.name, lock, lock.token
            )
            if reason:
                text += _(" Reason: {}").format(reason)
            self.log_change(request, event, text)
        if locks:
            names = words.few([lock.name for lock in locks])
            messages.success(request, _("Cleared: {}.").format(names))

    # The timeline, and the tasks

    @for_viewers
    def timeline_view(self, request: HttpRequest) -> HttpResponse:
        """Draw a window of the history, of all locks or of the lock or task in the address."""
        now = timezone.now()
        form = window_form(request, now, "1h")
        name = request.GET.get("name", "")
        task = ""
        lock_or_task = name
        if not name:
            task = request.GET.get("task", "")
            lock_or_task = task
        explained = {}
        if lock_or_task:
            explained = explain(lock_or_task)
        event = self.get_object(request, request.GET.get("event", ""))
        rows: Any = self.get_queryset(request)
        drawing = draw(rows, form["window"], now=now, name=name, task=task, event=event)
        return self.render(
            request,
            "timeline",
            name=name,
            task=task,
            event=event,
            spans=SPANS,
            **form,
            **explained,
            **drawing,
        )

    @for_viewers
    def per_task_view(self, request: HttpRequest) -> HttpResponse:
        """Sum up each task; the address says of which window, and in which order."""
        now = timezone.now()
        form = window_form(request, now, "24h")
        window = form["window"]
        sort, column, headings = sorting(request.GET.get("sort", ""), COLUMNS, "-trouble")
        rows: Any = self.get_queryset(request)
        tasks = per_task(rows, window, now)
        tasks.sort(key=lambda each: each.now["task"])
        is_descending = sort != column
        tasks.sort(key=lambda each: each.now[column], reverse=is_descending)
        columns = [(label, *headings[name]) for name, label in COLUMNS.items()]
        form["only"] = f"&sort={sort}"
        return self.render(
            request,
            "per_task",
            before=window.before(),
            spans=SPANS,
            tasks=tasks,
            columns=columns,
            **form,
        )

    # The history

    @for_viewers
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        context = self.context(request)
        if extra_context:
            context |= extra_context
        return super().changelist_view(request, context)

    @for_viewers
    def change_view(self, request: HttpRequest, object_id: str, *args: Any) -> HttpResponse:
        """Show an event on the page of its lock, among what happened at that time."""
        event = self.get_object(request, object_id)
        if event is None:
            return super().change_view(request, object_id, *args)
        margin = HOUR / 4
        window = Window(event.at - margin, event.end + margin)
        query = window.query(name=event.name, event=event.pk)
        return HttpResponseRedirect(f"{self.url('timeline')}?{query}#singletask-drawn")

    delete_view = for_viewers(admin.ModelAdmin.delete_view)
    history_view = for_viewers(admin.ModelAdmin.history_view)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        texts, counts, *refusals = super().get_deleted_objects(objs, request)
        return texts, {EVENTS.verbose_name_plural: sum(counts.values())}, *refusals

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return EventList

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        return queryset, False  # EventList searches, together with the window

    @admin.display(description=gettext_lazy("began"))
    def began(self, event: TaskLockEvent) -> str:
        return moment(event.at)

    @admin.display(description=gettext_lazy("ended"))
    def ended(self, event: TaskLockEvent) -> str:
        return words.end_time(event, moment)

    @admin.display(description=gettext_lazy("lock"))
    def lock(self, event: TaskLockEvent) -> SafeString:
        return format_html('<bdi class="singletask-lock">{}</bdi>', breakable(event.name))

    @admin.display(description=gettext_lazy("what happened"))
    def what(self, event: Any) -> SafeString:
        """Say how the hold ended, or what became of calls, how often, why, and who noticed it."""
        retaken = ""
        if event.retaken_at:
            at = moment(event.retaken_at)
            retaken = _("retaken × {}, last at {}").format(event.retaken, at)
        blocker = event.blocked_by_task_id
        if not blocker:
            blocker = event.blocked_by
        if blocker:
            shown = long_id(blocker)
            if event.blocker_pk:
                address = self.url("change", event.blocker_pk)
                shown = format_html('<a href="{}">{}</a>', address, shown)
            blocker = format_html(_("blocked by {}"), shown)
        details = lines(words.reason(event), blocker, words.witness(event), retaken)
        return format_html(
            '<span class="singletask-state singletask-{}">{}</span>{}',
            words.status(event),
            words.headline(event),
            details,
        )

    @admin.display(description=gettext_lazy("run"))
    def run(self, event: TaskLockEvent) -> SafeString:
        shown = ""
        if event.task_id:
            shown = task_id(event.task_id)
        known = lines(shown, words.process(event))
        if not known:
            return SafeString("-")
        return known


def sorting(
    order: str, columns: Collection[str], default: str
) -> tuple[str, str, dict[str, tuple[str, str]]]:
    """Return the order that an address names, if it exists, its column, and all headings.

    An order is a column, with a minus if the highest come first. A heading is two texts: the order
    that a click asks for, and "ascending", "descending" or "" for the order of now. The first
    column has names, so a click sorts it upwards first; the others have numbers.
    """
    if order.removeprefix("-") not in columns:
        order = default
    column = order.removeprefix("-")
    headings = {name: (f"-{name}", "") for name in columns}
    first = next(iter(columns))
    headings[first] = (first, "")
    headings[column] = (column, "descending")
    if order == column:
        headings[column] = (f"-{column}", "ascending")
    return order, column, headings


def explain(name: str) -> dict[str, Any]:
    """Return what is known of a lock or a task, or why nothing is, below its name as the title."""
    known, unknown = attempt(why, name, otherwise=None)
    if known is None:
        return {"title": name, "unknown": unknown}
    return {"title": name, "known": known, "facts": facts(known)}


def window_form(request: HttpRequest, now: datetime, span: str = "") -> dict[str, Any]:
    """Return what the form for a window needs; a wrong window of the address is a message.

    Without a window in the address, it is that of the ``span``, if there is one. The form gets the
    ``others`` of the address's parameters as they are. To an address with another window, ``only``
    adds the same lock or task.
    """
    window, problem = window_of(request.GET, now)
    if problem:
        messages.warning(request, problem)
    if window is None and span:
        window = Window.past(span, now)
    others = [pair for pair in request.GET.items() if pair[0] not in (*WINDOW, "p")]
    subject = {name: value for name, value in others if name in ("name", "task")}
    only = ""
    if subject:
        only = f"&{urlencode(subject)}"
    return {"window": window, "others": others, "only": only}


def list_locks(text: str, hungry: Sequence[Starving]) -> list[HeldLock]:
    """List the locks that a text selects, or all of them, the worst first."""
    return held.add_states(held.list_held(selectors_of(text)), hungry)


def selectors_of(searched: str) -> list[Selector]:
    """Return what a search means, which is everything if it is empty."""
    if not searched:
        return []
    return [Selector(searched)]


def key_of(asked: str) -> str:
    """Return the key of a lock that an address or a form names together with its token."""
    return asked.rpartition(" ")[0]


def dead_locks() -> list[HeldLock]:
    """Return the locks of dead processes."""
    return [lock for lock in held.list_held() if lock.state == "dead"]


def locks_named(asked: list[str]) -> list[HeldLock]:
    """Return the locks that are named by key and token, as far as they are still held."""
    locks = held.read(map(key_of, asked))
    return [lock for lock in locks if f"{lock.key} {lock.token}" in asked]


def sort_locks(locks: list[HeldLock], column: str, *, backwards: bool) -> None:
    if column == "conflicts":
        held.add_conflicts(locks)

    def value(lock: HeldLock) -> Any:
        found = getattr(lock, ORDERS[column])
        if found is None:
            return 0
        return found

    locks.sort(key=value, reverse=backwards)


def lines(*texts: str) -> SafeString:
    return format_html_join(
        "", '<div class="singletask-line">{}</div>', [(text,) for text in texts if text]
    )
