"""Make the name and the key of a lock from an explicit name or from a call."""

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

MAX_NAME = 255
MAX_SLUG = 100

# The kinds of entries next to a lock. No slug has an "@", so no lock has such a key.
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
        """Return a task's other entry for this lock; ``kind`` is ``QUEUED`` or ``LATEST``.

        Tasks that share a lock have separate entries, since their calls are not duplicates.
        """
        key = lock_of_slot(self.key)
        slug = key.rpartition(":")[0].removeprefix(PREFIX)
        slug = slug[: MAX_SLUG + len(PREFIX) - len(kind)]
        return LockKey(self.name, f"{kind}{slug}:{_digest(kind, key, task)}")

    def slots(self, count: int = MAX_SLOTS) -> tuple[str, ...]:
        """Return the keys of the first slots of this lock; the first slot has the lock's key."""
        key = lock_of_slot(self.key)
        return (key, *(f"{key}{SLOT}{number}" for number in range(2, count + 1)))


def lock_of_slot(key: str) -> str:
    """Return the key of a lock, given the key of one of its slots."""
    return key.partition(SLOT)[0]


def check_slots(what: str, slots: Any) -> int:
    """Return a valid number of slots, or raise an error whose text begins with ``what``."""
    if type(slots) is int and 1 <= slots <= MAX_SLOTS:
        return slots
    error = ValueError if type(slots) is int else TypeError
    raise error(f"{what} must be a whole number from 1 to {MAX_SLOTS}, not {slots!r}.")


NO_LOCK = LockKey("no lock", "none")
"""For a call without a lock, because ``lock_name`` returned None; messages carry it, too."""


def name_key(name: str) -> LockKey:
    """Return the lock of an explicit name.

    A name of more than 255 characters is shortened, but its key is made from the whole name. Raises
    ``TypeError`` if the name is not a string, and ``ValueError`` if it is empty or contains control
    characters.
    """
    if not isinstance(name, str):
        _check_name("name", name)  # raises
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

    Arguments that equal their defaults are not in the name or the key, but ``lock_name`` sees them.
    ``shown`` replaces the arguments in the readable name. ``partial``: arguments that are not part
    of the lock may be missing. Raises ``TypeError`` if the arguments do not fit the parameters, if
    one has no stable form, or if ``lock_on`` names another, and ``ValueError`` if the result of
    ``lock_name`` is not a valid name.
    """
    # An argument that lock_name needs is noticed when the name is made.
    required = (lock_on or ()) if partial and (lock_on is not None or lock_name) else None
    if lock_name is not None:
        return filled_key("lock_name", lock_name, task, parameters, args, kwargs, shown, required)
    arguments = parameters.bind(task, args, kwargs, required=required)
    if lock_on is not None:
        missing = [name for name in lock_on if name not in {*arguments, *parameters.names}]
        if missing:
            raise TypeError(
                f"lock_on of {task} names {missing[0]!r}, which is not an argument. "
                f"Its arguments are: {', '.join(parameters.names) or 'none'}."
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
    """Return the lock whose name a format string or a function makes from a call's arguments.

    ``option`` is the option's name, and ``of`` the name of the task or function. For the others
    see :func:`call_key` and :meth:`Parameters.bind`.
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
    """Yield the errors of a format string that is to make a name from the arguments."""
    try:
        fields = template_fields(what, template)
    except ValueError as error:
        yield error
        return
    for field in fields:
        name = _argument(field)
        if name not in parameters.names and not (parameters.takes_any_name and name.isidentifier()):
            yield TypeError(f"{what} uses {{{field}}}, which is not an argument.")


def template_fields(what: str, template: str) -> list[str]:
    """Return the fields of a format string.

    Raises ``ValueError``, with a text that begins with ``what``, if it cannot make names.
    """
    try:
        parts = [(text, field) for text, field, *_ in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{what} is not a format string: {error}.") from None
    texts = [text.strip() for text, _ in parts]
    if not any(texts):
        raise ValueError(f"{what} has no fixed text: two tasks could share a lock by accident.")
    return [field for _, field in parts if field is not None]


# Names


def _check_name(option: str, name: object) -> None:
    """Raise an error, with a text that begins with ``option``, for an invalid lock name."""
    if not isinstance(name, str):
        raise TypeError(f"{option} must be a string, not {name!r}.")
    if not name.strip():
        raise ValueError(f"{option} is empty: a lock needs a name.")
    if _UNPRINTABLE.search(name):
        shown = f": {name!r}" if conf.record_arguments else ""
        raise ValueError(f"{option} contains control characters or lone surrogates{shown}.")


def _argument(field: str) -> str:
    return re.split(r"[.\[]", field)[0]


def _format(what: str, template: str, arguments: Mapping[str, Any]) -> str:
    names = map(_argument, template_fields(what, template))
    try:
        return template.format(**{name: formattable(value) for name, value in arguments.items()})
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, KeyError) and error.args[0] in {*names} - arguments.keys():
            raise TypeError(f"{what} needs the argument {error}.") from None
        raise TypeError(
            f"{what} cannot be filled from the arguments ({', '.join(arguments) or 'none'}): "
            f"{type(error).__name__}: {error}"
        ) from error


def _made_key(source: str, name: object, public: str, shown: str | None) -> LockKey:
    """Return the lock of a name with arguments; ``public`` replaces it if they are hidden."""
    _check_name(source, name)
    if _ADDRESS.search(str(name)):
        raise TypeError(
            f"{source} contains the memory address of an object, which differs in each process. "
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
    name = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", f"{task}({shown})")
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 2]}…)"


# Keys


def _key(slug: str, *parts: Any) -> str:
    return f"{PREFIX}{_NOT_IN_KEYS.sub('_', slug[:MAX_SLUG])}:{_digest(*parts)}"


def _digest(*parts: Any) -> str:
    # FIPS builds have SHA-256, but not md5.
    return hashlib.sha256(encode(parts).encode("ascii")).hexdigest()[:32]


def _mark(key: str) -> str:
    """Return the mark that replaces hidden arguments in a name."""
    return f"#{key.rpartition(':')[2][:8]}"
