"""What is held now, and how to clear a lock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_singletask.admin.pages import OperatorPages, attempt, headings, unbroken
from django_singletask.conf import conf
from django_singletask.history.queries import reading
from django_singletask.holder import clean
from django_singletask.locks.keys import QUEUED
from django_singletask.locks.liveness import is_alive, proof_of_death, started_at
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import HOUR, Starving, starving
from django_singletask.operators.words import clock_time, duration, process, stop_command

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
    "skipped": lambda lock: lock.skipped or 0,
}
"""What the columns are sorted by."""


class HeldPages(OperatorPages):
    """What the store holds now, and a form that frees one lock."""

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
        event = TaskLockEvent(name=lock.name, kind="cleared", pk=runs[0].pk if runs else None)
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


def listed(text: str, order: str) -> list[HeldLock]:
    """Return the locks that mention a text, sorted by a column, or backwards if it has a minus."""
    locks = [lock for lock in held.held() if lock.mentions(text)]
    column = order.removeprefix("-")
    if column == "skipped":
        held.with_history(locks)
    locks.sort(key=ORDERS[column], reverse=order != column)
    return locks


def runs_of(locks: list[HeldLock]) -> tuple[list[TaskLockEvent], str]:
    """Return the rows of the runs that hold locks; or none, and why they cannot be read."""
    tokens = [lock.token for lock in locks]
    task_ids = [lock.task_id or "" for lock in locks]
    read = reading(even_if_off=True)(TaskLockEvent.objects.runs)
    return attempt(partial(read, tokens, task_ids), list[TaskLockEvent]())


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
        "{} call was skipped in {}, the last {} ago; none completed.",
        "{} calls were skipped in {}, the last {} ago; none completed.",
        state.skipped,
    ).format(state.skipped, duration(state.unmet), duration(state.last_skip))
    if state.since_completed is None:
        return f"{text} " + _("No completed run is known.")
    return f"{text} " + _("Last completed {} ago.").format(duration(state.since_completed))
