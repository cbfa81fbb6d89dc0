"""What tests need of the inside of the package: the one place that changes when its walls move.

Each function says what a test asks or does, in the words of the docs. Other files of tests use the
public names and these; only the tests of one module itself import that module, as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.conf import settings

from django_singletask import TaskLock, admin, conf, holder, stores
from django_singletask.history import queries, writing
from django_singletask.locks import keys, parameters
from django_singletask.operators import charts, explain, held, names
from django_singletask.operators import starving as starvation

# == Stores and the epoch

# == Locks, leases, renewal

# == Tasks, messages, headers

# == Options, settings, checks, keys

# == The history


def history_mode() -> str:
    """Return how the history is written, by the settings of now."""
    conf.conf.forget()
    return conf.conf.history


def write_in_the_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a batch lock its rows in the order of its events, instead of one order for all."""
    monkeypatch.setattr(writing, "_order", lambda row: 0)


# == Operators: held now, names, words, the command, the admin


def this_process() -> dict[str, Any]:
    """Return what the entry of a lock says of the process that holds it, if it is this one."""
    return vars(holder.this_process())


def start_of(pid: int) -> str:
    """Return when a process of this host began, as the entry of a lock says it."""
    return holder.start_time(pid)


def call_lock(task: str, **arguments: Any) -> tuple[str, str]:
    """Return the name and the key of the lock of a call, whose task no project need have."""
    return keys.call_key(task, parameters.AS_SHOWN, (), arguments)


def shown_key(name: str) -> str:
    """Return the key of the lock that pages show by this name: of a call, if it is one."""
    return next(iter(names.locks_of(name)))


def queued_key(key: str, task: str) -> str:
    """Return the key of the entry that a queued call of a task has beside its lock."""
    return keys.LockKey("", key).beside(keys.QUEUED, task).key


def put_entry(key: str, value: bytes, seconds: float = 60, alias: str = "redis") -> None:
    """Write an entry into a cache that holds locks, as another process would."""
    assert stores.get_store(alias).add(key, value, seconds) is None


def has_entry(key: str) -> bool:
    """Say whether Redis has an entry of a lock, or of a queued call, under a key."""
    return stores.get_store("redis").read(key) is not None


def forget(lock: TaskLock) -> None:
    """Let the cache forget a lock that is held, as by an eviction."""
    store = stores.get_store(lock.cache or settings.SINGLETASK_CACHE)
    store.release(lock.key, store.read(lock.key).value)


def held_now(*typed: str) -> list[Any]:
    """Return what the operators are shown: all that is held, or what some texts mean."""
    return held.held([names.select(text) for text in typed])


def starving(longer_than: float, *typed: str) -> list[Any]:
    """Return what has starved for so many seconds: all of it, or what some texts mean."""
    return starvation.starving(longer_than, [names.select(text) for text in typed])


def before_each_clear(monkeypatch: pytest.MonkeyPatch, act: Callable[..., None]) -> None:
    """Let something happen after an operator was shown a lock and before it is freed."""
    really = held.clear

    def clear(lock: Any, **by: Any) -> bool:
        act(**by)
        return really(lock, **by)

    monkeypatch.setattr(held, "clear", clear)


def forget_tasks_of_the_history() -> None:
    """Let the history's page ask for the tasks of the history, as it does each minute."""
    admin.tasks_of_history.cache_clear()


BOUNDS = {
    "locks on a page": (admin, "SHOWN"),
    "lanes of the timeline": (charts, "LANES"),
    "marks of the timeline": (charts, "ROWS"),
    "troubles of the timeline": (charts, "TROUBLES"),
    "runs of a percentile": (charts, "NEWEST"),
    "rows of a sum": (queries, "MOST"),
    "rows of a window": (queries, "NEWEST"),
    "names that a search begins": (queries, "FREQUENT"),
    "tokens of a question": (queries, "BATCH"),
    "rows of a search": (names, "SCANNED"),
    "open rows": (names, "OPEN"),
    "recorded tasks": (names, "RECORDED"),
    "rows of a task": (explain, "NEWEST"),
    "conflicts of what starves": (starvation, "NEWEST"),
    "usual holds": (held, "USUAL"),
}
"""How much the pages and the command read or show, at most."""


def bound(monkeypatch: pytest.MonkeyPatch, what: str, most: int) -> None:
    """Let this be the most that is read or shown, which otherwise needs many rows."""
    monkeypatch.setattr(*BOUNDS[what], most)


# == Workers
