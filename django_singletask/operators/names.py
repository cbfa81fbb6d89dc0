"""Read what an operator types: the name of a lock or a task, a call, a pattern, an id."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery import current_app

from django_singletask.conf import conf
from django_singletask.history.queries import NoHistory, reading
from django_singletask.holder import Holder, clean
from django_singletask.locks.keys import QUEUED, LockKey, call_key, name_key
from django_singletask.locks.parameters import AS_SHOWN
from django_singletask.models import TaskLockEvent
from django_singletask.operators.past import find, fits
from django_singletask.stores import get_store
from django_singletask.stores.base import PREFIX
from django_singletask.task.base import SingletonTask, import_tasks, singleton_tasks

if TYPE_CHECKING:
    from django_singletask.operators.rows import HeldLock

__all__ = [
    "Selector",
    "UnknownName",
    "locks_of",
    "select",
    "select_task",
    "task_names",
    "tasks",
]

RECORDED = 100
"""Tasks of the history, at most, that a shortened name is compared with; each costs a query."""


class UnknownName(Exception):
    """Nothing is known by the name that was typed; ``matches`` are names like it.

    If it is ``shortened``, these are the tasks whose names end with it.
    """

    def __init__(self, name: str, matches: Sequence[str], shortened: bool = False) -> None:
        self.matches = matches
        name, names = clean(name), [f'"{clean(match)}"' for match in matches]
        hint = f"Did you mean {', or '.join(names)}?"
        if shortened:
            problem = f"{len(names)} tasks have names that end with '{name}': {', '.join(names)}."
            hint = "Type more of the name."
        else:
            problem = f"No lock or task is known as '{name}'."
            hint = hint if names else "'manage.py locks' lists what is held."
        super().__init__(f"{problem} {hint}")


@dataclasses.dataclass(frozen=True)
class Selector:
    """What a text selects: locks that are held, and rows of the history.

    ``locks`` are those that it can name, ``task`` is the task that it names, all of whose locks are
    meant; ``registered`` says whether this project has such a task or call. The text can also be a
    pattern of names, a task id or a token. With ``only_task`` it is a task or a pattern of tasks.
    """

    text: str
    locks: tuple[LockKey, ...] = ()
    task: str = ""
    registered: bool = False
    only_task: bool = False

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(lock.key for lock in self.locks)

    @property
    def is_pattern(self) -> bool:
        return "*" in self.text and not self.text.startswith(PREFIX)

    def covers(self, name: str, task: str) -> bool:
        """Say whether the name of a lock, or the task that has it, is meant."""
        if self.only_task:
            return task != "" and fits(task, self.task)
        return fits(name, self.text) or (self.task != "" and task == self.task)

    def matches(self, lock: HeldLock) -> bool:
        """Say whether a lock, or a slot of it, is meant."""
        return self.covers(lock.name, lock.task or "") or (
            not self.keys.isdisjoint((lock.key, lock.lock_key))
            or (self.text in (lock.task_id, lock.token) and self.text != "" and not self.only_task)
        )

    def names(self) -> set[str]:
        """Return the names that the locks have in the history. Raises :class:`NoHistory`."""
        if self.text.startswith(PREFIX):
            with reading(even_if_off=True):
                return {TaskLockEvent.objects.name_of_key(self.text) or self.text}
        # PostgreSQL refuses NUL.
        typed = {self.text} - {""} if "\0" not in self.text and not self.only_task else set()
        return typed.union(lock.name for lock in self.locks)

    def conditions(self) -> list[dict[str, Any]]:
        """Return conditions for :func:`find`: the rows meet one of them.

        Raises :class:`NoHistory`.
        """
        if self.only_task:
            tasks = [*task_names(), *_recorded_tasks()] if self.is_pattern else [self.task]
            return [{"task": task} for task in dict.fromkeys(tasks) if fits(task, self.task)]
        if self.is_pattern:
            task, parenthesis, _arguments = self.text.partition("*")[0].partition("(")
            whole = task if parenthesis and task in task_names() else ""
            return [{"like": self.text, "task": whole}]
        meant: list[dict[str, Any]] = [{"name": name} for name in self.names()]
        if self.task:
            meant.append({"task": self.task})
        # The id of a lock that is not a task's is empty in its rows.
        if self.text and self.text.isprintable():
            meant += [{"task_id": self.text}, {"token": self.text}]
        return meant

    def is_known(self) -> bool:
        """Say whether the project or the history knows what is meant.

        Without the history nobody can say so of a lock: then it counts as known.
        """
        if self.registered:
            return True
        with suppress(NoHistory):
            if find(self.conditions(), limit=1).rows:
                return True
            if conf.history != "off":
                return self.task != "" and self.task in _holding_tasks()
        return not self.only_task


def select(text: str) -> Selector:
    """Read the name or key of a lock, a call, a pattern with ``*``, a task, a task id or a token.

    The name of a task, also in a call, can be its last parts: ``import_feed``. Raises
    :class:`UnknownName` if the names of several tasks end so.
    """
    if text.startswith(PREFIX):
        return Selector(text, tuple(locks_of(text)))
    if "*" in text:
        # The text before the star is part of a task's name, or a call of the task.
        start = text.partition("*")[0]
        likely = any(task.startswith(start[: len(task)]) for task in task_names())
        return Selector(text, registered=likely)
    name, parenthesis, arguments = text.partition("(")
    task = _whole(name, text)
    locks = [*locks_of(text), *locks_of(f"{task}{parenthesis}{arguments}" if task else "")]
    if parenthesis:
        call = _parse(f"{task}({arguments}")
        registered = call is not None and _lock_of(*call) is not None
        return Selector(text, tuple(dict.fromkeys(locks)), registered=registered)
    return Selector(text, tuple(dict.fromkeys(locks)), task, task in task_names())


def select_task(text: str) -> Selector:
    """Read the name of a task, its last parts, or a pattern with ``*``.

    Raises :class:`UnknownName` if the names of several tasks end so.
    """
    task = text if "*" in text else _whole(text) or text
    known = any(fits(each, task) for each in task_names())
    return Selector(text, task=task, registered=known, only_task=True)


def _whole(name: str, lock: str = "") -> str:
    """Return the whole name of the task whose name is, or ends with, a text; else "".

    A lock that has the typed text as its name is meant rather than a task whose name ends so.
    """
    if not name or name in task_names():
        return name
    if lock and _is_lock(lock):
        return ""
    for list_tasks in (task_names, _recorded_tasks, _holding_tasks):
        matches = {task for task in list_tasks() if f".{task}".endswith(f".{name}")}
        if len(matches) > 1 and name not in matches:
            raise UnknownName(name, sorted(matches), shortened=True)
        if matches:
            return name if name in matches else matches.pop()
    return ""


def _is_lock(name: str) -> bool:
    with suppress(NoHistory), reading(even_if_off=True):
        if TaskLockEvent.objects.named(name)[:1]:
            return True
    with suppress(Exception):  # the history is asked while the cache is away, too
        return bool(get_store(conf.cache).read_many(lock.key for lock in locks_of(name)))
    return False


def task_names() -> list[str]:
    """Return all tasks of this project: some take their locks by ``only_one``."""
    tasks()
    return [name for name in current_app.tasks if not name.startswith("celery.")]


def _recorded_tasks() -> list[str]:
    with suppress(NoHistory), reading(even_if_off=True):
        return [*TaskLockEvent.objects.task_names(RECORDED)]
    return []


def _holding_tasks() -> set[str]:
    """Return the tasks that hold a lock, as far as the cache says."""
    with suppress(Exception):  # it is away, or cannot list its entries
        entries = get_store(conf.cache).entries()
        return {Holder.decode(entry.value).task or "" for _key, entry in entries}
    return set()


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
