"""Select locks by what the lists show of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from celery import current_app
from django.utils.translation import gettext_lazy as _

from django_singletask.history.queries import NEWEST, NoHistory, reading
from django_singletask.holder import clean
from django_singletask.locks.keys import QUEUED, LockKey, lock_of_slot, name_key
from django_singletask.models import TaskLockEvent
from django_singletask.operators.words import few, process
from django_singletask.stores.keys import is_key
from django_singletask.task.base import import_tasks

RECORDED = 100
"""Tasks of the history, at most, that a shortened name is compared with; each costs a query."""
MODULES = re.compile(r"(?:[^\W\d]\w*\.)+(?=[^\W\d])")
"""What stands before the last part of the name of a task, or of a call."""
ID = re.compile("[0-9a-fA-F-]{16,}")
"""What the ids of tasks, and the tokens of locks, look like."""
NOT_RECORDED = _(
    "If it is the id of a call that found its lock held: of all calls that one holder blocks, only "
    "the id of the first is recorded. The log of the worker has a line for each call, which names "
    "the lock and the holder: ask for that lock."
)


class UnknownName(Exception):
    """Nothing is known by the name that was typed."""

    def __init__(self, name: str) -> None:
        shown = clean(name, 255)
        task, parenthesis, _arguments = shown.partition("(")
        hint = "'manage.py locks' lists what is held, and 'manage.py locks history' what was."
        if parenthesis and Selector(task).tasks:
            hint = f"'manage.py locks why {task}' tells what is known of that task."
        elif ID.fullmatch(name):
            hint = str(NOT_RECORDED)
        super().__init__(f"No lock or task is known as '{shown}'. {hint}")


class SeveralMeant(Exception):
    """More than one lock or task is meant by the name that was typed."""

    def __init__(self, name: str, matches: Sequence[str]) -> None:
        super().__init__(
            f"'{clean(name, 255)}' means more than one: {few(matches)}. Name one of them."
        )


class Selector:
    """What a text selects: the locks of which a list shows this text.

    The text is the key, name, token, task, task id, host or process (``web-3:8121``) of the holder.
    The last part of the name, or of the task, is enough. In a pattern ``*`` stands for any text,
    and so does ``…``, which stands in a table for what was cut out of a name.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_pattern: bool = any(sign in text for sign in "*…")

    @cached_property
    def tasks(self) -> list[str]:
        """The tasks of the project, or else of the history, whose name is the text or ends with it.

        If a task has exactly this name, it is the only one.
        """
        for list_tasks in (task_names, recorded_tasks):
            tasks = list_tasks()
            if self.text in tasks:
                return [self.text]
            tasks = [task for task in tasks if task.endswith(f".{self.text}")]
            if tasks:
                return sorted(tasks)
        return []

    @cached_property
    def name(self) -> str:
        """The name of the lock with this key, if the text is a key that the history has."""
        if is_key(self.text):
            with suppress(NoHistory), reading(even_if_off=True):
                name = TaskLockEvent.objects.name_of_key(self.text)
                if name:
                    return name
        return self.text

    @cached_property
    def recorded_keys(self) -> list[str]:
        """The keys of the locks with this name in the history, and those of their queued calls."""
        keys: list[str] = []
        with suppress(NoHistory), reading(even_if_off=True):
            rows = TaskLockEvent.objects.named(self.name).values_list("name", "key", "task")
            for name, key, task in {*rows[:NEWEST]}:
                # MySQL also finds names that differ in case, in accents, or in spaces at their end.
                if name == self.name:
                    keys += [key, LockKey(name, key).beside(QUEUED, task).key]
        return keys

    def keys(self) -> list[str]:
        """Return the keys that are read first: the text can be one of them, or their name."""
        keys = self.recorded_keys
        if is_key(self.text):
            slots = [key for key in keys if lock_of_slot(key) == self.text]
            return [self.text, *slots]
        with suppress(ValueError):
            keys = [name_key(self.text).key, *keys]
        return keys

    @cached_property
    def is_exact(self) -> bool:
        """Whether only a lock with this key or name is meant, whether or not it is held.

        A lock can have the name of a task: then the other locks of the task are meant as well.
        """
        if is_key(self.text) and not self.is_pattern:
            return True
        if self.text in self.tasks:
            return False
        return bool(self.recorded_keys)

    @property
    def may_be_name(self) -> bool:
        """Whether it can be the name of a lock that is neither a call nor an id."""
        if self.tasks or self.is_pattern or "(" in self.text:
            return False
        return ID.fullmatch(self.text) is None

    @cached_property
    def _keys(self) -> set[str]:
        return {*self.keys()}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # Only the star is special here. What fnmatch writes does not backtrack: a pattern with many
        # stars takes no longer than another.
        stars = self.text.replace("[", "[[]").replace("?", "[?]").replace("…", "*")
        return re.compile(fnmatch.translate(stars))

    def selects(self, lock: Any) -> bool:
        """Say whether this lock, a :class:`HeldLock`, is meant."""
        if lock.key in self._keys or lock.lock_key in self._keys:
            return True
        if self.is_exact:
            return bool(lock.name == self.text)
        return self.fits(
            lock.name,
            lock.task,
            lock.token,
            lock.task_id,
            lock.host,
            process(lock),
            lock.key,
            lock.lock_key,
        )

    def fits(self, name: str, task: str | None, *others: str | None) -> bool:
        """Say whether one of these texts is meant. One that is missing is not compared."""
        if not self.text.strip("…"):  # an empty text, or all is cut out
            return False
        if task in self.tasks or name == self.name:
            return True
        texts = [name, last_part(name), *others]
        if task:
            texts += [task, last_part(task)]
        if self.text in texts:
            return True
        if not self.is_pattern:
            return False
        return any(self._pattern.match(text) for text in texts if text)


def last_part(name: str) -> str:
    """Return the name of a task, or of a call, without its modules."""
    modules = MODULES.match(name)
    if modules is None:
        return name
    return name[modules.end() :]


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
