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
from django_singletask.operators.held import HeldLock, held, must_be_known, with_history
from django_singletask.operators.names import Selector, UnknownName, find, select
from django_singletask.operators.starving import starvation
from django_singletask.operators.words import duration
from django_singletask.stores.base import CannotList
from django_singletask.stores.keys import is_key

DAY = 86_400.0
SHOWN = 5
"""Locks of a task that are told one by one."""
HOLDING = frozenset({"held", "dead", "handed_over", "kept"})
"""States of a lock that somebody has."""


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
        return f"{holder.condition} ({holder.share} slots)" if holder.share else holder.condition


def why(text: str) -> Why:
    """Gather what is known of a lock, of the lock of a run, or of a task.

    ``text`` is what :func:`select` reads, but no pattern. Raises :class:`UnknownName` if there is
    nothing, :class:`CannotList` for a task, and :class:`LockUnavailable`.
    """
    selector = select(lock_of_slot(text) if is_key(text) else text)
    locks: list[HeldLock] = []
    try:
        locks = held([selector])
    except CannotList:
        # "No lock of this task is held" would be a guess.
        if selector.tasks:
            raise
    must_be_known([selector], locks)
    if any(lock.lock_key in selector.locks for lock in locks):
        return _gather(text, selector, locks)
    names = sorted({lock.name for lock in locks})
    if len(several := selector.tasks or names[:SHOWN]) > 1:
        raise UnknownName(text, several, several=True)
    if selector.tasks:
        [task] = selector.tasks
        holds = any(lock.state in HOLDING for lock in locks)
        if len(names) != 1 or not (holds or f"{task}()" in names):
            return _gather(text, selector, locks, task)
    runs = list[TaskLockEvent]()
    if not (names or selector.is_exact):
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
    rows, no_history, history = list[Any](), "", TaskLockEvent.objects
    names = {*(lock.name for lock in with_history(locks)), *selector.locks.values()}
    try:
        with reading():
            rows = [*(history.of_task(task) if task else history.named(*names))[:NEWEST]]
    except NoHistory as error:
        no_history = str(error)
    within = DAY if len(rows) < NEWEST else min(DAY, ago(rows[-1].last_at or rows[-1].at))
    name, key, same_name = task, "", list[str]()
    if not task:
        # The slot that was named comes first, then those that are held.
        locks.sort(key=lambda lock: (lock.key != text, lock.state not in HOLDING))
        about: dict[str, Any] = {}
        for each in [*locks, *rows]:
            about.setdefault(lock_of_slot(each.key), each)
        unseen, name = next(iter(selector.locks.items()), (selector.text, selector.text))
        keys = [each for each in about if not each.startswith(QUEUED)] or [unseen]
        key, task = selector.text if is_key(selector.text) else keys[0], name.partition("(")[0]
        if key in about:
            name, task = about[key].name, about[key].task or ""
        meant = {key, LockKey("", key).beside(QUEUED, task).key}
        # Two long names may be shown alike.
        same_name = [] if key == selector.text else [each for each in keys if each not in meant]
        locks = [lock for lock in locks if lock.lock_key in meant]
        rows = [row for row in rows if lock_of_slot(row.key) in meant]
    holding = [lock for lock in locks if lock.state in HOLDING]
    holder = holding[0] if holding and key else None
    # A free lock of which neither the key nor a name that the history knows was given may be
    # misspelled: the others of its task help.
    others: list[HeldLock] = []
    if key and task and not (holding or selector.is_exact):
        with suppress(CannotList):
            others = held([Selector(task, {}, [task])])
    newest = {trouble: row for row in reversed(rows) for trouble in row.troubles}
    met = [row for row in rows if row.is_counted]
    conflicts: Counter[str] = Counter()
    for row in met:
        conflicts[row.result or "duplicates"] += row.count * (ago(row.end) <= within)
    return Why(
        name=name,
        key=key,
        free=not holding,
        run=None,
        held=holding,
        queued=[lock for lock in locks if lock.queued],
        expired=[lock for lock in locks if lock.state == "expired"],
        alive=holder and holder.alive,
        death=holder and holder.death,
        usual=history.usual_hold(name, task),
        completed=next((row for row in rows if row.is_completed), None),
        conflict=max(met, key=attrgetter("end"), default=None),
        conflicts=+conflicts,
        within=within,
        troubles=sorted({*newest.values()}, key=attrgetter("pk"), reverse=True),
        starving=starvation(name, rows) if key else None,
        same_name=same_name,
        others=[lock.name for lock in others if lock.state in HOLDING],
        no_history=no_history,
    )


# In words


def facts(why: Why) -> Iterator[tuple[str, str]]:
    """Yield what is known, each fact with its label; an empty one is not known."""
    holder = why.held[0] if why.key and why.held else None
    if run := why.run:
        blocker = run.blocked_by_task_id or run.blocked_by
        when = duration(ago(run.at if run.is_counted else run.end))
        what = f"{run.holder()}: {words.word(run)} {when} ago"
        by = f"blocked by {blocker}" if blocker else ""
        yield "run", _joined(what, words.reason(run) if run.is_counted else "", by)
    if why.same_name:
        yield "same name", _joined(f"this is {why.key}", *why.same_name)
    if starving := why.starving:
        met = words.plural(starving.conflicts, "conflict")
        yield "starving", f"{met} in {duration(starving.unmet)}; no run completed"
    if holder:
        yield "held", _state(holder)
        if holder.state in ("held", "dead"):
            yield "lease", _lease(holder)
            yield "page", words.task_page(holder.task_id)
    else:  # the locks of a task, if there are any
        for lock in why.held[:SHOWN]:
            yield "held", f"{lock.name}: {lock.condition}, {_state(lock)}"
        if len(why.held) > SHOWN:
            yield "held", f"and {len(why.held) - SHOWN} more"
    if why.usual is not None:
        slow = "; this hold is slow" * any(lock.slow for lock in why.held if why.key)
        median, longest = words.hold_time(why.usual.median), words.hold_time(why.usual.longest)
        yield "usual", f"{median}, longest {longest}{slow}"
    yield "others", f"also held: {words.few(why.others)}" if why.others else ""
    if not why.no_history:
        yield "conflicts", _conflicts(why)
    if last := why.completed:
        raised = " with an error" if last.result == "raised" else ""
        yield "completed", f"{_ago(last)}{raised}, after {words.lasted(last)}, by {last.holder()}"
    elif not why.no_history:
        yield "completed", "none is recorded"
    for row in () if why.held else why.troubles:
        trouble = f"{' and '.join(row.troubles)} {_ago(row)}"
        yield "trouble", _joined(trouble, str(row.holder()), words.witness(row), row.reason)
    if holder:
        if holder.state == "held":
            yield "continue", f"kill -CONT {holder.pid}" if holder.stopped else ""
            yield "stop", words.stop_command(holder.task_id) if holder.task_id else ""
            kill = "kill -9 {}    # if it ignores SIGTERM" if holder.task_id else "kill {}"
            yield "stop", kill.format(holder.pid) if holder.alive else ""
        yield "free", _clear(holder)
        for lock in why.held[1:]:
            yield "slot", f"{lock.condition}, {_state(lock)}"
            yield "free", _clear(lock)
    for lock in why.queued:
        stopped = "" if lock.conflicts is None else f"; {words.plural(lock.conflicts, 'duplicate')}"
        yield "queued", f"{_state(lock)}{stopped}"
        yield "forget", _clear(lock)
    for lock in why.expired:
        yield "expired", _state(lock)
    yield "history", why.no_history


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
        process = f"{'stopped' if lock.stopped else 'alive'} on this host"
    since = f"for {ago} " if lock.since else ""
    return f"{since}by {lock} ({process})"


def _lease(lock: HeldLock) -> str:
    if lock.remaining is None:
        return duration(lock.timeout)
    age = max(0.0, lock.timeout - lock.remaining)
    renewed = f"renewed {duration(age)} ago, " if lock.held_for - age > 1 else ""
    unless = " unless renewed" * (lock.state == "held")
    return f"{duration(lock.timeout)}, {renewed}ends in {duration(lock.remaining)}{unless}"


def _conflicts(why: Why) -> str:
    last = f"; the last {_ago(why.conflict)}" if why.conflict else ""
    if why.held and why.key:
        count = sum(lock.conflicts or 0 for lock in why.held)
        waiting = sum(lock.waiting or 0 for lock in why.held)
        postponed = f", {waiting} waiting" if waiting else ""
        return f"{count or 'none'} during this hold{postponed}{last if count else ''}"
    conflicts = sorted(why.conflicts.items())
    # "1 duplicate": no other of these words ends with "s".
    counts = _joined(*(f"{n} {word.removesuffix('s' * (n == 1))}" for word, n in conflicts))
    blocker = why.conflict and why.conflict.blocked_by_task_id
    by = f", blocked by task {blocker}" if blocker else ""
    return f"{counts or 'none'} in the last {duration(why.within)}{last}{by}"


def _clear(lock: HeldLock) -> str:
    """Return the command that frees a lock, or forgets a queued call, and no other one."""
    # Where the cache cannot list its entries, a queued call is found by its name or key alone. An
    # entry that something else wrote has no token.
    which = shlex.quote(lock.token)
    if lock.queued or not lock.token:
        which = f"{'--queued ' * lock.queued}{shlex.quote(lock.key)}"
    return f"manage.py locks clear {which}"


def _ago(row: TaskLockEvent) -> str:
    return f"{duration(ago(row.end))} ago"


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))
