"""The admin's pages beside the history: what is held now, the clearing of a lock, the timeline."""

from __future__ import annotations

import dataclasses
import json
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_singletask.conf import conf
from django_singletask.history.queries import unreadable
from django_singletask.locks.keys import QUEUED
from django_singletask.locks.liveness import is_alive, proof_of_death, started_at
from django_singletask.operators import held as registry
from django_singletask.operators import timeline
from django_singletask.operators.answers import (
    apart,
    ask_the_store,
    ask_who_starves,
    holder_row,
    recorded,
    why,
)
from django_singletask.operators.errors import without_secrets
from django_singletask.operators.held import HeldLock, UsualHold
from django_singletask.operators.words import (
    clock_time,
    duration,
    hold_time,
    lock_state,
    process,
)

__all__ = ["OperatorPages"]

SHOWN = 200
"""Locks on one page; the command lists more."""
STARVING = 20


@dataclasses.dataclass(frozen=True)
class HeldRow:
    """A lock as the page shows it: texts."""

    lock: HeldLock
    word: str
    held_for: str
    slow: bool
    usual: UsualHold | None
    remaining: str
    since: str
    clear_query: str

    @property
    def process(self) -> str:
        """Name the process that has the lock; a queued call has none."""
        holder = self.lock.holder
        if self.lock.queued:
            return _("queued {}…").format((holder.task_id or "")[:8])
        return process(holder.host, holder.pid) or holder.host or "-"

    @property
    def usual_text(self) -> str:
        """Say how long the runs of this task had their lock until now."""
        if self.usual is None:
            return ""
        times = (hold_time(seconds) for seconds in (self.usual.median, self.usual.longest))
        unbroken = (text.replace(" ", "\N{NO-BREAK SPACE}") for text in times)
        return _("usual {}, longest {}").format(*unbroken)


class OperatorPages(admin.ModelAdmin):  # type: ignore[type-arg]
    """Views that ask the store, under the URL prefix of the model."""

    def get_urls(self) -> list[URLPattern]:
        """Land on what is held now; the history has a URL of its own."""

        def named(route: str, view: Any, name: str) -> URLPattern:
            pattern: URLPattern = path(
                route, self.admin_site.admin_view(view), name=self.url_name(name)
            )
            return pattern

        return [
            # The name by which the index of the admin, and its bread crumbs, know the model.
            named("", self.held_view, "changelist"),
            named("history/", self.changelist_view, "events"),
            named("timeline/", self.timeline_view, "timeline"),
            named("clear/", self.clear_view, "clear"),
            *super().get_urls(),
        ]

    def url_name(self, page: str) -> str:
        """Return the name of a page's URL pattern."""
        return f"{self.opts.app_label}_{self.opts.model_name}_{page}"

    def url(self, page: str, *args: Any, **query: str) -> str:
        """Return the address of a page on the site that this admin belongs to."""
        name = f"admin:{self.url_name(page)}"
        address = reverse(name, args=args, current_app=self.admin_site.name)
        return f"{address}?{urlencode(query)}" if query else address

    def tabs(self, current: str) -> list[tuple[str, Any, bool]]:
        """Return address, label and whether it is this one, for each page."""
        pages = {
            "changelist": gettext_lazy("Held now"),
            "events": gettext_lazy("History"),
            "timeline": gettext_lazy("Timeline"),
        }
        return [(self.url(page), label, page == current) for page, label in pages.items()]

    def has_clear_permission(self, request: HttpRequest) -> bool:
        """Say whether the user may free locks: a permission of its own, beside that to view."""
        may: bool = request.user.has_perm(f"{self.opts.app_label}.clear_lock")
        return may and self.has_view_permission(request)

    def render(
        self, request: HttpRequest, page: str, *, template: str = "", **context: Any
    ) -> TemplateResponse:
        """Render a page inside the admin, by the template of its name if no other is given."""
        # By this the templates' own URLs are those of this site.
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "tabs": self.tabs(page),
            "history_is_off": conf.history == "off",
            "held_url": self.url("changelist"),
            "events_url": self.url("events"),
            "timeline_url": self.url("timeline"),
            **context,
        }
        return TemplateResponse(request, f"django_singletask/{template or page}.html", context)

    def or_unreadable(
        self, page: str, view: Any, request: HttpRequest, *args: Any, **options: Any
    ) -> HttpResponse:
        """Answer by a view, or say that the history, which it shows, cannot be read."""
        try:
            with apart():
                answer: HttpResponse = view(request, *args, **options)
                return answer
        except Error as error:
            title = next(label for _url, label, current in self.tabs(page) if current)
            trouble = without_secrets(str(unreadable(error)))
            return self.render(request, page, template="unreadable", title=title, trouble=trouble)

    # Held now

    def held_view(self, request: HttpRequest) -> HttpResponse:
        """List the locks that are held, as the store knows them at this moment."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.GET:  # somebody's link to a search or filter of the list
            return HttpResponseRedirect(f"{self.url('events')}?{request.GET.urlencode()}")
        locks, trouble = ask_the_store()
        starving, unknown = ask_who_starves()
        return self.render(
            request,
            "changelist",
            title=_("Held now"),
            rows=self._held_rows(locks[:SHOWN]),
            recorded=recorded(locks[:SHOWN]),
            left_out=max(0, len(locks) - SHOWN),
            trouble=trouble,
            starving=starving[:STARVING],
            starving_left_out=max(0, len(starving) - STARVING),
            unknown=unknown,
            asked_at=clock_time(timezone.now()),
            cache=conf.cache,
            may_clear=self.has_clear_permission(request),
            clear_url=self.url("clear"),
        )

    def _held_rows(self, locks: list[HeldLock]) -> list[HeldRow]:
        with apart():
            usual = registry.usual_holds(locks)
        rows = []
        for lock in locks:
            known = None if lock.queued else usual.get(registry.whose(lock))
            rows.append(
                HeldRow(
                    lock=lock,
                    word=lock_state(lock.state),
                    held_for=duration(lock.held_for) if lock.holder.since else "-",
                    slow=lock.state == "held"
                    and known is not None
                    and known.is_exceeded_by(lock.held_for),
                    usual=known,
                    remaining="-" if lock.remaining is None else duration(lock.remaining),
                    since=_clock(lock.holder.since),
                    # An expired one is no entry of the store: there is nothing to free.
                    clear_query=""
                    if lock.state == "expired"
                    else urlencode({"key": lock.key, "token": lock.holder.token}),
                )
            )
        return rows

    # Clear

    def clear_view(self, request: HttpRequest) -> HttpResponse:
        """Ask, then free a lock if the holder that was shown still has it."""
        if not self.has_clear_permission(request):
            raise PermissionDenied
        asked = request.POST if request.method == "POST" else request.GET
        key, token, freed = asked.get("key", ""), asked.get("token", ""), False
        if not key:
            text = _("Nothing was asked for: choose here which lock to clear.")
            self.message_user(request, text, messages.WARNING)
            return HttpResponseRedirect(self.url("changelist"))
        try:
            with apart():
                lock = registry.still_held(key, token)
            if lock is not None and request.method == "POST":
                # The holder can have changed again by now: the store decides.
                freed = registry.clear(lock, actor=request.user.get_username())
        except Exception as error:  # each client has errors of its own
            self.message_user(request, why(error), messages.ERROR)
            return HttpResponseRedirect(self.url("changelist"))
        if lock is not None and freed:
            self._report_cleared(request, lock)
            return HttpResponseRedirect(self.url("changelist"))
        if lock is None or request.method == "POST":
            text = _(
                "Nothing was freed: this holder no longer has the lock. It was given back, it was "
                "cleared by somebody else, or another run has it by now."
            )
            if key.startswith(QUEUED):
                text = _(
                    "Nothing was forgotten: this call stops no equal ones any more. It has "
                    "started, was revoked, or was forgotten by somebody else."
                )
            self.message_user(request, text, messages.WARNING)
            return HttpResponseRedirect(self.url("changelist"))
        task_id, started = json.dumps(lock.holder.task_id), started_at(lock.holder)
        return self.render(
            request,
            "clear",
            title=_("Forget this queued call?") if lock.queued else _("Clear this lock?"),
            lock=lock,
            row=self._held_rows([lock])[0],
            alive=is_alive(lock.holder),
            proof=proof_of_death(lock.holder),
            started=_clock(started) if started else "",
            revoke=f"app.control.revoke({task_id}{'' if lock.queued else ', terminate=True'})",
            clear_url=self.url("clear"),
        )

    def _report_cleared(self, request: HttpRequest, lock: HeldLock) -> None:
        """Tell the user, and Django's admin log; the history has heard of it from the lock."""
        message = _("Cleared the lock {}, held by {}, token {}.").format(
            lock.name, lock.holder, lock.holder.token
        )
        try:
            with apart():
                row = holder_row(lock.holder.token)
        except Error as error:  # the lock is free all the same
            row = None
            if conf.history != "off":
                text = _("This is recorded in the admin's own log only, for now. {}")
                told = text.format(without_secrets(str(unreadable(error))))
                self.message_user(request, told, messages.WARNING)
        LogEntry.objects.create(
            user_id=request.user.pk,
            content_type_id=get_content_type_for_model(self.model).pk,
            object_id=None if row is None else str(row.pk),
            object_repr=lock.name[:200],
            action_flag=CHANGE,
            change_message=message,
        )
        text = _("The lock {} was freed. The run that held it, if there is one, goes on.")
        if lock.queued:
            text = _("The queued call of {} is forgotten: equal ones can be sent again.")
        self.message_user(request, text.format(lock.name), messages.SUCCESS)

    # Timeline

    def timeline_view(self, request: HttpRequest) -> HttpResponse:
        """Draw the last minutes, hours or days."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return self.or_unreadable("timeline", self._timeline, request)

    def _timeline(self, request: HttpRequest) -> HttpResponse:
        asked, name = request.GET.get("range", "1h"), request.GET.get("name", "")
        task = "" if name else request.GET.get("task", "")
        if asked not in timeline.SPANS:
            text = _("There is no range {}: this is the last hour.").format(repr(asked))
            self.message_user(request, text, messages.WARNING)
            asked = "1h"
        only = {"name": name} if name else {"task": task} if task else {}
        # A NUL, which no name has, is an error to PostgreSQL.
        if "\0" in name + task:
            return HttpResponseRedirect(self.url("timeline", range=asked))
        span = timeline.SPANS[asked]
        rows = self.get_queryset(request)
        drawing = timeline.draw(rows, span, now=timezone.now(), name=name, task=task)
        return self.render(
            request,
            "timeline",
            title=_("Timeline"),
            drawing=drawing,
            name=name,
            task=task,
            ranges=[
                (self.url("timeline", range=value, **only), each.label, value == asked)
                for value, each in timeline.SPANS.items()
            ],
            all_url=self.url("timeline", range=asked),
            range=asked,
        )


def _clock(seconds: float) -> str:
    """Write a Unix time; nothing for what something else wrote into the entry."""
    try:
        return clock_time(seconds, dated=True) if seconds else ""
    except (OverflowError, ValueError, OSError):
        return ""
