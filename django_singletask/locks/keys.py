"""Make the name and the key of a lock from an explicit name or from a call."""

from __future__ import annotations

import functools
import hashlib
import re
import reprlib
import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from django.core.signals import setting_changed

from django_singletask.conf import conf
from django_singletask.locks.parameters import (
    Arguments,
    Parameters,
    encode,
    formattable,
    list_names,
)
from django_singletask.log import in_words
from django_singletask.stores.keys import MAX_SLOTS, PREFIX, SLOT

MAX_NAME = 255
MAX_SLUG = 100

# These are the kinds of entries next to a lock. No slug has an "@", so no lock has such a key.
QUEUED = f"{PREFIX}@queued:"
LATEST = f"{PREFIX}@latest:"
ENDED = f"{PREFIX}@ended:"

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NOT_IN_KEYS = re.compile(r"[^A-Za-z0-9_.:()=-]+")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}>")


LockName: TypeAlias = str | Callable[..., str | None]
"""A format string over the arguments of a call, or a function of these arguments."""


class LockKey(NamedTuple):
    """The readable name of a lock and its cache key, before the cache's own key function."""

    name: str
    key: str

    def beside(self, kind: str, task: str) -> LockKey:
        """Return a task's other entry for this lock; ``kind`` is ``QUEUED`` or ``LATEST``.

        Tasks that share a lock have separate entries, since their calls are not duplicates. An
        entry of the kind ``ENDED`` belongs to a task id, which then stands for the ``task``.
        """
        key = lock_of_slot(self.key)
        slug = key.rpartition(":")[0].removeprefix(PREFIX)
        return LockKey(self.name, _key(kind, slug, kind, key, task))

    def slots(self, count: int = MAX_SLOTS) -> tuple[str, ...]:
        """Return the keys of the first slots of this lock; the first slot has the lock's key."""
        return _slots(lock_of_slot(self.key), count)


@functools.lru_cache(maxsize=64)
def _slots(key: str, count: int) -> tuple[str, ...]:
    others = [f"{key}{SLOT}{number}" for number in range(2, count + 1)]
    return (key, *others)


def lock_of_slot(key: str) -> str:
    """Return the key of a lock, given the key of one of its slots."""
    return key.partition(SLOT)[0]


def check_slots(what: str, slots: Any) -> None:
    """Raise an error whose text begins with ``what`` if that is no valid number of slots."""
    text = f"{what} must be a whole number from 1 to {MAX_SLOTS}, not {slots!r}."
    if type(slots) is not int:
        raise TypeError(text)
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(text)


NO_LOCK = LockKey("no lock", "none")
"""The key of a call without a lock, for which ``lock_name`` returned None; messages carry it."""


@functools.lru_cache(maxsize=1024)
def name_key(name: str) -> LockKey:
    """Return the name and key of the lock with an explicit name.

    A name of more than 255 characters is shortened, but its key is made from the whole name. Raises
    ``TypeError`` if the name is not a string, and ``ValueError`` if it is empty or contains control
    characters.
    """
    _check_name("name", name)
    slug = ""
    if conf.record_arguments:
        slug = name
    key = _key(PREFIX, slug, "name", name)
    if len(name) > MAX_NAME:
        mark = f"…{_mark(key)}"
        name = f"{name[: MAX_NAME - len(mark)]}{mark}"
    return LockKey(name, key)


setting_changed.connect(lambda **kwargs: name_key.cache_clear(), weak=False)


def call_key(
    task: str,
    parameters: Parameters,
    args: Sequence[Any],
    kwargs: Arguments,
    *,
    lock_on: Sequence[str] | None = None,
    lock_name: LockName | None = None,
    shown: str | None = None,
    partial: bool = False,
) -> LockKey:
    """Return the name and key of the lock of a call of ``task``; NO_LOCK for a call without one.

    Arguments that equal their defaults are not in the name or the key, but ``lock_name`` sees them.
    ``partial``: arguments that are not part of the lock may be missing. ``shown`` replaces the
    arguments in the readable name. Raises ``TypeError`` if the arguments do not fit the parameters,
    if one has no stable form, or if ``lock_on`` names another; and what :func:`named_key` raises.
    """
    is_named = lock_name is not None
    required: Sequence[str] | None = None
    if partial:
        required = lock_on
        if is_named:
            required = ()  # a missing argument that lock_name needs is an error of named_key()
    arguments = parameters.bind(task, args, kwargs, required, defaults=is_named)
    if lock_name is not None:
        return named_key("lock_name", lock_name, task, parameters, arguments, shown)
    if lock_on is not None:
        parameters.check_names(f"lock_on of {task}", lock_on, arguments)
        arguments = {name: arguments[name] for name in lock_on if name in arguments}
    forms = parameters.forms(task, arguments)
    key = _key(PREFIX, task, "call", task, forms)
    if shown is None:
        if forms and not conf.record_arguments:
            shown = _mark(key)
        else:
            pairs = [f"{name}={_repr(form)}" for name, form in forms.items()]
            shown = ", ".join(pairs)
    name = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", f"{task}({shown})")
    if len(name) > MAX_NAME:
        name = f"{name[: MAX_NAME - 2]}…)"
    return LockKey(name, key)


def named_key(
    option: str,
    lock_name: LockName,
    task: str,
    parameters: Parameters,
    arguments: Arguments,
    shown: str | None = None,
) -> LockKey:
    """Return the name and key that ``lock_name`` makes of these arguments; NO_LOCK for None.

    ``option`` is what the user calls ``lock_name``. If a text is ``shown`` instead of the
    arguments, they must not be seen, so the readable name has a mark instead of their values.
    Raises ``TypeError`` if ``lock_name`` cannot be filled, and ``ValueError`` if its result is no
    valid name.
    """
    if callable(lock_name):
        what = f"the result of {option} of {task}"
        public = f"{task}.{option}"
        name = parameters.call(lock_name, arguments)
        if name is None:
            return NO_LOCK
    else:
        what = f"{option}={lock_name!r} of {task}"
        public = lock_name
        template_fields(what, lock_name, parameters)
        try:
            name = lock_name.format(**{each: formattable(arguments[each]) for each in arguments})
        except (LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"{what} cannot be filled from the arguments ({list_names(arguments)}): "
                f"{in_words(error)}"
            ) from error
    _check_name(what, name)
    if _ADDRESS.search(name):
        raise TypeError(
            f"{what} contains the memory address of an object, which differs in each process. "
            "Use plain values (an id instead of an object)."
        )
    lock = name_key(str(name))
    if conf.record_arguments and shown is None:
        return lock
    mark = _mark(lock.key)
    return LockKey(f"{public[: MAX_NAME - len(mark)]}{mark}", lock.key)


def template_fields(what: str, template: str, parameters: Parameters) -> list[str]:
    """Return the arguments that a format string names.

    Raises ``ValueError``, with a text that begins with ``what``, if the format string cannot make
    names, and ``TypeError`` for a field that is not one of the ``parameters``.
    """
    try:
        parts = [(text, field) for text, field, *_ in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(f"{what} is not a format string: {error}.") from None
    # This is a list, since Python ignores the error of a signal that strikes while it deletes a
    # generator.
    if not "".join([text for text, _ in parts]).strip():
        raise ValueError(f"{what} has no fixed text: two tasks could share a lock by accident.")
    names = [re.split(r"[.\[]", field)[0] for _, field in parts if field is not None]
    passed: list[str] = []
    if parameters.extra:
        passed = [name for name in names if name.isidentifier()]
    parameters.check_names(what, names, passed)
    return names


# Names

_form = reprlib.Repr()
_form.maxstring = _form.maxother = _form.maxlong = 120
_form.maxdict = _form.maxlist = 10
_repr = functools.partial(_form.repr1, level=_form.maxlevel)


def _check_name(option: str, name: str) -> None:
    """Raise an error, with a text that begins with ``option``, for an invalid lock name."""
    if not isinstance(name, str):
        raise TypeError(f"{option} must be a string, not {name!r}.")
    if not name.strip():
        raise ValueError(f"{option} is empty: a lock needs a name.")
    if _UNPRINTABLE.search(name):
        text = f"{option} contains control characters or lone surrogates"
        if conf.record_arguments:
            text = f"{text}: {name!r}"
        raise ValueError(f"{text}.")


# Keys


def _key(kind: str, slug: str, *parts: Any) -> str:
    longest = MAX_SLUG + len(PREFIX) - len(kind)
    slug = _NOT_IN_KEYS.sub("_", slug[:longest])
    # FIPS builds have SHA-256, but not md5.
    digest = hashlib.sha256(encode(parts).encode("ascii")).hexdigest()
    return f"{kind}{slug}:{digest[:32]}"


def _mark(key: str) -> str:
    """Return the mark that replaces hidden arguments in a name."""
    return f"#{key[-32:-24]}"
