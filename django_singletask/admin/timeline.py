"""The timeline: a window of the history, drawn."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from django_singletask.admin.filters import window_form
from django_singletask.admin.pages import OperatorPages, or_unreadable
from django_singletask.operators.timeline import draw
from django_singletask.operators.windows import SPANS, Window


class TimelinePage(OperatorPages):
    """A window of the history, drawn."""

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
