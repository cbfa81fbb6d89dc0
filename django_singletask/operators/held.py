"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from django.db import Error
from django.db.models import Sum

from django_singletask.conf import conf
from django_singletask.history.queries import (
    NoHistory,
    UsualHold,
    open_rows,
    rows,
    timestamp,
    usual_hold,
)
from django_singletask.history.writing import _UNSTORABLE, COUNTED, SWEEPER
from django_singletask.holder import Holder
from django_singletask.locks.keys import LATEST, QUEUED, LockKey
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.lock import TaskLock
from django_singletask.operators.names import keys_of
from django_singletask.operators.starving import Starving, starving
from django_singletask.stores import CannotList, Entry, Store, get_store

__all__ = [
    "CannotList",
    "HeldLock",
    "NoHistory",
    "Starving",
    "UsualHold",
    "clear",
    "held",
    "starving",
    "still_held",
    "usual_holds",
    "whose",
]

logger = logging.getLogger("django_singletask")

USUAL = 30
"""Locks of which it is looked up how long they usually are held."""


@dataclasses.dataclass(frozen=True)
class HeldLock:
    """A lock that the store holds now, or what looks like one.

    ``state`` is ``"held"``; ``"dead"``, held by a process that is proven gone, and free for the
    next call on that host; ``"queued"``, no lock but the entry of a call that stops its
    duplicates; or ``"expired"``, an open row of the history whose first lease is over and whose
    token the store no longer has: the lock is free, or another's. A worker's sweep closes the row,
    unless its process lives and takes the lock again, which only a cache that forgot lets it.

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
        entries = ((key, entry) for key, entry in store.entries() if not key.startswith(LATEST))
        return _held(entries)
    except CannotList:
        # What is asked for by its key, or by the name of a TaskLock, needs no list.
        keys = dict.fromkeys(key for keys in wanted.values() for key in keys)
        direct = _read(store, keys)
        found = {lock.key for lock in direct}
        if wanted and all(found.intersection(keys) for keys in wanted.values()):
            return direct
        return _read(store, {**keys, **dict.fromkeys(_open_keys())})


def usual_holds(locks: Sequence[HeldLock]) -> dict[str, UsualHold]:
    """Return how long runs usually have these locks, by task, or by name of those without one.

    Of the longest held alone, since each costs a query: they can be held for unusually long.
    """
    asked: dict[str, UsualHold | None] = {}
    for lock in sorted(locks, key=lambda lock: -lock.held_for):
        if lock.state == "held" and whose(lock) not in asked and len(asked) < USUAL:
            asked[whose(lock)] = usual_hold(lock.name, lock.holder.task or "")
    return {of: usual for of, usual in asked.items() if usual is not None}


def whose(lock: HeldLock) -> str:
    """Return of what the usual hold of a lock is."""
    return lock.holder.task or lock.name


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


def still_held(key: str, token: str) -> HeldLock | None:
    """Return the lock that has this key, or None if this token no longer has it.

    Raises the errors of the cache's client.
    """
    locks = (lock for lock in look(key) if lock.state != "expired")
    return next((lock for lock in locks if (lock.key, lock.holder.token) == (key, token)), None)


def _read(store: Store, keys: Iterable[str]) -> list[HeldLock]:
    entries = ((key, store.read(key)) for key in keys)
    return _held((key, entry) for key, entry in entries if entry is not None)


def _held(entries: Iterable[tuple[str, Entry]]) -> list[HeldLock]:
    judged: dict[tuple[object, ...], bool] = {}  # one process may have many
    return [_lock(key, entry, judged) for key, entry in entries]


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


def _lock(key: str, entry: Entry, judged: dict[tuple[object, ...], bool]) -> HeldLock:
    holder = Holder.decode(entry.value)
    # Something else may have written the entry: what no database takes, no page can show either.
    facts = vars(holder).items()
    changed: Any = {
        name: _storable(text)
        for name, text in facts
        if isinstance(text, str) and _UNSTORABLE.search(text)
    }
    if changed:
        holder = dataclasses.replace(holder, **changed)
    return HeldLock(
        name=holder.name or key,
        key=key,
        holder=holder,
        held_for=max(0.0, time.time() - holder.since) if holder.since else 0.0,
        remaining=entry.remaining,
        skipped=None,
        state=_state(key, holder, judged),
    )


def _storable(text: str) -> str:
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def _state(key: str, holder: Holder, judged: dict[tuple[object, ...], bool]) -> str:
    if key.startswith(QUEUED):
        return "queued"
    process = (holder.boot_id, holder.pid_ns, holder.pid, holder.start)
    if process not in judged:
        judged[process] = proof_of_death(holder) is not None
    return "dead" if judged[process] else "held"


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
    beside = LockKey(lock.name, lock.key).beside(QUEUED, task).key
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
