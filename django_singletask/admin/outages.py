"""Show what can be shown while the cache or the database of the history is away."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from django_singletask.history.queries import NoHistory, reading
from django_singletask.operators.errors import cannot_ask, without_secrets

__all__ = ["attempt", "or_unreadable"]

T = TypeVar("T")


def attempt(ask: Callable[[], T], otherwise: T) -> tuple[T, str]:
    """Return the answer of the cache or the history; or ``otherwise``, and why there is none."""
    try:
        return ask(), ""
    except Exception as error:  # each cache client has errors of its own
        return otherwise, cannot_ask(error)


def or_unreadable(tab: str, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Return a view that, if the history cannot be read, says so below the tabs.

    ``view`` is a method of a class with the methods ``render`` and ``url``.
    """

    @wraps(view)
    def view_or_reason(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if any("\0" in value for _name, values in request.GET.lists() for value in values):
            # PostgreSQL refuses a NUL character, and no row has one.
            return HttpResponseRedirect(self.url(tab))
        try:
            with reading(even_if_off=True):
                return view(self, request, *args, **kwargs)
        except NoHistory as error:
            reason = without_secrets(str(error))
            answer: HttpResponse = self.render(request, "unreadable", tab, trouble=reason)
            return answer

    return view_or_reason
