"""The pages of the admin: what is held now, the timeline, the tasks, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import partial, wraps
from operator import attrgetter
from typing import Any, TypeVar
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, pgettext_lazy

from django_singletask.conf import conf
from django_singletask.history.queries import NoHistory, reading
from django_singletask.holder import clean
from django_singletask.locks.keys import QUEUED
from django_singletask.locks.liveness import is_alive, proof_of_death, started_at
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held
from django_singletask.operators.errors import cannot_ask
from django_singletask.operators.per_task import RANGES, chart_of, per_task
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import HOUR, Starving, starving
from django_singletask.operators.timeline import draw
from django_singletask.operators.windows import SPANS, Window, window_of
from django_singletask.operators.words import clock_time, duration, hold_time, process, stop_command

TABS = {
    "changelist": gettext_lazy("Held now"),
    "events": pgettext_lazy("page", "History"),
    "timeline": gettext_lazy("Timeline"),
    "per_task": gettext_lazy("Per task"),
}

T = TypeVar("T")
View = Callable[..., HttpResponse]


def attempt(ask: Callable[[], T], otherwise: T) -> tuple[T, str]:
    """Return the answer of the cache or the history; or ``otherwise``, and why there is none."""
    try:
        return ask(), ""
    except Exception as error:  # each cache client has errors of its own
        return otherwise, cannot_ask(error)


def or_unreadable(tab: str, view: View) -> View:
    """Return a view that, if the history cannot be read, says so below the tabs."""

    @wraps(view)
    def view_or_reason(
        self: OperatorPages, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        if any("\0" in value for _name, values in request.GET.lists() for value in values):
            # PostgreSQL refuses a NUL character, and no row has one.
            return HttpResponseRedirect(self.url(tab))
        try:
            with reading(even_if_off=True):
                return view(self, request, *args, **kwargs)
        except NoHistory as error:
            return self.render(request, "unreadable", tab, trouble=cannot_ask(error))

    return view_or_reason


class OperatorPages(admin.ModelAdmin):  # type: ignore[type-arg]
    """What the store holds now, a form that frees one lock, the timeline, and the tasks."""

    def get_urls(self) -> list[URLPattern]:
        """Put what is held now first; the history has a separate address."""
        pages: list[tuple[str, str, View]] = [
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

    def common_context(self, tab: str) -> dict[str, Any]:
        """Return what the templates of all pages need; ``tab`` is the current one."""
        return {
            "title": TABS.get(tab),
            "tabs": [(self.url(page), label, page == tab) for page, label in TABS.items()],
            "history_is_off": conf.history == "off",
        }

    def render(
        self, request: HttpRequest, template: str, tab: str = "", **context: Any
    ) -> TemplateResponse:
        context = {
            **self.admin_site.each_context(request),
            **self.common_context(tab),
            **{f"{page}_url": self.url(page) for page in (*TABS, "clear")},
            "opts": self.opts,
            "sheets": ("admin/css/changelists.css", "django_singletask/admin.css"),
            **context,
        }
        return TemplateResponse(request, f"django_singletask/{template}.html", context)

    def has_clear_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may clear locks, which needs the permission to view, too."""
        may_clear: bool = request.user.has_perm(f"{self.opts.app_label}.clear_lock")
        return may_clear and self.has_view_permission(request)

    def held_view(self, request: HttpRequest) -> HttpResponse:
        """List the locks that are held, as the store knows them at this moment."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if set(request.GET) - PARAMETERS:
            # A link that was made for the list of events, with a filter.
            return HttpResponseRedirect(f"{self.url('events')}?{request.GET.urlencode()}")
        query, order = request.GET.get("q", "").strip(), request.GET.get("o", "")
        order = order if order.removeprefix("-") in ORDERS else "-held"
        locks, trouble = attempt(partial(listed, query, order), list[HeldLock]())
        hungry, unknown = attempt(partial(starving, HOUR), list[Starving]())
        page = Paginator(locks, SHOWN).get_page(request.GET.get("p"))
        shown = list(page.object_list)
        events, _reason = runs_of(shown)
        refresh = self.refresh_every(request)
        response = self.render(
            request,
            "changelist",
            "changelist",
            rows=[held_row(lock) for lock in held.with_history(shown)],
            recorded={event.token for event in events},
            page=page,
            query=request.GET,
            searched=query,
            orders=headings(ORDERS, order),
            refresh=refresh,
            trouble=trouble,
            starving=[(state.name, describe(state)) for state in hungry[:STARVING]],
            starving_left_out=max(0, len(hungry) - STARVING),
            unknown=unknown,
            asked_at=clock_time(timezone.now()),
            cache=conf.cache,
            may_clear=self.has_clear_permission(request),
        )
        if refresh:
            response["Refresh"] = str(refresh)
        return response

    def refresh_every(self, request: HttpRequest) -> int | None:
        """Return after how many seconds the browser is to ask again, or None."""
        text = request.GET.get("refresh", "")
        if text in map(str, REFRESH):
            return int(text)
        if text:
            text = _("refresh={} is not a number of seconds from {} to {}.").format(
                repr(text[:20]), REFRESH[0], REFRESH[-1]
            )
            self.message_user(request, text, messages.WARNING)
        return None

    def clear_view(self, request: HttpRequest) -> HttpResponse:
        """Ask, then free a lock if the holder that was shown still has it."""
        if not self.has_clear_permission(request):
            raise PermissionDenied
        query = request.POST if request.method == "POST" else request.GET
        key, token = query.get("key", ""), query.get("token", "")
        if not key:
            text = _("No lock was named: choose here which one to clear.")
            return self.back_to_held(request, messages.WARNING, text)
        lock, trouble = attempt(partial(held.still_held, key, token), None)
        if lock is not None and request.method != "POST":
            return self.ask_to_clear(request, lock)
        if lock is not None:
            # The holder may have changed since this look: the store decides.
            by = {"actor": request.user.get_username(), "reason": query.get("reason", "").strip()}
            freed, trouble = attempt(partial(held.clear, lock, **by), False)
            if freed:
                return self.report_cleared(request, lock, by["reason"])
        if trouble:
            return self.back_to_held(request, messages.ERROR, trouble)
        text = _(
            "Nothing was freed: this holder no longer has the lock. The lock was released or "
            "cleared, or another run has taken it."
        )
        if key.startswith(QUEUED):
            text = _(
                "Nothing was forgotten: this call no longer stops identical calls. It has started, "
                "was revoked, or was already forgotten."
            )
        return self.back_to_held(request, messages.WARNING, text)

    def ask_to_clear(self, request: HttpRequest, lock: HeldLock) -> HttpResponse:
        """Show who holds a lock, and a form that frees it."""
        held.with_history([lock])
        started = started_at(lock.process)
        return self.render(
            request,
            "clear",
            title=_("Forget this queued call?") if lock.queued else _("Clear this lock?"),
            lock=lock,
            row=held_row(lock),
            alive=is_alive(lock.process),
            proof=proof_of_death(lock.process),
            started=clock_time(started, dated=True) if started else "",
            stop=stop_command(lock.task_id, queued=lock.queued) if lock.task_id else "",
        )

    def report_cleared(self, request: HttpRequest, lock: HeldLock, reason: str) -> HttpResponse:
        """Tell the user and the admin's own log; the lock itself tells the history."""
        runs, trouble = runs_of([lock])
        if trouble and conf.history != "off":
            text = _("For now, only the admin's own log has a record of this. {}")
            self.message_user(request, text.format(trouble), messages.WARNING)
        event = TaskLockEvent(name=lock.name, outcome="cleared", pk=runs[0].pk if runs else None)
        text = _("Cleared the lock {}, held by {}, token {}.")
        text = text.format(lock.name, lock.run, lock.token)
        because = _(" Reason: {}").format(clean(reason, 255)) if reason else ""
        self.log_change(request, event, text + because)
        text = _("The lock {} was freed. If its task still runs, it keeps running.")
        if lock.queued:
            text = _("The queued call of {} is forgotten: identical calls can be sent again.")
        return self.back_to_held(request, messages.SUCCESS, text.format(lock.name))

    def back_to_held(self, request: HttpRequest, level: int, text: str) -> HttpResponse:
        self.message_user(request, text, level)
        return HttpResponseRedirect(self.url("changelist"))

    @partial(or_unreadable, "timeline")
    def timeline_view(self, request: HttpRequest) -> HttpResponse:
        """Draw a window of the history; of one lock or task if the address names it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        now, name = timezone.now(), request.GET.get("name", "")
        task = "" if name else request.GET.get("task", "")
        only = {key: value for key, value in (("name", name), ("task", task)) if value}
        form = window_form(request, now)
        window = form["window"] or Window.past("1h", now)
        rows: Any = self.get_queryset(request)
        return self.render(
            request,
            "timeline",
            "timeline",
            **{**form, "window": window},
            spans=SPANS,
            only=f"&{urlencode(only)}" if only else "",
            in_history=urlencode({"q": name} if name else only),
            **only,
            **draw(rows, window, now=now, **only),
        )

    @partial(or_unreadable, "per_task")
    def per_task_view(self, request: HttpRequest) -> HttpResponse:
        """Sum up each task; the address says of which time span, and in which order."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        span, sort = request.GET.get("range", ""), request.GET.get("sort", "")
        span = span if span in RANGES else "24h"
        sort = sort if sort.removeprefix("-") in COLUMNS else "-runs"
        column = sort.removeprefix("-")
        rows: Any = self.get_queryset(request)
        window, step = chart_of(span, timezone.now())
        tasks, cut = per_task(rows, window, step)
        tasks.sort(
            key=lambda facts: (facts[column] is not None, facts[column], facts["task"]),
            reverse=sort != column,
        )
        links = headings(COLUMNS, sort)
        return self.render(
            request,
            "per_task",
            "per_task",
            spans=RANGES,
            range=span,
            sort=sort,
            columns=[(label, *links[name]) for name, label in COLUMNS.items()],
            rows=[(facts, cells(facts)) for facts in tasks],
            bar_width=90 * step / (window.end - window.start),
            hours=step // timedelta(hours=1),
            start=clock_time(window.start, dated=True),
            cut=clock_time(cut, dated=True) if cut else "",
        )


def headings(columns: Iterable[str], order: str) -> dict[str, tuple[str, str]]:
    """Return the order that a click on each column asks for, and the one that the column has.

    The first column has names, the others have numbers, of which the highest come first.
    """
    links = {column: (f"-{column}", "") for column in columns}
    name, current = next(iter(links)), order.removeprefix("-")
    links[name] = (name, "")
    links[current] = (current, "descending") if order != current else (f"-{current}", "ascending")
    return links


def unbroken(seconds: float) -> str:
    """Write how long a lock was held, such that the browser does not break the line inside."""
    return hold_time(seconds).replace(" ", "\N{NO-BREAK SPACE}")


WINDOW = ["range", "from", "to"]
"""What can name a window in an address."""


def window_form(request: HttpRequest, now: datetime) -> dict[str, Any]:
    """Return what the form for a window needs; a wrong window of the address is a message."""
    window, problem = window_of(request.GET, now)
    if problem:
        messages.warning(request, problem)
    others = [pair for pair in request.GET.items() if pair[0] not in (*WINDOW, "p")]
    return {"window": window, "others": others}


SHOWN = 100
"""Locks on a page of what is held."""
STARVING = 20
"""Starving locks above them."""
REFRESH = range(2, 3601)
"""Seconds after which the page can ask again."""
PARAMETERS = {"q", "o", "p", "refresh"}
"""What the address of the page can say; another parameter is one of the list of events."""
ORDERS: dict[str, Callable[[HeldLock], Any]] = {
    "name": attrgetter("name"),
    "held": attrgetter("held_for"),
    "lease": attrgetter("left"),
    "conflicts": lambda lock: lock.conflicts or 0,
}
"""What the columns are sorted by."""


def listed(text: str, order: str) -> list[HeldLock]:
    """Return the locks that mention a text, sorted by a column, or backwards if it has a minus."""
    locks = [lock for lock in held.held() if lock.mentions(text)]
    column = order.removeprefix("-")
    if column == "conflicts":
        held.with_history(locks)
    locks.sort(key=ORDERS[column], reverse=order != column)
    return locks


def runs_of(locks: list[HeldLock]) -> tuple[list[TaskLockEvent], str]:
    """Return the rows of the runs that hold locks; or none, and why they cannot be read."""
    read = reading(even_if_off=True)(TaskLockEvent.objects.runs)
    return attempt(partial(read, [lock.token for lock in locks]), list[TaskLockEvent]())


def held_row(lock: HeldLock) -> dict[str, Any]:
    usual = lock.usual
    return {
        "lock": lock,
        "held_for": duration(lock.held_for) if lock.since else "-",
        "usual": [unbroken(usual.median), unbroken(usual.longest)] if usual is not None else [],
        "remaining": "-" if lock.remaining is None else duration(lock.remaining),
        "since": clock_time(lock.since, dated=True) if lock.since else "",
        "process": process(lock.host, lock.pid) or lock.host or "-",
    }


def describe(state: Starving) -> str:
    text = ngettext(
        "{} conflict in {}, the last {} ago; no run completed.",
        "{} conflicts in {}, the last {} ago; no run completed.",
        state.conflicts,
    ).format(state.conflicts, duration(state.unmet), duration(state.last_conflict))
    if state.since_completed is None:
        return f"{text} " + _("No completed run is known.")
    return f"{text} " + _("Last completed {} ago.").format(duration(state.since_completed))


COLUMNS = {
    "task": gettext_lazy("Task"),
    "runs": gettext_lazy("Runs"),
    "returned": gettext_lazy("Returned"),
    "raised": gettext_lazy("Raised"),
    "other": gettext_lazy("Other ends"),
    "conflicts": gettext_lazy("Conflicts"),
    "duplicates": gettext_lazy("Duplicates"),
    "p50": gettext_lazy("p50"),
    "p95": gettext_lazy("p95"),
    "longest": gettext_lazy("Longest"),
    "lease": gettext_lazy("Lease"),
}
DURATIONS = {"p50": hold_time, "p95": hold_time, "longest": hold_time, "lease": duration}


def cells(facts: dict[str, Any]) -> list[tuple[Any, Any, bool, str]]:
    """Return label, text, whether it exceeds the lease, and a remark, of each column but one."""
    row = []
    for column, label in list(COLUMNS.items())[1:]:
        text, exceeds = facts[column], False
        if column in DURATIONS:
            exceeds = column != "lease" and 0 < (facts["lease"] or 0) <= (text or 0)
            text = DURATIONS[column](text) if text is not None else "-"
        remark = facts["others"] if column == "other" else ()
        row.append((label, text, exceeds, ", ".join(f"{number} {word}" for word, number in remark)))
    return row
