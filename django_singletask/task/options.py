"""The lock options of a task: their defaults, the options of one call, and their errors.

What is wrong with options is said by :meth:`LockOptions.problems`, at fixed moments:

* the body of a class refuses a value of a wrong type;
* the first use of a task, after Celery has bound it, refuses whatever cannot work;
* ``manage.py check`` reports the same, each with a hint;
* the options of one call are checked when it is sent, and again when a worker has read them.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any, Literal, TypedDict, get_args

from django_singletask.arguments import check_choice, check_seconds
from django_singletask.conf import conf
from django_singletask.exceptions import LockError
from django_singletask.locks.keys import (
    NO_LOCK,
    LockKey,
    LockName,
    call_key,
    check_slots,
    template_fields,
)
from django_singletask.locks.lock import TaskLock, lock_of_task
from django_singletask.locks.parameters import Parameters
from django_singletask.locks.ref import LockRef
from django_singletask.version import DOCS

Problem = tuple[tuple[str, ...], Exception]
"""The names of options, and their error. Only the system check reports a ``UserWarning``."""

Limits = dict[str, bool]
SECONDS: dict[str, Limits] = {
    "lock_timeout": {},
    "lock_wait": {"zero": True, "infinite": True},
    "lock_at_least": {"zero": True},
    "unique_for": {},
}
"""The options that are seconds, and what :func:`check_seconds` allows for each."""

OnConflict = Literal["skip", "raise", "wait", "requeue"]
OnOutage = Literal["raise", "run", "skip"]
UniqueUntil = Literal["start", "finish", "expiry"]
OnDuplicate = Literal["return", "raise", "replace"]
Function = Callable[..., Any]
LockOn = list[str] | tuple[str, ...]
UNIQUE_FOR = 3600
"""The seconds of ``unique_for`` where it is not set."""
BOOLEANS = (True, False)
CHOICES: dict[str, tuple[Any, ...]] = {
    "on_conflict": get_args(OnConflict),
    "on_outage": get_args(OnOutage),
    "unique_until": (None, *get_args(UniqueUntil)),
    "on_duplicate": get_args(OnDuplicate),
    "lock_renew": BOOLEANS,
    "lock_history": BOOLEANS,
}
"""The options that are one of a few values."""
WAITING = ("wait", "requeue")
"""The policies that use ``lock_wait``."""
WHY = f"Change or remove one of them; see {DOCS}/reference/options.html#pairs"


def shown(value: Any) -> str:
    """Return the value of an option as text; a function has its name, without its address."""
    name = getattr(value, "__qualname__", None)
    if name:
        return str(name)
    return repr(value)


def check_value(option: str, where: str, value: Any, parameters: Parameters | None = None) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a value that the option cannot have.

    The names of arguments are checked only with the ``parameters`` of the body.
    """
    what = f"{option} {where}"
    kind = None
    if value is getattr(Attributes, option):
        return  # the value is the default
    if option in SECONDS:
        check_seconds(what, value, **SECONDS[option])
    elif option == "lock_slots":
        check_slots(what, value)
    elif option in CHOICES:
        after_value = f" {where}"
        check_choice(option, value, CHOICES[option], after_value)
    elif option == "lock_on" and isinstance(value, str):
        raise TypeError(f"{option}={value!r} {where} is a string; did you mean [{value!r}]?")
    elif option == "lock_on" and not are_names(value):
        kind = "a list of argument names"
    elif option == "lock_name" and not (isinstance(value, str) or callable(value)):
        kind = "a format string or a callable"
    elif option == "on_skip" and (not callable(value) or iscoroutinefunction(value)):
        kind = "a plain function"
    elif option == "skip_result" and callable(value):
        kind = "a value (for a function use on_skip)"
    if kind:
        raise TypeError(f"{what} must be {kind}, not {shown(value)}.")
    if parameters and option == "lock_on" and not parameters.extra:
        parameters.check_names(f"{option}={value!r} {where}", value)  # pyright: ignore[reportArgumentType]
    if parameters and option == "lock_name" and isinstance(value, str):
        template_fields(f"{option}={value!r} {where}", value, parameters)


def are_names(value: Any) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(name, str) for name in value)


class Attributes:
    """The lock options of a task, and their defaults; see :class:`SingletonTask`."""

    lock_timeout: float | None = None
    lock_renew: bool = True
    lock_on: LockOn | None = None
    lock_name: Any = None  # also a method
    on_conflict: OnConflict = "skip"
    lock_wait: float | None = None
    lock_at_least: float = 0
    lock_slots: int = 1
    on_skip: Any = None  # also a method
    on_outage: OnOutage = "raise"
    skip_result: Any = None
    unique_until: UniqueUntil | None = None
    unique_for: float | None = None
    on_duplicate: OnDuplicate = "return"
    lock_history: bool = True


class CallOptions(TypedDict, total=False):
    """The lock options that one call can have: ``apply_async(…, lock_options={…})``."""

    lock_timeout: float | None
    lock_renew: bool
    lock_on: LockOn | None
    lock_name: LockName | None
    on_conflict: OnConflict
    lock_wait: float | None
    lock_at_least: float
    lock_slots: int
    on_outage: OnOutage
    skip_result: Any
    unique_until: UniqueUntil | None
    unique_for: float | None
    on_duplicate: OnDuplicate
    lock_history: bool


class RunOptions(CallOptions, total=False):
    """The lock options of a run that is not sent: ``apply(…, lock_options={…})``."""

    on_skip: Function | None


class SendOptions(TypedDict, total=False):
    """Celery's options of ``apply_async``, but for those that can be given by position."""

    add_to_parent: bool
    argsrepr: str
    compression: str | None
    connection: Any
    countdown: float | None
    delivery_mode: int | str | None
    eta: datetime | None
    exchange: Any
    expires: float | datetime | None
    headers: Mapping[str, Any] | None
    ignore_result: bool | None
    kwargsrepr: str
    priority: int | None
    publisher: Any
    queue: Any
    retry: bool
    retry_policy: Mapping[str, Any]
    routing_key: str | None
    serializer: str | None
    soft_time_limit: float | None
    time_limit: float | None


FIELDS = tuple(Attributes.__annotations__)
NAMES = frozenset(FIELDS)
_values = operator.attrgetter(*FIELDS)
parameters_of: Callable[[Any], Parameters] = operator.attrgetter("_parameters")
"""Return the parameters of the body of a task."""


# Names that are no options

ALL = f"the options are {', '.join(sorted(NAMES))}."
GUIDE = f"See {DOCS}/guides/coming-from.html"
ELSEWHERE = {
    "once": "lock_on, unique_until, unique_for and on_duplicate",
    "unique_on": "lock_on",
    "lock_expiry": "unique_for, and lock_timeout for the run",
    "raise_on_duplicate": "on_duplicate='raise'",
}
"""Options of celery-once and celery-singleton, which Celery would accept and ignore."""
OF_ONLY_ONE = {name.removeprefix("lock_"): name for name in FIELDS}
OTHER_WORDS = {
    **OF_ONLY_ONE,
    **ELSEWHERE,
    "key": "lock_name",
    "lock_key": "lock_name",
    "unique": "unique_until",
}
"""What a user may write for an option by mistake, and what to use for it."""


def guess(name: str, default: str = "") -> str:
    """Return a hint that names the option that a misspelled name means, or ``default``."""
    similar = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.85)
    if not similar:
        return default
    return f"did you mean {similar[0]!r}?"


def unknown_options(names: Iterable[str], base: type) -> Iterator[tuple[str, str]]:
    """Yield the names that are meant as options, but are none of ``base``, each with a hint."""
    for name in names:
        if name in dir(base):  # hasattr() would bind the class to an application
            continue
        hint = guess(name)
        if name in OTHER_WORDS:
            hint = f"use {OTHER_WORDS[name]}. {GUIDE}"
        elif name.startswith(("lock_", "unique_")):
            hint = guess(name, default=ALL)
        if hint:
            yield name, hint


class LockOptions(SimpleNamespace, Attributes):
    """The lock options of one call, or of all calls of a task."""

    @classmethod
    def of(cls, task: object, overrides: Mapping[str, Any] | None = None) -> LockOptions:
        """Return the options of a task, with the changes of one call."""
        of_task = dict(zip(FIELDS, _values(task), strict=True))
        options = cls(**of_task)
        if overrides:
            if "lock_on" in overrides or "lock_name" in overrides:
                # Only one of the two can be set, so the call's one replaces the task's one.
                options.lock_on = None
                options.lock_name = None
            for name, value in overrides.items():
                setattr(options, name, value)
        return options

    @property
    def blocks_for(self) -> float:
        """For how many seconds a queued call stops identical calls, at most."""
        if self.unique_for is None:
            return UNIQUE_FOR
        return self.unique_for

    def lock(self, key: LockKey, task: str) -> TaskLock:
        """Return the lock of a task with these options, not acquired.

        Raises :class:`LockError` if the call takes no lock.
        """
        if key == NO_LOCK:
            raise LockError(f"lock_name of {task} returned None: this call takes no lock.")
        ref = LockRef(conf.cache, *key, task=task, quiet=not self.lock_history)
        return lock_of_task(
            ref, timeout=self.lock_timeout, renew=self.lock_renew, slots=self.lock_slots
        )

    def key(self, task: Any, args: Any, kwargs: Any, **facts: Any) -> LockKey:
        """Return the name and key of a call's lock; ``facts`` are arguments of :func:`call_key`."""
        if args is None:
            args = ()
        if kwargs is None:
            kwargs = {}
        facts |= {"lock_on": self.lock_on, "lock_name": self.lock_name}
        return call_key(task.name, parameters_of(task), args, kwargs, **facts)

    # Errors

    @classmethod
    def check_class(cls, task: type, where: str) -> None:
        """Raise ``TypeError`` for a value of a wrong type in the body of a task's class."""
        for name in sorted(NAMES & vars(task).keys()):
            value = getattr(task, name)
            # A property has a value only on the task.
            if callable(value) or not hasattr(value, "__get__"):
                with suppress(ValueError):  # a subclass may set another value
                    check_value(name, where, value)

    @classmethod
    def check_call(cls, task: Any, overrides: Mapping[str, Any]) -> None:
        """Raise the first error of the options of one call."""
        if not isinstance(overrides, Mapping):
            raise TypeError(f"lock_options of {task.name} must be a dict, not {overrides!r}.")
        where = f"in lock_options of {task.name}"
        unknown = sorted(map(str, overrides.keys() - NAMES))
        if unknown:
            hint = guess(unknown[0], default=ALL)
            raise TypeError(f"{unknown[0]!r} {where} is unknown; {hint}")
        for names, error in cls.of(task, overrides).problems(where):
            if not isinstance(error, Warning) and not overrides.keys().isdisjoint(names):
                raise error

    @classmethod
    def problems_of(cls, task: Any) -> Iterator[Problem]:
        """Return an iterator over what is wrong with the options of a task."""
        return cls.of(task).problems(f"of {task.name}", parameters_of(task))

    def problems(self, where: str, parameters: Parameters | None = None) -> Iterator[Problem]:
        """Yield what is wrong with these options.

        In the texts, ``where`` follows the name of an option: ``"of shop.tasks.add"``. Pairs of
        options are checked only if each value is valid by itself.
        """
        is_valid = True
        for option in FIELDS:
            try:
                check_value(option, where, getattr(self, option), parameters)
            except (TypeError, ValueError) as error:
                is_valid = False
                yield (option,), error
        if is_valid:
            yield from self._wrong_pairs(where)

    def _wrong_pairs(self, where: str) -> Iterator[Problem]:
        policy = self.on_conflict
        replaces = self.on_duplicate == "replace"
        if not self.lock_renew and self.lock_timeout is None:
            text = f"lock_renew=False {where} needs lock_timeout, a lease longer than any run."
            yield ("lock_renew", "lock_timeout"), TypeError(text)
        if policy == "wait" and not self.lock_wait:
            text = f'on_conflict="wait" {where} needs lock_wait, the longest wait in seconds.'
            yield ("on_conflict", "lock_wait"), ValueError(text)
        if self.lock_on is not None and self.lock_name is not None:
            yield self._exclusion(where, "lock_on", "lock_name")
        if self.lock_slots > 1 and self.unique_until in ("finish", "expiry"):
            yield self._exclusion(where, "lock_slots", "unique_until")
        if replaces and self.unique_until == "expiry":
            yield self._exclusion(where, "unique_until", "on_duplicate")
        if self.lock_wait is not None and policy not in WAITING:
            yield self._no_effect(where, "lock_wait", "on_conflict")
        if self.unique_until is None and self.unique_for is not None:
            yield self._no_effect(where, "unique_for", "unique_until")
        if self.unique_until is None and self.on_duplicate != "return":
            yield self._no_effect(where, "on_duplicate", "unique_until")
        if self.on_skip is not None and policy != "skip":
            yield self._no_effect(where, "on_skip", "on_conflict")
        # A call that is skipped in an outage, or replaced by a newer one, returns skip_result, too.
        if self.skip_result is not None and self.on_outage != "skip" and not replaces:
            if policy != "skip":
                yield self._no_effect(where, "skip_result", "on_conflict")
            if self.on_skip is not None:
                yield self._no_effect(where, "skip_result", "on_skip")

    def _exclusion(self, where: str, one: str, other: str) -> Problem:
        text = f"{self._text_of(one)} and {self._text_of(other)} {where} cannot be combined. {WHY}"
        return (one, other), TypeError(text)

    def _no_effect(self, where: str, one: str, other: str) -> Problem:
        text = f"{self._text_of(one)} {where} has no effect with {self._text_of(other)}."
        return (one, other), UserWarning(text)

    def _text_of(self, option: str) -> str:
        return f"{option}={shown(getattr(self, option))}"
