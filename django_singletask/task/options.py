"""The lock options of a task: their defaults, the options of one call, and their errors."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any

from django_singletask.arguments import check_choice, check_seconds
from django_singletask.conf import conf
from django_singletask.exceptions import LockError
from django_singletask.locks.keys import NO_LOCK, LockKey, call_key, check_slots, template_fields
from django_singletask.locks.lock import TaskLock, lock_of_task
from django_singletask.locks.parameters import Parameters
from django_singletask.locks.ref import LockRef
from django_singletask.version import DOCS

Problem = tuple[tuple[str, ...], Exception]
"""Names of options, and their error. A ``UserWarning`` is only reported by the system check."""

SECONDS: dict[str, dict[str, bool]] = {
    "lock_timeout": {},
    "lock_wait": {"zero": True, "infinite": True},
    "lock_at_least": {"zero": True},
    "unique_for": {},
}
"""The options that are seconds, and what :func:`check_seconds` allows for each."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "on_conflict": ("skip", "raise", "wait", "requeue"),
    "on_outage": ("raise", "run", "skip"),
    "unique_until": (None, "start", "finish", "expiry"),
    "on_duplicate": ("return", "raise", "replace"),
    "lock_renew": (True, False),
    "lock_history": (True, False),
}
"""The options that are one of a few values."""
INSTEAD_OF_RERUN = 'unique_until="start", on_duplicate="replace", on_conflict="requeue"'
"""What to say for a policy of earlier versions, by which the last call that conflicts runs."""
WAITING = ("wait", "requeue")
WHY = f"Change or remove one of them; see {DOCS}/reference/options.html#pairs"


def shown(value: Any) -> str:
    """Return the value of an option as text; of a function the name, without its address."""
    return str(getattr(value, "__qualname__", None) or repr(value))


def check_value(option: str, where: str, value: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a value that the option cannot have."""
    what, is_text = f"{option} {where}", isinstance(value, str)
    if option in SECONDS:
        check_seconds(what, value, **SECONDS[option])
    elif option == "lock_slots":
        check_slots(what, value)
    elif option == "on_conflict" and value == "rerun":
        raise ValueError(f"{option}={value!r} {where} is gone: say {INSTEAD_OF_RERUN}.")
    elif option in CHOICES:
        check_choice(option, value, CHOICES[option], f" {where}")
    elif option == "lock_on" and is_text:
        raise TypeError(f"{option}={value!r} {where} is a string; did you mean [{value!r}]?")
    else:
        are_names = isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
        is_valid, kind = {
            "lock_on": (are_names, "a list of argument names"),
            "lock_name": (is_text or callable(value), "a format string or a callable"),
            "on_skip": (callable(value) and not iscoroutinefunction(value), "a plain function"),
            "skip_result": (not callable(value), "a value (for a function use on_skip)"),
        }[option]
        if not is_valid:
            raise TypeError(f"{what} must be {kind}, not {shown(value)}.")


class Attributes:
    """The lock options of a task, and their defaults; see :class:`SingletonTask`."""

    lock_timeout: float | None = None
    lock_renew: bool = True
    lock_on: Sequence[str] | None = None
    lock_name: Any = None
    on_conflict: str = "skip"
    lock_wait: float | None = None
    lock_at_least: float = 0
    lock_slots: int = 1
    on_skip: Any = None
    on_outage: str = "raise"
    skip_result: Any = None
    unique_until: str | None = None
    unique_for: float = 3600
    on_duplicate: str = "return"
    lock_history: bool = True


FIELDS = tuple(Attributes.__annotations__)
NAMES = frozenset(FIELDS)
ALL = f"the options are {', '.join(sorted(NAMES))}."
_values = operator.attrgetter(*FIELDS)
parameters_of: Callable[[Any], Parameters] = operator.attrgetter("_parameters")
"""Return the parameters of the body of a task."""


def guess(name: str) -> str:
    """Return which option is meant by a misspelled name, for an error; empty if none is."""
    similar = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8)
    return f"did you mean {similar[0]!r}?" if similar else ""


class LockOptions(SimpleNamespace, Attributes):
    """The lock options of one call, or of all calls of a task."""

    @classmethod
    def of(cls, task: object, overrides: Mapping[str, Any] | None = None) -> LockOptions:
        """Return the options of a task, or of other options, with the changes of one call."""
        options = cls(**dict(zip(FIELDS, _values(task), strict=True)))
        if overrides:
            if {"lock_on", "lock_name"} & overrides.keys():
                # Only one of the two can be set, so the call's one replaces the task's one.
                options.lock_on = options.lock_name = None
            vars(options).update(overrides)
        return options

    def lock(self, key: LockKey, task: str) -> TaskLock:
        """Return the lock of a task with these options, not acquired.

        Raises :class:`LockError` if the call takes none, and ``TypeError`` or ``ValueError`` for
        options that cannot work.
        """
        self.check_run(task)
        if key == NO_LOCK:
            raise LockError(f"lock_name of {task} returned None: this call takes no lock.")
        ref = LockRef(conf.cache, *key, task=task, quiet=not self.lock_history)
        return lock_of_task(
            ref, timeout=self.lock_timeout, renew=self.lock_renew, slots=self.lock_slots
        )

    def check_run(self, task: str) -> None:
        """Raise ``TypeError`` or ``ValueError`` for options with which no run can have its lock."""
        _check_run(task, *_values_of_run(self))

    def key(self, task: Any, args: Any, kwargs: Any, **facts: Any) -> LockKey:
        """Return the name and key of a call's lock; ``facts`` are arguments of :func:`call_key`."""
        facts |= {"lock_on": self.lock_on, "lock_name": self.lock_name}
        return call_key(task.name, parameters_of(task), args or (), kwargs or {}, **facts)

    @classmethod
    def check_call(cls, task: Any, overrides: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` or ``ValueError`` for invalid options of one call of a task."""
        if not isinstance(overrides, Mapping):
            raise TypeError(f"lock_options of {task.name} must be a dict, not {overrides!r}.")
        where = f"in lock_options of {task.name}"
        unknown = sorted(map(str, overrides.keys() - NAMES))
        if unknown:
            raise TypeError(f"{unknown[0]!r} {where} is unknown; {guess(unknown[0]) or ALL}")
        cls.of(task, overrides).check(where, frozenset(overrides))

    def check(self, where: str, changed: frozenset[str]) -> None:
        """Raise the first error of one of the ``changed`` options."""
        for names, error in self.problems(where):
            if not isinstance(error, Warning) and not changed.isdisjoint(names):
                raise error

    def problems(self, where: str, parameters: Parameters | None = None) -> Iterator[Problem]:
        """Yield the problems of these options: for a class body, for one call and for the check.

        In the texts, ``where`` follows the name of an option: ``"of shop.tasks.add"``. The names of
        arguments are checked only with the ``parameters`` of the body. Pairs of options are checked
        only if each value is valid by itself.
        """
        is_valid = True
        for option in FIELDS:
            value = getattr(self, option)
            if value is getattr(Attributes, option):
                continue
            try:
                check_value(option, where, value)
                if parameters and option == "lock_on" and not parameters.extra:
                    parameters.check_names(f"{option}={value!r} {where}", value)
                if parameters and option == "lock_name" and isinstance(value, str):
                    template_fields(f"{option}={value!r} {where}", value, parameters)
            except (TypeError, ValueError) as error:
                is_valid = False
                yield (option,), error
        if is_valid:
            yield from self._wrong_pairs(where)

    def _wrong_pairs(self, where: str) -> Iterator[Problem]:
        until, policy = self.unique_until, self.on_conflict
        replaces = self.on_duplicate == "replace"
        if not self.lock_renew and self.lock_timeout is None:
            text = f"lock_renew=False {where} needs lock_timeout, a lease longer than any run."
            yield ("lock_renew", "lock_timeout"), TypeError(text)
        if policy == "wait" and not self.lock_wait:
            text = f'on_conflict="wait" {where} needs lock_wait, the longest wait in seconds.'
            yield ("on_conflict", "lock_wait"), ValueError(text)
        # An outage and a newer call return skip_result, too.
        only_skip = not (self.skip_result is None or self.on_outage == "skip" or replaces)
        excluded = {
            ("lock_on", "lock_name"): None not in (self.lock_on, self.lock_name),
            ("lock_slots", "unique_until"): self.lock_slots > 1 and until in ("finish", "expiry"),
            ("unique_until", "on_duplicate"): replaces and until == "expiry",
        }
        useless = {
            ("lock_wait", "on_conflict"): self.lock_wait is not None and policy not in WAITING,
            ("unique_for", "unique_until"): not until and self.unique_for != Attributes.unique_for,
            ("on_duplicate", "unique_until"): not until and self.on_duplicate != "return",
            ("on_skip", "on_conflict"): self.on_skip is not None and policy != "skip",
            ("skip_result", "on_conflict"): only_skip and policy in ("raise", *WAITING),
            ("skip_result", "on_skip"): only_skip and self.on_skip is not None,
        }
        for pair, is_wrong in (excluded | useless).items():
            if is_wrong:
                one, other = [f"{option}={shown(getattr(self, option))}" for option in pair]
                if pair in excluded:
                    yield pair, TypeError(f"{one} and {other} {where} cannot be combined. {WHY}")
                else:
                    yield pair, UserWarning(f"{one} {where} has no effect with {other}.")


OF_RUN = ("on_conflict", "lock_wait", "lock_timeout", "lock_renew", "lock_at_least", "lock_slots")
_values_of_run = operator.attrgetter(*OF_RUN)


@lru_cache(maxsize=1024, typed=True)
def _check_run(task: str, *values: Any) -> None:
    """Raise an error for what cannot work in a run: some projects run no system checks."""
    options = LockOptions(**dict(zip(OF_RUN, values, strict=True)))
    options.check(f"of {task}", NAMES)
