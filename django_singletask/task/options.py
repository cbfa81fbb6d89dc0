"""The lock options of a task: their defaults, one call's own, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django_singletask.conf import check_seconds
from django_singletask.locks.keys import LockKey, Parameters, template_fields
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run

__all__ = ["NAMES", "POLICIES", "LockOptions", "refuse_foreign", "refuse_unwrapped"]

POLICIES = ("skip", "raise", "wait", "requeue", "rerun")

CHOICES: dict[str, tuple[Any, ...]] = {
    "on_conflict": POLICIES,
    "on_outage": ("raise", "run", "skip"),
    "unique_until": (None, "start", "finish", "expiry"),
    "on_duplicate": ("return", "raise", "replace"),
    "lock_renew": (True, False),
    "lock_history": (True, False),
}
SECONDS: dict[str, dict[str, bool]] = {
    "lock_timeout": {},
    "lock_wait": {"zero": True, "infinite": True},
    "lock_at_least": {"zero": True},
    "unique_for": {},
}
"""Options in seconds, and what :func:`check_seconds` allows for each."""

CHECKS = {
    "seconds": "E008",
    "lock_on": "E009",
    "lock_name": "E010",
    "fixed lease": "E011",
    "choice": "E012",
    "wait": "E017",
    "no wait": "W011",
}
"""Numbers of the system checks."""


class Problem(NamedTuple):
    """One thing that is wrong with ``options``.

    ``check`` is the number of the system check. ``error`` is what a call with these options
    raises; None: a call raises nothing, only the system check reports it. ``early``: the body of
    a class raises it too.
    """

    options: tuple[str, ...]
    text: str
    hint: str
    check: str
    error: type[Exception] | None = None
    early: bool = False


@dataclasses.dataclass(frozen=True)
class LockOptions:
    """The lock options of one task, or of one call; see :class:`SingletonTask`."""

    lock_timeout: float | None = None
    lock_renew: bool = True
    lock_on: Sequence[str] | None = None
    lock_name: str | Callable[..., str] | None = None
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
        if self.on_conflict not in POLICIES:
            raise ValueError(next(self._wrong_choices(f"of {task}")).text)
        for problem in self._wrong_wait(f"of {task}") if self.on_conflict == "wait" else ():
            raise ValueError(problem.text)

    def lock(self, key: LockKey, task: str) -> TaskLock:
        """Return the lock of a task with these options, not acquired."""
        self.check_policy(task)
        run = Run(task, quiet=not self.lock_history)
        return TaskLock(key, timeout=self.lock_timeout, renew=self.lock_renew, run=run)

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
        yield from list(self._wrong_seconds(where)) or self._wrong_wait(where)
        yield from self._wrong_choices(where)
        yield from self._wrong_lock_on(where, parameters)
        yield from self._wrong_lock_name(where, parameters)
        if self.lock_on is not None and self.lock_name is not None:
            yield Problem(
                ("lock_on", "lock_name"),
                f"lock_on and lock_name {where} exclude each other.",
                "Keep one of them.",
                CHECKS["lock_name"],
                TypeError,
                early=True,
            )
        if not self.lock_renew and self.lock_timeout is None:
            yield Problem(
                ("lock_renew", "lock_timeout"),
                f"lock_renew=False {where} has no lock_timeout: after it the lock would end under "
                "a running task.",
                "Set lock_timeout to more seconds than the task can run, or let it renew.",
                CHECKS["fixed lease"],
                TypeError,
            )

    def _wrong_seconds(self, where: str) -> Iterator[Problem]:
        for option, allowed in SECONDS.items():
            value = getattr(self, option)
            if option in {"lock_timeout", "lock_wait"} and value is None:
                continue
            try:
                check_seconds(f"{option} {where}", value, **allowed)
            except (TypeError, ValueError) as error:
                hint = f"Set {option} to seconds, such as 60, or remove it."
                early = isinstance(error, TypeError)
                yield Problem((option,), str(error), hint, CHECKS["seconds"], type(error), early)

    def _wrong_wait(self, where: str) -> Iterator[Problem]:
        if self.on_conflict == "wait" and not self.lock_wait:
            yield Problem(
                ("on_conflict", "lock_wait"),
                f'on_conflict="wait" {where} needs lock_wait: how many seconds it waits.',
                'Set lock_wait to seconds or math.inf, or on_conflict to "raise".',
                CHECKS["wait"],
                ValueError,
            )
        elif self.lock_wait is not None and self.on_conflict not in {"wait", "requeue"}:
            yield Problem(
                ("on_conflict", "lock_wait"),
                f"lock_wait={self.lock_wait!r} {where} is not used: on_conflict="
                f"{self.on_conflict!r} does not wait.",
                'Set on_conflict to "wait" or "requeue", or remove lock_wait.',
                CHECKS["no wait"],
            )

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
        fields = template_fields(what, template)
    except ValueError as error:
        hint = "Write what it stands for, as in 'customer:{customer_id}'; double a literal brace."
        yield Problem(("lock_name",), str(error), hint, CHECKS["lock_name"])
        return
    arguments = ", ".join(parameters.names) or "none"
    for field in fields:
        name = re.split(r"[.\[]", field)[0]
        if name not in parameters.names and not (parameters.takes_any_name and name.isidentifier()):
            text = f"{what} uses {{{field}}}, which is no argument of it."
            hint = f"Its arguments are: {arguments}."
            yield Problem(("lock_name",), text, hint, CHECKS["lock_name"])


ELSEWHERE = {
    "once": "lock_on, unique_until, unique_for and on_duplicate",
    "unique_on": "lock_on",
    "lock_expiry": "unique_for, and lock_timeout for the run",
    "raise_on_duplicate": "on_duplicate='raise'",
}
"""Options of celery-once and celery-singleton, which Celery would accept and nobody would read."""


def refuse_unwrapped(what: str, names: Iterable[str]) -> None:
    """Raise ``TypeError`` for what is no option of ``apply_async``; Celery would accept it."""
    refuse_foreign(what, names)
    for name in names:
        if name in NAMES:
            raise TypeError(f"{what} has no option {name!r}: write lock_options={{{name!r}: …}}.")


def refuse_foreign(what: str, names: Iterable[str]) -> None:
    """Raise ``TypeError`` for an option of another library."""
    for name in names:
        if name in ELSEWHERE:
            raise TypeError(
                f"{what} has no option {name!r}: here it is {ELSEWHERE[name]}; see 'Coming from "
                "celery-once, celery-singleton, the cookbook recipe' in the documentation."
            )
