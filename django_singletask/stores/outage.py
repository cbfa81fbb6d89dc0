"""Let every store raise one error, whichever client cannot ask its cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from django_singletask.exceptions import LockUnavailable

__all__ = ["raise_unavailable"]


def raise_unavailable(store_class: type) -> None:
    """Let the public methods of a class of stores raise :class:`LockUnavailable`.

    The errors in ``client_errors`` of the store become its cause; others pass. The private methods
    still see the client's own errors, so that they can ask once more.
    """
    for name, method in list(vars(store_class).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            iterates = inspect.isgeneratorfunction(method)
            setattr(store_class, name, _iterating(method) if iterates else _asking(method))


def _unavailable(store: Any, error: Exception) -> LockUnavailable:
    reason = str(error).partition("\n")[0].rstrip(".")
    alias = store.cache_alias
    return LockUnavailable(f"The cache {alias!r} cannot be asked: {type(error).__name__}: {reason}")


def _asking(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except self.client_errors as error:
            raise _unavailable(self, error) from error

    return ask


def _iterating(method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @wraps(method)
    def iterate(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from method(self, *args, **kwargs)
        except self.client_errors as error:
            raise _unavailable(self, error) from error

    return iterate
