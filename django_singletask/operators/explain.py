"""Say why a lock is held, or is not: the facts of the store and of the history together.

The command prints them, and the page of a lock in the admin shows them, in the same words.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from django_singletask.history.queries import NEWEST, NoHistory, ago, reading
from django_singletask.locks.keys import QUEUED, LockKey, lock_of_slot
from django_singletask.models import TaskLockEvent
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
from django_singletask.operators.names import Selector, SeveralMeant, select
from django_singletask.operators.recorded import find
from django_singletask.operators.starving import starvation
from django_singletask.operators.words import duration
from django_singletask.stores.base import CannotList
from django_singletask.stores.keys import is_key

DAY = 86_400.0
SHOWN = 5
"""Locks of a task that are told one by one."""


class Why(SimpleNamespace):
    """What is known of one lock, or of all locks of a task, now.

    The attributes are the keys of the JSON. ``key`` is empty for a task. ``run`` is the run whose
    id was asked for, if it holds no lock. ``held`` are locks in a state of ``HOLDING``: the holder,
    and those of other slots; or the locks of the task. ``queued`` are the calls that stop
    duplicates, ``expired`` holds whose end nobody reported. ``alive`` says whether the process of
    the first holder is there, None if that cannot be told from this host; ``death`` is the proof
    that it is gone. ``conflicts`` counts the calls of the last ``within`` seconds that found a lock
    held, by what became of them; ``conflict`` is the last of them. ``same_name`` are the keys of
    other locks with the same name, and ``others`` the names of the task's other locks that are
    held, if this one is free. ``no_history`` says why nothing is known of the past, or is empty.
    """

    @property
    def state(self) -> str:
        """The state of the lock; of a task, how many locks are held."""
        if not self.key:
            return f"{words.plural(len(self.held), 'lock')} held"
        if not self.held:
            return "not held"
        holder = self.held[0]
        state: str = holder.word
        if holder.share:
            state += f" ({holder.share} slots)"
        return state


def why(text: str) -> Why:
    """Gather what is known of a lock, of the lock of a run, or of a task.

    ``text`` is what :func:`select` reads, but no pattern. Raises :class:`UnknownName` if there is
    nothing, :class:`CannotList` for a task, and :class:`LockUnavailable`.
    """
    asked = text
    if is_key(text):
        asked = lock_of_slot(text)
    selector = select(asked)
    locks: list[HeldLock] = []
    try:
        locks = list_held([selector])
    except CannotList:
        # "No lock of this task is held" would be a guess.
        if selector.tasks:
            raise
    must_be_known([selector], locks)
    if selector.is_exact or any(selector.text in (lock.key, lock.name) for lock in locks):
        return _gather(text, selector, locks)
    names = sorted({lock.name for lock in locks})
    several = selector.tasks or names[:SHOWN]
    if len(several) > 1:
        raise SeveralMeant(text, several)
    if selector.tasks:
        [task] = selector.tasks
        holds = any(lock.state in HOLDING for lock in locks)
        if len(names) != 1 or not (holds or f"{task}()" in names):
            return _gather(text, selector, locks, task)
    runs = list[TaskLockEvent]()
    if not names:
        with suppress(NoHistory):
            runs, _complete = find([{"task_id": text}, {"ref": text}], limit=1)
    names += [*(row.name for row in runs), text]
    # The lock of a run, or the only one of a task.
    lock = next((lock.key for lock in locks if text in (lock.task_id, lock.token)), names[0])
    if lock == text:
        return _gather(text, selector, locks)
    known = why(lock)
    known.run = next(iter(runs), None)
    return known


def _gather(text: str, selector: Selector, locks: list[HeldLock], task: str = "") -> Why:
    """Gather what is known of a task, or else of the lock that is named."""
    history = TaskLockEvent.objects
    add_states(locks)
    add_conflicts(locks)
    names = {*(lock.name for lock in locks), selector.name}
    recorded = history.named(*names)
    if task:
        recorded = history.of_task(task)
    rows: list[Any] = []
    no_history = ""
    try:
        with reading():
            rows = list(recorded[:NEWEST])
    except NoHistory as error:
        no_history = str(error)
    within = DAY
    if len(rows) == NEWEST:
        within = min(DAY, ago(rows[-1].last_at or rows[-1].at))
    name = task
    key = ""
    same_name: list[str] = []
    if not task:
        # The slot that was named comes first, then those that are held.
        locks.sort(key=lambda lock: (lock.key != text, lock.state not in HOLDING))
        about: dict[str, Any] = {}
        for each in [*locks, *rows]:
            about.setdefault(lock_of_slot(each.key), each)
        key, name, task = _choose_lock(selector, about)
        meant = {key, LockKey("", key).beside(QUEUED, task).key}
        if key != selector.text:
            # Two long names may be shown alike.
            same_name = [k for k in about if k not in meant and not k.startswith(QUEUED)]
        locks = [lock for lock in locks if lock.lock_key in meant]
        rows = [row for row in rows if lock_of_slot(row.key) in meant]
    holding = [lock for lock in locks if lock.state in HOLDING]
    others: list[HeldLock] = []
    if key and task and not (holding or selector.is_exact):
        with suppress(CannotList):
            others = list_held([select(task)])
    newest: dict[str, Any] = {}
    for row in rows:
        for trouble in row.troubles:
            newest.setdefault(trouble, row)
    met = [row for row in rows if row.is_counted]
    conflicts: Counter[str] = Counter()
    for row in met:
        if ago(row.end) <= within:
            conflicts[row.result or "duplicates"] += row.count
    known = Why(
        name=name,
        key=key,
        free=not holding,
        run=None,
        held=holding,
        queued=[lock for lock in locks if lock.queued],
        expired=[lock for lock in locks if lock.state == "expired"],
        alive=None,
        death=None,
        usual=history.usual_hold(name, task),
        completed=next((row for row in rows if row.is_completed), None),
        conflict=max(met, key=attrgetter("end"), default=None),
        conflicts=conflicts,
        within=within,
        troubles=sorted({*newest.values()}, key=attrgetter("pk"), reverse=True),
        starving=None,
        same_name=same_name,
        others=[lock.name for lock in others if lock.state in HOLDING],
        no_history=no_history,
    )
    if key:
        known.starving = starvation(name, rows)
        if holding:
            known.alive = holding[0].alive
            known.death = holding[0].death
    return known


def _choose_lock(selector: Selector, about: dict[str, Any]) -> tuple[str, str, str]:
    """Return the key, the name and the task of the lock that is meant, of those that are there."""
    key = next(iter(selector.keys()), selector.text)
    name = selector.name
    keys = [each for each in about if not each.startswith(QUEUED)]
    if keys and not is_key(selector.text):
        key = keys[0]
    if key in about:
        return key, about[key].name, about[key].task or ""
    return key, name, name.partition("(")[0]


# In words


def facts(why: Why) -> Iterator[tuple[str, str]]:
    """Yield what is known, each fact with its label; an empty one is not known."""
    holder = None
    if why.key and why.held:
        holder = why.held[0]
    if why.run:
        yield "run", _run(why.run)
    if why.same_name:
        yield "same name", _join(f"this is {why.key}", *why.same_name)
    if why.starving:
        met = words.plural(why.starving.conflicts, "conflict")
        yield "starving", f"{met} in {duration(why.starving.unmet)}; no run completed"
    if holder:
        yield "held", _state(holder)
        if holder.state in RUNNING | {"dead"}:
            yield "lease", _lease(holder)
            yield "page", words.task_page(holder.task_id)
    else:  # the locks of a task, if there are any
        for lock in why.held[:SHOWN]:
            yield "held", f"{lock.name}: {lock.word}, {_state(lock)}"
        if len(why.held) > SHOWN:
            yield "held", f"and {len(why.held) - SHOWN} more"
    yield from _past(why)
    if holder:
        if holder.state in RUNNING:
            if holder.state == "stopped":
                yield "continue", f"kill -CONT {holder.pid}"
            kill = f"kill {holder.pid}"
            if holder.task_id:
                yield "stop", words.stop_command(holder.task_id)
                kill = f"kill -9 {holder.pid}    # if it ignores SIGTERM"
            if holder.alive:
                yield "stop", kill
        yield "free", _clear(holder)
        for lock in why.held[1:]:
            yield "slot", f"{lock.word}, {_state(lock)}"
            yield "free", _clear(lock)
    for lock in why.queued:
        text = _state(lock)
        if lock.conflicts is not None:
            text += f"; {words.plural(lock.conflicts, 'duplicate')}"
        yield "queued", text
        yield "forget", _clear(lock)
    for lock in why.expired:
        yield "expired", _state(lock)
    yield "history", why.no_history


def _run(run: TaskLockEvent) -> str:
    """Say what became of the run, or the call, whose id was asked for."""
    when = run.end
    reason = ""
    if run.is_counted:
        when = run.at
        reason = words.reason(run)
    by = ""
    blocker = run.blocked_by_task_id or run.blocked_by
    if blocker:
        by = f"blocked by {blocker}"
    return _join(f"{run.holder()}: {words.word(run)} {duration(ago(when))} ago", reason, by)


def _past(why: Why) -> Iterator[tuple[str, str]]:
    """Yield what the history knows."""
    if why.usual is not None:
        text = f"{words.hold_time(why.usual.median)}, longest {words.hold_time(why.usual.longest)}"
        if why.key and any(lock.state == "slow" for lock in why.held):
            text += "; this hold is slow"
        yield "usual", text
    if why.others:
        yield "others", f"also held: {words.few(why.others)}"
    if not why.no_history:
        yield "conflicts", _conflicts(why)
    last = why.completed
    if last:
        when = _ago(last)
        if last.result == "raised":
            when += " with an error"
        yield "completed", f"{when}, after {words.lasted(last)}, by {last.holder()}"
    elif not why.no_history:
        yield "completed", "none is recorded"
    if not why.held:
        for row in why.troubles:
            trouble = f"{' and '.join(row.troubles)} {_ago(row)}"
            yield "trouble", _join(trouble, str(row.holder()), words.witness(row), row.reason)


STATES = {
    "kept": "for {left} more by lock_at_least; {lock} has returned",
    "handed_over": "handed over {ago} ago by {lock}; its receiver must take it within {left}",
    "queued": "{lock}, sent {ago} ago; stops identical calls for {left} at most",
    "blocking": "{lock}, sent {ago} ago; stops them for {left}, although the call has begun",
    "expired": "{lock} took it {ago} ago; the cache no longer has the lock: nothing to free",
}
"""What is said of a lock that no process has, by its state."""


def _state(lock: HeldLock) -> str:
    """Say since when who has a lock, and what is known of its process."""
    ago = duration(lock.held_for)
    if lock.state in STATES:
        return STATES[lock.state].format(lock=lock, ago=ago, left=duration(lock.left))
    process = "another host or container: not known whether it is alive"
    if lock.death:
        process = f"dead: {lock.death}; the next call on this host takes the lock over"
    elif lock.alive:
        process = "alive on this host"
        if lock.state == "stopped":
            process = "stopped on this host"
    text = f"by {lock} ({process})"
    if lock.since:
        return f"for {ago} {text}"
    return text


def _lease(lock: HeldLock) -> str:
    if lock.remaining is None:
        return duration(lock.timeout)
    age = max(0.0, lock.timeout - lock.remaining)
    text = duration(lock.timeout)
    if lock.held_for - age > 1:
        text += f", renewed {duration(age)} ago"
    text += f", ends in {duration(lock.remaining)}"
    if lock.state in RUNNING:
        text += " unless renewed"
    return text


def _conflicts(why: Why) -> str:
    last = ""
    if why.conflict:
        last = f"; the last {_ago(why.conflict)}"
    if why.held and why.key:
        count = sum(lock.conflicts or 0 for lock in why.held)
        if not count:
            return "none during this hold"
        waiting = sum(lock.waiting or 0 for lock in why.held)
        text = f"{count} during this hold"
        if waiting:
            text += f", {waiting} waiting"
        return text + last
    counts = []
    for word, count in sorted(why.conflicts.items()):
        counted = word
        if count == 1:
            counted = word.removesuffix("s")  # of "duplicates": no other word ends with "s"
        counts.append(f"{count} {counted}")
    text = "none"
    if counts:
        text = ", ".join(counts)
    text += f" in the last {duration(why.within)}{last}"
    if why.conflict and why.conflict.blocked_by_task_id:
        text += f", blocked by task {why.conflict.blocked_by_task_id}"
    return text


def _clear(lock: HeldLock) -> str:
    """Return the command that frees a lock, or forgets a queued call, and no other one."""
    # Where the cache cannot list its entries, a queued call is found by its name or key alone. An
    # entry that something else wrote has no token.
    command = "manage.py locks clear"
    if lock.queued:
        command += " --queued"
    elif lock.token:
        return f"{command} {shlex.quote(lock.token)}"
    return f"{command} {shlex.quote(lock.key)}"


def _ago(row: TaskLockEvent) -> str:
    return f"{duration(ago(row.end))} ago"


def _join(*texts: str) -> str:
    return ", ".join(filter(None, texts))
