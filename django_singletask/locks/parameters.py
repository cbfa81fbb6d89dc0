"""Which functions can have a lock, and the parameters of such a function."""

from __future__ import annotations

import datetime
import enum
import inspect
import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import PurePath
from typing import Any, Final, TypeAlias

from django.utils.functional import Promise

encode: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_PLAIN = frozenset({str, float, bool, type(None)})
_TEXT = (uuid.UUID, Decimal, Promise, PurePath, datetime.timedelta)
_DATES = (datetime.date, datetime.time)
TOO_DEEP = (
    "refers to itself or is nested too deeply to compare calls. Leave it out with lock_on=[…]."
)
# Python refuses to write an integer of more than 4300 digits.
_TOO_LONG = 10**4300


Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of a call by name."""


class Unstable(Exception):
    """A value has no canonical form; the text of the error follows the name of the argument."""


def formattable(value: Any) -> Any:
    """Return the same form for values that a message may confuse, for a format string.

    Other values stay as they are, unlike in :func:`canonical`: a format string may ask for the
    attributes of a value, ``{feed.pk}``, or give a date its form, ``{day:%Y-%m}``.
    """
    if isinstance(value, enum.Enum):
        return formattable(value.value)
    if type(value) in (list, tuple):
        return [formattable(item) for item in value]
    if type(value) in (set, frozenset):
        return sorted((formattable(item) for item in value), key=repr)
    if type(value) is dict:
        return {name: formattable(value[name]) for name in sorted(value, key=str)}
    return value


def canonical(value: Any) -> Any:
    """Return a value as JSON would: strings, numbers, booleans, None, lists and dicts of them.

    The sender has the value itself, and a worker has what a message in JSON or pickle made of it.
    Both have the same canonical form. Raises :class:`Unstable` for a value without one, and
    ``RecursionError`` for a value that refers to itself.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        if -_TOO_LONG < value < _TOO_LONG:
            return value
        raise Unstable("contains an integer with too many digits. Leave it out with lock_on=[…].")
    if isinstance(value, enum.Enum):
        return canonical(value.value)
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if isinstance(value, Mapping):
        # JSON turns the names of an object into strings, and 2 sorts before 10 but "2" after "10".
        return {_name(name): canonical(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((canonical(item) for item in value), key=encode)
    if isinstance(value, _TEXT):
        return canonical(str(value))
    if isinstance(value, _DATES):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, str):
        return str.__str__(value)  # str() would return Django's SafeString unchanged
    for number in (int, float):
        if isinstance(value, number):
            return canonical(number(value))
    for reducer in ("__json__", "model_dump"):  # kombu's messages and pydantic's models
        if callable(getattr(value, reducer, None)) and not isinstance(value, type):
            return canonical(getattr(value, reducer)())
    raise Unstable(
        f"contains a {kind.__module__}.{kind.__qualname__}, which has no stable form: calls "
        "with it cannot be compared. Pass plain values (an id instead of an object), or leave it "
        "out with lock_on=[…]."
    )


def _name(name: Any) -> str:
    name = canonical(name)
    if isinstance(name, str):
        return name
    return encode(name)


def refuse_deferred(function: Any, what: str, *, awaits: bool = False) -> None:
    """Raise ``TypeError`` for a generator function, and for a coroutine function unless ``awaits``.

    The text of the error begins with ``what``.
    """
    if inspect.iscoroutinefunction(function) and not awaits:
        kind = "coroutine"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        kind = "generator"
    else:
        return
    raise TypeError(
        f"{what}: {function.__qualname__} is a {kind} function: its lock would be free before its "
        "body runs. Take a TaskLock inside the body of a plain function instead."
    )


def list_names(names: Collection[str]) -> str:
    """Return names as text, for an error."""
    if not names:
        return "none"
    return ", ".join(names)


class Parameters:
    """The parameters of a body, and the canonical forms of their defaults.

    Create this together with the task, because a body can change a default that is a list.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        self.names: list[str] = [*signature.parameters]
        """The names of the arguments, without those in ``**kwargs``."""
        self.extra: str | None = None
        """The name of ``**kwargs``, which takes arguments of any name."""
        self.rest: str | None = None
        """The name of ``*args``."""
        self._required: list[str] = []
        self._defaults: dict[str, str] = {}  # encoded, because 1 differs from 1.0 and from True
        self._unstable: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self.extra = name
                self.names.remove(name)
            elif parameter.default is not parameter.empty:
                try:
                    self._defaults[name] = encode(canonical(parameter.default))
                except Exception:  # the default may be a translation, before Django is ready
                    self._unstable[name] = parameter.default
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self.rest = name
            else:
                self._required.append(name)

    def check_names(self, what: str, names: Collection[str], passed: Collection[str] = ()) -> None:
        """Raise ``TypeError`` if one of the names is no parameter, and was not ``passed``."""
        for name in names:
            if name not in self.names and name not in passed:
                raise TypeError(
                    f"{what} names {name!r}, which is not an argument. "
                    f"Its arguments are: {list_names(self.names)}."
                )

    def bind(
        self,
        task: str,
        args: Sequence[Any],
        kwargs: Arguments,
        required: Collection[str] | None = None,
        *,
        defaults: bool = False,
    ) -> Arguments:
        """Return the arguments of a call by name, including those of ``**kwargs``.

        The arguments in ``required`` must be passed, or if it is None, all without a default.
        ``defaults`` adds the arguments that were not passed. Raises ``TypeError``, with the task's
        name, if the arguments do not fit.
        """
        try:
            bound = self.signature.bind_partial(*args, **kwargs)
            for name in self._required:
                if name not in bound.arguments and (required is None or name in required):
                    raise TypeError(f"missing a required argument: {name!r}")
        except TypeError as error:
            raise TypeError(f"{task}: {error}") from None
        if defaults:
            bound.apply_defaults()
        arguments = bound.arguments
        if self.extra in arguments:
            for name, value in sorted(arguments.pop(self.extra).items()):
                # f(1, a=2) of def f(a, /, **kwargs) has two arguments called a: a and **a.
                shown = name
                if name in self.names or name.startswith("**"):
                    shown = f"**{name}"
                arguments[shown] = value
        return arguments

    def call(self, function: Callable[..., Any], arguments: Arguments) -> Any:
        """Return what a function of the project returns for the arguments of a call.

        The function gets those arguments by name that it takes. So it gets the same ones however
        the call was written. A function with ``*args``, or with arguments that cannot be passed by
        name, gets the values of all arguments in their order.
        """
        taken = inspect.signature(function).parameters
        kinds = {each.kind for each in taken.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            return function(**arguments)
        if kinds <= BY_NAME:
            return function(**{name: arguments[name] for name in taken if name in arguments})
        values: list[Any] = []
        for name, value in arguments.items():
            if name == self.rest:
                values += value
            else:
                values.append(value)
        return function(*values)

    def forms(self, task: str, arguments: Arguments) -> dict[str, Any]:
        """Return the canonical forms of the arguments that differ from their defaults.

        Raises ``TypeError`` for an argument without a stable form. A default without a stable form
        equals only itself.
        """
        forms = {}
        for name, value in arguments.items():
            if name in self._unstable and value is self._unstable[name]:
                continue
            try:
                form = canonical(value)
            except Unstable as error:
                raise TypeError(f"argument {name!r} of {task} {error}") from None
            except RecursionError:
                raise TypeError(f"argument {name!r} of {task} {TOO_DEEP}") from None
            if name not in self._defaults or encode(form) != self._defaults[name]:
                forms[name] = form
        return forms


BY_NAME = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
"""The kinds of parameters that can be passed by name."""
