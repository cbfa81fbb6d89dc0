"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import (
    NEWEST,
    OPEN,
    NoHistory,
    UsualHold,
    reading,
    timestamp,
)
from django_singletask.locks.address import Address
from django_singletask.locks.keys import QUEUED, LockKey
from django_singletask.locks.lease import KEPT
from django_singletask.models import TaskLockEvent
from django_singletask.operators.names import (
    Selector,
    UnknownName,
    nearest,
    recorded_tasks,
    select,
    task_names,
)
from django_singletask.operators.rows import HeldLock, lock_of, locks_of
from django_singletask.stores import get_store
from django_singletask.stores.base import CannotList

logger = logging.getLogger("django_singletask")

USUAL = 30
"""Locks whose usual hold is looked up."""
MATCHES = 2000
"""Newest rows among whose names those like an unknown name are looked for."""


def held(selectors: Sequence[Selector] = ()) -> list[HeldLock]:
    """List the locks that are held, dead, queued or expired, the longest held first.

    They match one of ``selectors``, if there are any. A store that cannot list its entries is asked
    for the keys of the open rows of the history. Raises :class:`CannotList` if there are none to be
    had, and :class:`LockUnavailable`.
    """
    locks = _find(selectors)
    holders = Counter(lock.lock_key for lock in locks)
    for lock in locks:
        lock.slots_held = holders[lock.lock_key]
    locks += _expired({lock.token for lock in locks})
    locks = [
        lock
        for lock in locks
        # A call that is unique until it has finished has its lock as well while it runs.
        if not (lock.queued and lock.pid)
        and (not selectors or any(selector.matches(lock) for selector in selectors))
    ]
    return sorted(locks, key=lambda lock: (-lock.held_for, lock.name))


def judge(rows: Iterable[TaskLockEvent]) -> None:
    """Set the state of open holds of the history, which the store knows: as :func:`held` has it."""
    rows = [row for row in rows if row.kind == "run" and not row.outcome]
    try:
        locks = _read({row.key for row in rows if row.cache in ("", conf.cache)})
    except Exception as error:  # each cache client has errors of its own
        logger.warning("The states of open holds are not known: %s", error)
        return
    states = {lock.token: lock.state for lock in locks if lock.state in ("held", "dead")}
    for row in rows:
        row.state = states.get(row.token, "expired" if _is_over(row) else "held")


def look(selectors: Sequence[Selector] = ()) -> list[HeldLock]:
    """List what :func:`held` does; nothing where the cache cannot list its entries."""
    try:
        return held(selectors)
    except CannotList:
        return []


def must_be_known(selectors: Iterable[Selector], locks: Sequence[HeldLock] = ()) -> None:
    """Raise :class:`UnknownName` if a selector means no lock and nothing else that is known."""
    for selector in selectors:
        if any(map(selector.matches, locks)) or selector.is_known():
            continue
        names = [*task_names(), *recorded_tasks()]
        if selector.name:
            with suppress(LockUnavailable):
                names += [lock.name for lock in look()]
            with suppress(NoHistory), reading():
                names += TaskLockEvent.objects.newest().values_list("name", flat=True)[:MATCHES]
        raise UnknownName(selector.text, nearest(selector.text, names))


def still_held(key: str, token: str) -> HeldLock | None:
    """Return the lock that has this key, or None if this token no longer has it."""
    locks = (lock for lock in look([select(key)]) if lock.state != "expired")
    return next((lock for lock in locks if (lock.key, lock.token) == (key, token)), None)


def with_history(locks: list[HeldLock]) -> list[HeldLock]:
    """Set how many calls met each lock, and how long it usually is held.

    What is usual for a task, or a name without one, costs a query, so only the longest held, which
    come first, are looked up: a hold that has only begun cannot be an unusually long one.
    """
    if conf.history == "off":
        return locks
    conflicts: Counter[str] = Counter()
    try:
        with reading():
            tokens = (lock.token for lock in locks)
            for token, count in TaskLockEvent.objects.counts_behind(tokens):
                conflicts[token] += count
    except NoHistory as error:
        logger.warning("The conflicts cannot be counted. %s", error)
        return locks
    holds: dict[str, UsualHold | None] = {}
    for lock in locks:
        lock.conflicts = conflicts[lock.token]
        if lock.state == "held":
            owner = lock.task or lock.name
            if owner not in holds and len(holds) < USUAL:
                holds[owner] = TaskLockEvent.objects.usual_hold(lock.name, lock.task or "")
            lock.usual = holds.get(owner)
    return locks


def clear(lock: HeldLock, *, actor: str, reason: str = "") -> bool:
    """Free a lock if the holder that was shown still has it; say whether it was freed.

    An expired lock has nothing to free, and its row is for the sweep to close. If the task is
    unique until it has finished, the entry that stops duplicates of this call is freed too: the
    process that hangs would renew it without end.
    """
    if not _clear(lock, actor, reason):
        return False
    if lock.task and not lock.queued:
        beside = LockKey(lock.name, lock.key).beside(QUEUED, lock.task).key
        try:
            for entry in _read([beside]):
                # The entry of a call that is queued behind this one stays.
                if entry.task_id == lock.task_id:
                    _clear(entry, actor, reason, tell=False)  # the row of the lock says it
        except LockUnavailable as error:
            # Not raised: the lock itself is free, and the caller must hear that.
            logger.warning("%s was freed, but not the entry of its call: %s", lock.key, error)
    return True


def _clear(lock: HeldLock, actor: str, reason: str, *, tell: bool = True) -> bool:
    address = Address(conf.cache, LockKey(lock.name, lock.key))
    return address.clear(lock.token, actor, timeout=None, reason=reason, tell=tell)


def _find(selectors: Sequence[Selector]) -> list[HeldLock]:
    """Return what the store has under the keys of the selectors, or else all that it has."""
    keys = [slot for each in selectors for lock in each.locks for slot in lock.slots()]
    locks = _read(keys)
    seen = {key for lock in locks for key in (lock.key, lock.lock_key)}
    if selectors and all(seen & each.keys and not each.task for each in selectors):
        return locks
    # A name that hides its arguments, for example, is only found in the list.
    try:
        return locks_of(get_store(conf.cache).entries())
    except CannotList:
        return _read([*keys, *_open_keys()])


def _open_keys() -> list[str]:
    """Return the keys of holds that are open in the history, and of those that were kept last."""
    try:
        with reading():
            keys = list(TaskLockEvent.objects.open().values_list("key", flat=True)[:OPEN])
            ended = TaskLockEvent.objects.of_state("run", None).newest()[:NEWEST]
            return keys + [row.key for row in ended if row.reason.startswith(KEPT)]
    except NoHistory as error:
        raise CannotList(
            f"The cache {conf.cache!r} cannot list its entries, and without the history nothing "
            f"else says what is held. {error} Name one lock."
        ) from error


def _read(keys: Iterable[str]) -> list[HeldLock]:
    return locks_of(get_store(conf.cache).read_many(dict.fromkeys(keys)).items())


def _expired(tokens: Collection[str]) -> list[HeldLock]:
    """Return the holds that are open in the history although their tokens are not held."""
    try:
        with reading():
            rows = TaskLockEvent.objects.open()[:OPEN]
            over = [row for row in rows if row.token not in tokens and _is_over(row)]
    except NoHistory:
        return []
    holders = [(row.key, row.holder()) for row in over]
    return [lock_of(key, holder, holder, "expired", time.time()) for key, holder in holders]


def _is_over(row: TaskLockEvent) -> bool:
    """Say whether the first lease of a hold has ended, if it is of this cache."""
    return row.cache in ("", conf.cache) and timestamp(row.at) + row.timeout < time.time()
