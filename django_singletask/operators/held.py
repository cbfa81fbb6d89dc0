"""Say which locks are held, and clear them: for the command and the admin alike."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import (
    NEWEST,
    OPEN,
    SWEEPER,
    NoHistory,
    UsualHold,
    reading,
    timestamp,
)
from django_singletask.holder import Holder, clean
from django_singletask.locks.address import Address
from django_singletask.locks.keys import LATEST, QUEUED, LockKey, lock_of_slot
from django_singletask.locks.lease import KEPT
from django_singletask.locks.liveness import proof_of_death
from django_singletask.models import TaskLockEvent
from django_singletask.operators.names import keys_of
from django_singletask.stores import CannotList, Entry, get_store

__all__ = [
    "USUAL",
    "HeldLock",
    "clear",
    "held",
    "look",
    "must_list",
    "still_held",
    "with_usual_holds",
]

logger = logging.getLogger("django_singletask")

USUAL = 30
"""Locks whose usual hold is looked up."""


@dataclasses.dataclass(frozen=True)
class HeldLock:
    """A lock that the store holds now, or what looks like one.

    ``state`` is ``"held"``; ``"dead"``, held by a process that is proven gone, and free for the
    next call on that host; ``"handed_over"``, left to a process that has not received it yet;
    ``"kept"`` by a run that has returned (``lock_at_least``); ``"queued"``, no lock but the entry
    of a call that stops its duplicates; ``"blocking"``, such an entry of a call that has begun,
    which stays until its time is over; or ``"expired"``, an open row of the history whose first
    lease is over and whose token the store no longer has: the lock is free, or another holder has
    it. A worker's sweep closes the row, unless its process lives and takes the lock again, as it
    may when the cache has forgotten the lock.

    ``held_for`` and ``remaining`` are seconds, ``remaining`` None where the store cannot tell;
    ``skipped`` counts the runs that this holder was in the way of (of a queued call: its
    duplicates), None without a history. ``usual`` is set by :func:`with_usual_holds`. Each holder
    of a lock with several slots is a lock here, and ``slots_held`` counts them.
    """

    name: str
    key: str
    holder: Holder
    held_for: float
    state: str
    remaining: float | None
    skipped: int | None = None
    usual: UsualHold | None = None
    slots_held: int = 1

    @property
    def slots(self) -> int:
        """How many may hold the lock at once, as its holder knows it."""
        return self.holder.slots

    @property
    def lock_key(self) -> str:
        """The key of the lock; ``key`` is that of the slot if the lock has several."""
        return lock_of_slot(self.key)

    def goes_by(self, name: str, keys: Collection[str]) -> bool:
        """Say whether a name, which can stand for these keys, means this lock or this slot."""
        return self.name == name or self.key in keys or self.lock_key in keys

    @property
    def queued(self) -> bool:
        """Whether this is no lock, but the entry of a call that stops its duplicates."""
        return self.state in {"queued", "blocking"}

    @property
    def left(self) -> float:
        """Seconds until an entry ends that nobody renews, by clocks if the store cannot tell."""
        left = self.holder.timeout - self.held_for if self.remaining is None else self.remaining
        return max(0.0, left)

    @property
    def slow(self) -> bool:
        """Whether it has been held for longer than is usual, as far as that is known."""
        return self.usual is not None and self.usual.is_exceeded_by(self.held_for)


def held(names: Iterable[str] = (), *, task: str | None = None) -> list[HeldLock]:
    """List the locks that are held, dead, queued or expired, the longest held first.

    ``names`` (see :func:`keys_of`) and ``task`` narrow the list. A store that cannot list its
    entries is asked for the keys of the open rows of the history. Raises :class:`CannotList` if
    there are none to be had, and :class:`LockUnavailable`.
    """
    wanted = {name: keys_of(name) for name in sorted(set(names))}
    locks = _with_slots(_find(wanted))
    locks += _expired({lock.holder.token for lock in locks})
    locks = [
        lock
        for lock in locks
        if lock.name != SWEEPER
        # A call that is unique until it has finished has its lock as well while it runs.
        and not (lock.queued and lock.holder.pid)
        and (not wanted or any(lock.goes_by(n, keys) for n, keys in wanted.items()))
        and (task is None or lock.holder.task == task)
    ]
    return sorted(_with_skips(locks), key=lambda lock: (-lock.held_for, lock.name))


def look(names: Iterable[str] = (), *, task: str | None = None) -> list[HeldLock]:
    """List what :func:`held` does; nothing where the cache cannot list its entries."""
    try:
        return held(names, task=task)
    except CannotList:
        return []


def still_held(key: str, token: str) -> HeldLock | None:
    """Return the lock that has this key, or None if this token no longer has it.

    Raises :class:`LockUnavailable`.
    """
    locks = (lock for lock in look([key]) if lock.state != "expired")
    return next((lock for lock in locks if (lock.key, lock.holder.token) == (key, token)), None)


def must_list() -> None:
    """Raise :class:`CannotList` if the cache cannot list its entries."""
    try:
        next(get_store(conf.cache).entries(), None)
    except CannotList as error:
        raise CannotList(
            f"The cache {conf.cache!r} cannot list its entries, and no history knows which calls "
            "are queued. Name them, as in 'feeds.tasks.import_feed(feed_id=7)'."
        ) from error


def with_usual_holds(locks: Sequence[HeldLock]) -> list[HeldLock]:
    """Return the locks and, of those that are held, how long they usually are, by task or name.

    Each costs a query, so only the longest held, which come first, are looked up: a hold that has
    only begun cannot be an unusually long one.
    """
    holds: dict[str, UsualHold | None] = {}
    for lock in locks:
        owner = _owner(lock)
        if owner and owner not in holds and len(holds) < USUAL:
            holds[owner] = TaskLockEvent.objects.usual_hold(lock.name, lock.holder.task or "")
    return [dataclasses.replace(lock, usual=holds.get(_owner(lock))) for lock in locks]


def _owner(lock: HeldLock) -> str:
    """Return the task, or the name without one, whose usual hold is that of a held lock."""
    return (lock.holder.task or lock.name) if lock.state == "held" else ""


def clear(lock: HeldLock, *, actor: str) -> bool:
    """Free a lock if the holder that was shown still has it; say whether it was freed.

    An expired lock has nothing to free, and its row is for the sweep to close. If the task is
    unique until it has finished, the entry that stops duplicates of this call is freed too: the
    process that hangs would renew it without end.
    """
    if not _clear(lock, actor):
        return False
    if lock.holder.task and not lock.queued:
        beside = LockKey(lock.name, lock.key).beside(QUEUED, lock.holder.task).key
        try:
            for entry in _read([beside]):
                # The entry of a call that is queued behind this one stays.
                if entry.holder.task_id == lock.holder.task_id:
                    _clear(entry, actor)
        except LockUnavailable as error:
            # Not raised: the lock itself is free, and the caller must hear that.
            logger.warning("%s was freed, but not the entry of its call: %s", lock.key, error)
    return True


def _clear(lock: HeldLock, actor: str) -> bool:
    address = Address(conf.cache, LockKey(lock.name, lock.key))
    return address.clear(lock.holder.token, actor, timeout=None)


def _find(wanted: Mapping[str, Collection[str]]) -> list[HeldLock]:
    """Return what the store has under the keys of each wanted name, or else all that it has."""
    keys = dict.fromkeys(
        slot
        for keys in wanted.values()
        for key in keys
        for slot in ([key] if key.startswith(QUEUED) else LockKey("", key).slots())
    )
    locks = _read(keys)
    held_keys = {key for lock in locks for key in (lock.key, lock.lock_key)}
    if wanted and all(held_keys.intersection(keys) for keys in wanted.values()):
        return locks
    # A name that hides its arguments, for example, is only found in the list.
    try:
        entries = get_store(conf.cache).entries()
        return [_stored(key, entry) for key, entry in entries if not key.startswith(LATEST)]
    except CannotList:
        return _read({**keys, **dict.fromkeys(_open_keys())})


def _open_keys() -> list[str]:
    """Return the keys of holds that are open in the history, and of those that were kept last."""
    try:
        with reading():
            keys = list(TaskLockEvent.objects.open().values_list("key", flat=True)[:OPEN])
            ended = TaskLockEvent.objects.of_kind("acquired").values_list("key", "reason")[:NEWEST]
            return keys + [key for key, reason in ended if reason.startswith(KEPT)]
    except NoHistory as error:
        raise CannotList(
            f"The cache {conf.cache!r} cannot list its entries, and no history says what is held. "
            f"{error} Name a lock by its key, or ask for one lock in code: task.lock(…).holder()."
        ) from error


def _read(keys: Iterable[str]) -> list[HeldLock]:
    entries = get_store(conf.cache).read_many(keys)
    return [_stored(key, entry) for key, entry in entries.items()]


def _with_slots(locks: list[HeldLock]) -> list[HeldLock]:
    counts = Counter(lock.lock_key for lock in locks)
    return [
        dataclasses.replace(lock, slots_held=counts[lock.lock_key]) if lock.slots > 1 else lock
        for lock in locks
    ]


def _stored(key: str, entry: Entry) -> HeldLock:
    holder = Holder.decode(entry.value)
    if holder.kept:
        state = "blocking" if key.startswith(QUEUED) else "kept"
    elif key.startswith(QUEUED):
        state = "queued"
    elif holder.token and not holder.pid:
        state = "handed_over"
    else:
        state = "dead" if proof_of_death(holder) else "held"
    return _lock(key, holder, state, entry.remaining)


def _expired(tokens: Collection[str]) -> list[HeldLock]:
    """Return the holds that are open in the history although their tokens are not held."""
    now = time.time()
    try:
        with reading():
            over = [
                row
                for row in TaskLockEvent.objects.open()[:OPEN]
                if row.cache in {"", conf.cache}
                and row.token not in tokens
                and timestamp(row.at) + row.timeout < now
            ]
            # A run may have ended since the store was read: its row is closed by now.
            over = TaskLockEvent.objects.still_open(over)
    except NoHistory:
        return []
    return [_lock(row.key, row.holder(), "expired") for row in over]


def _lock(key: str, holder: Holder, state: str, remaining: float | None = None) -> HeldLock:
    held_for = max(0.0, time.time() - holder.since) if holder.since else 0.0
    return HeldLock(holder.name or clean(key, 255), key, holder, held_for, state, remaining)


def _with_skips(locks: list[HeldLock]) -> list[HeldLock]:
    if conf.history == "off":
        return locks
    skipped = dict.fromkeys((lock.holder.token for lock in locks), 0)
    try:
        with reading():
            for row in TaskLockEvent.objects.blocked_by(skipped):
                skipped[row.blocked_by] += row.count
    except NoHistory as error:
        logger.warning("The skipped runs cannot be counted. %s", error)
        return locks
    return [dataclasses.replace(lock, skipped=skipped[lock.holder.token]) for lock in locks]
