"""Turn a call into the name and the key of its lock."""

from __future__ import annotations

import datetime
import enum
import hashlib
import inspect
import json
import re
import reprlib
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from django.utils.functional import Promise

from django_singletask.conf import conf

__all__ = ["LATEST", "QUEUED", "LockKey", "bind", "call_key", "key_beside", "name_key", "shown_key"]

MAX_NAME = 255
MAX_SLUG = 100


class LockKey(NamedTuple):
    """The readable name of a lock and its cache key, before the cache's own key function."""

    name: str
    key: str


def name_key(name: str) -> LockKey:
    """Return the lock of an explicit name.

    Raises ``TypeError`` if it is no string and ``ValueError`` if it is empty, longer than 255
    characters or holds control characters.
    """
    if not isinstance(name, str):
        check_name("name", name)  # raises, also for what no cache can look up
    return _name_key(name, conf.record_arguments)


@lru_cache(maxsize=1024)
def _name_key(name: str, recorded: bool) -> LockKey:
    check_name("name", name)
    return LockKey(name, _key(name if recorded else "", "name", name))


_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


# Entries beside a lock. No slug has an "@", so no lock is taken for one of them.
QUEUED = "singletask:@queued:"
LATEST = "singletask:@latest:"


def key_beside(kind: str, key: str, task: str) -> str:
    """Return the key of the entry that a task keeps beside a lock: ``QUEUED`` or ``LATEST``.

    Tasks that share a lock have an entry each: a call of one is no duplicate of the other's.
    """
    slug = key.rpartition(":")[0].removeprefix("singletask:")
    return f"{kind}{slug[: MAX_SLUG - len('@queued:')]}:{_digest(kind, key, task)}"


def check_name(option: str, name: object) -> None:
    """Raise if ``name`` cannot be the name of a lock; the message speaks of ``option``."""
    if not isinstance(name, str):
        raise TypeError(f"{option} must be a string, not {name!r}.")
    if not name.strip():
        raise ValueError(f"{option} is empty: name what must run only once at a time.")
    if len(name) > MAX_NAME:
        raise ValueError(f"{option} has {len(name)} characters, at most {MAX_NAME} are allowed.")
    if _UNPRINTABLE.search(name):
        shown = f": {name!r}" if conf.record_arguments else ""
        raise ValueError(f"{option} holds control characters or lone surrogates{shown}.")


def call_key(
    task: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    lock_on: Sequence[str] | None = None,
    lock_name: str | Callable[..., str] | None = None,
    shown: str | None = None,
) -> LockKey:
    """Return the lock of a call of ``task`` with these arguments.

    ``shown`` replaces the arguments in the readable name. Raises ``TypeError`` if the arguments
    do not fit the signature, if one has no stable form, or if ``lock_on`` names none of them, and
    ``ValueError`` if ``lock_name`` makes what cannot be a name.
    """
    if callable(lock_name):
        name = lock_name(*args, **kwargs)
        return _named(f"the result of lock_name of {task}", name, f"{task}.lock_name", shown)
    bound = bind(task, signature, args, kwargs)
    if lock_name is not None:
        name = _format(task, lock_name, bound)
        return _named(f"lock_name={lock_name!r} of {task}", name, lock_name, shown)
    if lock_on is not None:
        missing = [argument for argument in lock_on if argument not in bound]
        if missing:
            raise TypeError(
                f"lock_on of {task} names {missing[0]!r}, which is no argument of it; "
                f"it has {', '.join(bound) or 'none'}."
            )
        bound = {argument: bound[argument] for argument in lock_on}
    stable = {name: _stable(value, f"argument {name!r}", task) for name, value in bound.items()}
    try:
        key = _key(task, "call", task, stable)
    except ValueError:
        name = next(name for name, value in stable.items() if not _can_encode(value))
        raise TypeError(
            f"argument {name!r} of {task} holds a number with too many digits to write it down. "
            "Leave it out with lock_on=[…]."
        ) from None
    return LockKey(_call_name(task, stable, key, shown), key)


def shown_key(task: str, arguments: Mapping[str, Any]) -> str:
    """Return the key of the call whose name shows these arguments, which make its lock.

    Raises ``TypeError`` if one has no stable form.
    """
    stable = {name: _stable(value, f"argument {name!r}", task) for name, value in arguments.items()}
    return _key(task, "call", task, stable)


def bind(
    task: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments by their names, defaults and those of ``**kwargs`` included."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{task}: {error}") from None
    bound.apply_defaults()
    arguments = bound.arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = sorted(arguments.pop(name).items())
            # f(1, a=2) of def f(a, /, **kwargs) has two arguments called a.
            own, marker = set(arguments), f"**{name}"
            twice = {key: value for key, value in extra if key in own or key == marker}
            arguments.update((key, value) for key, value in extra if key not in twice)
            if twice:
                arguments[marker] = twice
    return arguments


def _format(task: str, template: str, bound: Mapping[str, Any]) -> str:
    if not has_literal_text(template):
        raise ValueError(
            f"lock_name={template!r} of {task} has no text of its own: two tasks could share a "
            f"lock by accident. Write what it stands for, as in 'customer:{template}'."
        )
    try:
        return template.format(**{name: _formattable(value) for name, value in bound.items()})
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"lock_name={template!r} of {task} cannot be filled from its arguments "
            f"({', '.join(bound) or 'none'}): {type(error).__name__}: {error}"
        ) from error


def _formattable(value: Any) -> Any:
    """Give one look to what a message may turn into one another; dates keep their formats."""
    if isinstance(value, enum.Enum):
        return _formattable(value.value)
    if type(value) in (list, tuple):
        return [_formattable(item) for item in value]
    if type(value) in (set, frozenset):
        return sorted((_formattable(item) for item in value), key=repr)
    if type(value) is dict:
        items = ((name, _formattable(item)) for name, item in value.items())
        return dict(sorted(items, key=lambda item: str(item[0])))
    return value


def has_literal_text(template: str) -> bool:
    """Say whether a format string holds more than its fields.

    Raises ``ValueError`` for a string that is no format string.
    """
    return any(literal.strip() for literal, *_ in string.Formatter().parse(template))


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}>")


def _named(what: str, name: object, public: str, shown: str | None) -> LockKey:
    check_name(what, name)
    if _ADDRESS.search(str(name)):
        raise TypeError(
            f"{what} holds the memory address of an object, which differs in each process. "
            "Use plain values (an id instead of an object)."
        )
    key = name_key(str(name))
    if conf.record_arguments and shown is None:
        return key
    tail = f"#{_tail(key.key)}"
    return LockKey(f"{public[: MAX_NAME - len(tail)]}{tail}", key.key)


def _tail(key: str) -> str:
    return key.rpartition(":")[2][:8]


def _call_name(task: str, stable: Mapping[str, Any], key: str, shown: str | None) -> str:
    if shown is None and not conf.record_arguments and stable:
        shown = f"#{_tail(key)}"
    if shown is None:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in stable.items())
    # A task's name and a call's argsrepr are free text.
    name = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", f"{task}({shown})")
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 2]}…)"


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 120
_repr.maxdict = _repr.maxlist = 10


def _short(value: Any) -> str:
    return _repr.repr(value)


_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_.:()=-]+")
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _key(slug: str, *parts: Any) -> str:
    return f"singletask:{_NOT_IN_KEYS.sub('_', slug[:MAX_SLUG])}:{_digest(*parts)}"


def _digest(*parts: Any) -> str:
    # SHA-256 is there on FIPS builds too, where md5 is not.
    return hashlib.sha256(_encode(parts).encode("ascii")).hexdigest()[:32]


def _can_encode(value: Any) -> bool:
    try:
        _encode(value)
    except ValueError:
        return False
    return True


def _stable(value: Any, what: str, task: str) -> Any:
    """Reduce a value to what a JSON message makes of it, so that both ends see one call."""
    try:
        return _reduce(value)
    except RecursionError:
        raise TypeError(
            f"{what} of {task} refers to itself or is nested too deeply to tell calls apart. "
            "Leave it out with lock_on=[…]."
        ) from None
    except _Unstable as error:
        raise TypeError(
            f"{what} of {task} holds a {error}, which has no stable form to tell calls apart. "
            "Pass plain values (an id instead of an object), or leave it out with lock_on=[…]."
        ) from None


class _Unstable(Exception):
    pass


_PLAIN = frozenset({str, int, float, bool, type(None)})
_TEXT = (uuid.UUID, Decimal, Promise)
_DATES = (datetime.date, datetime.time)


def _reduce(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return _reduce(value.value)
    if isinstance(value, (list, tuple)):
        return [_reduce(item) for item in value]
    if isinstance(value, Mapping):
        # JSON turns the names of an object into strings, and 2 sorts before 10 but "2" after "10".
        return {_reduce_name(name): _reduce(item) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_reduce(item) for item in value), key=_encode)
    if isinstance(value, _TEXT):
        return str(value)
    if isinstance(value, _DATES):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return f"{value.days}d{value.seconds}s{value.microseconds}us"
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(value).hex()}
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    for reducer in ("__json__", "model_dump"):  # kombu's messages and pydantic's models
        if callable(getattr(value, reducer, None)) and not isinstance(value, type):
            return _reduce(getattr(value, reducer)())
    raise _Unstable(f"{type(value).__module__}.{type(value).__qualname__}")


def _reduce_name(name: Any) -> str:
    name = _reduce(name)
    return name if isinstance(name, str) else _encode(name)
