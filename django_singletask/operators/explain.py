"""Say why a lock is held, or is not: the facts of the store and of the history together."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from django.db import Error

from django_singletask.history.queries import (
    NoHistory,
    UsualHold,
    ago,
    is_completed,
    last_rows,
    names_of_key,
    rows,
    timestamp,
    usual_hold,
)
from django_singletask.history.writing import COUNTED, TROUBLE
from django_singletask.locks.keys import QUEUED, LockKey
from django_singletask.locks.liveness import is_alive, proof_of_death
from django_singletask.operators import held as registry
from django_singletask.operators import names as calls
from django_singletask.operators.held import CannotList, HeldLock
from django_singletask.operators.starving import Starving, starvation
from django_singletask.stores.base import PREFIX

if TYPE_CHECKING:
    from django_singletask.models import TaskLockEvent

__all__ = ["Past", "UnknownLock", "Why", "why"]

MATCHES = 500
"""Names among which those like an unknown one are looked for."""


class UnknownLock(Exception):
    """No lock of this name is held, and none is known; ``matches`` are names like it."""

    def __init__(self, name: str, matches: list[str]) -> None:
        super().__init__(name, matches)
        self.name = name
        self.matches = matches


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

    ``lock`` has it (``held`` or ``dead``), ``queued`` is a call that waits for it, ``expired`` are
    holds whose end nobody told. ``duplicates`` counts those among the calls that came to nothing
    because of ``lock``. ``alive`` says whether the holder's process is there: None if that cannot
    be told from this host; ``death`` is the proof that it is not. ``others`` are the locks that the
    task of a free one holds with other arguments, ``same_name`` the keys of those that have this
    name as well. ``no_history`` says why nothing is known of what was; else the rest does.
    """

    name: str
    key: str
    lock: HeldLock | None
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

    Raises :class:`UnknownLock` if there is nothing, and the errors of the cache's client.
    """
    found = registry.look(name)
    past: list[TaskLockEvent] = []
    no_history = ""
    try:
        past = _past(name, [lock.name for lock in found])
    except NoHistory as error:
        no_history = str(error)
    if not (found or past or no_history or calls.is_call(name)):
        raise UnknownLock(name, _like(name))
    keys, same_name = _keys(name, found, past)
    found = [lock for lock in found if lock.key in keys]
    past = [row for row in past if row.key in keys]
    lock = next((lock for lock in found if lock.state in {"held", "dead"}), None)
    queued = next((lock for lock in found if lock.queued), None)
    expired = [lock for lock in found if lock.state == "expired"]
    first = lock or queued or next(iter(expired), None)
    shown = first.name if first else past[0].name if past else name
    task = (first.holder.task or "") if first else past[0].task if past else name.partition("(")[0]
    death = proof_of_death(lock.holder) if lock else None
    completed = next((row for row in past if is_completed(row)), None)
    skipped = next((row for row in past if row.kind in COUNTED), None)
    newest = {kind: next((r for r in past if r.kind == kind), None) for kind in sorted(TROUBLE)}
    return Why(
        name=shown,
        key=first.key if first else past[0].key if past else calls.keys_of(name)[0],
        lock=lock,
        queued=queued,
        expired=expired,
        alive=is_alive(lock.holder) if lock else None,
        death=death,
        usual=usual_hold(shown, task),
        completed=_told(completed, completed.result) if completed else None,
        skipped=_told(skipped, skipped.kind) if skipped else None,
        troubles=[_told(row, kind) for kind, row in newest.items() if row is not None],
        starving=starvation(shown, past),
        others=[] if lock else _others(task),
        same_name=same_name,
        duplicates=sum(
            row.count
            for row in past
            if lock and row.kind == "duplicate" and row.blocked_by == lock.holder.token
        ),
        no_history=no_history,
    )


def _past(name: str, names: list[str]) -> list[TaskLockEvent]:
    """Return the newest rows of a name, the newest first."""
    if name.startswith(PREFIX):
        names = [*names, *names_of_key(name)]
    else:
        names = [*names, *(lock.name for lock in calls.locks_of(name))]
    return next(filter(None, map(last_rows, dict.fromkeys([*names, name]))), [])


def _keys(
    name: str, found: list[HeldLock], past: list[TaskLockEvent]
) -> tuple[set[str], list[str]]:
    """Return the keys of the lock that is meant, and those of others that have its name.

    Of two long names the parts that are shown may be the same: then the one held is meant, or else
    the one that was seen last.
    """
    held_first = sorted(found, key=lambda lock: lock.state not in {"held", "dead"})
    tasks = {lock.key: lock.holder.task or "" for lock in held_first}
    tasks = {**tasks, **{row.key: row.task for row in past if row.key not in tasks}}
    locks = [key for key in tasks if not key.startswith(QUEUED)]
    meant, same_name = {*calls.keys_of(name)}, []
    if not (name.startswith(PREFIX) or meant.intersection(tasks)):
        meant, same_name = {*locks[:1]}, locks[1:]
    if meant.issuperset(locks):
        return {*tasks}, []
    return meant | {
        LockKey(name, key).beside(QUEUED, tasks[key]).key for key in meant & {*tasks}
    }, same_name


def _told(row: TaskLockEvent, what: str) -> Past:
    at = row.ended_at or row.last_at or row.at
    whose = row.task_id if row.kind not in COUNTED else row.blocked_by_task_id
    return Past(
        what=what,
        ago=ago(at),
        task_id=whose,
        host=row.host,
        pid=row.pid,
        reason=row.reason,
        actor=row.actor,
        lasted=timestamp(at) - timestamp(row.at) if row.kind == "acquired" else None,
    )


def _others(task: str) -> list[str]:
    try:
        locks = registry.held(task=task) if task else []
    except CannotList:
        return []
    return [lock.name for lock in locks if lock.state in {"held", "dead"}]


def _like(name: str) -> list[str]:
    names: list[str] = []
    with suppress(CannotList):
        names += (lock.name for lock in registry.held())
    with suppress(NoHistory, Error):
        names += rows().values_list("name", flat=True)[: 4 * MATCHES]
    return calls.nearest(name, names) or calls.nearest(name, calls.patterns())
