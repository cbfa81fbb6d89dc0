"""Refuse a task that could not run under its lock, and options that do not exist."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from functools import partialmethod
from typing import Any

from celery import Task

from django_singletask.conf import DOCS
from django_singletask.locks.parameters import refuse_deferred
from django_singletask.task.options import NAMES, LockOptions

ELSEWHERE = {
    "once": "lock_on, unique_until, unique_for and on_duplicate",
    "unique_on": "lock_on",
    "lock_expiry": "unique_for, and lock_timeout for the run",
    "raise_on_duplicate": "on_duplicate='raise'",
}
"""Options of celery-once and celery-singleton, which Celery would accept and ignore."""

OF_ONLY_ONE = {
    "key": "lock_name",
    "slots": "lock_slots",
    "at_least": "lock_at_least",
    "timeout": "lock_timeout",
    "renew": "lock_renew",
    "wait": "lock_wait",
    "unique": "unique_until",
    "lock_key": "lock_name",  # and the name of a method
}
"""Options of ``only_one`` that a user may pass to a task by mistake."""


def check_definition(cls: type, base: type) -> None:
    """Raise ``TypeError`` for an error in the body of a class, or in its decorator.

    ``base`` is the class whose attributes are valid options. The system check reports numbers that
    cannot work, with a hint.
    """
    what = str(cls.__dict__.get("name") or f"{cls.__module__}.{cls.__qualname__}")
    if "_decorated" in cls.__dict__:
        _refuse_foreign(what, cls.__dict__, {**ELSEWHERE, **OF_ONLY_ONE})
        for name in sorted(cls.__dict__.keys() - set(dir(base))):
            for similar in difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8):
                raise TypeError(f"{what} has no option {name!r}; did you mean {similar!r}?")
            if name.startswith(("lock_", "unique_")):
                options = ", ".join(sorted(NAMES))
                raise TypeError(f"{what} has no option {name!r}; the options are {options}.")
    values = {name: getattr(cls, name) for name in NAMES}
    for name, value in [*values.items()]:
        if hasattr(value, "__get__") and not callable(value):
            del values[name]  # a property, which has a value only on the task
    for problem in LockOptions(**values).problems(f"of {what}"):
        inherited = cls.__dict__.keys().isdisjoint(problem.options)
        if problem.early and problem.error is not None and not inherited:
            raise problem.error(problem.text)
    run = cls.__dict__.get("run")
    if run is not None:
        refuse_deferred(inspect.unwrap(getattr(run, "__func__", run)), what)
    for outer in cls.__mro__[: cls.__mro__.index(base)]:
        call = outer.__dict__.get("__call__")
        if call and not _mentions(getattr(inspect.unwrap(call), "__code__", None), "__call__"):
            raise TypeError(
                f"{outer.__qualname__}.__call__ never calls super().__call__(*args, **kwargs), so "
                f"{what} would run without its lock. Call it, or make {base.__name__} the first "
                "base class."
            )
    for inner in cls.__mro__[cls.__mro__.index(Task) + 1 : -1]:  # all but object
        if "__call__" in inner.__dict__:
            raise TypeError(
                f"{inner.__qualname__}.__call__ would never be called for {what}, since Celery's "
                f"Task comes before it. Derive {inner.__qualname__} from celery.Task, or "
                f"put it before {base.__name__} in the list of base classes."
            )


def bind_functions(cls: type) -> None:
    """Keep functions from the decorator from becoming methods, which would get the task first.

    Only ``on_skip`` gets the task if the body does, too (``bind=True``).
    """
    for name in ("lock_name", "on_skip"):
        function = cls.__dict__.get(name)
        bound = name == "on_skip" and not isinstance(cls.__dict__["run"], staticmethod)
        if callable(function):
            setattr(cls, name, partialmethod(function) if bound else staticmethod(function))


def refuse_unsendable(what: str, names: Iterable[str], lock_options: Any) -> None:
    """Raise ``TypeError`` for options that ``apply_async`` does not have or cannot send."""
    _refuse_foreign(what, names, ELSEWHERE)
    for name in names:
        if name in NAMES:
            raise TypeError(f"{what} has no option {name!r}: write lock_options={{{name!r}: …}}.")
    if isinstance(lock_options, Mapping) and callable(lock_options.get("on_skip")):
        raise TypeError(f"{what} cannot send on_skip, a function: set it on the task.")


def _refuse_foreign(what: str, names: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    for name in names:
        if name in elsewhere:
            raise TypeError(
                f"{what} has no option {name!r}: use {elsewhere[name]}. See "
                f"{DOCS}/guides/coming-from.html"
            )


def _mentions(code: Any, name: str) -> bool:
    if code is None or name in code.co_names:
        return True
    return any(_mentions(inner, name) for inner in code.co_consts if inspect.iscode(inner))
