"""Let a function run only once at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from django_singletask.conf import check_seconds
from django_singletask.exceptions import LockConflict
from django_singletask.locks.deferred import refuse_deferred
from django_singletask.locks.lock import TaskLock

__all__ = ["only_one"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def only_one(function: Callable[P, R]) -> Callable[P, R]: ...
@overload
def only_one(
    function: None = None,
    *,
    key: str | None = None,
    timeout: float | None = None,
    renew: bool = True,
    wait: float = 0,
    on_conflict: str = "skip",
    skip_result: Any = None,
    on_skip: Callable[..., Any] | None = None,
    at_least: float = 0,
    slots: int = 1,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def only_one(
    function: Callable[P, R] | None = None,
    *,
    key: str | None = None,
    timeout: float | None = None,
    renew: bool = True,
    wait: float = 0,
    on_conflict: str = "skip",
    skip_result: Any = None,
    on_skip: Callable[..., Any] | None = None,
    at_least: float = 0,
    slots: int = 1,
) -> Any:
    """Let a function run only once at a time; a call that finds it running is skipped.

    ``key`` is the name of the lock, by default the dotted name of the function. A skipped call
    returns ``skip_result``, or what ``on_skip`` returns, which is called with the
    :class:`LockConflict` and then the call's arguments; with ``on_conflict="raise"`` it raises that
    error. A call that returns keeps the lock until ``at_least`` seconds after it took the lock. The
    other options are those of :class:`TaskLock`. Works on functions, methods (``run`` of a
    class-based task) and below ``@shared_task`` and Django's ``@task``.

    Raises ``TypeError`` for coroutine and generator functions, whose body runs after the call has
    returned, for task objects, and for a ``skip_result`` that is a function. The name is that of
    the recipe by Ted Tieken (2012).
    """
    if callable(skip_result):
        raise TypeError(f"skip_result must be a value, not {skip_result!r}: use on_skip.")
    if on_skip is not None and (not callable(on_skip) or on_conflict != "skip"):
        raise TypeError(f'on_skip={on_skip!r} must be a function, and on_conflict "skip".')

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        for attribute, decorator in (("apply_async", "@shared_task"), ("enqueue", "@task")):
            if hasattr(function, attribute):
                raise TypeError(f"{function!r} is a task object: put @only_one below {decorator}.")
        refuse_deferred(function, "only_one")
        make_lock = functools.partial(
            TaskLock,
            f"{function.__module__}.{function.__qualname__}" if key is None else key,
            timeout=timeout,
            renew=renew,
            wait=wait,
            on_conflict=on_conflict,
            slots=slots,
        )
        check_seconds("at_least", at_least, zero=True)
        make_lock()  # raises at decoration, not at the first call, for options that cannot work

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Any:
            lock = make_lock()
            lock.at_least = at_least
            with lock:
                if lock:
                    return function(*args, **kwargs)
            if on_skip is None:
                return skip_result
            return on_skip(LockConflict.of(lock), *args, **kwargs)

        return wrapper

    return decorate if function is None else decorate(function)
