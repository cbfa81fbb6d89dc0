"""One row for each task: how its runs ended, and how long they had their locks."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from django_singletask.admin.pages import OperatorPages, headings, or_unreadable
from django_singletask.operators.per_task import RANGES, chart_of, per_task
from django_singletask.operators.words import clock_time, duration, hold_time

COLUMNS = {
    "task": _("Task"),
    "runs": _("Runs"),
    "returned": _("Returned"),
    "raised": _("Raised"),
    "other": _("Other ends"),
    "skipped": _("Skipped"),
    "duplicates": _("Duplicates"),
    "p50": _("p50"),
    "p95": _("p95"),
    "longest": _("Longest"),
    "lease": _("Lease"),
}
DURATIONS = {"p50": hold_time, "p95": hold_time, "longest": hold_time, "lease": duration}


class PerTaskPage(OperatorPages):
    """The history of a day or a week, summed up for each task."""

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
