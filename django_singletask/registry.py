"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import ast
import dataclasses
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from celery import current_app
from django.db import Error
from django.db.models import Sum

from django_singletask.checks import import_tasks
from django_singletask.conf import conf
from django_singletask.history import _UNSTORABLE, COUNTED, SWEEPER
from django_singletask.keys import LATEST, QUEUED, LockKey, key_beside, name_key, shown_key
from django_singletask.liveness import Holder, proof_of_death
from django_singletask.locks import TaskLock
from django_singletask.past import (
    NoHistory,
    Starving,
    UsualHold,
    of_task,
    open_rows,
    rows,
    starving,
    timestamp,
    usual_hold,
)
from django_singletask.stores import CannotList, Store, get_store
from django_singletask.stores.base import PREFIX
from django_singletask.task import SingletonTask

__all__ = [
    "CannotList",
    "HeldLock",
    "NoHistory",
    "Starving",
    "UsualHold",
    "clear",
    "held",
    "starving",
    "usual_hold",
]

logger = logging.getLogger("django_singletask")


@dataclasses.dataclass(frozen=True)
class HeldLock:
    """A lock that the store holds now, or what looks like one.

    ``state`` is ``"held"``; ``"dead"``, held by a process that is proven gone, and free for the
    next call on that host; ``"queued"``, no lock but the entry of a call that stops its
    duplicates; or ``"expired"``, an open row of the history whose lease is over and whose token
    the store no longer has: the lock is free, or another's, and a worker's sweep closes the row.

    ``held_for`` and ``remaining`` are seconds, ``remaining`` None where the store cannot tell;
    ``skipped`` counts the runs that this holder was in the way of (of a queued call: its
    duplicates), None without a history.
    """

    name: str
    key: str
    holder: Holder
    held_for: float
    remaining: float | None
    skipped: int | None
    state: str = "held"

    @property
    def queued(self) -> bool:
        """Whether this is no lock, but the entry of a queued call."""
        return self.state == "queued"


def held(names: Iterable[str] = (), *, task: str | None = None) -> list[HeldLock]:
    """List the locks that are held, dead, queued or expired, the longest held first.

    ``names`` (see :func:`keys_of`) and ``task`` narrow the list. Read from the store where it can
    list its entries, else from the open rows of the history, each verified against the store.
    Raises :class:`CannotList` where there is neither, and the errors of the cache's client.
    """
    wanted = {name: keys_of(name) for name in sorted(set(names))}
    found = _find(get_store(conf.cache), wanted)
    locks = [
        lock
        for lock in found + _expired({lock.holder.token for lock in found})
        if lock.name != SWEEPER
        # While it runs, a call that is unique until it has finished has its lock.
        and not (lock.queued and lock.holder.pid)
        and (not wanted or any(lock.name == n or lock.key in keys for n, keys in wanted.items()))
        and (task is None or lock.holder.task == task)
    ]
    return sorted(_with_skips(locks), key=lambda lock: (-lock.held_for, lock.name))


def _expired(tokens: Collection[str]) -> list[HeldLock]:
    """Return the holds that the history takes for open although their tokens are not held."""
    now = time.time()
    try:
        over = {
            row.pk: row
            for row in open_rows()
            if row.cache in {"", conf.cache}
            and row.token not in tokens
            and timestamp(row.at) + row.timeout < now
        }
        # Of a run that ended between the look at the store and this one the row is closed by now.
        # The outcome is looked at here: SQLite would rather read all that have none.
        still = rows().filter(pk__in=list(over)).order_by().values_list("pk", "outcome")
        found = [over[pk] for pk, outcome in still if not outcome] if over else []
    except (NoHistory, Error):
        return []
    return [
        HeldLock(
            name=row.name,
            key=row.key,
            holder=Holder.from_dict(
                {
                    **{field: getattr(row, field) for field in ("token", "name", "host", "pid")},
                    "task": row.task or None,
                    "task_id": row.task_id or None,
                    "since": timestamp(row.at),
                    "timeout": row.timeout,
                }
            ),
            held_for=now - timestamp(row.at),
            remaining=None,
            skipped=None,
            state="expired",
        )
        for row in found
    ]


def must_list() -> None:
    """Raise :class:`CannotList` if the cache cannot list its entries."""
    try:
        next(get_store(conf.cache).entries(), None)
    except CannotList as error:
        raise CannotList(
            f"The cache {conf.cache!r} cannot list its entries, and no history knows which calls "
            "are queued. Name them, as in 'feeds.tasks.import_feed(feed_id=7)'."
        ) from error


def _find(store: Store, wanted: Mapping[str, Collection[str]]) -> list[HeldLock]:
    try:
        return [
            _held(key, Holder.decode(entry.value), entry.remaining)
            for key, entry in store.entries()
            if not key.startswith(LATEST)
        ]
    except CannotList:
        # What is asked for by its key, or by the name of a TaskLock, needs no list.
        keys = dict.fromkeys(key for keys in wanted.values() for key in keys)
        direct = _read(store, keys)
        found = {lock.key for lock in direct}
        if wanted and all(found.intersection(keys) for keys in wanted.values()):
            return direct
        return _read(store, {**keys, **dict.fromkeys(_open_keys())})


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
            found.append(LockKey(name, shown_key(task, kwargs)))
    with suppress(Exception):  # a callable lock_name may raise anything
        if known := _task(task):
            found.append(known.lock_key(args, kwargs, {}))
    for lock in found:
        locks += [lock, LockKey(lock.name, key_beside(QUEUED, lock.key, task))]
    return locks


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


def calls() -> list[str]:
    """Return a pattern of a call of each task of this project that takes a lock."""
    _import_tasks()
    found = []
    for name, task in sorted(current_app.tasks.items()):
        if isinstance(task, SingletonTask):
            needed = (each for each in task.run_signature.parameters.values())
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


def without_defaults(name: str) -> str:
    """Return the name of a call without the arguments that have their defaults.

    It is the same call, and found as such by :func:`keys_of`.
    """
    call = _call(name)
    task = call and _task(call[0])
    if not (call and task):
        return name
    default = {each.name: each.default for each in task.run_signature.parameters.values()}
    kept = [f"{n}={v!r}" for n, v in call[2].items() if n not in default or default[n] != v]
    return f"{task.name}({', '.join([*map(repr, call[1]), *kept])})"


def look(name: str) -> list[HeldLock]:
    """Return what is held, dead, queued or expired under one name, without listing if possible.

    Raises the errors of the cache's client.
    """
    keys = keys_of(name)
    found = _read(get_store(conf.cache), keys)
    if not found:
        # A name that hides its arguments, say, is found only where it stands.
        with suppress(CannotList):
            return held([name])
    expired = _expired({lock.holder.token for lock in found})
    locks = [*found, *(lock for lock in expired if lock.key in keys or lock.name == name)]
    return _with_skips([lock for lock in locks if not (lock.queued and lock.holder.pid)])


def _read(store: Store, keys: Iterable[str]) -> list[HeldLock]:
    entries = ((key, store.read(key)) for key in keys)
    return [
        _held(key, Holder.decode(entry.value), entry.remaining) for key, entry in entries if entry
    ]


def _open_keys() -> list[str]:
    cannot = f"The cache {conf.cache!r} cannot list its entries, and "
    hint = " Name a lock by its key, or ask for one lock in code: task.lock(…).holder()."
    if conf.history == "off":
        raise CannotList(f"{cannot}with SINGLETASK_HISTORY = 'off' nothing else knows them.{hint}")
    try:
        return list(dict.fromkeys(open_rows().values_list("key", flat=True)))
    except Error as error:
        raise CannotList(
            f"{cannot}the history, which knows them, cannot be read: {_first_line(error)}. "
            f"Has 'manage.py migrate' run?{hint}"
        ) from error


def _held(key: str, holder: Holder, remaining: float | None) -> HeldLock:
    # Something else may have written the entry: what no database takes, no page can show either.
    facts = vars(holder).items()
    texts: Any = {name: _storable(text) for name, text in facts if isinstance(text, str)}
    holder = dataclasses.replace(holder, **texts)
    since = holder.since if math.isfinite(holder.since) else 0
    timeout = holder.timeout if math.isfinite(holder.timeout) else 0
    return HeldLock(
        name=holder.name or key,
        key=key,
        holder=dataclasses.replace(holder, since=since, timeout=timeout),
        held_for=max(0.0, time.time() - since) if since else 0.0,
        remaining=remaining,
        skipped=None,
        state=_state(key, holder),
    )


def _storable(text: str) -> str:
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _state(key: str, holder: Holder) -> str:
    if key.startswith(QUEUED):
        return "queued"
    return "dead" if proof_of_death(holder) else "held"


def _with_skips(locks: list[HeldLock]) -> list[HeldLock]:
    if conf.history == "off" or not locks:
        return locks
    tokens = [lock.holder.token for lock in locks if lock.holder.token]
    skipped: dict[str, int] = {}
    try:
        for start in range(0, len(tokens), 500):
            # The kind is looked at here: SQLite would rather read all that were skipped.
            part = rows().filter(blocked_by__in=tokens[start : start + 500]).order_by()
            sums = part.values("blocked_by", "kind").annotate(total=Sum("count"))
            for token, kind, total in sums.values_list("blocked_by", "kind", "total"):
                if kind in COUNTED:
                    skipped[token] = skipped.get(token, 0) + total
    except Error as error:
        logger.warning("The skipped runs cannot be counted: %s.", _first_line(error))
        return locks
    return [dataclasses.replace(lock, skipped=skipped.get(lock.holder.token, 0)) for lock in locks]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def clear(lock: HeldLock, *, actor: str) -> bool:
    """Free a lock if the holder that was shown still has it; say whether it was freed.

    Of an expired one there is nothing to free, and its row is the sweep's to close. With the lock
    of a call that is unique until it has finished goes the entry that stops its duplicates: the
    process that hangs would renew it for ever.
    """
    if not _clear(lock.name, lock.key, lock.holder.token, actor):
        return False
    if lock.holder.task and not lock.queued:
        try:
            _clear_beside(lock, lock.holder.task, actor)
        except Exception as error:  # each client has errors of its own
            # The lock itself is free, and who is told otherwise looks for the fault elsewhere.
            why = f"{type(error).__name__}: {_first_line(error)}"
            logger.warning("%s was freed, but not the entry of its call: %s.", lock.key, why)
    return True


def _clear_beside(lock: HeldLock, task: str, actor: str) -> None:
    beside = key_beside(QUEUED, lock.key, task)
    for entry in _read(get_store(conf.cache), [beside]):
        # Of a call that is queued behind this one it stays.
        if entry.holder.task_id == lock.holder.task_id:
            _clear(lock.name, beside, entry.holder.token, actor)


def _clear(name: str, key: str, token: str, actor: str) -> bool:
    if "\N{REPLACEMENT CHARACTER}" in token:
        # It was shown with what can be shown; the entry has it as it is.
        entry = get_store(conf.cache).read(key)
        whole = Holder.decode(entry.value).token if entry is not None else ""
        token = whole if _storable(whole) == token else token
    return TaskLock(LockKey(name, key)).clear(token=token, actor=actor)
