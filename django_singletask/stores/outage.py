"""Let every store raise the same error if its cache cannot be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from django.conf import settings

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.stores.places import place_of

__all__ = ["raise_unavailable"]

ASKS_NOTHING = {"close", "lock_key", "make_key", "prefix"}
"""Public methods of stores that send no request; each take calls some of them."""


def raise_unavailable(store_class: type) -> None:
    """Let the public methods of a store class raise :class:`LockUnavailable`.

    It replaces the errors in ``client_errors``. Private methods still see the client's errors, so
    that they can try again.
    """
    for name, method in list(vars(store_class).items()):
        if inspect.isfunction(method) and not name.startswith("_") and name not in ASKS_NOTHING:
            setattr(store_class, name, _asking(method))


def _asking(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except self.client_errors as error:
            raise _unavailable(self, error) from error

    @wraps(method)
    def ask_page_by_page(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from method(self, *args, **kwargs)
        except self.client_errors as error:
            raise _unavailable(self, error) from error

    return ask_page_by_page if inspect.isgeneratorfunction(method) else ask


def _unavailable(store: Any, error: Exception) -> LockUnavailable:
    reason = f"{type(error).__name__}: " + str(error).partition("\n")[0].rstrip(".")
    text = f"The cache {store.cache_alias!r} cannot be used: {reason}."
    if store.cache_alias in settings.CACHES:
        text += f" It is {place_of(store.cache_alias)}."
    if store.cache_alias == conf.cache:
        text += " 'manage.py locks probe' tests it."
    return LockUnavailable(text)
