"""The lock options of a task: their names, types and values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django_singletask.conf import check_seconds
from django_singletask.task.delivery import POLICIES
from django_singletask.task.unique import ON_DUPLICATE, UNIQUE_UNTIL

if TYPE_CHECKING:
    from django_singletask.task.base import SingletonTask

__all__ = [
    "CHOICES",
    "OPTIONS",
    "SECONDS",
    "check_lock_options",
    "check_types",
    "choice_error",
    "refuse_foreign",
    "refuse_misspelt",
    "refuse_unwrapped",
]

CHOICES: dict[str, tuple[str | None, ...]] = {
    "on_conflict": POLICIES,
    "unique_until": (None, *UNIQUE_UNTIL),
    "on_duplicate": ON_DUPLICATE,
}
SECONDS = {"lock_timeout": False, "lock_wait": True, "unique_for": False}
"""Options in seconds, and whether each can be 0."""

OPTIONS = frozenset(
    {
        *CHOICES,
        *SECONDS,
        "lock_history",
        "lock_name",
        "lock_on",
        "lock_renew",
        "skip_result",
    }
)


ELSEWHERE = {
    "once": "lock_on, unique_until, unique_for and on_duplicate",
    "unique_on": "lock_on",
    "lock_expiry": "unique_for, and lock_timeout for the run",
    "raise_on_duplicate": "on_duplicate='raise'",
}
"""Options of celery-once and celery-singleton, which Celery would take without a word."""


def refuse_foreign(what: str, names: Iterable[str]) -> None:
    """Raise ``TypeError`` for an option of another library."""
    for name in names:
        if name in ELSEWHERE:
            raise TypeError(
                f"{what} has no option {name!r}: here it is {ELSEWHERE[name]}; see 'Coming from "
                "celery-once, celery-singleton, the cookbook recipe' in the documentation."
            )


def refuse_unwrapped(what: str, names: Iterable[str]) -> None:
    """Raise ``TypeError`` for what is no option of ``apply_async``; Celery would keep quiet."""
    refuse_foreign(what, names)
    for name in names:
        if name in OPTIONS:
            raise TypeError(f"{what} has no option {name!r}: write lock_options={{{name!r}: …}}.")


def refuse_misspelt(what: str, names: Iterable[str]) -> None:
    """Raise ``TypeError`` for a name in the decorator that is almost a lock option."""
    refuse_foreign(what, names)
    for name in names:
        meant = difflib.get_close_matches(name, OPTIONS, n=1, cutoff=0.8)
        if meant:
            raise TypeError(f"{what} has no option {name!r}; did you mean {meant[0]!r}?")


def check_types(what: str, options: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for a lock option of a wrong type; the message begins with ``what``."""
    for name, value in options.items():
        if name in {"lock_renew", "lock_history"} and not isinstance(value, bool):
            raise TypeError(f"{what}: {name} must be True or False, not {value!r}.")
        if name in SECONDS and not (name == "lock_timeout" and value is None):
            # A number that cannot work is for the system check, which names it with a hint.
            with suppress(ValueError):
                check_seconds(f"{what}: {name}", value, zero=True)
        if name in CHOICES and not isinstance(value, str) and value not in CHOICES[name]:
            raise TypeError(choice_error(what, name, value))
        if name == "lock_name" and not (value is None or isinstance(value, str) or callable(value)):
            raise TypeError(
                f"{what}: lock_name must be a format string or a callable, not {value!r}."
            )
        if name == "lock_on" and value is not None:
            if isinstance(value, str):
                raise TypeError(f"{what}: lock_on={value!r} is a string; did you mean [{value!r}]?")
            if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
                raise TypeError(f"{what}: lock_on must be a list of argument names, not {value!r}.")


def choice_error(what: str, option: str, value: object) -> str:
    """Say that an option cannot be ``value``."""
    choices = ", ".join(map(str, CHOICES[option]))
    return f"{what}: {option} must be one of {choices}, not {value!r}."


def check_lock_options(task: SingletonTask, lock_options: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` or ``ValueError`` for options of one call that cannot work."""
    if not isinstance(lock_options, Mapping):
        raise TypeError(f"lock_options of {task.name} must be a dict, not {lock_options!r}.")
    unknown = lock_options.keys() - OPTIONS
    if unknown:
        raise TypeError(
            f"lock_options of {task.name} has no {sorted(unknown)[0]!r}; "
            f"it knows {', '.join(sorted(OPTIONS))}."
        )
    check_types(f"lock_options of {task.name}", lock_options)
    if None not in (lock_options.get("lock_on"), lock_options.get("lock_name")):
        raise TypeError(
            f"lock_options of {task.name}: lock_on and lock_name exclude each other; keep one."
        )
    fixed = not task.option("lock_renew", lock_options)
    if fixed and task.option("lock_timeout", lock_options) is None:
        raise TypeError(f"lock_options of {task.name}: lock_renew=False needs a lock_timeout.")
    for name, zero in SECONDS.items():
        if lock_options.get(name) is not None:
            check_seconds(f"lock_options of {task.name}: {name}", lock_options[name], zero=zero)
    for name, choices in CHOICES.items():
        value = task.option(name, lock_options)
        if value not in choices:
            raise ValueError(choice_error(f"lock_options of {task.name}", name, value))
