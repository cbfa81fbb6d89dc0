"""The timeline: a time span of the history, drawn."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from django_singletask.admin.pages import OperatorPages, or_unreadable
from django_singletask.operators.timeline import SPANS, draw

__all__ = ["TimelinePage"]


class TimelinePage(OperatorPages):
    """A time span of the history, drawn."""

    @partial(or_unreadable, "timeline")
    def timeline_view(self, request: HttpRequest) -> HttpResponse:
        """Draw a time span of the history; of one lock or task if the address names it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        chosen, name = request.GET.get("range", "1h"), request.GET.get("name", "")
        only = {"name": name} if name else {"task": request.GET.get("task", "")}
        if chosen not in SPANS:
            text = _("There is no range {}: this is the last hour.").format(repr(chosen))
            self.message_user(request, text, messages.WARNING)
            chosen = "1h"
        rows: Any = self.get_queryset(request)
        drawing = draw(rows, SPANS[chosen], now=timezone.now(), **only)
        query = urlencode({key: value for key, value in only.items() if value})
        return self.render(
            request,
            "timeline",
            "timeline",
            spans=SPANS,
            range=chosen,
            only=f"&{query}" if query else "",
            **only,
            **drawing,
        )
