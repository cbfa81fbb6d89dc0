"""Refuse a function whose call returns before its body has run."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["refuse_deferred"]


def refuse_deferred(function: Any, what: str, *, awaits: bool = False) -> None:
    """Raise ``TypeError`` for a generator function, and for a coroutine function unless ``awaits``.

    The lock around its call would be free before its body runs. The message begins with ``what``.
    """
    for test, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
        (inspect.isgeneratorfunction, "a generator function"),
    ):
        if test(function) and not (awaits and test is inspect.iscoroutinefunction):
            raise TypeError(
                f"{what}: {function.__qualname__} is {kind}: its lock would be free before its "
                "body runs. Take a TaskLock inside the body of a plain function instead."
            )
