"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import ast
import dataclasses
import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from celery import current_app
from django.db import DatabaseError
from django.db.models import Sum

from django_singletask.conf import conf
from django_singletask.history import COUNTED, SWEEPER
from django_singletask.keys import LATEST, QUEUED, LockKey, key_beside, name_key, shown_key
from django_singletask.liveness import Holder
from django_singletask.locks import TaskLock
from django_singletask.stores import CannotList, Store, get_store
from django_singletask.stores.base import PREFIX
from django_singletask.task import SingletonTask

__all__ = ["CannotList", "HeldLock", "clear", "duration", "held"]

logger = logging.getLogger("django_singletask")


@dataclasses.dataclass(frozen=True)
class HeldLock:
    """A lock that the store holds now, or a call that is ``queued`` and stops its duplicates.

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

    @property
    def queued(self) -> bool:
        """Whether this is no lock, but the entry of a queued call."""
        return self.key.startswith(QUEUED)


def held(names: Iterable[str] = (), *, task: str | None = None) -> list[HeldLock]:
    """List the locks that are held, the longest held first.

    ``names`` (see :func:`keys_of`) and ``task`` narrow the list. Read from the store where it can
    list its entries, else from the open rows of the history, each verified against the store.
    Raises :class:`CannotList` where there is neither, and the errors of the cache's client.
    """
    wanted = {name: keys_of(name) for name in sorted(set(names))}
    locks = [
        lock
        for lock in _find(get_store(conf.cache), wanted)
        if lock.name != SWEEPER
        # While it runs, a call that is unique until it has finished has its lock.
        and not (lock.queued and lock.holder.pid)
        and (not wanted or any(lock.name == n or lock.key in keys for n, keys in wanted.items()))
        and (task is None or lock.holder.task == task)
    ]
    return sorted(_with_skips(locks), key=lambda lock: (-lock.held_for, lock.name))


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
    if name.startswith(PREFIX):
        return [name]
    keys = []
    with suppress(ValueError):
        keys.append(name_key(name).key)
    task, separator, _arguments = name.partition("(")
    try:
        call = ast.parse(name.strip(), mode="eval").body
        if not separator or not isinstance(call, ast.Call):
            return keys
        args = [ast.literal_eval(argument) for argument in call.args]
        kwargs = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        known = current_app.tasks.get(task)
        # As names are shown: all arguments that make the lock, and only those.
        found = [] if args else [shown_key(task, kwargs)]
        if isinstance(known, SingletonTask):
            with suppress(TypeError, ValueError):
                found.append(known.lock_key(args, kwargs, {}).key)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return keys
    for key in found:
        keys += [key, key_beside(QUEUED, key, task)]
    return keys


def _read(store: Store, keys: Iterable[str]) -> list[HeldLock]:
    entries = ((key, store.read(key)) for key in keys)
    return [
        _held(key, Holder.decode(entry.value), entry.remaining) for key, entry in entries if entry
    ]


def _open_keys() -> list[str]:
    from django_singletask.models import TaskLockEvent

    cannot = f"The cache {conf.cache!r} cannot list its entries, and "
    hint = " Name a lock by its key, or ask for one lock in code: task.lock(…).holder()."
    if conf.history == "off":
        raise CannotList(f"{cannot}with SINGLETASK_HISTORY = 'off' nothing else knows them.{hint}")
    rows = TaskLockEvent.objects.filter(kind="acquired", outcome="")
    try:
        return list(dict.fromkeys(rows.order_by("id").values_list("key", flat=True)))
    except DatabaseError as error:
        raise CannotList(
            f"{cannot}the history, which knows them, cannot be read: {_first_line(error)}. "
            f"Has 'manage.py migrate' run?{hint}"
        ) from error


def _held(key: str, holder: Holder, remaining: float | None) -> HeldLock:
    # Something else may have written the entry.
    since = holder.since if math.isfinite(holder.since) else 0
    timeout = holder.timeout if math.isfinite(holder.timeout) else 0
    return HeldLock(
        name=holder.name or key,
        key=key,
        holder=dataclasses.replace(holder, since=since, timeout=timeout),
        held_for=max(0.0, time.time() - since) if since else 0.0,
        remaining=remaining,
        skipped=None,
    )


def _with_skips(locks: list[HeldLock]) -> list[HeldLock]:
    if conf.history == "off" or not locks:
        return locks
    from django_singletask.models import TaskLockEvent

    tokens = [lock.holder.token for lock in locks if lock.holder.token]
    skipped: dict[str, int] = {}
    try:
        for start in range(0, len(tokens), 500):
            rows = TaskLockEvent.objects.filter(
                kind__in=COUNTED, blocked_by__in=tokens[start : start + 500]
            )
            sums = rows.order_by().values("blocked_by").annotate(total=Sum("count"))
            skipped.update(sums.values_list("blocked_by", "total"))
    except DatabaseError as error:
        logger.warning("The skipped runs cannot be counted: %s.", _first_line(error))
        return locks
    return [dataclasses.replace(lock, skipped=skipped.get(lock.holder.token, 0)) for lock in locks]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def clear(lock: HeldLock, *, actor: str) -> bool:
    """Free a lock if the holder that was shown still has it; say whether it was freed."""
    return TaskLock(LockKey(lock.name, lock.key)).clear(token=lock.holder.token, actor=actor)


def duration(seconds: float) -> str:
    """Write a duration in its two largest units: ``3s``, ``2m 14s``, ``1h 02m``, ``3d 04h``."""
    total = int(seconds)
    minutes, secs = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {secs:02d}s"
    return f"{secs}s"
