"""Read a call as an operator writes it: which task, which locks, which arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any

from celery import current_app
from django.db import Error

from django_singletask.history.queries import NoHistory, names_of_key, of_task, rows
from django_singletask.locks.keys import AS_SHOWN, QUEUED, LockKey, call_key, name_key
from django_singletask.stores.base import PREFIX
from django_singletask.task.base import SingletonTask
from django_singletask.task.registered import import_tasks, singleton_tasks

__all__ = [
    "is_call",
    "is_task",
    "keys_of",
    "locks_of",
    "names_of",
    "nearest",
    "patterns",
    "without_defaults",
]


def keys_of(name: str) -> list[str]:
    """Return the keys that a name can stand for.

    ``name`` is a key, the name of a :class:`TaskLock`, or a call such as
    ``feeds.tasks.import_feed(7)`` or ``feeds.tasks.import_feed(feed_id=7)``: that call's lock,
    and the entry of the call while it is queued.
    """
    return [key for _name, key in locks_of(name)]


def locks_of(name: str) -> list[LockKey]:
    """Return the locks, and the entries of queued calls, that a name can stand for."""
    if name.startswith(PREFIX):
        return [LockKey(name, name)]
    locks = []
    with suppress(ValueError):
        locks.append(name_key(name))
    call = _call(name)
    if call is None:
        return locks
    task, args, kwargs = call
    found = []
    if not args:
        with suppress(TypeError, ValueError):
            # As names are shown: all arguments that make the lock, and only those.
            found.append(call_key(task, AS_SHOWN, (), kwargs))
    with suppress(Exception):  # a callable lock_name may raise anything
        if known := _task(task):
            found.append(known.lock_key(args, kwargs, {}))
    for lock in found:
        locks += [lock, lock.beside(QUEUED, task)]
    return locks


def names_of(name: str) -> set[str]:
    """Return the names that one, a key or a call can have in the history.

    Raises :class:`NoHistory`.
    """
    found = names_of_key(name) if name.startswith(PREFIX) else []
    return {*found} or {lock.name for lock in locks_of(name)}


def is_call(name: str) -> bool:
    """Say whether a name is a call of a task of this project, with arguments that fit it."""
    call = _call(name)
    known = call and _task(call[0])
    if not (call and known):
        return False
    try:
        known.lock_key(call[1], call[2], {})
    except Exception:
        return False
    return True


def _call(name: str) -> tuple[str, list[Any], dict[str, Any]] | None:
    """Take a call apart, as ``feeds.tasks.import_feed(7, full=True)``; None if it is none."""
    task, separator, _arguments = name.partition("(")
    try:
        call = ast.parse(name.strip(), mode="eval").body
        if not separator or not isinstance(call, ast.Call):
            return None
        args = [ast.literal_eval(argument) for argument in call.args]
        kwargs = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    return task.strip(), args, kwargs


def _task(name: str) -> SingletonTask | None:
    if name not in current_app.tasks:
        _import_tasks()
    task = current_app.tasks.get(name)
    return task if isinstance(task, SingletonTask) else None


@cache
def _import_tasks() -> None:
    # What fails there is not the matter here.
    with suppress(Exception):
        import_tasks()


def patterns() -> list[str]:
    """Return a pattern of a call of each task of this project that takes a lock."""
    _import_tasks()
    found = []
    for name, task in singleton_tasks().items():
        needed = (each for each in task.parameters.signature.parameters.values())
        given = [f"{each.name}=…" for each in needed if each.default is each.empty]
        found.append(f"{name}({', '.join(given)})")
    return found


def is_task(name: str) -> bool:
    """Say whether this project has a task of this name, or the history knows one."""
    _task(name)
    try:
        return name in current_app.tasks or bool(of_task(rows(), name)[:1])
    except (NoHistory, Error):
        return False


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return at most three of the candidates that are like a name, the most alike first.

    The tasks are compared first, in as many parts of their dotted names as ``name`` has, then the
    arguments: ``import_fed`` is like ``feeds.tasks.import_feed(feed_id=7)``.
    """
    typed = name.strip().lower()
    task = typed.partition("(")[0]
    alike: dict[str, list[str]] = {}
    for candidate in dict.fromkeys(candidates):
        parts = candidate.lower().partition("(")[0].split(".")[-task.count(".") - 1 :]
        # A part of a name means that name.
        part = task if typed and typed in candidate.lower() else ".".join(parts)
        alike.setdefault(part, []).append(candidate)
    tasks = get_close_matches(task, alike)
    return [each for part in tasks for each in get_close_matches(typed, alike[part], cutoff=0)][:3]


def without_defaults(name: str) -> str:
    """Return the name of a call without the arguments that have their defaults.

    It is the same call, and found as such by :func:`keys_of`.
    """
    task = _task(name.partition("(")[0])
    if task is None:
        return name
    parameters = task.parameters.signature.parameters.values()
    default = {each.name: each.default for each in parameters if each.default is not each.empty}
    call = _call(name) if default else None
    if call is None:
        return name
    kept = [f"{n}={v!r}" for n, v in call[2].items() if n not in default or default[n] != v]
    return f"{task.name}({', '.join([*map(repr, call[1]), *kept])})"
