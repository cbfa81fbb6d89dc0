"""The lock options of a task: their defaults, one call's own, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from django_singletask.conf import check_seconds
from django_singletask.exceptions import LockError
from django_singletask.locks.keys import NO_LOCK, LockKey, call_key, foreign_fields
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.parameters import Parameters
from django_singletask.locks.run import Run
from django_singletask.locks.slots import check_slots
from django_singletask.task.pairs import PAIRS, Problem

__all__ = ["NAMES", "POLICIES", "LockOptions"]

POLICIES = ("skip", "raise", "wait", "requeue", "rerun")

CHOICES: dict[str, tuple[Any, ...]] = {
    "on_conflict": POLICIES,
    "on_outage": ("raise", "run", "skip"),
    "unique_until": (None, "start", "finish", "expiry"),
    "on_duplicate": ("return", "raise", "replace"),
    "lock_renew": (True, False),
    "lock_history": (True, False),
}
NUMBERS: dict[str, Callable[[str, Any], Any]] = {
    "lock_timeout": check_seconds,
    "lock_wait": partial(check_seconds, zero=True, infinite=True),
    "lock_at_least": partial(check_seconds, zero=True),
    "lock_slots": check_slots,
    "unique_for": check_seconds,
}
"""Options that are numbers, and what raises if they are wrong."""

CHECKS = {"number": "E008", "lock_on": "E009", "lock_name": "E010", "choice": "E012"}
"""Numbers of the system checks of single options; those of pairs are in PAIRS."""


@dataclasses.dataclass(frozen=True)
class LockOptions:
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
        """Return the options that are the attributes of a task, or of its class."""
        options = object.__new__(cls)
        # A quarter of the time of a frozen dataclass's own way to set its fields one by one.
        vars(options).update(zip(NAMES, _values(task), strict=True))
        return options

    def but(self, overrides: Mapping[str, Any]) -> LockOptions:
        """Return these options with those of one call; see :meth:`check_call`."""
        if not overrides:
            return self
        if "lock_on" in overrides or "lock_name" in overrides:
            # They exclude each other: the one of the call replaces the other of the task.
            overrides = {"lock_on": None, "lock_name": None, **overrides}
        return dataclasses.replace(self, **overrides)

    def check_policy(self, task: str) -> None:
        """Raise ``ValueError`` for an ``on_conflict`` that cannot work: some run no checks."""
        if self.on_conflict not in POLICIES or (self.on_conflict == "wait" and not self.lock_wait):
            names = {"on_conflict", "lock_wait"}
            wrong = (p for p in self.problems(f"of {task}") if not names.isdisjoint(p.options))
            raise ValueError(next(wrong).text)

    def key(self, *call: Any, **facts: Any) -> LockKey:
        """Return the lock of a call; the arguments are those of :func:`call_key`."""
        return call_key(*call, lock_on=self.lock_on, lock_name=self.lock_name, **facts)

    def lock(self, key: LockKey, task: str) -> TaskLock:
        """Return the lock of a task with these options, not acquired.

        Raises :class:`LockError` if the call takes none.
        """
        self.check_policy(task)
        if key == NO_LOCK:
            raise LockError(f"lock_name of {task} returned None: this call takes no lock.")
        run = Run(task, quiet=not self.lock_history)
        return TaskLock(
            key, timeout=self.lock_timeout, renew=self.lock_renew, slots=self.lock_slots, run=run
        )

    def check_call(self, task: str, overrides: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` or ``ValueError`` for options of one call that cannot work."""
        where = f"in lock_options of {task}"
        if not isinstance(overrides, Mapping):
            raise TypeError(f"lock_options of {task} must be a dict, not {overrides!r}.")
        unknown = sorted(map(str, overrides.keys() - NAMES))
        if unknown:
            raise TypeError(
                f"{unknown[0]!r} {where} is unknown; the options are {', '.join(sorted(NAMES))}."
            )
        both = overrides.get("lock_on") is not None and overrides.get("lock_name") is not None
        options = dataclasses.replace(self, **overrides) if both else self.but(overrides)
        for problem in options.problems(where):
            # What is wrong with the task's own options is the task's problem, not the call's.
            if problem.error is not None and overrides.keys() & set(problem.options):
                raise problem.error(problem.text)

    def problems(self, where: str, parameters: Parameters | None = None) -> Iterator[Problem]:
        """Yield what is wrong, for the body of a class, for one call and for the check alike.

        ``where`` follows the name of an option in the texts: ``"of shop.tasks.add"``. With the
        ``parameters`` of the body the names of arguments are looked at, too.
        """
        wrong: set[str] = set()
        for problem in self._wrong_values(where, parameters):
            wrong.update(problem.options)
            yield problem
        for pair in PAIRS:
            if wrong.isdisjoint(pair.names) and pair.is_among(self):
                yield pair.problem(self, where)

    def _wrong_values(self, where: str, parameters: Parameters | None) -> Iterator[Problem]:
        yield from self._wrong_numbers(where)
        yield from self._wrong_choices(where)
        yield from self._wrong_skips(where)
        yield from self._wrong_lock_on(where, parameters)
        yield from self._wrong_lock_name(where, parameters)

    def _wrong_numbers(self, where: str) -> Iterator[Problem]:
        for option, check in NUMBERS.items():
            value = getattr(self, option)
            if option in {"lock_timeout", "lock_wait"} and value is None:
                continue
            try:
                check(f"{option} {where}", value)
            except (TypeError, ValueError) as error:
                what = "a number of runs" if option == "lock_slots" else "seconds, such as 60"
                hint = f"Set {option} to {what}, or remove it."
                early = isinstance(error, TypeError)
                yield Problem((option,), str(error), hint, CHECKS["number"], type(error), early)

    def _wrong_choices(self, where: str) -> Iterator[Problem]:
        for option, choices in CHOICES.items():
            value = getattr(self, option)
            # 1 equals True, but is not it.
            if value in choices and (True not in choices or isinstance(value, bool)):
                continue
            wrong_type = not isinstance(value, str) or True in choices
            yield Problem(
                (option,),
                f"{option}={value!r} {where} is none of {', '.join(map(str, choices))}.",
                f"Set {option} to one of them, or remove it.",
                CHECKS["choice"],
                TypeError if wrong_type else ValueError,
                early=wrong_type,
            )

    def _wrong_skips(self, where: str) -> Iterator[Problem]:
        function = self.on_skip
        if function is not None and (not callable(function) or iscoroutinefunction(function)):
            text = f"on_skip {where} must be a function that is not async, not {function!r}."
            hint = "Set on_skip to a function, or skip_result to a value."
            yield Problem(("on_skip",), text, hint, CHECKS["choice"], TypeError, early=True)
        if callable(self.skip_result):
            text = f"skip_result {where} must be a value, not {self.skip_result!r}: use on_skip."
            hint = "Set on_skip to what is to be called when a run is skipped."
            yield Problem(("skip_result",), text, hint, CHECKS["choice"], TypeError, early=True)

    def _wrong_lock_on(self, where: str, parameters: Parameters | None) -> Iterator[Problem]:
        names: Any = self.lock_on
        if names is None:
            return
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            text = f"lock_on {where} must be a list of argument names, not {names!r}."
            if isinstance(names, str):
                text = f"lock_on={names!r} {where} is a string; did you mean [{names!r}]?"
            hint = "Set lock_on to a list."
            yield Problem(("lock_on",), text, hint, CHECKS["lock_on"], TypeError, early=True)
        elif parameters is not None and not parameters.takes_any_name:
            arguments = ", ".join(parameters.names) or "none; use lock_on=[]"
            for name in names:
                if name not in parameters.names:
                    yield Problem(
                        ("lock_on",),
                        f"lock_on={list(names)!r} {where} names {name!r}, which is no argument of "
                        "it.",
                        f"Its arguments are: {arguments}.",
                        CHECKS["lock_on"],
                    )

    def _wrong_lock_name(self, where: str, parameters: Parameters | None) -> Iterator[Problem]:
        template: Any = self.lock_name
        if template is None or callable(template):
            return
        if not isinstance(template, str):
            text = f"lock_name {where} must be a format string or a callable, not {template!r}."
            hint = "Set lock_name to a string or a function."
            yield Problem(("lock_name",), text, hint, CHECKS["lock_name"], TypeError, early=True)
        elif parameters is not None:
            yield from _wrong_template(template, f"lock_name={template!r} {where}", parameters)


NAMES = frozenset(field.name for field in dataclasses.fields(LockOptions))
_values = operator.attrgetter(*NAMES)


def _wrong_template(template: str, what: str, parameters: Parameters) -> Iterator[Problem]:
    try:
        foreign = foreign_fields(what, template, parameters)
    except ValueError as error:
        hint = "Write what it stands for, as in 'customer:{customer_id}'; double a literal brace."
        yield Problem(("lock_name",), str(error), hint, CHECKS["lock_name"])
        return
    arguments = ", ".join(parameters.names) or "none"
    for field in foreign:
        text = f"{what} uses {{{field}}}, which is no argument of it."
        hint = f"Its arguments are: {arguments}."
        yield Problem(("lock_name",), text, hint, CHECKS["lock_name"])
