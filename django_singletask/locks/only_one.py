"""Let a function run only once at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from django_singletask.locks.keys import (
    NO_LOCK,
    LockKey,
    LockName,
    name_key,
    named_key,
    template_fields,
)
from django_singletask.locks.lock import TaskLock, conflict_of
from django_singletask.locks.parameters import Parameters, refuse_deferred

if TYPE_CHECKING:
    from typing import Unpack

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
CoroutineFunction = Callable[P, Coroutine[Any, Any, R]]


class OnlyOneOptions(TypedDict, total=False):
    """The options of :func:`only_one`, but for those that say what a skipped call returns."""

    key: LockName | None
    timeout: float | None
    renew: bool
    wait: float
    at_least: float
    slots: int


class Skipping(Protocol[S_co]):
    """The decorator of functions whose skipped calls return another type."""

    @overload
    def __call__(self, function: CoroutineFunction[P, R], /) -> CoroutineFunction[P, R | S_co]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R | S_co]: ...


@overload
def only_one(function: CoroutineFunction[P, R], /) -> CoroutineFunction[P, R | None]: ...
@overload
def only_one(function: Callable[P, R], /) -> Callable[P, R | None]: ...
@overload
def only_one(
    *, on_conflict: Literal["raise"], **options: Unpack[OnlyOneOptions]
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def only_one(
    *, on_conflict: Literal["skip"] = "skip", **options: Unpack[OnlyOneOptions]
) -> Skipping[None]: ...
@overload
def only_one(
    *,
    on_conflict: Literal["skip"] = "skip",
    skip_result: S,
    **options: Unpack[OnlyOneOptions],
) -> Skipping[S]: ...
@overload
def only_one(
    *,
    on_conflict: Literal["skip"] = "skip",
    on_skip: Callable[..., Any],
    **options: Unpack[OnlyOneOptions],
) -> Skipping[Any]: ...
def only_one(
    function: Callable[P, R] | None = None,
    *,
    key: LockName | None = None,
    timeout: float | None = None,
    renew: bool = True,
    wait: float = 0,
    on_conflict: Literal["raise", "skip"] = "skip",
    skip_result: Any = None,
    on_skip: Callable[..., Any] | None = None,
    at_least: float = 0,
    slots: int = 1,
) -> Any:
    """Let a function run only once at a time; a call while it runs is skipped.

    ::

        @only_one(key="sync-{user_id}")
        def sync(user_id):
            ...

    * ``key``: the name of the lock: a format string over the arguments, or a function of them
      (no lock if it returns None). The default is the dotted name of the function.
    * ``on_conflict``: ``"skip"``, or ``"raise"`` :class:`LockConflict`.
    * ``skip_result``: what a skipped call returns.
    * ``on_skip``: a function that gets the :class:`LockConflict` and the call's arguments, and
      returns the result of a skipped call.
    * The other options are those of :class:`TaskLock`.

    It works on functions, methods and coroutine functions, and below ``@shared_task`` and Django's
    ``@task``. The name comes from a recipe by Ted Tieken (2012).

    Raises ``TypeError`` for generator functions, task objects, and invalid options. A call can
    raise :class:`LockUnavailable`.
    """
    make_lock = functools.partial(
        TaskLock,
        timeout=timeout,
        renew=renew,
        wait=wait,
        on_conflict=on_conflict,
        slots=slots,
        at_least=at_least,
    )
    make_lock("any")  # raises for invalid options, at decoration
    if callable(skip_result):
        raise TypeError(f"skip_result must be a value, not {skip_result!r}: use on_skip.")
    if on_skip is not None and (not callable(on_skip) or on_conflict != "skip"):
        raise TypeError(f'on_skip={on_skip!r} must be a function, and needs on_conflict="skip".')

    guard = functools.partial(_guard, key, make_lock, on_skip, skip_result)
    if function is None:
        return guard
    return guard(function)


def _guard(key: Any, make_lock: Any, on_skip: Any, skip_result: Any, function: Any) -> Any:
    """Return the function as its callers see it."""
    key_of = _key_maker(function, key)

    def skip(lock: TaskLock, args: Any, kwargs: Any) -> Any:
        if on_skip is None:
            return skip_result
        return on_skip(conflict_of(lock), *args, **kwargs)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        lock_key = key_of(args, kwargs)
        if lock_key is NO_LOCK:
            return function(*args, **kwargs)
        with make_lock(lock_key) as lock:
            if lock.blocker is None:
                return function(*args, **kwargs)
        return skip(lock, args, kwargs)

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        lock_key = key_of(args, kwargs)
        if lock_key is NO_LOCK:
            return await function(*args, **kwargs)
        async with make_lock(lock_key) as lock:
            if lock.blocker is None:
                return await function(*args, **kwargs)
        result = skip(lock, args, kwargs)
        if inspect.isawaitable(result):
            return await result
        return result

    if inspect.iscoroutinefunction(function):
        return call_async
    if inspect.iscoroutinefunction(on_skip):
        text = f"on_skip={on_skip!r} is a coroutine function, but {function!r} is not."
        raise TypeError(text)
    return call


def _key_maker(function: Any, key: LockName | None) -> Callable[[Any, Any], LockKey]:
    """Return a function that makes the key of a call's lock, or NO_LOCK, from the arguments."""
    if hasattr(function, "apply_async") or hasattr(function, "enqueue"):
        raise TypeError(f"{function!r} is a task: put @only_one below @shared_task or @task.")
    if inspect.isclass(function) or not callable(function):
        raise TypeError(f"only_one guards a function or a method, not {function!r}: use key=….")
    refuse_deferred(function, "only_one", awaits=True)
    path = f"{function.__module__}.{function.__qualname__}"
    if key is None:
        return lambda args, kwargs: name_key(path)
    parameters = Parameters(inspect.signature(function))
    what = f"key={key!r} of {path}"
    if isinstance(key, str):
        if not template_fields(what, key, parameters):
            name = key.format()
            name_key(name)  # raises for an invalid name, at decoration
            return lambda args, kwargs: name_key(name)
    elif not callable(key):
        raise TypeError(f"{what} must be a format string or a callable.")

    def key_of(args: Any, kwargs: Any) -> LockKey:
        arguments = parameters.bind(path, args, kwargs, defaults=True)
        return named_key("key", key, path, parameters, arguments)  # pyright: ignore[reportArgumentType]

    return key_of
