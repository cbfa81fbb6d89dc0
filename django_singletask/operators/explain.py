"""Say why a lock is held, or is not: the facts of the store and of the history together.

The command prints them, and the page of a lock in the admin shows them, in the same words.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from django_singletask.conf import conf
from django_singletask.history.queries import (
    NEWEST,
    ONLY_TROUBLE,
    NoHistory,
    UsualHold,
    ago,
    reading,
)
from django_singletask.locks.keys import QUEUED, lock_of_slot
from django_singletask.models import OF_CALLS, RETAKEN, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.held import (
    HOLDING,
    RUNNING,
    HeldLock,
    add_conflicts,
    add_states,
    list_held,
    must_be_known,
)
from django_singletask.operators.names import Selector, SeveralMeant, UnknownName
from django_singletask.operators.recorded import find
from django_singletask.operators.starving import Starving, starvation
from django_singletask.operators.words import duration
from django_singletask.stores.base import CannotList
from django_singletask.stores.keys import is_key

DAY = 86_400.0
SHOWN = 5
"""Locks of a task that are told one by one."""


@dataclasses.dataclass
class Why:
    """What is known of one lock, or of all locks of a task, now.

    The attributes are the keys of the JSON:

    * ``key`` is empty for a task. ``run`` is the run whose id was asked for, if it holds no lock.
    * ``held`` are locks in a state of ``HOLDING``, the worst first: the holder, and those of other
      slots; or the locks of the task. ``queued`` are the calls that stop duplicates, ``expired``
      holds whose end nobody reported.
    * ``completed`` is the last completed run; ``task_completed`` is that of the task, if this lock
      has none.
    * ``conflicts`` counts the calls of the last ``within`` seconds that found a lock held, by what
      became of them, and ``duplicates`` those that found an equal call queued. ``conflict`` is the
      last of all these.
    * ``troubles`` are the last runs with each kind of trouble, the newest first.
    * ``no_history`` says why nothing is known of the past, or is empty.
    """

    name: str
    key: str
    free: bool
    held: list[HeldLock]
    queued: list[HeldLock]
    expired: list[HeldLock]
    run: TaskLockEvent | None = None
    usual: UsualHold | None = None
    completed: TaskLockEvent | None = None
    task_completed: TaskLockEvent | None = None
    conflict: TaskLockEvent | None = None
    conflicts: Counter[str] = dataclasses.field(default_factory=Counter)
    duplicates: int = 0
    within: float = DAY
    troubles: list[TaskLockEvent] = dataclasses.field(default_factory=list)
    starving: Starving | None = None
    no_history: str = ""

    @property
    def state(self) -> str:
        """The state of the lock; of a task, how many locks are held."""
        if not self.key:
            return f"{words.plural(len(self.held), 'lock')} held"
        if not self.held:
            return "not held"
        holder = self.held[0]
        if holder.share:
            return f"{holder.word} ({holder.share} slots)"
        return holder.word


# What is meant


def why(text: str) -> Why:
    """Gather what is known of a lock, of the lock of a run, or of a task.

    ``text`` is that of a :class:`Selector`. Raises :class:`UnknownName` if nothing is known by it,
    :class:`SeveralMeant`, :class:`CannotList`, and :class:`LockUnavailable`.
    """
    selector = Selector(text)
    locks = _list(selector)
    must_be_known([selector], locks)
    # A lock that somebody has comes before queued calls and expired holds.
    meant: list[Any] = sorted(locks, key=lambda lock: lock.state not in HOLDING)
    if not locks:
        with suppress(NoHistory):
            meant, _complete = find([selector], limit=NEWEST)
            # A call that waited and then gave up has two rows: its end says more.
            meant.sort(key=lambda row: row.result == "waiting")
    task = _task_meant(selector, meant)
    if task:
        if not selector.tasks:  # a host, or a pattern, that has only some of its locks
            locks = list_held([Selector(task)])
        return _explain_task(task, locks)
    if not meant:
        if selector.is_pattern:
            raise UnknownName(text)
        # Without the history it is not known whether there is such a lock.
        keys = [*selector.keys(), text]
        return _explain_lock(text, keys[0])
    first = meant[0]
    key = first.key
    only = is_key(text) and selector.is_exact
    if only:
        key = text
    known = _explain_lock(first.name, lock_of_slot(key), only=only)
    if not locks and text in (first.task_id, first.token):
        known.run = first
    return known


def _list(selector: Selector) -> list[HeldLock]:
    """List what a text selects, also where the cache cannot list its entries.

    There the name of a lock is enough, unless it is that of a call: its key needs the arguments.
    """
    try:
        return list_held([selector])
    except CannotList:
        if not selector.may_be_name:
            raise
        keys = selector.keys()
        return list_held([Selector(key) for key in keys])


def _task_meant(selector: Selector, meant: list[Any]) -> str | None:
    """Return the task if a selector means all locks of a task.

    Return None if it means one lock, or nothing. Raise :class:`SeveralMeant` if it means more than
    one task, or several locks that are not of one task. ``meant`` are locks, or rows of the
    history.
    """
    names = sorted({each.name for each in meant})
    if selector.is_exact or selector.text in names:
        return None
    # The text can end the names of two tasks of which only one has a lock now.
    if len(selector.tasks) > 1:
        raise SeveralMeant(selector.text, selector.tasks)
    if len(names) == 1:
        return None
    tasks = {*selector.tasks, *(each.task for each in meant)}
    if not tasks:
        return None
    task, *others = tasks
    if others or not task:  # a lock can have no task
        raise SeveralMeant(selector.text, names)
    return str(task)


# What is known


def _explain_lock(name: str, key: str, *, only: bool = False) -> Why:
    """Gather what is known of the lock with this name.

    A name that was cut can belong to several locks. With ``only``, those with another key are left
    out.
    """
    locks = list_held([Selector(key)])
    seen = {lock.key for lock in locks}
    with suppress(CannotList):  # then only this lock is known
        locks += [lock for lock in list_held([Selector(name)]) if lock.key not in seen]
    rows, no_history = _read_rows(TaskLockEvent.objects.named(name))
    if only and not key.startswith(QUEUED):
        # The key of a queued call has a hash that does not show the lock, so these all stay.
        locks = [lock for lock in locks if lock.queued or lock.lock_key == key]
        rows = [row for row in rows if row.key.startswith(QUEUED) or lock_of_slot(row.key) == key]
    starving = starvation(name, rows)
    hungry = []
    if starving is not None:
        hungry = [starving]
    add_states(locks, hungry)
    known = _about(name, key, locks)
    known.starving = starving
    known.no_history = no_history
    _note_rows(known, rows)
    task = next((each.task for each in [*locks, *rows] if each.task), "")
    known.usual = TaskLockEvent.objects.usual_hold(name, task)
    if task and not known.completed:
        of_task, _no_history = _read_rows(TaskLockEvent.objects.of_task(task))
        known.task_completed = _last_completed(of_task)
    return known


def _explain_task(task: str, locks: list[HeldLock]) -> Why:
    """Gather what is known of a task; ``locks`` are those that it has."""
    known = _about(task, "", add_states(locks))
    rows, known.no_history = _read_rows(TaskLockEvent.objects.of_task(task))
    _note_rows(known, rows)
    known.usual = TaskLockEvent.objects.usual_hold("", task)
    return known


def _about(name: str, key: str, locks: list[HeldLock]) -> Why:
    """Return what the store knows of a lock or a task that has these locks."""
    add_conflicts(locks)
    held = [lock for lock in locks if lock.state in HOLDING]
    queued = [lock for lock in locks if lock.queued]
    expired = [lock for lock in locks if lock.state == "expired"]
    return Why(name, key, not held, held, queued, expired)


def _read_rows(rows: Any) -> tuple[list[Any], str]:
    """Return the newest of these rows; without a history, why there is none."""
    try:
        with reading():
            return list(rows[:NEWEST]), ""
    except NoHistory as error:
        return [], str(error)


def _note_rows(known: Why, rows: list[TaskLockEvent]) -> None:
    """Note what the newest rows say of a lock or a task."""
    known.completed = _last_completed(rows)
    if len(rows) == NEWEST:  # there may be older rows, which were not read
        known.within = min(DAY, ago(rows[-1].end))
    # A retry that met its own earlier try is no other call.
    met = [row for row in rows if row.is_counted and row.reason != "retry"]
    known.conflict = next(iter(met), None)
    for row in met:
        if ago(row.end) > known.within:
            break
        if row.kind == "duplicate":
            known.duplicates += row.count
        else:
            known.conflicts[row.result] += row.count
    told: set[str] = set()
    for row in rows:
        new_kinds = set(row.troubles) - told
        if new_kinds:
            known.troubles.append(row)
            told |= new_kinds


def _last_completed(rows: list[TaskLockEvent]) -> TaskLockEvent | None:
    """Return the last completed run; None if such runs are not kept: it would be an old one."""
    if conf.history_keeps == "trouble":
        return None
    return next((row for row in rows if row.is_completed), None)


# In words


class Fact(NamedTuple):
    """One thing that is known, with its label; ``text`` is empty if it is not known."""

    label: str
    text: str
    is_command: bool = False
    """Whether the text is a command for a shell."""


def facts(why: Why) -> Iterator[Fact]:
    """Yield what is known, each fact with its label."""
    if why.run:
        yield Fact("run", _tell_run(why.run))
    if not (why.key or why.held or why.queued or why.completed or why.conflict):
        text = (
            "no lock of this task is held or recorded: 'manage.py locks' lists what calls wait for"
        )
        yield Fact("task", text)
    if why.starving:
        met = words.plural(why.starving.conflicts, "conflict")
        span = duration(why.starving.unmet)
        yield Fact("starving", f"{met} in {span}; no run completed")
    for lock in why.held[:SHOWN]:
        yield from _tell_hold(why, lock)
    if len(why.held) > SHOWN:
        yield Fact("held", f"and {len(why.held) - SHOWN} more")
    if not why.no_history:
        yield from _tell_past(why)
    for lock in why.queued:
        yield Fact("queued", _named(why, lock, _tell_queued(lock)))
        yield Fact("forget", _clear_command(lock), is_command=True)
    for lock in why.expired:
        yield Fact("expired", _named(why, lock, _tell_state(lock)))
    yield Fact("history", why.no_history)


def _tell_run(run: TaskLockEvent) -> str:
    """Say what became of the run, or the call, whose id was asked for."""
    text = f"{run.holder()}: {words.word(run)} "
    if run.is_counted:
        text += f"{_when(run.at)}, {words.reason(run)}"
    else:
        text += _when(run.end)
    if run.blocked_by_task_id:
        text += f", blocked by {run.blocked_by_task_id}"
    return text


def _tell_hold(why: Why, lock: HeldLock) -> Iterator[Fact]:
    """Yield who has a lock, and the commands that end the hold."""
    label = "held"
    text = _tell_state(lock)
    if not why.key:
        text = f"{lock.name}: {lock.word}, {text}"
    elif len(why.held) > 1:
        label = "slot"
        text = f"{lock.word}, {text}"
    yield Fact(label, text)
    if lock.task and not lock.name.startswith(lock.task):
        yield Fact("task", lock.task)
    if lock.state not in WITHOUT_PROCESS:
        yield Fact("lease", _tell_lease(lock))
        yield Fact("page", words.task_page(lock.task_id))
    if lock.state in RUNNING:
        yield from _stop_commands(lock)
    yield Fact("free", _clear_command(lock), is_command=True)


def _named(why: Why, lock: HeldLock | TaskLockEvent, text: str) -> str:
    """Say which lock of a task a text is about; the name of the lock is said already."""
    if why.key:
        return text
    return f"{lock.name}: {text}"


def _tell_past(why: Why) -> Iterator[Fact]:
    """Yield what the history knows."""
    if why.usual:
        median = words.hold_time(why.usual.median)
        longest = words.hold_time(why.usual.longest)
        yield Fact("usual", f"{median}, longest {longest}")
    yield Fact("conflicts", _tell_conflicts(why))
    yield Fact("completed", _tell_completed(why))
    for row in why.troubles:
        yield Fact("trouble", _named(why, row, _tell_trouble(row)))


def _tell_trouble(row: TaskLockEvent) -> str:
    when = row.end
    if row.troubles == [RETAKEN] and row.retaken_at:
        when = row.retaken_at
    troubles = " and ".join(row.troubles)
    parts = [f"{troubles} {_when(when)}", str(row.holder())]
    parts += filter(None, [words.witness(row), row.reason])
    return ", ".join(parts)


def _tell_completed(why: Why) -> str:
    if conf.history_keeps == "trouble":
        return f"not known. {ONLY_TROUBLE}"
    last = why.completed
    if last:
        when = _when(last.end)
        if last.result == "raised":
            when += " with an error"
        lasted = words.lasted(last)
        return _named(why, last, f"{when}, after {lasted}, by {last.holder()}")
    if why.task_completed:
        return f"none of this lock is recorded; the task completed {_when(why.task_completed.end)}"
    return "none is recorded"


WITHOUT_PROCESS = {
    "kept": "for {left} more by lock_at_least; the body of {lock} has ended",
    "handed_over": "handed over {ago} ago by {lock}; free in {left} unless received before",
    "queued": "{lock}, sent {ago} ago; stops identical calls for {left} at most",
    "blocking": "{lock}, sent {ago} ago and begun; stops identical calls for {left} more",
    "expired": "{lock} took it {ago} ago; the cache no longer has the lock: nothing to free",
}
"""What is said of a lock that no process has, by its state."""


def _tell_state(lock: HeldLock) -> str:
    """Say since when who has a lock, and what is known of its process."""
    ago = duration(lock.held_for)
    if lock.state in WITHOUT_PROCESS:
        return WITHOUT_PROCESS[lock.state].format(lock=lock, ago=ago, left=duration(lock.left))
    text = f"by {lock} ({_tell_process(lock)})"
    if lock.since:
        since = words.clock_time(lock.since, dated=lock.held_for >= DAY)
        return f"for {ago} (since {since}) {text}"
    return text


def _tell_process(lock: HeldLock) -> str:
    if lock.death:
        return f"dead: {lock.death}; the next call on {lock.host} takes the lock over"
    if lock.state == "stopped":
        return "stopped on this host"
    if lock.alive:
        return "alive on this host"
    return "another host or container: not known whether it is alive"


def _tell_queued(lock: HeldLock) -> str:
    text = _tell_state(lock)
    if lock.conflicts is not None:
        text += f"; {words.plural(lock.conflicts, 'duplicate')}"
    return text


def _tell_lease(lock: HeldLock) -> str:
    text = duration(lock.timeout)
    if lock.remaining is None:
        return text
    age = max(0.0, lock.timeout - lock.remaining)
    if lock.held_for - age > 1:
        text += f", renewed {duration(age)} ago"
    text += f", ends in {duration(lock.remaining)}"
    if lock.state in RUNNING:
        text += " unless renewed"
    return text


def _tell_conflicts(why: Why) -> str:
    """Say how many calls met the holders of a lock, or lately found it held."""
    if why.key and why.held:
        text = _tell_met(why.held)
    else:
        met = why.conflicts + Counter(duplicate=why.duplicates)
        text = f"{_by_result(met)} in the last {duration(why.within)}"
    if why.conflict:
        text += f"; the last {_ago(why.conflict.end)}"
        if why.free and why.conflict.blocked_by_task_id:
            text += f", blocked by task {why.conflict.blocked_by_task_id}"
    return text


def _tell_met(held: list[HeldLock]) -> str:
    """Say how many calls met these holders, and what became of them."""
    met = Counter[str]()
    for lock in held:
        if lock.met is not None:
            met += lock.met
    if not met:
        return "none during this hold"
    return f"{met.total()} during this hold: {_by_result(met)}"


def _by_result(met: Counter[str]) -> str:
    """Write the numbers of calls by their results, those of duplicates last."""
    counts = [f"{met[result]} {result}" for result in sorted(OF_CALLS) if met[result]]
    if met["duplicate"]:
        counts.append(words.plural(met["duplicate"], "duplicate"))
    if not counts:
        return "none"
    return ", ".join(counts)


def _stop_commands(lock: HeldLock) -> Iterator[Fact]:
    """Yield the commands that end a run; a signal only for a process that is seen from here."""
    if lock.state == "stopped":
        yield Fact("continue", f"kill -CONT {lock.pid}  # on {lock.host}", is_command=True)
    kill = f"kill {lock.pid}  # on {lock.host}"
    if lock.task_id:
        yield Fact("stop", words.stop_command(lock.task_id), is_command=True)
        kill = f"kill -9 {lock.pid}  # on {lock.host}, if it ignores SIGTERM"
    if lock.alive:
        yield Fact("stop", kill, is_command=True)


def _clear_command(lock: HeldLock) -> str:
    """Return the command that frees a lock, or forgets a queued call, and no other one."""
    command = "manage.py locks clear"
    key = shlex.quote(lock.key)
    if lock.queued:
        # A cache that cannot list its entries finds a queued call by its key, not by its token.
        return f"{command} --queued {key}"
    if lock.token:
        return f"{command} {shlex.quote(lock.token)}"
    return f"{command} {key}"  # something else wrote this entry


def _ago(at: datetime) -> str:
    return f"{duration(ago(at))} ago"


def _when(at: datetime) -> str:
    is_old = ago(at) >= DAY
    return f"{_ago(at)} ({words.clock_time(at, dated=is_old)})"
