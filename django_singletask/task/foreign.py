"""Refuse what is no option here: one of another library, or one in the wrong place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django_singletask.task.options import NAMES

__all__ = ["refuse_foreign", "refuse_unsendable"]

ELSEWHERE = {
    "once": "lock_on, unique_until, unique_for and on_duplicate",
    "unique_on": "lock_on",
    "lock_expiry": "unique_for, and lock_timeout for the run",
    "raise_on_duplicate": "on_duplicate='raise'",
}
"""Options of celery-once and celery-singleton, which Celery would accept and nobody would read."""


def refuse_unsendable(what: str, names: Iterable[str], lock_options: Any) -> None:
    """Raise ``TypeError`` for what is no option of ``apply_async``, or cannot travel."""
    refuse_foreign(what, names)
    for name in names:
        if name in NAMES:
            raise TypeError(f"{what} has no option {name!r}: write lock_options={{{name!r}: …}}.")
    if isinstance(lock_options, Mapping) and callable(lock_options.get("on_skip")):
        raise TypeError(f"{what} cannot send on_skip, a function: set it on the task.")


def refuse_foreign(what: str, names: Iterable[str]) -> None:
    """Raise ``TypeError`` for an option of another library."""
    for name in names:
        if name in ELSEWHERE:
            raise TypeError(
                f"{what} has no option {name!r}: here it is {ELSEWHERE[name]}; see 'Coming from "
                "celery-once, celery-singleton, the cookbook recipe' in the documentation."
            )
