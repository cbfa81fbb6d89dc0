"""Show what can be shown while the cache or the database of the history is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

from django.db import Error, connections, router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from django_singletask.history.queries import NoHistory, reading
from django_singletask.models import TaskLockEvent
from django_singletask.operators.errors import cannot_ask, without_secrets

__all__ = ["attempt", "or_unreadable"]

T = TypeVar("T")


@contextmanager
def savepoint() -> Iterator[None]:
    """Keep a failing statement to the history from spoiling the transaction of the request.

    After a failure, PostgreSQL refuses every statement until the transaction is rolled back, at
    least to a savepoint.
    """
    alias, completed = router.db_for_read(TaskLockEvent), False
    in_transaction = connections[alias].in_atomic_block
    try:
        with transaction.atomic(using=alias) if in_transaction else nullcontext():
            yield
            completed = True
    except Error:
        # A block that completed has handled the error of its statement by itself. Only the release
        # of the savepoint failed then, and Django has rolled back to it.
        if not completed:
            raise


def attempt(ask: Callable[[], T], otherwise: T) -> tuple[T, str]:
    """Return the answer of the cache or the history; or ``otherwise``, and why there is none."""
    try:
        with savepoint():
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
            with reading(even_if_off=True), savepoint():
                return view(self, request, *args, **kwargs)
        except NoHistory as error:
            reason = without_secrets(str(error))
            answer: HttpResponse = self.render(request, "unreadable", tab, trouble=reason)
            return answer

    return view_or_reason
