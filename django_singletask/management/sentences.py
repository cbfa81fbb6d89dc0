"""Tell an operator, in sentences, what is known of a lock."""

from __future__ import annotations

import math
import shlex
import textwrap
import time
from collections.abc import Iterator
from functools import partial

from django_singletask.holder import describe_run
from django_singletask.locks.liveness import started_at
from django_singletask.management.tables import few, printable, width
from django_singletask.operators.explain import Why
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import HOUR
from django_singletask.operators.stop import stop_command
from django_singletask.operators.words import clock_time, in_words, plural

__all__ = ["explain"]


COMMAND = "    "
"""Beginning of a line that is to be copied, and therefore is never wrapped."""


def explain(why: Why) -> list[str]:
    """Write what is known of a lock as lines that fit the terminal."""
    wrap = partial(textwrap.wrap, width=width(), break_long_words=False, break_on_hyphens=False)
    lines = []
    for text in map(printable, _sentences(why)):
        lines += [text] if text.startswith(COMMAND) else wrap(text)
    return lines


def _sentences(why: Why) -> Iterator[str]:
    if why.same_name:
        yield (
            f"{len(why.same_name) + 1} locks have this name, and this is about the one with the "
            f"key {why.key}. The others: {few(why.same_name)}."
        )
    if why.lock is not None:
        if why.lock.share:
            longest = why.lock.held_for >= max(lock.held_for for lock in (why.lock, *why.beside))
            yield f"{why.lock.share} slots are held. This one{' for longest' if longest else ''}:"
        yield from _held(why, why.lock)
        for lock in why.beside:
            yield f"Another slot: {_beside(lock)}. To free it:"
            yield _clear(lock)
    elif why.queued is None or why.queued.state == "blocking":
        yield f"Free: {why.name}."
    if why.queued is not None:
        yield from _queued(why.queued)
    if why.others:
        yield f"Held with other arguments: {few(list(map(_arguments, why.others)))}."
    for lock in why.expired:
        yield (
            f"An open row of the history: {lock.run} took it {_whole(lock.held_for)} ago, for "
            f"{in_words(lock.timeout)} unless renewed, and the cache has it no more. There is "
            "nothing to free. If its process lives, that may take the lock again at its next "
            "renewal; else a worker's sweep closes the row."
        )
    if why.lock is None:
        yield from _past(why)
    if why.no_history:
        yield why.no_history


def _beside(lock: HeldLock) -> str:
    if lock.state == "kept":
        return f"{lock.word}; {lock.run} has returned"
    return f"{lock.word} for {_whole(lock.held_for)} by {lock.run}"


def _arguments(name: str) -> str:
    _task, parenthesis, arguments = name.partition("(")
    return printable(f"{parenthesis}{arguments}" or name, 40)


def _held(why: Why, lock: HeldLock) -> Iterator[str]:
    to_free, runs = "To free it now:", False
    if lock.state == "kept":
        state = lock.word.capitalize()
        yield f"{state}, for {_whole(lock.left)} more: {lock.run} has returned (lock_at_least)."
    elif lock.state == "handed_over":
        to_free = "To free it now, so that its receiver finds it lost:"
        yield (
            f"Handed over {_whole(lock.held_for)} ago by {lock.run}: no process has it. It "
            f"waits for its receiver for {_whole(lock.left)} more at most."
        )
    else:
        alive, runs = "on another host or in another container: it cannot be seen from here", True
        if why.death:
            to_free = f"The next call on this host takes it over. {to_free}"
            alive, runs = f"dead: {why.death}", False
        elif why.alive:
            alive = f"alive: same host{_started(lock)}"
        since = f"for {_whole(lock.held_for)} " if lock.since else ""
        yield f"Held {since}by {lock.run} ({alive})."
        yield f"{_lease(lock)} {_usual(why)}"
    yield f"{_skipped(why, lock)} {_completed(why)}".strip()
    yield from _hungry(why, lock)
    if runs and lock.task_id:
        yield "It is freed when the task ends or its process dies. To stop the task:"
        yield f"{COMMAND}{stop_command(lock.task_id)}"
    elif runs:
        yield "It is freed when its block of code ends or its process dies."
    if runs:
        to_free = "To free only the lock (a second run can then start beside this one):"
    yield to_free
    yield _clear(lock)


def _started(lock: HeldLock) -> str:
    started = started_at(lock.process)
    if started is None:
        return ""
    another_day = time.localtime(started)[:3] != time.localtime()[:3]
    return f", started {clock_time(started, dated=another_day)}"


def _lease(lock: HeldLock) -> str:
    lease, left = lock.timeout, lock.remaining
    parts = [f"Lease: {in_words(lease)}"]
    if left is not None:
        renewed = max(0.0, lease - left)
        if lock.held_for - renewed > 1:
            parts.append(f"renewed {_whole(renewed)} ago")
        parts.append(f"ends in {_whole(left)} unless renewed")
    return f"{', '.join(parts)}."


def _whole(seconds: float) -> str:
    return in_words(math.floor(seconds))


def _usual(why: Why) -> str:
    if why.usual is None:
        return ""
    whose = "" if why.completed else " of the task's other runs"
    median, longest = in_words(why.usual.median), in_words(why.usual.longest)
    return f"Usual hold{whose}: {median}, longest {longest}."


def _skipped(why: Why, lock: HeldLock) -> str:
    if not lock.skipped:
        return "" if lock.skipped is None else "No run was skipped meanwhile."
    counts = [
        _counted(lock.skipped - why.duplicates, "run", "skipped"),
        _counted(why.duplicates, "duplicate", "stopped"),
    ]
    last = "the last " if lock.skipped > 1 else ""
    ago = f", {last}{_whole(why.skipped.ago)} ago" if why.skipped else ""
    return f"{' and '.join(filter(None, counts))} meanwhile{ago}."


def _counted(count: int, noun: str, verb: str) -> str:
    return f"{plural(count, noun)} {'was' if count == 1 else 'were'} {verb}" if count > 0 else ""


def _completed(why: Why) -> str:
    if why.completed is not None:
        raised = " (it raised)" if why.completed.what == "raised" else ""
        return f"Last completed: {_whole(why.completed.ago)} ago{raised}."
    return "" if why.no_history else "No completed run is in its history."


def _hungry(why: Why, lock: HeldLock | None) -> Iterator[str]:
    """Count the calls that came to nothing, if they are more than those already counted."""
    starving = why.starving
    if starving is not None and starving.skipped > max(1, (lock and lock.skipped) or 0):
        word = "Starving: " if starving.lasts(HOUR) else ""
        yield (
            f"{word}{plural(starving.skipped, 'call')} came to nothing in "
            f"{_whole(starving.unmet)}, the last {_whole(starving.last_skip)} ago."
        )


def _queued(lock: HeldLock) -> Iterator[str]:
    stopped = _counted(lock.skipped or 0, "duplicate", "stopped") or "No duplicate was stopped"
    state, until = "Queued", f"until it has run, for {_whole(lock.left)} more at most"
    if lock.state == "blocking":
        state, until = "Has begun", f"for {_whole(lock.left)} more, although it may have ended"
    yield (
        f"{state}: task {lock.task_id}, sent {_whole(lock.held_for)} ago from "
        f"{lock.host or 'an unknown host'}. It stops equal calls {until}."
        f"{'' if lock.skipped is None else f' {stopped}.'}"
    )
    yield "To forget it, so that an equal call can be sent beside it:"
    yield _clear(lock)


def _clear(lock: HeldLock) -> str:
    """Return the command that frees a lock, or forgets a queued call, and no other one."""
    # Where the cache cannot list its entries, a queued call is found by its name or key alone. An
    # entry that something else wrote has no token.
    if lock.queued or not lock.token:
        which = f"{'--queued ' if lock.queued else ''}{shlex.quote(lock.key)}"
    else:
        which = f"--token {shlex.quote(lock.token)}"
    return f"{COMMAND}manage.py locks clear {which}"


def _past(why: Why) -> Iterator[str]:
    completed, skipped = why.completed, why.skipped
    if completed is not None:
        run = describe_run(completed.task_id, completed.host, completed.pid)
        how = "it raised, " if completed.what == "raised" else ""
        yield (
            f"Last completed: {_whole(completed.ago)} ago, by {run} "
            f"({how}held for {in_words(completed.lasted or 0)})."
        )
    elif not why.no_history:
        yield _completed(why)
    if why.usual:
        yield _usual(why)
    if skipped is not None:
        behind = f", behind task {skipped.task_id}" if skipped.task_id else ""
        what = "found a duplicate" if skipped.what == "duplicate" else "skipped"
        yield f"Last {what}: {_whole(skipped.ago)} ago{behind}."
    for trouble in sorted(why.troubles, key=lambda trouble: trouble.ago):
        run = describe_run(trouble.task_id, trouble.host, trouble.pid)
        reasons = ", ".join(filter(None, [trouble.actor and f"by {trouble.actor}", trouble.reason]))
        because = f" ({reasons})" if reasons else ""
        yield f"Last {trouble.what}: {_whole(trouble.ago)} ago, {run}{because}."
    if not (why.starving or why.no_history):
        since = " since it was last completed" if completed else ""
        yield f"Not starving: no call was skipped{since}."
    yield from _hungry(why, why.queued)
