"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Iterable

from django.db import DatabaseError
from django.db.models import Sum

from django_singletask.conf import conf
from django_singletask.history import SWEEPER
from django_singletask.keys import LockKey, name_key
from django_singletask.liveness import Holder
from django_singletask.locks import TaskLock
from django_singletask.stores import CannotList, Store, get_store
from django_singletask.stores.base import PREFIX

__all__ = ["CannotList", "HeldLock", "clear", "duration", "held"]

logger = logging.getLogger("django_singletask")


@dataclasses.dataclass(frozen=True)
class HeldLock:
    """A lock that the store holds now.

    ``held_for`` and ``remaining`` are seconds, ``remaining`` None where the store cannot tell;
    ``skipped`` counts the runs that this holder was in the way of, None without a history.
    """

    name: str
    key: str
    holder: Holder
    held_for: float
    remaining: float | None
    skipped: int | None


def held(names: Iterable[str] = (), *, task: str | None = None) -> list[HeldLock]:
    """List the locks that are held, the longest held first.

    ``names`` (names or keys) and ``task`` narrow the list. Read from the store where it can list
    its entries, else from the open rows of the history, each verified against the store. Raises
    :class:`CannotList` where there is neither, and the errors of the cache's client.
    """
    wanted = set(names)
    locks = [
        lock
        for lock in _find(get_store(conf.cache), wanted)
        if lock.name != SWEEPER
        and (not wanted or lock.name in wanted or lock.key in wanted)
        and (task is None or lock.holder.task == task)
    ]
    return sorted(_with_skips(locks), key=lambda lock: (-lock.held_for, lock.name))


def _find(store: Store, wanted: set[str]) -> list[HeldLock]:
    try:
        return [
            _held(key, Holder.decode(entry.value), entry.remaining)
            for key, entry in store.entries()
        ]
    except CannotList:
        # What is asked for by its key, or by the name of a TaskLock, needs no list.
        keys = dict.fromkeys(filter(None, map(_direct_key, sorted(wanted))))
        direct = _read(store, keys)
        if wanted and wanted <= {part for lock in direct for part in (lock.name, lock.key)}:
            return direct
        return _read(store, {**keys, **dict.fromkeys(_open_keys())})


def _direct_key(name: str) -> str | None:
    if name.startswith(PREFIX):
        return name
    try:
        return name_key(name).key
    except ValueError:
        return None


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
                kind="skipped", blocked_by__in=tokens[start : start + 500]
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
