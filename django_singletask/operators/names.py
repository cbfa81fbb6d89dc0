"""Read what an operator types, and find the rows of the history that it means."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import current_app
from django.utils.timezone import now as django_now

from django_singletask.conf import conf
from django_singletask.history.queries import FREQUENT, NoHistory, reading
from django_singletask.holder import clean
from django_singletask.locks.keys import QUEUED, LockKey, call_key, name_key
from django_singletask.locks.parameters import AS_SHOWN
from django_singletask.models import RETAKEN, TaskLockEvent
from django_singletask.stores.base import is_key
from django_singletask.task.base import import_tasks

SCANNED = 20_000
"""Newest rows, at most, among which those are looked for that no index serves."""


class Found(NamedTuple):
    """Rows, the newest first; ``complete`` is False if older rows may fit that nobody looked at."""

    rows: list[TaskLockEvent]
    complete: bool


def fits(name: str, pattern: str) -> bool:
    """Say whether a name fits a pattern, in which ``*`` stands for any text."""
    if "*" not in pattern:
        return name == pattern
    return fnmatchcase(name, re.sub(r"[\[?]", r"[\g<0>]", pattern))


def find(
    conditions: Iterable[Mapping[str, Any]] = ({},), *, limit: int = 50, **facts: Any
) -> Found:
    """Return the newest rows that meet one of the conditions, and have all the facts.

    Conditions and facts are columns of the history and their values (None leaves a fact out),
    ``like`` (a pattern for the name) and ``since`` (seconds before now). Old rows are found with
    the history off, too. Raises :class:`NoHistory`.
    """
    facts = {name: fact for name, fact in facts.items() if fact is not None}
    with reading(even_if_off=True):
        parts = [_find(limit, **{**facts, **condition}) for condition in conditions]
    rows = {row.pk: row for part in parts for row in part.rows}
    newest = sorted(rows, reverse=True)[:limit]
    return Found([rows[pk] for pk in newest], all(part.complete for part in parts))


def _find(limit: int, **facts: Any) -> Found:
    history, task, since = TaskLockEvent.objects.all(), facts.pop("task", ""), facts.pop("since", 0)
    like, result = facts.pop("like", "*"), facts.pop("result", "")
    rows = history.of_task(task) if task else history.newest()
    kind, outcome = facts.pop("kind", None), facts.pop("outcome", None)
    if result in ("skipped", "waiting", "failed"):
        kind = kind or "conflict"
    if outcome == RETAKEN:
        rows = rows.of_trouble(RETAKEN).filter(kind=kind or "run")
    else:
        rows = rows.of_state(kind, outcome)
    rows = rows.filter(**facts)
    if since:
        rows = rows.since(django_now() - timedelta(seconds=since))
    if not result and like == "*":
        return Found(list(rows[:limit]), True)
    if start := like.partition("*")[0]:
        named = history.order_by().named_like(start).values_list("pk", flat=True)
        ids = list(named[: FREQUENT + 1])
        rows = rows.filter(pk__in=ids) if len(ids) <= FREQUENT else rows
    seen = list(rows.values_list("pk", "name", "result")[:SCANNED])
    meant = [pk for pk, name, ended in seen if fits(name, like) and result in ("", ended)][:limit]
    complete = len(seen) < SCANNED or len(meant) == limit
    return Found(list(history.newest().filter(pk__in=meant)), complete)


if TYPE_CHECKING:
    from django_singletask.operators.rows import HeldLock

RECORDED = 100
"""Tasks of the history, at most, that a shortened name is compared with; each costs a query."""
COMPARED = 2000
"""Calls of one task, at most, whose arguments are compared with those of an unknown name."""
ABBREVIATED = re.compile("[0-9a-f-]{8,31}…?|[0-9a-f]{4}…")
"""What may be the beginning of a task id or a token."""


class UnknownName(Exception):
    """Nothing, or more than one task, is known by the name that was typed.

    ``matches`` are the names that are like it.
    """

    def __init__(self, name: str, matches: Sequence[str]) -> None:
        self.matches = matches
        names = ", or ".join(f'"{clean(match)}"' for match in matches)
        hint = "'manage.py locks' lists what is held."
        if ABBREVIATED.fullmatch(name):
            hint = "If this is the beginning of an id, write the whole id."
        hint = f"Did you mean {names}?" if names else hint
        super().__init__(f"No lock or task is known as '{clean(name, 255)}'. {hint}")


@dataclasses.dataclass(frozen=True)
class Selector:
    """What a text selects: locks that are held, and rows of the history.

    ``name`` is the name of a lock, a pattern, a task id or a token, ``task`` a task, all of whose
    locks are meant. Either is empty if the text cannot mean that. ``locks`` are those that the text
    can name. ``registered`` says whether this project has such a task or call.
    """

    text: str
    name: str = ""
    task: str = ""
    locks: Sequence[LockKey] = ()
    registered: bool = False

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(lock.key for lock in self.locks)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names that the locks have in the history."""
        return frozenset(lock.name for lock in self.locks)

    def covers(self, name: str, task: str) -> bool:
        """Say whether the name of a lock, or the task that has it, is meant."""
        return fits(name, self.name) or (task != "" and task == self.task)

    def matches(self, lock: HeldLock) -> bool:
        """Say whether a lock, or a slot of it, is meant."""
        if self.covers(lock.name, lock.task or "") or {lock.key, lock.lock_key} & self.keys:
            return True
        # A task of another project is only known by its lock.
        return self.name != "" and self.name in (lock.task_id, lock.token, lock.task)

    def conditions(self) -> list[dict[str, Any]]:
        """Return conditions for :func:`find`: the rows meet one of them."""
        meant = [{"task": self.task}] if self.task else []
        meant += [{"like": self.name}] if "*" in self.name else []
        meant += [{"name": name} for name in self.names]
        # The id of a lock that is not a task's is empty in its rows.
        if self.name and self.names and self.text.isprintable():
            meant += [{"task_id": self.text}, {"ref": self.text}]
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
                return False
        return not self.task


def select(text: str) -> Selector:
    """Read the name or key of a lock, a call, a pattern with ``*``, a task, a task id or a token.

    The name of a task, also in a call, can be its last parts: ``import_feed``. Raises
    :class:`UnknownName` if the names of several tasks end so.
    """
    if is_key(text):
        return Selector(text, locks=locks_of(text))
    name, parenthesis, arguments = text.partition("(")
    if "*" in text:
        start = name.partition("*")[0]
        return Selector(text, text, registered=any(t.startswith(start) for t in task_names()))
    task = _whole(name, text)
    whole = f"{task or name}{parenthesis}{arguments}"
    if parenthesis:
        call = _parse(whole)
        registered = call is not None and _lock_of(*call) is not None
        return Selector(text, text, "", locks_of(whole), registered)
    return Selector(text, text, task, locks_of(whole), task in task_names())


def _whole(name: str, lock: str = "") -> str:
    """Return the whole name of the task whose name is, or ends with, a text; else "".

    A lock that has the typed text as its name is meant rather than a task whose name ends so.
    """
    if name in task_names():
        return name
    with suppress(NoHistory), reading(even_if_off=True):
        if lock and TaskLockEvent.objects.named(lock)[:1]:
            return ""
    for list_tasks in (task_names, recorded_tasks):
        matches = sorted(task for task in list_tasks() if f".{task}".endswith(f".{name}"))
        if name in matches:
            return name
        if len(matches) > 1:
            raise UnknownName(name, matches)
        if matches:
            return matches[0]
    return ""


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


def locks_of(name: str) -> list[LockKey]:
    """Return the locks, and the entries of queued calls, that a name can stand for.

    ``name`` is a key, the name of a :class:`TaskLock`, or a call such as
    ``feeds.tasks.import_feed(7)`` or ``feeds.tasks.import_feed(feed_id=7)``.
    """
    if is_key(name):
        with suppress(NoHistory), reading(even_if_off=True):
            return [LockKey(TaskLockEvent.objects.name_of_key(name) or name, name)]
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
    project: Any = current_app
    try:
        return project.tasks[task].lock_key(args, kwargs) if task in task_names() else None
    except Exception:  # a callable lock_name may raise anything
        return None
