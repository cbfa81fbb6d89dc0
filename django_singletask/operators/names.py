"""Read what an operator types: which locks and which rows of the history it means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NamedTuple

from celery import current_app

from django_singletask.conf import conf
from django_singletask.history.queries import NEWEST, NoHistory, reading
from django_singletask.holder import clean
from django_singletask.locks.keys import QUEUED, LockKey, call_key, lock_of_slot, name_key
from django_singletask.locks.parameters import AS_SHOWN
from django_singletask.models import TaskLockEvent
from django_singletask.operators.recorded import NOT_RECORDED, find, regex
from django_singletask.stores.keys import is_key
from django_singletask.task.base import import_tasks


def fits(name: str, pattern: str) -> bool:
    """Say whether a name fits a pattern, in which ``*`` stands for any text.

    ``…`` stands for what a table has cut out of a name.
    """
    return re.fullmatch(regex(pattern), name) is not None


RECORDED = 100
"""Tasks of the history, at most, that a shortened name is compared with; each costs a query."""
MATCHES = 2000
"""Newest rows among whose names those like an unknown name are looked for."""


class UnknownName(Exception):
    """Nothing is known by the name that was typed, or more than one thing: the matches."""

    def __init__(self, name: str, matches: Sequence[str], *, several: bool = False) -> None:
        hint = f"'manage.py locks' lists what is held, 'locks --help' the actions. {NOT_RECORDED}"
        if matches:
            names = ", or ".join(f'"{clean(match)}"' for match in matches)
            hint = f"Did you mean {names}?"
        problem = "No lock or task is known as"
        if several:
            problem = "More than one is meant by"
        super().__init__(f"{problem} '{clean(name, 255)}'. {hint}")


class Selector(NamedTuple):
    """What a text selects: locks that are held, and rows of the history.

    ``locks`` are the keys and names of those whose name or key it can be. ``tasks`` have it as
    their name, or at its end. ``is_exact``: it is a key, or the history knows a lock with this
    name, so nothing else is meant.
    """

    text: str
    locks: dict[str, str]
    tasks: Sequence[str] = ()
    is_exact: bool = False

    def covers(self, name: str, task: str | None) -> bool:
        """Say whether the name of a lock, or the task that has it, is meant.

        A lock that was taken outside a task has none, and no text is compared with that.
        """
        if name in self.locks.values() or fits(name, self.text):
            return True
        if "(" in self.text:
            return f".{name}".endswith(f".{self.text}")
        if self.tasks or not task:
            return task in self.tasks
        # A task of another project is only known by its lock.
        return f".{task}".endswith(f".{self.text}")

    def conditions(self) -> list[dict[str, Any]]:
        """Return conditions for :func:`find`: the rows meet one of them."""
        if "*" in self.text:
            return [{"like": self.text}]
        meant = [{"task": task} for task in self.tasks]
        meant += [{"name": name} for name in {*self.locks.values()}]
        if self.locks:  # otherwise no row has such a text, or nearly all have the empty one
            meant += [{"task_id": self.text}, {"ref": self.text}]
        return meant

    def is_known(self) -> bool:
        """Say whether the project or the history knows what is meant.

        Without the history nobody can say so of a lock: then it counts as known.
        """
        name, parenthesis, _arguments = self.text.partition("(")
        # Of a call that cannot be read, only its own name could be known.
        is_read = not parenthesis or "*" in self.text or len(self.locks) > 1
        if self.tasks or (is_read and any(fits(f".{task}", f"*.{name}") for task in task_names())):
            return True
        with suppress(NoHistory):
            rows, complete = find(self.conditions(), limit=1)
            return bool(rows) or not complete or conf.history == "off"
        return True


def select(text: str) -> Selector:
    """Read a name or key of a lock, a pattern with ``*``, the end of a task's name, or an id.

    A lock that has the text as its name is meant rather than a task whose name ends so.
    """
    locks = locks_of(text)
    if "*" in text or is_key(text):
        return Selector(text, locks, is_exact="*" not in text)
    with suppress(NoHistory), reading(even_if_off=True):
        rows = TaskLockEvent.objects.named(text).values_list("name", "key", "task")[:NEWEST]
        # MySQL also finds names that differ in case, in accents, or in spaces at their ends.
        recorded = {(key, task) for name, key, task in rows if name == text}
        if recorded and text not in task_names():
            for key, task in recorded:
                lock = LockKey(text, lock_of_slot(key))
                locks |= {lock.key: text, lock.beside(QUEUED, task).key: text}
            return Selector(text, locks, is_exact=True)
    tasks: list[str] = []
    if "(" not in text:
        tasks = tasks_of(text)
    return Selector(text, locks, tasks)


def tasks_of(text: str) -> list[str]:
    """Return the tasks whose name is, or else ends with, a text: of the project, or the history."""
    for list_tasks in (task_names, recorded_tasks):
        tasks = list_tasks()
        if text in tasks:
            return [text]
        tasks = [task for task in tasks if task.endswith(f".{text}")]
        if tasks:
            return sorted(tasks)
    return []


def unknown(text: str, names: Iterable[str]) -> UnknownName:
    """Return the error for a text that means nothing: names and tasks that are like it."""
    names = [*names, *recorded_tasks(), *task_names()]
    with suppress(NoHistory), reading():
        names += TaskLockEvent.objects.values_list("name", flat=True)[:MATCHES]
    return UnknownName(text, nearest(text, names))


def nearest(text: str, names: Iterable[str]) -> list[str]:
    """Return at most three names whose last parts, without arguments, are like that of a text."""
    by_end = {_end(name): name for name in names}
    return [by_end[end] for end in get_close_matches(_end(text), by_end)]


def _end(name: str) -> str:
    return name.partition("(")[0].rpartition(".")[2]


def task_names() -> list[str]:
    """Return all tasks of this project, as far as its modules can be imported.

    Plain tasks are among them: some take their locks by ``only_one``.
    """
    with suppress(Exception):
        import_tasks()
    return [name for name in current_app.tasks if not name.startswith("celery.")]


def recorded_tasks() -> list[str]:
    with suppress(NoHistory), reading(even_if_off=True):
        return [*TaskLockEvent.objects.task_names(RECORDED)]
    return []


def locks_of(name: str) -> dict[str, str]:
    """Return the keys and names of the locks and queued calls that a name or key can stand for.

    ``name`` is a key, or the name of a lock as it is shown: ``nightly``, or
    ``feeds.tasks.import_feed(feed_id=7)``.
    """
    if is_key(name):
        with suppress(NoHistory), reading(even_if_off=True):
            return {name: TaskLockEvent.objects.name_of_key(name) or name}
        return {name: name}
    locks: dict[str, str] = {}
    with suppress(SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        call = ast.parse(name.strip(), mode="eval").body
        if isinstance(call, ast.Call) and not call.args:
            shown = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
            end = ast.unparse(call.func)
            tasks = tasks_of(end)
            if not tasks:
                tasks = [end]
            for task in tasks:
                lock = call_key(task, AS_SHOWN, (), shown)
                locks |= {lock.key: lock.name, lock.beside(QUEUED, task).key: lock.name}
    with suppress(ValueError):
        lock = name_key(name)
        locks[lock.key] = lock.name
    return locks
