"""Say why a lock is held, or is not: the facts of the store and of the history together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from operator import attrgetter

from django_singletask.history.queries import NEWEST, NoHistory, UsualHold, ago, reading
from django_singletask.locks.keys import QUEUED, LockKey, lock_of_slot
from django_singletask.locks.liveness import is_alive, proof_of_death
from django_singletask.models import TaskLockEvent
from django_singletask.operators.held import held, look, must_be_known, with_history
from django_singletask.operators.names import Selector, find, select
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import HOUR, Starving, starvation
from django_singletask.stores.base import is_key

DAY = 86_400.0
HOLDING = frozenset({"held", "dead", "handed_over", "kept"})
"""States of a lock that somebody has."""


@dataclasses.dataclass(frozen=True)
class Why:
    """What is known of one lock now.

    ``run`` is the run whose id was asked for, if it does not hold the lock.
    ``lock`` is the lock in a state of ``HOLDING``, ``beside`` are its other holders if it has
    several slots, ``queued`` is the call that waits for it, ``expired`` are holds whose end nobody
    reported. ``alive`` says whether the holder's process is there, None if that cannot be told from
    this host; ``death`` is the proof that it is gone. ``same_name`` are the keys of other locks
    with the same name. ``no_history`` says why nothing is known of the past, or is empty.
    """

    name: str
    key: str
    free: bool
    run: TaskLockEvent | None
    lock: HeldLock | None
    beside: list[HeldLock]
    queued: HeldLock | None
    expired: list[HeldLock]
    alive: bool | None
    death: str | None
    usual: UsualHold | None
    completed: TaskLockEvent | None
    conflict: TaskLockEvent | None
    troubles: list[TaskLockEvent]
    starving: Starving | None
    same_name: list[str]
    no_history: str


@dataclasses.dataclass(frozen=True)
class TaskFacts:
    """What is known of all locks of a task now.

    ``held`` are its locks that somebody holds, ``queued`` its calls that stop duplicates. In the
    last ``within`` seconds ``conflicts`` of its calls found a lock held, ``conflict`` is the last.
    """

    task: str
    free: bool
    held: list[HeldLock]
    queued: list[HeldLock]
    usual: UsualHold | None
    completed: TaskLockEvent | None
    conflict: TaskLockEvent | None
    conflicts: int
    within: float
    no_history: str


def why(text: str) -> Why | TaskFacts:
    """Gather what is known of a lock, of the lock of a run, or of a task.

    ``text`` is what :func:`select` reads, but no pattern. Raises :class:`UnknownName` if there is
    nothing, :class:`CannotList` for a task, and :class:`LockUnavailable`.
    """
    selector, run = select(lock_of_slot(text) if is_key(text) else text), None
    # Where the cache cannot list its entries, "no lock of this task is held" would be a guess.
    locks = held([selector]) if selector.task else look([selector])
    must_be_known([selector], locks)
    if selector.task:
        names = {lock.name for lock in locks}
        holds = any(lock.state in HOLDING for lock in locks)
        if len(names) != 1 or not (holds or f"{selector.task}()" in names):
            return _of_task(selector, with_history(locks))
        text = names.pop()  # its only lock
    # A lock goes by its name before a run goes by its id.
    elif key := next((lock.key for lock in locks if text in (lock.task_id, lock.token)), ""):
        text = key
    elif not locks and (run := _run_of(selector)):
        text = run.name
    else:
        return _of_lock(text, selector, locks)
    selector = select(lock_of_slot(text) if is_key(text) else text)
    return _of_lock(text, selector, look([selector]), run)


def _run_of(selector: Selector) -> TaskLockEvent | None:
    with suppress(NoHistory):
        for row in find(selector.conditions(), limit=1).rows:
            if selector.text in (row.task_id, row.token) and row.name != selector.text:
                return row
    return None


def _last(row: TaskLockEvent) -> datetime:
    return row.last_at or row.at


def _of_task(selector: Selector, locks: list[HeldLock]) -> TaskFacts:
    rows, no_history = _newest_rows(selector, locks)
    within = DAY if len(rows) < NEWEST else min(DAY, ago(rows[-1].last_at or rows[-1].at))
    met = [row for row in rows if row.is_counted and ago(row.last_at or row.at) <= within]
    holding = [lock for lock in locks if lock.state in HOLDING]
    return TaskFacts(
        task=selector.task,
        free=not holding,
        held=holding,
        queued=[lock for lock in locks if lock.queued],
        usual=TaskLockEvent.objects.usual_hold("", selector.task),
        completed=next((row for row in rows if row.is_completed), None),
        conflict=max(met, key=_last, default=None),
        conflicts=sum(row.count for row in met),
        within=within,
        no_history=no_history,
    )


def _of_lock(
    text: str, selector: Selector, locks: list[HeldLock], run: TaskLockEvent | None = None
) -> Why:
    rows, no_history = _newest_rows(selector, with_history(locks))
    keys, same_name = _keys(selector, locks, rows)
    locks = [lock for lock in locks if lock.lock_key in keys]
    rows = [row for row in rows if lock_of_slot(row.key) in keys]
    holding = [lock for lock in locks if lock.state in HOLDING]
    holding.sort(key=lambda lock: lock.key != text)  # the slot that was named comes first
    queued = [lock for lock in locks if lock.queued]
    expired = [lock for lock in locks if lock.state == "expired"]
    shown, task = selector.text, selector.text.partition("(")[0]
    key = selector.locks[0].key if selector.locks else shown
    known: list[HeldLock | TaskLockEvent] = [*holding, *queued, *expired, *rows]
    if known:
        shown, key, task = known[0].name, lock_of_slot(known[0].key), known[0].task or ""
    lock, starved = next(iter(holding), None), starvation(shown, rows)
    newest = {trouble: row for row in reversed(rows) for trouble in row.troubles}
    return Why(
        name=shown,
        key=key,
        free=lock is None,
        run=run,
        lock=lock,
        beside=holding[1:],
        queued=next(iter(queued), None),
        expired=expired,
        alive=is_alive(lock.process) if lock else None,
        death=proof_of_death(lock.process) if lock else None,
        usual=TaskLockEvent.objects.usual_hold(shown, task),
        completed=next((row for row in rows if row.is_completed), None),
        conflict=max((row for row in rows if row.is_counted), key=_last, default=None),
        troubles=sorted({*newest.values()}, key=attrgetter("pk"), reverse=True),
        starving=starved if starved and starved.lasts(HOUR) else None,
        same_name=same_name,
        no_history=no_history,
    )


def _newest_rows(selector: Selector, locks: Sequence[HeldLock]) -> tuple[list[TaskLockEvent], str]:
    """Return the newest rows of a task, or of the first name of a lock that has any.

    If they cannot be read, there are none, but the reason.
    """
    try:
        with reading():
            queries = [TaskLockEvent.objects.of_task(selector.task)]
            if not selector.task:
                names = dict.fromkeys([*(lock.name for lock in locks), *selector.names])
                queries = [TaskLockEvent.objects.named(name) for name in names]
            return next(filter(None, (list(rows[:NEWEST]) for rows in queries)), []), ""
    except NoHistory as error:
        return [], str(error)


def _keys(
    selector: Selector, locks: Sequence[HeldLock], rows: Sequence[TaskLockEvent]
) -> tuple[set[str], list[str]]:
    """Return the keys of the lock that is meant, and those of other locks with its name.

    Two long names may be shown alike. Then the lock that is held is meant, or else the one that
    was seen last.
    """
    tasks: dict[str, str] = {}
    held_first = sorted(locks, key=lambda lock: lock.state not in HOLDING)
    facts: list[HeldLock | TaskLockEvent] = [*held_first, *rows]
    for each in facts:
        tasks.setdefault(lock_of_slot(each.key), each.task or "")
    lock_keys = [key for key in tasks if not key.startswith(QUEUED)]
    meant, same_name = {*selector.keys}, list[str]()
    if not (is_key(selector.text) or meant.intersection(tasks)):
        meant, same_name = {*lock_keys[:1]}, lock_keys[1:]
    if meant.issuperset(lock_keys):
        return {*tasks}, []
    locks_meant = meant.intersection(tasks)
    queued = {LockKey("", key).beside(QUEUED, tasks[key]).key for key in locks_meant}
    return meant | queued, same_name
