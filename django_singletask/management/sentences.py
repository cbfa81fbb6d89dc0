"""Tell an operator, in sentences, what is known of a lock."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
import time
from collections.abc import Iterator

from django_singletask.holder import this_process
from django_singletask.locks.liveness import is_gone, started_at
from django_singletask.management.tables import columns, few, plural, printable, width
from django_singletask.operators.explain import Past, Why
from django_singletask.operators.held import HeldLock
from django_singletask.operators.names import without_defaults
from django_singletask.operators.starving import HOUR
from django_singletask.operators.words import in_words

__all__ = ["explain"]

CLOCK = "%H:%M:%S"


def explain(why: Why) -> list[str]:
    """Write what is known of a lock as lines that fit the terminal."""
    lines = []
    for sentence, command in _sentences(why):
        whole = printable(f"{sentence} {command}{'.' if command.endswith(')') else ''}".strip())
        if columns(whole) <= width() or not command:
            lines += textwrap.wrap(
                whole, width(), break_long_words=False, break_on_hyphens=False
            ) or [""]
        else:
            # A line that is to be copied stays one.
            lines += textwrap.wrap(printable(sentence), width(), break_on_hyphens=False)
            lines.append(f"    {printable(command)}")
    return lines


def _sentences(why: Why) -> Iterator[tuple[str, str]]:
    """Yield sentences, each with a command that belongs behind it, or an empty one."""
    if why.same_name:
        yield (
            f"{len(why.same_name) + 1} locks have this name, and this is about the one with the "
            f"key {why.key}. The others: {few(why.same_name)}.",
            "",
        )
    if why.lock is not None:
        yield from _held(why, why.lock)
    elif why.queued is None:
        yield f"Free: {without_defaults(why.name)}.", ""
    if why.queued is not None:
        yield from _queued(why.queued)
    if why.others:
        yield f"Held with other arguments: {few([_arguments(name) for name in why.others])}.", ""
    for lock in why.expired:
        yield (
            f"An open row of the history: {_whose(lock)} took it {_whole(lock.held_for)} ago, "
            f"for {in_words(lock.holder.timeout)} unless renewed, and the cache has it no more. "
            f"There is nothing to free. {_if_it_lives(lock)}",
            "",
        )
    if why.lock is None:
        yield from _past(why)
    if why.no_history:
        yield why.no_history, ""


def _held(why: Why, lock: HeldLock) -> Iterator[tuple[str, str]]:
    if why.death:
        alive = f"dead: {why.death}"
    elif why.alive:
        alive = f"alive: same host{_started(lock)}"
    else:
        alive = "on another host or in another container: it cannot be seen from here"
    since = f"for {_whole(lock.held_for)} " if lock.holder.since else ""
    yield f"Held {since}by {_whose(lock)} ({alive}).", ""
    yield f"{_lease(lock)} {_usual(why)}", ""
    yield " ".join(filter(None, (_skipped(why, lock), _completed(why)))), ""
    yield from _hungry(why, lock)
    if why.death:
        yield "The next call on this host takes it over. To free it now:", _clear(lock)
        return
    if lock.holder.task_id:
        revoke = f"app.control.revoke({json.dumps(lock.holder.task_id)}, terminate=True)"
        yield "It is freed when the task ends or its process dies. To stop the task:", revoke
    else:
        yield "It is freed when its block of code ends or its process dies.", ""
    yield (
        "To free only the lock (a second run can then start beside this one):",
        _clear(lock),
    )


def _arguments(name: str) -> str:
    _task, bracket, arguments = without_defaults(name).partition("(")
    return printable(f"{bracket}{arguments}" or name, 40)


def _whose(lock: HeldLock) -> str:
    holder = lock.holder
    who = f"task {holder.task_id}" if holder.task_id else "a lock in code"
    return f"{who} on {holder.host or 'an unknown host'}, process {holder.pid or 'unknown'}"


def _if_it_lives(lock: HeldLock) -> str:
    # The history knows the host's name and a number, which another process may have by now.
    there = lock.holder.pid > 0 and not is_gone(lock.holder.pid, "")
    if lock.holder.host == this_process().host and there:
        lives = "A process of this number runs on this host: if it is that one, it"
    else:
        lives = "If its process lives, that"
    return (
        f"{lives} may take the lock again at its next renewal; else a worker's sweep closes "
        "the row."
    )


def _started(lock: HeldLock) -> str:
    started = started_at(lock.holder)
    if started is None:
        return ""
    there = time.localtime(started)
    same_day = there[:3] == time.localtime()[:3]
    return f", started {time.strftime(CLOCK if same_day else f'%Y-%m-%d {CLOCK}', there)}"


def _lease(lock: HeldLock) -> str:
    lease, left = lock.holder.timeout, lock.remaining
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
    told = []
    for count, noun, verb in (
        (lock.skipped - why.duplicates, "run", "skipped"),
        (why.duplicates, "duplicate", "stopped"),
    ):
        if count > 0:
            told.append(f"{plural(count, noun)} {'was' if count == 1 else 'were'} {verb}")
    last = (
        f", {'the last ' if lock.skipped > 1 else ''}{_whole(why.skipped.ago)} ago"
        if (why.skipped)
        else ""
    )
    return f"{' and '.join(told)} meanwhile{last}."


def _completed(why: Why) -> str:
    if why.completed is not None:
        raised = " (it raised)" if why.completed.what == "raised" else ""
        return f"Last completed: {_whole(why.completed.ago)} ago{raised}."
    return "" if why.no_history else "No completed run is in its history."


def _hungry(why: Why, lock: HeldLock | None) -> Iterator[tuple[str, str]]:
    """Tell of calls that came to nothing, if they are more than is told already."""
    starving = why.starving
    if starving is not None and starving.skipped > max(1, (lock and lock.skipped) or 0):
        word = "Starving: " if starving.lasts(HOUR) else ""
        calls, last = plural(starving.skipped, "call"), _whole(starving.last_skip)
        yield (
            f"{word}{calls} came to nothing in {_whole(starving.unmet)}, the last {last} ago.",
            "",
        )


def _clear(lock: HeldLock) -> str:
    if lock.queued:
        # Where the cache cannot list, a queued call is found by its name or key alone.
        return f"manage.py locks clear --queued {_quoted(lock)}"
    if not lock.holder.token:
        return f"manage.py locks clear {shlex.quote(lock.key)}"
    return f"manage.py locks clear --token {shlex.quote(lock.holder.token)}"


def _quoted(lock: HeldLock) -> str:
    """Return the name as a shell takes it, if it can be read then, else the key."""
    return shlex.quote(lock.key) if set('"$`\\!…') & set(lock.name) else f'"{lock.name}"'


def _queued(lock: HeldLock) -> Iterator[tuple[str, str]]:
    left = lock.remaining
    if left is None:
        left = max(0.0, lock.holder.timeout - lock.held_for)
    duplicates = plural(lock.skipped, "duplicate") if lock.skipped else "No duplicate"
    were = "was" if not lock.skipped or lock.skipped == 1 else "were"
    told = f" {duplicates} {were} stopped." if lock.skipped is not None else ""
    yield (
        f"Queued: task {lock.holder.task_id}, sent {_whole(lock.held_for)} ago from "
        f"{lock.holder.host or 'an unknown host'}. It stops equal calls until it has run, for "
        f"{_whole(left)} more at most.{told}",
        "",
    )
    yield "To forget it, so that an equal call can be sent beside it:", _clear(lock)


def _past(why: Why) -> Iterator[tuple[str, str]]:
    facts = []
    if why.completed is not None:
        how = "it raised, " if why.completed.what == "raised" else ""
        facts.append(
            f"{_completed(why).partition(' (')[0].rstrip('.')}, by {_by(why.completed)} "
            f"({how}held for {in_words(why.completed.lasted or 0)})."
        )
    elif not why.no_history:
        facts.append(_completed(why))
    if why.usual:
        facts.append(_usual(why))
    if why.skipped is not None:
        behind = f", behind task {why.skipped.task_id}" if why.skipped.task_id else ""
        what = "found a duplicate" if why.skipped.what == "duplicate" else "skipped"
        facts.append(f"Last {what}: {_whole(why.skipped.ago)} ago{behind}.")
    for trouble in sorted(why.troubles, key=lambda trouble: trouble.ago):
        reason = f"by {trouble.actor}" if trouble.actor else trouble.reason
        facts.append(
            f"Last {trouble.what}: {_whole(trouble.ago)} ago, {_by(trouble)}"
            f"{f' ({reason})' if reason else ''}."
        )
    if not (why.starving or why.no_history):
        since = " since it was last completed" if why.completed else ""
        facts.append(f"Not starving: no call was skipped{since}.")
    for fact in facts:
        yield fact, ""
    yield from _hungry(why, why.queued)


def _by(past: Past) -> str:
    who = f"task {past.task_id}" if past.task_id else "a lock in code"
    return f"{who} on {past.host or 'an unknown host'}, process {past.pid or 'unknown'}"
