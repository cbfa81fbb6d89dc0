"""A decorator for tasks with a lock, whose parameters, result and options a type checker knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, Unpack, overload

from celery import shared_task

from django_singletask.task.base import SingletonTask
from django_singletask.task.options import Function, RunOptions

P = ParamSpec("P")
R = TypeVar("R")


class TaskOptions(RunOptions, total=False):
    """The options of a task in its decorator: those of its lock, and Celery's."""

    base: type[SingletonTask]

    Request: type[Any] | str
    acks_late: bool
    acks_on_failure: bool | None
    acks_on_failure_or_timeout: bool
    acks_on_timeout: bool | None
    after_return: Function
    autoretry_for: Sequence[type[BaseException]]
    backend: Any
    before_start: Function
    compression: str | None
    default_retry_delay: float
    delivery_mode: int | str | None
    dont_autoretry_for: Sequence[type[BaseException]]
    exchange: Any
    expires: float | datetime | None
    ignore_result: bool
    immediate: bool | None
    mandatory: bool | None
    max_retries: int | None
    name: str
    on_failure: Function
    on_retry: Function
    on_success: Function
    priority: int | None
    pydantic: bool
    pydantic_context: dict[str, Any] | None
    pydantic_dump_kwargs: dict[str, Any] | None
    pydantic_strict: bool
    queue: str
    rate_limit: str | None
    reject_on_worker_lost: bool
    resultrepr_maxsize: int
    retry_backoff: bool | int
    retry_backoff_max: int
    retry_jitter: bool
    retry_kwargs: dict[str, Any]
    retry_on_worker_lost: bool | None
    routing_key: str | None
    send_events: bool
    serializer: str | None
    shadow_name: Function
    soft_time_limit: float | None
    store_eager_result: bool
    store_errors_even_if_ignored: bool
    throws: tuple[type[Exception], ...]
    time_limit: float | None
    track_started: bool
    trail: bool
    typing: bool


class Decorator(Protocol):
    """Makes a task of a function."""

    def __call__(self, function: Callable[P, R], /) -> SingletonTask[P, R]: ...


class BoundDecorator(Protocol):
    """Makes a task of a function whose first argument is the task."""

    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> SingletonTask[P, R]: ...


@overload
def singleton_task(function: Callable[P, R], /) -> SingletonTask[P, R]: ...
@overload
def singleton_task(*, bind: Literal[True], **options: Unpack[TaskOptions]) -> BoundDecorator: ...
@overload
def singleton_task(
    *, bind: Literal[False] = False, **options: Unpack[TaskOptions]
) -> Decorator: ...
def singleton_task(
    *function: Any, base: type[SingletonTask] = SingletonTask, **options: Any
) -> Any:
    """Do what ``@shared_task(base=SingletonTask)`` does, with the same options.

    A type checker then knows the parameters and the result of the task. ``base`` can be a subclass.
    """
    return shared_task(*function, base=base, **options)
