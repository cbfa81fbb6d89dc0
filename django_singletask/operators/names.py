"""Read the name of a lock as an operator writes it: a name, a key or a call of a task."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from celery import current_app

from django_singletask.history.queries import NoHistory, reading
from django_singletask.locks.keys import QUEUED, LockKey, call_key, name_key
from django_singletask.locks.parameters import AS_SHOWN
from django_singletask.models import TaskLockEvent
from django_singletask.stores.base import PREFIX
from django_singletask.task.base import SingletonTask, import_tasks, singleton_tasks

__all__ = ["is_call", "is_task", "keys_of", "locks_of", "names_of", "nearest", "patterns", "tasks"]

COMPARED = 2000
"""Calls of one task, at most, whose arguments are compared with those of an unknown name."""


def locks_of(name: str) -> list[LockKey]:
    """Return the locks, and the entries of queued calls, that a name can stand for.

    ``name`` is a key, the name of a :class:`TaskLock`, or a call such as
    ``feeds.tasks.import_feed(7)`` or ``feeds.tasks.import_feed(feed_id=7)``.
    """
    if name.startswith(PREFIX):
        return [LockKey(name, name)]
    locks = []
    with suppress(ValueError):
        locks.append(name_key(name))
    call = _parse(name)
    if call is not None:
        task, args, kwargs = call
        calls = [_lock_of(*call)]
        # A lock's name shows the arguments that make it, and the task may be of another project.
        with suppress(TypeError, ValueError):
            calls += [] if args else [call_key(task, AS_SHOWN, (), kwargs)]
        for lock in filter(None, calls):
            locks += [lock, lock.beside(QUEUED, task)]
    return locks


def keys_of(name: str) -> list[str]:
    return [lock.key for lock in locks_of(name)]


def names_of(name: str) -> list[str]:
    """Return the names that a name, a key or a call can have in the history.

    Raises :class:`NoHistory`.
    """
    recorded = ""
    if name.startswith(PREFIX):
        with reading(even_if_off=True):
            recorded = TaskLockEvent.objects.name_of_key(name)
    return [recorded] if recorded else [lock.name for lock in locks_of(name)]


def is_call(name: str) -> bool:
    """Say whether a name is a call of a task of this project, with arguments that fit it."""
    call = _parse(name)
    return call is not None and _lock_of(*call) is not None


def is_task(name: str) -> bool:
    """Say whether this project has a task of this name, or the history knows one."""
    tasks()
    recorded = False
    with suppress(NoHistory), reading():
        recorded = bool(TaskLockEvent.objects.of_task(name)[:1])
    return recorded or name in current_app.tasks


def patterns() -> list[str]:
    """Return a call of each task that takes a lock, such as ``feeds.import_feed(feed_id=…)``."""
    calls = []
    for name, task in tasks().items():
        parameters = task.parameters.signature.parameters.values()
        needed = [f"{each.name}=…" for each in parameters if each.default is each.empty]
        calls.append(f"{name}({', '.join(needed)})")
    return calls


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
        # Whoever types a part of a name means that name.
        part = task if typed and typed in candidate.lower() else ".".join(parts)
        alike.setdefault(part, []).append(candidate)
    calls = (alike[part][:COMPARED] for part in get_close_matches(task, alike))
    return [each for some in calls for each in get_close_matches(typed, some, cutoff=0)][:3]


def _parse(name: str) -> tuple[str, list[Any], dict[str, Any]] | None:
    """Return task and arguments of a call, as ``feeds.tasks.import_feed(7, full=True)``."""
    task, parenthesis, _arguments = name.partition("(")
    try:
        call = ast.parse(name.strip(), mode="eval").body
        if not parenthesis or not isinstance(call, ast.Call):
            return None
        args = [ast.literal_eval(argument) for argument in call.args]
        kwargs = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None
    return task.strip(), args, kwargs


def _lock_of(task: str, args: list[Any], kwargs: dict[str, Any]) -> LockKey | None:
    """Return the lock of a call of a task of this project, or None if it has no such call."""
    try:
        return tasks()[task].lock_key(args, kwargs)
    except Exception:  # a callable lock_name may raise anything
        return None


def tasks() -> dict[str, SingletonTask]:
    """Return the tasks of this project that take locks, as far as its modules can be imported."""
    with suppress(Exception):
        import_tasks()
    return singleton_tasks()
