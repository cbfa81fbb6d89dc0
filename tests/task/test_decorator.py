"""``@singleton_task`` makes what ``@shared_task(base=SingletonTask)`` makes, for type checkers too.

tests/typing has what a type checker says. Here is that its options are those of a task.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, _state, current_app, shared_task
from celery.app.task import extract_exec_options

from django_singletask import CallOptions, SingletonTask, only_one, singleton_task
from django_singletask.locks.only_one import OnlyOneOptions
from django_singletask.task import decorator
from django_singletask.task import options as task_options
from django_singletask.testing import no_locks
from tests import inside

CANNOT_TRAVEL = {"on_skip"}
"""Options of a task that are functions, so one call cannot have them."""
READ_BY_CELERY = {
    *("autoretry_for", "base", "dont_autoretry_for", "store_eager_result"),
    *("retry_backoff", "retry_backoff_max", "retry_jitter", "retry_kwargs"),
    *("pydantic", "pydantic_context", "pydantic_dump_kwargs", "pydantic_strict"),
}
"""Options that are no attributes of Celery's ``Task``."""
SINCE_CELERY_57 = {"acks_on_failure", "acks_on_timeout", "retry_on_worker_lost"}
SET_BY_CELERY = {
    *("MaxRetriesExceededError", "OperationalError"),
    *("abstract", "app", "from_config", "request", "request_stack"),
}
"""Attributes of Celery's ``Task`` that its users do not set in a decorator."""
REFUSED = {"Strategy"}
"""A class of a Strategy is an error of a task with locks."""


@pytest.fixture(autouse=True)
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give an application of its own, and let no other one have the shared tasks."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    monkeypatch.setattr(_state, "_apps", set())
    before = current_app._get_current_object()
    Celery("decorated", broker="memory://")
    yield
    before.set_current()


def double(number: int) -> int:
    return number * 2


def double_bound(self: Task, number: int) -> int:
    return number * self.lock_slots


class Own(SingletonTask):
    lock_slots = 2


def test_a_bare_decorator_makes_a_task() -> None:
    task = singleton_task(double)
    assert isinstance(task, SingletonTask)
    with no_locks():
        assert task(4) == 8


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (double, {}),
        (double, {"lock_on": [], "on_conflict": "raise", "acks_late": True}),
        (double, {"bind": False}),
        (double_bound, {"bind": True, "lock_slots": 2}),
        (double_bound, {"bind": True, "base": Own}),
    ],
)
def test_it_takes_the_options_of_shared_task(function: Any, options: dict[str, Any]) -> None:
    task = singleton_task(**options, name="one")(function)
    other = shared_task(**{"base": SingletonTask, **options, "name": "other"})(function)
    assert type(task).__mro__[1:] == type(other).__mro__[1:]
    for name in inside.task_options():
        assert getattr(task, name) == getattr(other, name)
    assert task.acks_late == other.acks_late
    with no_locks():
        assert task(4) == 8


def test_the_decorator_refuses_what_shared_task_refuses() -> None:
    async def coroutine() -> None: ...

    with pytest.raises(TypeError, match="did you mean 'on_conflict'"):
        singleton_task(on_konflict="skip")(double).name  # noqa: B018
    with pytest.raises(TypeError, match="coroutine"):
        singleton_task(coroutine).name  # noqa: B018


def test_type_checkers_know_each_lock_option() -> None:
    options = {*inside.task_options()}
    assert {*CallOptions.__annotations__} == options - CANNOT_TRAVEL
    assert {*task_options.RunOptions.__annotations__} == options
    assert {*decorator.TaskOptions.__annotations__} >= options
    keywords = {*inspect.signature(only_one).parameters}
    assert keywords > {*OnlyOneOptions.__annotations__} > {"key", "timeout"}


def test_type_checkers_know_no_option_that_celery_does_not_know() -> None:
    of_celery = decorator.TaskOptions.__annotations__.keys() - inside.task_options().keys()
    unknown = {name for name in of_celery - SINCE_CELERY_57 if not hasattr(Task, name)}
    sent = extract_exec_options(Task).keys()
    assert unknown - sent == READ_BY_CELERY


def test_type_checkers_know_each_option_of_celery() -> None:
    public = {name for name in vars(Task) if not name.startswith("_")}
    plain = {name for name in public if not inspect.isroutine(inspect.getattr_static(Task, name))}
    read = {name for name, _setting in Task.from_config}
    sent = extract_exec_options(Task).keys()
    missing = (plain | read | sent) - decorator.TaskOptions.__annotations__.keys()
    assert missing == SET_BY_CELERY | REFUSED
    missing = sent - task_options.SendOptions.__annotations__.keys()
    assert missing == {"immediate", "mandatory"}  # of AMQP; Redis ignores them
