"""Turn a name, or a call, into the name and the key of its lock."""

from __future__ import annotations

import hashlib
import re
import reprlib
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from django_singletask.conf import conf
from django_singletask.locks.canonical import encode, formattable
from django_singletask.locks.parameters import Parameters
from django_singletask.stores.base import MAX_SLOTS, PREFIX, SLOT

__all__ = [
    "LATEST",
    "MAX_NAME",
    "NO_LOCK",
    "QUEUED",
    "LockKey",
    "call_key",
    "check_slots",
    "filled_key",
    "lock_of_slot",
    "name_key",
    "template_errors",
    "template_fields",
]

MAX_NAME = 255
MAX_SLUG = 100

# The kinds of entries beside a lock. No slug has an "@", so no lock is taken for such an entry.
QUEUED = f"{PREFIX}@queued:"
LATEST = f"{PREFIX}@latest:"

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_.:()=-]+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}>")


class LockKey(NamedTuple):
    """The readable name of a lock and its cache key, before the cache's own key function."""

    name: str
    key: str

    def beside(self, kind: str, task: str) -> LockKey:
        """Return the entry that a task keeps beside this lock; ``kind``: ``QUEUED`` or ``LATEST``.

        Tasks that share a lock have an entry each: a call of one is no duplicate of the other's.
        """
        key = lock_of_slot(self.key)
        slug = key.rpartition(":")[0].removeprefix(PREFIX)
        slug = slug[: MAX_SLUG + len(PREFIX) - len(kind)]
        return LockKey(self.name, f"{kind}{slug}:{_digest(kind, key, task)}")

    def slots(self, count: int = MAX_SLOTS) -> tuple[str, ...]:
        """Return the keys of the first slots of this lock; the first slot has the lock's own."""
        key = lock_of_slot(self.key)
        return (key, *(f"{key}{SLOT}{number}" for number in range(2, count + 1)))


def lock_of_slot(key: str) -> str:
    """Return the key of a lock, given that of one of its slots."""
    return key.partition(SLOT)[0]


def check_slots(what: str, slots: Any) -> int:
    """Return a number of slots; raise if it is none. The message begins with ``what``."""
    if type(slots) is int and 1 <= slots <= MAX_SLOTS:
        return slots
    error = ValueError if type(slots) is int else TypeError
    raise error(f"{what} must be a whole number from 1 to {MAX_SLOTS}, not {slots!r}.")


NO_LOCK = LockKey("no lock", "none")
"""For a call that takes none, because ``lock_name`` returned None; it travels like any other."""


def name_key(name: str) -> LockKey:
    """Return the lock of an explicit name.

    A name of more than 255 characters is shown shortened; its key is that of the whole. Raises
    ``TypeError`` if it is no string and ``ValueError`` if it is empty or holds control characters.
    """
    if not isinstance(name, str):
        _check_name("name", name)  # raises, also for what the cache of functions cannot look up
    if len(name) <= MAX_NAME:
        return _name_key(name, conf.record_arguments)
    key = _name_key.__wrapped__(name, conf.record_arguments).key  # too much to keep in memory
    mark = f"…{_mark(key)}"
    return LockKey(f"{name[: MAX_NAME - len(mark)]}{mark}", key)


@lru_cache(maxsize=1024)
def _name_key(name: str, recorded: bool) -> LockKey:
    _check_name("name", name)
    return LockKey(name, _key(name if recorded else "", "name", name))


def call_key(
    task: str,
    parameters: Parameters,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    lock_on: Sequence[str] | None = None,
    lock_name: str | Callable[..., str | None] | None = None,
    shown: str | None = None,
    partial: bool = False,
) -> LockKey:
    """Return the lock of a call of ``task`` with these arguments; NO_LOCK if it takes none.

    Name and key leave out the arguments that equal their defaults; ``lock_name`` sees them.
    ``shown`` replaces the arguments in the readable name. ``partial``: arguments that do not make
    the lock may be missing. Raises ``TypeError`` if the arguments do not fit the parameters, if one
    has no stable form, or if ``lock_on`` names none of them, and ``ValueError`` if ``lock_name``
    makes what cannot be a name.
    """
    # What a lock_name misses is noticed when it is filled.
    required = (lock_on or ()) if partial and (lock_on is not None or lock_name) else None
    if lock_name is not None:
        return filled_key("lock_name", lock_name, task, parameters, args, kwargs, shown, required)
    arguments = parameters.bind(task, args, kwargs, required=required)
    if lock_on is not None:
        missing = [name for name in lock_on if name not in {*arguments, *parameters.names}]
        if missing:
            raise TypeError(
                f"lock_on of {task} names {missing[0]!r}, which is no argument of it; "
                f"it has {', '.join(parameters.names) or 'none'}."
            )
        arguments = {name: arguments[name] for name in lock_on if name in arguments}
    forms = parameters.forms(task, arguments)
    key = _key(task, "call", task, forms)
    return LockKey(_call_name(task, forms, key, shown), key)


def filled_key(
    option: str,
    source: str | Callable[..., str | None],
    of: str,
    parameters: Parameters,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shown: str | None = None,
    required: Collection[str] | None = None,
) -> LockKey:
    """Return the lock whose name a format string or a callable makes of a call's arguments.

    ``option`` is the word for the source, and ``of`` the name of the task or function. The rest is
    as in :func:`call_key` and :meth:`Parameters.bind`.
    """
    if callable(source):
        name = source(*args, **kwargs)
        if name is None:
            return NO_LOCK
        return _made_key(f"the result of {option} of {of}", name, f"{of}.{option}", shown)
    what = f"{option}={source!r} of {of}"
    name = _format(
        what, source, parameters.bind(of, args, kwargs, defaults=True, required=required)
    )
    return _made_key(what, name, source, shown)


def template_errors(what: str, template: str, parameters: Parameters) -> Iterator[Exception]:
    """Yield what keeps a format string from making a name of the arguments."""
    try:
        fields = template_fields(what, template)
    except ValueError as error:
        yield error
        return
    for field in fields:
        name = _argument(field)
        if name not in parameters.names and not (parameters.takes_any_name and name.isidentifier()):
            yield TypeError(f"{what} uses {{{field}}}, which is no argument of it.")


def template_fields(what: str, template: str) -> list[str]:
    """Return the fields of a format string that can be a name with arguments in it.

    Raises ``ValueError``, whose message begins with ``what``, if it cannot be one.
    """
    try:
        parts = [(text, field) for text, field, *_ in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{what} is no format string: {error}.") from None
    if not any(text.strip() for text, _ in parts):
        raise ValueError(
            f"{what} has no text of its own: two tasks could share a lock by accident."
        )
    return [field for _, field in parts if field is not None]


# Names


def _check_name(option: str, name: object) -> None:
    """Raise if ``name`` cannot be the name of a lock; the message begins with ``option``."""
    if not isinstance(name, str):
        raise TypeError(f"{option} must be a string, not {name!r}.")
    if not name.strip():
        raise ValueError(f"{option} is empty: name what must run only once at a time.")
    if _UNPRINTABLE.search(name):
        shown = f": {name!r}" if conf.record_arguments else ""
        raise ValueError(f"{option} holds control characters or lone surrogates{shown}.")


def _argument(field: str) -> str:
    """Return the name of the argument that a field of a format string begins with."""
    return re.split(r"[.\[]", field)[0]


def _format(what: str, template: str, arguments: Mapping[str, Any]) -> str:
    names = map(_argument, template_fields(what, template))
    try:
        return template.format(**{name: formattable(value) for name, value in arguments.items()})
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, KeyError) and error.args[0] in {*names} - arguments.keys():
            raise TypeError(f"{what} needs the argument {error}.") from None
        raise TypeError(
            f"{what} cannot be filled from its arguments ({', '.join(arguments) or 'none'}): "
            f"{type(error).__name__}: {error}"
        ) from error


def _made_key(source: str, name: object, public: str, shown: str | None) -> LockKey:
    """Return the lock of a name that was made of arguments; ``public`` is shown if they are not."""
    _check_name(source, name)
    if _ADDRESS.search(str(name)):
        raise TypeError(
            f"{source} holds the memory address of an object, which differs in each process. "
            "Use plain values (an id instead of an object)."
        )
    key = name_key(str(name))
    if conf.record_arguments and shown is None:
        return key
    mark = _mark(key.key)
    return LockKey(f"{public[: MAX_NAME - len(mark)]}{mark}", key.key)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 120
_repr.maxdict = _repr.maxlist = 10


def _call_name(task: str, forms: Mapping[str, Any], key: str, shown: str | None) -> str:
    if shown is None and forms and not conf.record_arguments:
        shown = _mark(key)
    if shown is None:
        shown = ", ".join(f"{name}={_repr.repr(form)}" for name, form in forms.items())
    # A task's name and a call's argsrepr are free text.
    name = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", f"{task}({shown})")
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 2]}…)"


# Keys


def _key(slug: str, *parts: Any) -> str:
    return f"{PREFIX}{_NOT_IN_KEYS.sub('_', slug[:MAX_SLUG])}:{_digest(*parts)}"


def _digest(*parts: Any) -> str:
    # SHA-256 is there on FIPS builds too, where md5 is not.
    return hashlib.sha256(encode(parts).encode("ascii")).hexdigest()[:32]


def _mark(key: str) -> str:
    """Return what stands in a name for arguments that must not be shown."""
    return f"#{key.rpartition(':')[2][:8]}"
