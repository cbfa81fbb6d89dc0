"""Say why a lock is held, or is not: the facts of the store and of the history together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from django_singletask.history.queries import NEWEST, NoHistory, UsualHold, ago, reading
from django_singletask.locks.keys import QUEUED, LockKey, lock_of_slot
from django_singletask.locks.liveness import is_alive, proof_of_death
from django_singletask.models import TROUBLE, TaskLockEvent
from django_singletask.operators.held import look, must_be_known, with_history
from django_singletask.operators.names import Selector, select, select_task
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import Starving, starvation
from django_singletask.operators.words import hold_seconds
from django_singletask.stores.base import PREFIX

__all__ = ["HOLDING", "Why", "why"]

HOLDING = frozenset({"held", "dead", "handed_over", "kept"})
"""States of a lock that somebody has."""


@dataclasses.dataclass(frozen=True)
class Past:
    """One thing that happened ``ago`` seconds before now; ``lasted`` is the length of a hold."""

    what: str
    ago: float
    task_id: str = ""
    host: str = ""
    pid: int = 0
    reason: str = ""
    actor: str = ""
    lasted: float | None = None


@dataclasses.dataclass(frozen=True)
class Why:
    """What is known of one lock now.

    ``lock`` is the lock in a state of ``HOLDING``, ``queued`` the call that waits for it,
    ``expired`` are holds whose end nobody reported. ``alive`` says whether the holder's process is
    there, None if that cannot be told from this host; ``death`` is the proof that it is gone.
    ``duplicates`` counts the duplicates among the calls that ``lock`` was in the way of.
    ``beside`` are the other holders of a lock with several slots, ``others`` are the locks that the
    task holds with other arguments if this one is free, ``same_name`` the keys of other locks with
    the same name. ``no_history`` says why nothing is known of the past, which the other fields are
    about; it is empty if the history was read.
    """

    name: str
    key: str
    lock: HeldLock | None
    beside: list[HeldLock]
    queued: HeldLock | None
    expired: list[HeldLock]
    alive: bool | None
    death: str | None
    usual: UsualHold | None
    completed: Past | None
    skipped: Past | None
    troubles: list[Past]
    starving: Starving | None
    others: list[str]
    same_name: list[str]
    duplicates: int
    no_history: str


def why(name: str) -> Why:
    """Gather what is known of a lock, given its name, its key, or a call of its task.

    Raises :class:`UnknownName` if there is nothing, and :class:`LockUnavailable`.
    """
    slot, name = name, lock_of_slot(name) if name.startswith(PREFIX) else name
    selector = select(name)
    locks = with_history(look([selector]))
    must_be_known([selector], locks)
    rows, no_history = [], ""
    try:
        rows = _newest_rows(selector, locks)
    except NoHistory as error:
        no_history = str(error)
    keys, same_name = _keys(selector, locks, rows)
    locks = [lock for lock in locks if lock.lock_key in keys]
    rows = [row for row in rows if lock_of_slot(row.key) in keys]
    holding = [lock for lock in locks if lock.state in HOLDING]
    holding.sort(key=lambda lock: lock.key != slot)  # the slot that was named comes first
    lock = next(iter(holding), None)
    queued = [lock for lock in locks if lock.queued]
    expired = [lock for lock in locks if lock.state == "expired"]
    shown, task = name, name.partition("(")[0]
    key = selector.locks[0].key if selector.locks else name
    known: list[HeldLock | TaskLockEvent] = [*holding, *queued, *expired, *rows]
    if known:
        shown, key, task = known[0].name, lock_of_slot(known[0].key), known[0].task or ""
    skips = [row for row in rows if row.is_counted]
    behind = [row for row in skips if lock and row.blocked_by == lock.token]
    newest = {row.kind: row for row in reversed(rows)}
    others = look([select_task(task)]) if task and not lock else []
    return Why(
        name=shown,
        key=key,
        lock=lock,
        beside=holding[1:],
        queued=next(iter(queued), None),
        expired=expired,
        alive=is_alive(lock.process) if lock else None,
        death=proof_of_death(lock.process) if lock else None,
        usual=TaskLockEvent.objects.usual_hold(shown, task),
        completed=next((_past(row) for row in rows if row.is_completed), None),
        skipped=next(map(_past, skips), None),
        troubles=[_past(newest[kind]) for kind in sorted(TROUBLE & newest.keys())],
        starving=starvation(shown, rows),
        others=[other.name for other in others if other.state in HOLDING],
        same_name=same_name,
        duplicates=sum(row.count for row in behind if row.kind == "duplicate"),
        no_history=no_history,
    )


def _newest_rows(selector: Selector, locks: Sequence[HeldLock]) -> list[TaskLockEvent]:
    """Return the newest rows of the first of these names that has any, the newest first."""
    name = selector.text
    with reading():
        for each in dict.fromkeys([*(lock.name for lock in locks), *selector.names(), name]):
            if rows := list(TaskLockEvent.objects.named(each)[:NEWEST]):
                return rows
    return []


def _keys(
    selector: Selector, locks: Sequence[HeldLock], rows: Sequence[TaskLockEvent]
) -> tuple[set[str], list[str]]:
    """Return the keys of the lock that is meant, and those of other locks with its name.

    Two long names may be shown alike. Then the lock that is held is meant, or else the one that
    was seen last.
    """
    held_first = sorted(locks, key=lambda lock: lock.state not in HOLDING)
    tasks = {lock.lock_key: lock.task or "" for lock in held_first}
    for row in rows:
        tasks.setdefault(lock_of_slot(row.key), row.task)
    lock_keys = [key for key in tasks if not key.startswith(QUEUED)]
    name, meant, same_name = selector.text, {*selector.keys}, list[str]()
    if not (name.startswith(PREFIX) or meant.intersection(tasks)):
        meant, same_name = {*lock_keys[:1]}, lock_keys[1:]
    if meant.issuperset(lock_keys):
        return {*tasks}, []
    return meant | {
        LockKey(name, key).beside(QUEUED, tasks[key]).key for key in meant & {*tasks}
    }, same_name


def _past(row: TaskLockEvent) -> Past:
    return Past(
        what=row.result or row.kind,
        ago=ago(row.ended_at or row.last_at or row.at),
        task_id=row.blocked_by_task_id if row.is_counted else row.task_id,
        host=row.host,
        pid=row.pid,
        reason=row.reason,
        actor=row.actor,
        lasted=hold_seconds(row) if row.kind == "acquired" else None,
    )
