"""What the admin's pages have in common: addresses, tabs, permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

from django.contrib import admin
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext_lazy, pgettext_lazy

from django_singletask.conf import conf
from django_singletask.history.queries import NoHistory, reading
from django_singletask.operators.errors import cannot_ask
from django_singletask.operators.words import hold_time

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
    """Views that ask the store, under the URL prefix of the model."""

    def get_urls(self) -> list[URLPattern]:
        view = self.admin_site.admin_view
        pages = [
            path(route, view(show), name=self.url_name(page)) for route, page, show in self.views()
        ]
        return [*pages, *super().get_urls()]

    def views(self) -> list[tuple[str, str, View]]:
        """Return the address, the name and the view of each page.

        Only the last class, in ``history.py``, knows the pages of all the others.
        """
        raise NotImplementedError

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
