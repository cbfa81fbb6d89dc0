"""The lock options of a task: their defaults, the options of one call, and their errors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, NamedTuple

from django_singletask.conf import check_seconds
from django_singletask.exceptions import LockError
from django_singletask.locks.keys import NO_LOCK, LockKey, check_slots, template_errors
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.parameters import Parameters
from django_singletask.locks.run import Run
from django_singletask.task.pairs import Problem, shown, wrong_pairs

Rule = Callable[[str, str, Any], object]
"""Raises an error if an option, at a place, has an invalid value."""

POLICIES = ("skip", "raise", "wait", "requeue", "rerun")

CHECKS = {"number": "E008", "lock_on": "E009", "lock_name": "E010", "choice": "E012"}
"""Ids of the system checks of single options; pairs have E011."""


class LockOptions(NamedTuple):
    """The lock options of one task, or of one call; see :class:`SingletonTask`."""

    lock_timeout: float | None = None
    lock_renew: bool = True
    lock_on: Sequence[str] | None = None
    lock_name: str | Callable[..., str | None] | None = None
    on_conflict: str = "skip"
    lock_wait: float | None = None
    lock_at_least: float = 0
    lock_slots: int = 1
    on_skip: Callable[..., Any] | None = None
    on_outage: str = "raise"
    skip_result: Any = None
    unique_until: str | None = None
    unique_for: float = 3600
    on_duplicate: str = "return"
    lock_history: bool = True

    @classmethod
    def of(cls, task: object) -> LockOptions:
        return cls._make(_values(task))

    def but(self, overrides: Mapping[str, Any]) -> LockOptions:
        """Return these options with the changes of one call; see :meth:`check_call`."""
        if not overrides:
            return self
        if "lock_on" in overrides or "lock_name" in overrides:
            # Only one of the two can be set, so the call's one replaces the task's one.
            overrides = {"lock_on": None, "lock_name": None, **overrides}
        return self._replace(**overrides)

    def check_run(self, task: str) -> None:
        """Raise ``TypeError`` or ``ValueError`` for what cannot work in a run.

        Some projects run no system checks. The result is cached.
        """
        _check_run(task, *_values_of_run(self))

    def lock(self, key: LockKey, task: str) -> TaskLock:
        """Return the lock of a task with these options, not acquired.

        Raises :class:`LockError` if the call takes none.
        """
        self.check_run(task)
        if key == NO_LOCK:
            raise LockError(f"lock_name of {task} returned None: this call takes no lock.")
        run = Run(task, quiet=not self.lock_history)
        return TaskLock(
            key, timeout=self.lock_timeout, renew=self.lock_renew, slots=self.lock_slots, run=run
        )

    def check_call(self, task: str, overrides: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` or ``ValueError`` for invalid options of one call."""
        where = f"in lock_options of {task}"
        if not isinstance(overrides, Mapping):
            raise TypeError(f"lock_options of {task} must be a dict, not {overrides!r}.")
        unknown = sorted(map(str, overrides.keys() - NAMES))
        if unknown:
            raise TypeError(
                f"{unknown[0]!r} {where} is unknown; the options are {', '.join(sorted(NAMES))}."
            )
        for problem in self.but(overrides).problems(where):
            # Leave out the problems of the task's own options.
            if problem.error is not None and overrides.keys() & set(problem.options):
                raise problem.error(problem.text)

    def problems(self, where: str, parameters: Parameters | None = None) -> Iterator[Problem]:
        """Yield the problems of these options: for a class body, for one call and for the check.

        In the texts, ``where`` follows the name of an option: ``"of shop.tasks.add"``. The names of
        arguments are checked only with the ``parameters`` of the body.
        """
        wrong: set[str] = set()
        for problem in self._wrong_values(where):
            wrong.update(problem.options)
            yield problem
        if parameters is not None and wrong.isdisjoint({"lock_on", "lock_name"}):
            yield from self._wrong_arguments(where, parameters)
        yield from wrong_pairs(self, where, wrong)

    def _wrong_values(self, where: str) -> Iterator[Problem]:
        for option, (rule, kind, right) in RULES.items():
            value = getattr(self, option)
            if value is self._field_defaults[option]:
                continue
            try:
                rule(option, where, value)
            except (TypeError, ValueError) as error:
                hint = f"Set {option} to {right}, or remove it."
                early = isinstance(error, TypeError)
                yield Problem((option,), str(error), hint, CHECKS[kind], type(error), early)

    def _wrong_arguments(self, where: str, parameters: Parameters) -> Iterator[Problem]:
        arguments = ", ".join(parameters.names)
        for name in self.lock_on or ():
            if name not in parameters.names and not parameters.takes_any_name:
                text = f"lock_on={self.lock_on!r} {where} names {name!r}, which is not an argument."
                hint = f"Its arguments are: {arguments or 'none; use lock_on=[]'}."
                yield Problem(("lock_on",), text, hint, CHECKS["lock_on"], TypeError)
        if isinstance(self.lock_name, str):
            what = f"lock_name={self.lock_name!r} {where}"
            for error in template_errors(what, self.lock_name, parameters):
                hint = f"Its arguments are: {arguments or 'none'}."
                if isinstance(error, ValueError):
                    example = "'customer:{customer_id}'"
                    hint = f"Add a fixed text, as in {example}; double a literal brace."
                yield Problem(("lock_name",), str(error), hint, CHECKS["lock_name"], type(error))


NAMES = frozenset(LockOptions._fields)
_values = operator.attrgetter(*LockOptions._fields)

OF_RUN = ("on_conflict", "lock_wait", "lock_timeout", "lock_renew", "lock_at_least", "lock_slots")
_values_of_run = operator.attrgetter(*OF_RUN)


@lru_cache(maxsize=1024, typed=True)
def _check_run(task: str, *values: Any) -> None:
    options = LockOptions(**dict(zip(OF_RUN, values, strict=True)))
    for problem in options.problems(f"of {task}"):
        if problem.error is not None:
            raise problem.error(problem.text)


# The values that each option may have


def _number(check: Callable[..., Any] = check_seconds, **allowed: bool) -> Rule:
    return lambda option, where, value: check(f"{option} {where}", value, **allowed)


def _choice(*choices: Any) -> Rule:
    def check(option: str, where: str, value: Any) -> None:
        # 1 == True, but 1 is not valid.
        if value not in choices or (True in choices and not isinstance(value, bool)):
            error = ValueError if isinstance(value, str) and True not in choices else TypeError
            names = ", ".join(map(str, choices))
            raise error(f"{option}={value!r} {where} is not one of {names}.")

    return check


def _function(option: str, where: str, value: Any) -> None:
    if not callable(value) or iscoroutinefunction(value):
        raise TypeError(f"{option} {where} must be a plain function, not {shown(value)}.")


def _value(option: str, where: str, value: Any) -> None:
    if callable(value):
        raise TypeError(f"{option} {where} must be a value, not {shown(value)}: use on_skip.")


def _names(option: str, where: str, value: Any) -> None:
    if isinstance(value, str):
        raise TypeError(f"{option}={value!r} {where} is a string; did you mean [{value!r}]?")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{option} {where} must be a list of argument names, not {value!r}.")


def _name(option: str, where: str, value: Any) -> None:
    if not isinstance(value, str) and not callable(value):
        raise TypeError(f"{option} {where} must be a format string or a callable, not {value!r}.")


SECONDS = "seconds, such as 60"
BOOLEAN = _choice(True, False), "choice", "one of these values"
RULES: dict[str, tuple[Rule, str, str]] = {
    "lock_timeout": (_number(), "number", SECONDS),
    "lock_wait": (_number(zero=True, infinite=True), "number", f"{SECONDS}, or math.inf"),
    "lock_at_least": (_number(zero=True), "number", SECONDS),
    "unique_for": (_number(), "number", SECONDS),
    "lock_slots": (_number(check_slots), "number", "a number of runs"),
    "on_conflict": (_choice(*POLICIES), "choice", "one of these values"),
    "on_outage": (_choice("raise", "run", "skip"), "choice", "one of these values"),
    "unique_until": (_choice(None, "start", "finish", "expiry"), "choice", "one of these values"),
    "on_duplicate": (_choice("return", "raise", "replace"), "choice", "one of these values"),
    "lock_renew": BOOLEAN,
    "lock_history": BOOLEAN,
    "on_skip": (_function, "choice", "a function"),
    "skip_result": (_value, "choice", "a value"),
    "lock_on": (_names, "lock_on", "a list"),
    "lock_name": (_name, "lock_name", "a string or a function"),
}
"""The rule of each option, the kind of its check, and a valid value for the hint."""
