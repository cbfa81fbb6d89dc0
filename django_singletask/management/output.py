"""What the command prints: tables, sentences and JSON."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import zip_longest
from typing import Any

from django_singletask.history.queries import ago, timestamp
from django_singletask.holder import clean, describe_run
from django_singletask.locks.liveness import started_at
from django_singletask.models import RETAKEN, TaskLockEvent
from django_singletask.operators import words
from django_singletask.operators.explain import TaskFacts, Why
from django_singletask.operators.probe import Probe
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.words import (
    compact,
    hold_seconds,
    in_words,
    plural,
    status,
    stop_command,
    task_page,
    witness,
)

WIDTH = 80
SHOWN = 5
"""Locks that a sentence names."""

LEFT, RIGHT, NAME = "left", "right", "name"


def width() -> int:
    """Return the columns of the terminal; 80 if it has fewer, or where there is none."""
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def table(
    heads: Sequence[str],
    kinds: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Iterable[str] = (),
) -> Iterator[str]:
    """Lay out rows below their heads, and yield the lines.

    A column is ``"left"`` or ``"right"`` and as wide as its texts, but one has the ``"name"``. The
    last column has up to a third of the room that is left, and the names the rest.
    A row's note stands behind its last cell, or below where it does not fit.
    """
    first, last, room = kinds.index(NAME), len(kinds) - 1, width()
    # A text that many rows have is measured once.
    texts = ({head, *(row[n] for row in rows)} for n, head in enumerate(heads))
    widths = [max(columns(printable(text)) for text in column) for column in texts]
    left = room - sum(widths[n] for n in range(last) if n != first) - 2 * last
    # The last may have the room that the first does not need.
    widths[last] = min(widths[last], max(left // 3, left - widths[first]))
    widths[first] = min(widths[first], left - widths[last])
    yield "  ".join(map(_fit, heads, widths, kinds)).rstrip()
    for row, note in zip_longest(rows, notes, fillvalue=""):
        line = "  ".join(map(_fit, row, widths, kinds)).rstrip()
        if note and columns(f"{line} {note}") > room:
            yield line
            yield f"    {note}"
        else:
            yield f"{line} {note}" if note else line


def _fit(text: str, width: int, kind: str) -> str:
    """Cut or pad a cell, so that it has a width."""
    if not (text.isascii() and text.isprintable() and len(text) <= width):
        # The names of two pods differ at their ends, as those of two locks do: cut the middle.
        text = printable(text)
        text = _name(text, width) if kind == NAME else printable(text, width)
        width -= columns(text) - len(text)
    return text.rjust(width) if kind == RIGHT else text.ljust(width)


def _name(text: str, width: int) -> str:
    """Cut the name of a call so that the function and the last arguments stay: they tell it apart.

    First the modules go, from the left, then the middle of the arguments.
    """
    task, parenthesis, arguments = text.partition("(")
    modules = len(task.rpartition(".")[0])
    if not (parenthesis and modules) or columns(text) <= width:
        return printable(text, width)
    task = f"…{task[min(modules, columns(text) - width) + 1 :]}("
    return printable(f"{task}{arguments}", width, columns(task))


def printable(text: str, width: int | None = None, beginning: int = 255) -> str:
    """Escape what could steer a terminal, and cut the middle out of what is wider than ``width``.

    Format characters are escaped too: they can turn the direction of what follows. What stays of
    the beginning is half of ``width``, but not more than ``beginning``.
    """
    text = clean(text)
    if width is None or columns(text) <= width:
        return text
    head = tail = text
    while columns(head) > min((width - 1) // 2, beginning):
        head = head[:-1]
    while tail and columns(head) + 1 + columns(tail) > width:
        tail = tail[1:]
    return f"{head}…{tail}"


def columns(text: str) -> int:
    """Count the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def few(names: Sequence[str]) -> str:
    """Write the first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(printable, names[:SHOWN])) + more


COMMAND = " (manage.py locks)"
"""End of the actor's name if it was this command."""


def lock_table(locks: Sequence[HeldLock]) -> Iterator[str]:
    return table(
        ("LOCK", "HELD FOR", "LEASE", "CONFLICTS", "HOLDER"),
        (NAME, RIGHT, RIGHT, RIGHT, LEFT),
        [
            (
                lock.name,
                words.duration(lock.held_for),
                _lease(lock),
                "-" if lock.conflicts is None else str(lock.conflicts),
                _holder(lock),
            )
            for lock in locks
        ],
        map(_note, locks),
    )


ENDING = {"kept", "blocking"}
"""States without a process, which end at a time that a note says."""


def _lease(lock: HeldLock) -> str:
    if lock.state in ENDING:
        return words.duration(lock.left)
    return "-" if lock.remaining is None or lock.queued else words.duration(lock.remaining)


def _note(lock: HeldLock) -> str:
    notes = [lock.word if lock.state in ENDING else "", lock.share, "stopped" * lock.stopped]
    if lock.usual and lock.slow:
        median = round(lock.usual.median)
        usual = words.duration(median).partition(" ")[0] if median else "<1s"
        notes.append(f"slow: usual {usual}")
    return " ".join(f"({note})" for note in notes if note)


def _holder(lock: HeldLock) -> str:
    """Name the process that holds a lock, or the task id of the call that is queued."""
    if lock.state in ENDING:
        return "-"
    if lock.queued:
        name = f"{lock.task_id[:4]}…" if lock.task_id else "unknown"
    else:
        name = words.process(lock.host, lock.pid) or lock.host or "unknown"
    return name if lock.state == "held" else f"{lock.word} {name}"


def history_table(rows: Sequence[TaskLockEvent]) -> Iterator[str]:
    # Two of them where a switch to or from summer time lies between the rows.
    zones = {words.clock_time(row.at, zone=True).partition(" ")[2] for row in rows}
    return table(
        (f"AT ({'/'.join(sorted(zones))})", "LOCK", "WHAT", "HELD", "BY"),
        (LEFT, NAME, LEFT, RIGHT, LEFT),
        [
            (
                _day_and_time(row.at),
                row.name,
                _what(row),
                _held(row),
                _by(row),
            )
            for row in rows
        ],
        map(_history_note, rows),
    )


def _by(row: TaskLockEvent) -> str:
    """Name who cleared the lock, or else the process of the run."""
    if row.outcome != "cleared":
        return words.process(row.host, row.pid) or row.host or "unknown"
    # There is no room for the host of somebody who used the command.
    return row.actor.rpartition(" on ")[0] if row.actor.endswith(COMMAND) else row.actor


def _day_and_time(at: datetime) -> str:
    """Leave the year out: there is no room for it."""
    return words.clock_time(at, dated=True).partition("-")[2]


def _history_note(row: TaskLockEvent) -> str:
    """Say why a lock was cleared, or when the last of several calls came."""
    if row.count > 1 and row.last_at:
        return f"(last {_day_and_time(row.last_at)})"
    return (
        f"({printable(row.reason, width() - 6)})" if row.outcome == "cleared" and row.reason else ""
    )


def _held(row: TaskLockEvent) -> str:
    if row.hold_ended_at is None:
        return "-"
    # Of a run that expired only the time at which a sweep noticed it is known.
    return "≤" * (row.outcome == "expired") + words.hold_time(words.hold_seconds(row))


def _what(row: TaskLockEvent) -> str:
    """Say what a row is about, what became of a call, and that a lock was retaken."""
    because = f" {words.reason(row)}" if row.kind == "conflict" else ""
    because += f", {RETAKEN}" if row.retaken else ""
    return f"{words.status(row)[1]}{because}" + (f" ×{row.count}" if row.count > 1 else "")


def probe_report(probe: Probe) -> list[str]:
    backend = probe.backend.rpartition(".")[2]
    lines = [printable(f"Cache {probe.cache!r}: {backend}, {probe.server}", width())]
    for finding in probe.findings:
        lines += textwrap.wrap(
            printable(finding.text),
            width(),
            initial_indent=f"  {finding.level:<7}  ",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
        )
    warnings = sum(finding.level == "warning" for finding in probe.findings)
    if probe.fit:
        but = f", with {words.plural(warnings, 'warning')}" if warnings else ""
        lines.append(f"Fit to hold locks{but}.")
    return lines


VERSION = 2
"""Of the keys of the JSON: it grows when a key goes, or gets another meaning."""


def json_rows(name: str, rows: Sequence[Any]) -> Iterator[str]:
    """Yield the lines of a JSON object with an array, with a line for each row."""
    yield f'{{"version": {VERSION}, "{name}": ['
    for number, row in enumerate(rows):
        yield f"{',' * bool(number)}{to_json(row)}"
    yield "]}"


def to_json(data: Any, **layout: Any) -> str:
    """Write JSON in which only what could steer a terminal, or what it lacks, is escaped."""
    ascii_only = "utf" not in str(getattr(sys.stdout, "encoding", "utf-8")).lower()
    text = json.dumps(data, default=as_json, ensure_ascii=ascii_only, **layout)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def as_json(fact: Any) -> Any:
    """Return what JSON has for a fact that ``json`` does not know by itself.

    Times become Unix times, and spans seconds.
    """
    if isinstance(fact, datetime):
        return round(timestamp(fact), 3)
    digits = 6 if isinstance(fact, Probe) else 3  # a lock is taken in less than a millisecond
    names: Iterable[str] = LOCK
    if isinstance(fact, TaskLockEvent):
        names = (field.name for field in fact._meta.concrete_fields if field.name != "ref")
        names = [*names, "token"]
    elif not isinstance(fact, HeldLock):
        names = vars(fact)
    facts = ((name, getattr(fact, name)) for name in names)
    return {name: round(x, digits) if isinstance(x, float) else x for name, x in facts}


LOCK = (
    *("name", "key", "slots", "slots_held", "state", "queued", "held_for", "remaining"),
    *("conflicts", "usual", "slow", "stopped"),
    *("token", "task", "task_id", "host", "pid", "since", "timeout"),
)


INDENT = "    "
"""Beginning of a line that is to be copied, and therefore is never wrapped."""


def explain(facts: Why | TaskFacts, asked: str = "") -> list[str]:
    """Write what is known, first the name if that was not ``asked``, as lines that fit."""
    sentences = _of_task(facts) if isinstance(facts, TaskFacts) else _of_lock(facts, asked)
    wrap = partial(textwrap.wrap, width=width(), break_long_words=False, break_on_hyphens=False)
    lines = []
    for text in map(printable, sentences):
        lines += [text] if text.startswith(INDENT) else wrap(text)
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
    yield facts.no_history or f"{_conflicts(facts.conflicts)} in the last {compact(facts.within)}."
    known: list[HeldLock | TaskLockEvent | None] = [*held, *queued, facts.completed, facts.conflict]
    if name := next((each.name for each in known if each), ""):
        yield "To explain one lock:"
        yield f"{INDENT}manage.py locks why {shlex.quote(name)}"
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
        met = _conflicts(starving.conflicts)
        yield f"Starving: {met} in {_whole(starving.unmet)}; no run completed."
    if why.lock is not None:
        if why.lock.share:
            yield f"{why.lock.share} slots are held. One slot:"
        yield from _of_holder(why, why.lock)
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
            reasons = ", ".join(filter(None, [witness(row), row.reason]))
            because = f" ({reasons})" if reasons else ""
            yield f"Last trouble: {' and '.join(row.troubles)} {_ago(row)}, {_run(row)}{because}."
    if why.no_history:
        yield why.no_history


def _of_holder(why: Why, lock: HeldLock) -> Iterator[str]:
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
        yield f"{_lease_of(lock)} {'Slower than usual. ' * lock.slow}{_usual(why)}"
    yield f"{_met(why, lock)} {_completed(why)}".strip()
    if page := task_page(lock.task_id):
        yield "The page of the task:"
        yield f"{INDENT}{page}"
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
        yield f"{INDENT}kill -CONT {lock.pid}"
    to_stop = " To stop the task:" if lock.task_id else ""
    yield f"The lock is released when the {run} ends or its process dies.{to_stop}"
    if lock.task_id:
        yield f"{INDENT}{stop_command(lock.task_id)}"
    yield (
        f"To free only the lock (the {run} keeps running, and a second copy can start at the same "
        "time):"
    )


def _lease_of(lock: HeldLock) -> str:
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


def _met(why: Why, lock: HeldLock) -> str:
    if lock.conflicts is None:
        return ""
    last = "the last " if lock.conflicts > 1 else ""
    when = f", {last}{_ago(why.conflict)}" if lock.conflicts and why.conflict else ""
    return f"{_conflicts(lock.conflicts)} during this hold{when}."


def _conflicts(count: int) -> str:
    return plural(count, "conflict") if count else "No conflict"


def _completed(facts: Why | TaskFacts) -> str:
    if (last := facts.completed) is None:
        return "" if facts.no_history else "No completed run is in the history."
    raised = " (it raised an error)" if last.result == "raised" else ""
    by = f", by {_run(last)} (held for {in_words(hold_seconds(last))})" if facts.free else ""
    return f"Last completed: {_ago(last)}{raised}{by}."


def _queued(lock: HeldLock) -> Iterator[str]:
    until = "for {} more, although the call has begun"
    until = until if lock.state == "blocking" else "until it has run, but at most for {} more"
    stopped = ""
    if lock.conflicts is not None:
        stopped = f" {plural(lock.conflicts, 'duplicate') if lock.conflicts else 'No duplicate'}."
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
    return f"{INDENT}manage.py locks clear {which}"


def _last(facts: Why | TaskFacts) -> Iterator[str]:
    yield from filter(None, [_completed(facts), _usual(facts)])
    if met := facts.conflict:
        blocker = met.blocked_by_task_id
        behind = f", because task {blocker} had the lock" if blocker else ""
        yield f"Last {status(met)[1]}: {_ago(met)}{behind}."


def _ago(row: TaskLockEvent) -> str:
    return f"{_whole(ago(row.end))} ago"


def _run(row: TaskLockEvent) -> str:
    return describe_run(row.task_id, row.host, row.pid)
