"""Reduce an argument to a form that is the same for the sender and the receiver of a message."""

from __future__ import annotations

import datetime
import enum
import json
import uuid
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from django.utils.functional import Promise

encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

_PLAIN = frozenset({str, float, bool, type(None)})
_TEXT = (uuid.UUID, Decimal, Promise)
_DATES = (datetime.date, datetime.time)
# Python refuses to write an integer of more than 4300 digits.
_TOO_LONG = 10**4300


class Unstable(Exception):
    """A value has no canonical form; the text follows the name of the argument."""


def canonical(value: Any) -> Any:
    """Return a value as JSON would: strings, numbers, booleans, None, lists and dicts of them.

    The sender has the value itself, and a worker has what a message in JSON or pickle made of it.
    Both have the same canonical form. Raises :class:`Unstable` if there is none.
    """
    try:
        return _reduce(value)
    except RecursionError:
        raise Unstable(
            "refers to itself or is nested too deeply to compare calls. "
            "Leave it out with lock_on=[…]."
        ) from None


def same(one: Any, other: Any) -> bool:
    """Return whether two canonical forms are the same; 1 differs from 1.0 and from True."""
    kind = type(one)
    if kind is not type(other):
        return False
    simple = kind is str or kind is int or kind is bool
    return bool(one == other) if simple else encode(one) == encode(other)


def formattable(value: Any) -> Any:
    """Return the same form for values that a message may confuse; dates stay dates."""
    if isinstance(value, enum.Enum):
        return formattable(value.value)
    if type(value) in (list, tuple):
        return [formattable(item) for item in value]
    if type(value) in (set, frozenset):
        return sorted((formattable(item) for item in value), key=repr)
    if type(value) is dict:
        items = ((name, formattable(item)) for name, item in value.items())
        return dict(sorted(items, key=lambda item: str(item[0])))
    return value


def _reduce(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is int:
        if -_TOO_LONG < value < _TOO_LONG:
            return value
        raise Unstable("contains an integer with too many digits. Leave it out with lock_on=[…].")
    if isinstance(value, enum.Enum):
        return _reduce(value.value)
    if isinstance(value, (list, tuple)):
        return [_reduce(item) for item in value]
    if isinstance(value, Mapping):
        # JSON turns the names of an object into strings, and 2 sorts before 10 but "2" after "10".
        return {_reduce_name(name): _reduce(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_reduce(item) for item in value), key=encode)
    if isinstance(value, _TEXT):
        return _reduce(str(value))
    if isinstance(value, _DATES):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return f"{value.days}d{value.seconds}s{value.microseconds}us"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, str):
        return str.__str__(value)  # str() would return Django's SafeString unchanged
    for number in (int, float):
        if isinstance(value, number):
            return _reduce(number(value))
    for reducer in ("__json__", "model_dump"):  # kombu's messages and pydantic's models
        if callable(getattr(value, reducer, None)) and not isinstance(value, type):
            return _reduce(getattr(value, reducer)())
    raise Unstable(
        f"contains a {kind.__module__}.{kind.__qualname__}, which has no stable form: calls "
        "with it cannot be compared. Pass plain values (an id instead of an object), or leave it "
        "out with lock_on=[…]."
    )


def _reduce_name(name: Any) -> str:
    name = _reduce(name)
    return name if isinstance(name, str) else encode(name)
