"""One rule: an option ``lock_X`` of a task is ``X`` of ``TaskLock`` and of ``only_one``.

It has the same meaning and the same limits. What exists on one of them only is in a table of
docs/reference/options.rst, with the reason.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

from django_singletask import TaskLock, only_one
from django_singletask.task.options import FIELDS, LockOptions

NAMES = {
    "lock_timeout": "timeout",
    "lock_renew": "renew",
    "lock_wait": "wait",
    "lock_at_least": "at_least",
    "lock_slots": "slots",
    "on_conflict": "on_conflict",
}
OF_FUNCTIONS = {"skip_result": "skip_result", "on_skip": "on_skip"}
PAIRS = [(option, name, TaskLock) for option, name in NAMES.items()]
PAIRS += [(option, name, only_one) for option, name in (NAMES | OF_FUNCTIONS).items()]

ONLY_TASKS = {"lock_on", "lock_name", "on_outage", "unique_until", "unique_for", "on_duplicate"}
ONLY_TASKS |= {"lock_history"}
ONLY_LOCKS = {"name", "cache"}
ONLY_FUNCTIONS = {"function", "key"}

SECONDS = [0, -1, 1e-9, 0.5, 30 * 86_400, 30 * 86_400 + 1, math.inf, math.nan, True, "5", [5]]
VALUES: dict[str, list[Any]] = {
    **dict.fromkeys(("lock_timeout", "lock_wait", "lock_at_least"), SECONDS),
    "lock_renew": [True, False, 1, 0, "yes", None],
    "lock_slots": [1, 100, 0, -1, 10_000, 2.0, True, "2", None],
    "on_conflict": ["skip", "raise", "ask", "", None, 1, ["skip"]],
    "skip_result": [None, 0, "busy", [1], print],
    "on_skip": [None, print, "print", 1],
}


def outcome(make: Callable[[], object]) -> type[Exception] | None:
    try:
        make()
    except (TypeError, ValueError) as error:
        return type(error)
    return None


def of_task(option: str, value: Any) -> None:
    others = {"lock_renew": {"lock_timeout": 60}, "lock_wait": {"on_conflict": "wait"}}
    options = {**others.get(option, {}), option: value}
    LockOptions.check_call(NoOptions, options)


class NoOptions:
    """A task without options of its own."""

    name = "shop.tasks.bill"


for field in FIELDS:
    setattr(NoOptions, field, getattr(LockOptions, field))


@pytest.mark.parametrize(
    ("option", "name", "other", "value"),
    [(*pair, value) for pair in PAIRS for value in VALUES[pair[0]]],
)
def test_the_limits_are_the_same(option: str, name: str, other: Any, value: Any) -> None:
    others = {"renew": {"timeout": 60}}.get(name, {})
    arguments = ["nightly"] if other is TaskLock else []
    here = outcome(lambda: other(*arguments, **others, **{name: value}))
    if option == "lock_wait" and value == 0:  # "wait" of a task needs more than that
        assert here is None
        return
    assert here is outcome(lambda: of_task(option, value))


def test_an_option_that_one_of_them_has_is_on_all_or_in_the_table() -> None:
    of_lock = inspect.signature(TaskLock).parameters.keys()
    of_function = inspect.signature(only_one).parameters.keys()
    assert of_lock == {*NAMES.values()} | ONLY_LOCKS
    assert of_function == {*NAMES.values(), *OF_FUNCTIONS.values()} | ONLY_FUNCTIONS
    assert set(FIELDS) == NAMES.keys() | OF_FUNCTIONS.keys() | ONLY_TASKS


def test_an_error_begins_with_the_name_that_the_user_wrote() -> None:
    for name, value in {"timeout": "5", "at_least": "5", "wait": "5", "slots": "2"}.items():
        with pytest.raises(TypeError, match=f"^{name} "):
            TaskLock("nightly", **{name: value})
        with pytest.raises(TypeError, match=f"^{name} "):
            only_one(**{name: value})
