"""Tell an operator, in sentences, what is known of a lock."""

from __future__ import annotations

import math
import shlex
import textwrap
import time
from collections.abc import Iterator
from functools import partial

from django_singletask.history.queries import ago
from django_singletask.holder import describe_run
from django_singletask.locks.liveness import started_at
from django_singletask.management.tables import few, printable, width
from django_singletask.models import TaskLockEvent
from django_singletask.operators.explain import TaskFacts, Why
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.words import (
    compact,
    hold_seconds,
    in_words,
    plural,
    status,
    stop_command,
    task_page,
)

COMMAND = "    "
"""Beginning of a line that is to be copied, and therefore is never wrapped."""


def explain(facts: Why | TaskFacts, asked: str = "") -> list[str]:
    """Write what is known, first the name if that was not ``asked``, as lines that fit."""
    sentences = _of_task(facts) if isinstance(facts, TaskFacts) else _of_lock(facts, asked)
    wrap = partial(textwrap.wrap, width=width(), break_long_words=False, break_on_hyphens=False)
    lines = []
    for text in map(printable, sentences):
        lines += [text] if text.startswith(COMMAND) else wrap(text)
    return lines


def _of_task(facts: TaskFacts) -> Iterator[str]:
    """Sum up the locks of a task, and say what to type for one of them."""
    task, held, queued = facts.task, facts.held, facts.queued
    yield f"{task}: {plural(len(held), 'lock')} held, {plural(len(queued), 'call')} queued."
    if held:
        names = few([printable(lock.name.removeprefix(task), 40) + _state(lock) for lock in held])
        held_for = _whole(held[0].held_for)
        yield f"Held: {names}. The first has been held for {held_for}, by {held[0].run}."
    yield from _last(facts)
    skips = _counted(facts.skips, "call", "skipped")
    yield facts.no_history or f"{skips} in the last {compact(facts.within)}."
    known: list[HeldLock | TaskLockEvent | None] = [*held, *queued, facts.completed, facts.skipped]
    if name := next((each.name for each in known if each), ""):
        yield "To explain one lock:"
        yield f"{COMMAND}manage.py locks why {shlex.quote(name)}"
    else:
        yield f"To explain one lock, name the call with its arguments: {task}(…)."


def _state(lock: HeldLock) -> str:
    word = lock.word if lock.state != "held" else "stopped" * lock.stopped or "slow" * lock.slow
    return f" ({word})" if word else ""


def _of_lock(why: Why, asked: str) -> Iterator[str]:
    if (why.lock or why.queued) and asked not in ("", why.name):
        yield f"{why.name}:"
    if run := why.run:
        yield f"{_upper(_run(run))}: {status(run)[1]} {_ago(run)}."
    if why.same_name:
        yield (
            f"{len(why.same_name) + 1} locks have this name. This is the lock with the key "
            f"{why.key}; the other keys: {few(why.same_name)}."
        )
    if starving := why.starving:
        skips = _counted(starving.skipped, "call", "skipped")
        yield f"Starving: {skips} in {_whole(starving.unmet)}; none completed."
    if why.lock is not None:
        if why.lock.share:
            yield f"{why.lock.share} slots are held. One slot:"
        yield from _held(why, why.lock)
        for lock in why.beside:
            yield (
                f"Another slot: {lock.word}, acquired {_whole(lock.held_for)} ago by {lock.run}. "
                "To free that slot:"
            )
            yield _clear(lock)
    elif why.queued is None or why.queued.state == "blocking":
        yield f"Free: {why.name}."
    if why.queued is not None:
        yield from _queued(why.queued)
    for lock in why.expired:
        yield (
            f"Stale history entry: {lock.run} acquired this lock {_whole(lock.held_for)} ago with "
            f"a {in_words(lock.timeout)} lease; the cache no longer has it. Nothing to free. A "
            "worker will close the entry."
        )
    if why.lock is None:
        yield from _last(why)
        for row in why.troubles:
            reasons = ", ".join(filter(None, [row.actor and f"by {row.actor}", row.reason]))
            because = f" ({reasons})" if reasons else ""
            yield f"Last {status(row)[1]}: {_ago(row)}, {_run(row)}{because}."
    if why.no_history:
        yield why.no_history


def _held(why: Why, lock: HeldLock) -> Iterator[str]:
    if lock.state == "kept":
        yield (
            f"{_upper(lock.word)}, for {_whole(lock.left)} more, by lock_at_least: {lock.run} has "
            "returned."
        )
    elif lock.state == "handed_over":
        yield (
            f"Handed over {_whole(lock.held_for)} ago by {lock.run}: no process holds the lock. "
            f"Its receiver must take the lock within {_whole(lock.left)}."
        )
    else:
        process = "on another host or in another container: not known whether it is alive"
        if why.death:
            process = f"dead: {why.death}"
        elif why.alive:
            at = started_at(lock.process)
            started = "" if at is None else f", started {_whole(time.time() - at)} ago"
            process = f"{'stopped' if lock.stopped else 'alive'}, on this host{started}"
        since = f"for {_whole(lock.held_for)} " if lock.since else ""
        yield f"Held {since}by {lock.run} ({process})."
        yield f"{_lease(lock)} {'Slower than usual. ' * lock.slow}{_usual(why)}"
    yield f"{_skipped(why, lock)} {_completed(why)}".strip()
    if page := task_page(lock.task_id):
        yield "The page of the task:"
        yield f"{COMMAND}{page}"
    if lock.state == "held":
        yield from _to_stop(lock)
    else:
        taken_over = "The next call on this host takes the lock over. " * (lock.state == "dead")
        yield f"{taken_over}To free the lock now:"
    yield _clear(lock)


def _to_stop(lock: HeldLock) -> Iterator[str]:
    run = "task" if lock.task_id else "code"
    if lock.stopped:
        yield (
            "The process is stopped (SIGSTOP, or a debugger) and cannot renew the lease: another "
            f"run can start when the lease ends. To let the {run} continue:"
        )
        yield f"{COMMAND}kill -CONT {lock.pid}"
    to_stop = " To stop the task:" if lock.task_id else ""
    yield f"The lock is released when the {run} ends or its process dies.{to_stop}"
    if lock.task_id:
        yield f"{COMMAND}{stop_command(lock.task_id)}"
    yield (
        f"To free only the lock (the {run} keeps running, and a second copy can start at the same "
        "time):"
    )


def _lease(lock: HeldLock) -> str:
    lease = f"Lease: {in_words(lock.timeout)}"
    if lock.remaining is None:
        return f"{lease}."
    age = max(0.0, lock.timeout - lock.remaining)
    renewed = f"renewed {_whole(age)} ago, " if lock.held_for - age > 1 else ""
    return f"{lease}, {renewed}ends in {_whole(lock.remaining)} unless renewed."


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _whole(seconds: float) -> str:
    return in_words(max(0, math.floor(seconds)))


def _usual(facts: Why | TaskFacts) -> str:
    if facts.usual is None:
        return ""
    known = (facts.lock, facts.completed) if isinstance(facts, Why) else ()
    of = " of its task" * (isinstance(facts, Why) and all(each.task for each in known if each))
    holds = f"{in_words(facts.usual.median)}, longest {in_words(facts.usual.longest)}"
    return f"Usual hold{of}: {holds}."


def _skipped(why: Why, lock: HeldLock) -> str:
    if lock.skipped is None:
        return ""
    last = "the last " if lock.skipped > 1 else ""
    when = f", {last}{_ago(why.skipped)}" if lock.skipped and why.skipped else ""
    return f"{_counted(lock.skipped, 'call', 'skipped')} during this hold{when}."


def _counted(count: int, noun: str, verb: str) -> str:
    number = plural(count, noun) if count else f"No {noun}"
    return f"{number} {'were' if count > 1 else 'was'} {verb}"


def _completed(facts: Why | TaskFacts) -> str:
    if (last := facts.completed) is None:
        return "" if facts.no_history else "No completed run is in the history."
    raised = " (it raised an error)" if last.result == "raised" else ""
    by = f", by {_run(last)} (held for {in_words(hold_seconds(last))})" if facts.free else ""
    return f"Last completed: {_ago(last)}{raised}{by}."


def _queued(lock: HeldLock) -> Iterator[str]:
    until = "for {} more, although the call has begun"
    until = until if lock.state == "blocking" else "until it has run, but at most for {} more"
    skipped = lock.skipped
    stopped = "" if skipped is None else f" {_counted(skipped, 'duplicate', 'stopped')}."
    yield (
        f"{_upper(lock.word)}: task {lock.task_id}, sent {_whole(lock.held_for)} ago from "
        f"{lock.host or 'an unknown host'}. It stops identical calls "
        f"{until.format(_whole(lock.left))}.{stopped}"
    )
    yield "To forget it (an identical call can then be sent, and run at the same time):"
    yield _clear(lock)


def _clear(lock: HeldLock) -> str:
    """Return the command that frees a lock, or forgets a queued call, and no other one."""
    # Where the cache cannot list its entries, a queued call is found by its name or key alone. An
    # entry that something else wrote has no token.
    which = shlex.quote(lock.token)
    if lock.queued or not lock.token:
        which = f"{'--queued ' * lock.queued}{shlex.quote(lock.key)}"
    return f"{COMMAND}manage.py locks clear {which}"


def _last(facts: Why | TaskFacts) -> Iterator[str]:
    yield from filter(None, [_completed(facts), _usual(facts)])
    if skipped := facts.skipped:
        blocker = skipped.blocked_by_task_id
        behind = f", because task {blocker} had the lock" if blocker else ""
        yield f"Last {status(skipped)[1]}: {_ago(skipped)}{behind}."


def _ago(row: TaskLockEvent) -> str:
    return f"{_whole(ago(row.ended_at or row.last_at or row.at))} ago"


def _run(row: TaskLockEvent) -> str:
    return describe_run(row.task_id, row.host, row.pid)
