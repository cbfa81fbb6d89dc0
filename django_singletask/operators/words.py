"""Put times, processes and states into words: the same ones for the command and the admin."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from urllib.parse import quote

from celery.app import app_or_default
from django.conf import settings
from django.utils.dateparse import parse_datetime
from django.utils.formats import date_format
from django.utils.timezone import is_naive, localtime, make_aware, make_naive
from django.utils.translation import gettext_lazy as _

from django_singletask.conf import TASK_URL, conf
from django_singletask.holder import Holder, clean
from django_singletask.models import COUNTED, OUTCOMES, RESULTS, RETAKEN, TaskLockEvent

STATES = {
    "dead": _("dead"),
    "expired": _("expired"),
    "stopped": _("stopped"),
    "slow": _("slow"),
    "starving": _("starving"),
    "held": _("held"),
    "kept": _("kept"),
    "handed_over": _("handed over"),
    "blocking": _("blocking"),
    "queued": _("queued"),
}
"""The words for the states of a lock."""
ANY_TROUBLE = "trouble"
"""Stands for all outcomes that can let two runs work at the same time, and for retaken locks."""
OPEN = {state: STATES[state] for state in ("held", "handed_over")}
"""The words for holds that go on, in the list of what happened."""
WORDS: dict[str, Any] = {
    **OPEN,
    **RESULTS,
    **OUTCOMES,
    RETAKEN: _("retaken"),
    **COUNTED,
    ANY_TROUBLE: _("trouble"),
}
"""What can have become of a run or a call, in the words of the list."""
CELERY_APPS = ("app", "celery", "celery_app")
"""Names that a Celery application usually has in its module."""
UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
NEIGHBOURS = [*pairwise(UNITS.items())]
"""Each unit with the next smaller one."""
# Each unit at most once, the largest first: 1h30m, not 30m1h.
GRAMMAR = re.compile("".join(f"(?:([0-9]{{1,12}}){unit})?" for unit in UNITS))
LONGEST = 36_500 * 86_400
"""Seconds: no database has a time that lies further back."""


def parse_duration(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``2h``, ``7d`` or ``1h30m``.

    Raises the error of ``argparse``, which shows its message, for anything else.
    """
    seconds = 0.0
    match = GRAMMAR.fullmatch(text)
    if match:
        for number, unit in zip(match.groups("0"), UNITS.values(), strict=True):
            seconds += int(number) * unit
    if not 0 < seconds <= LONGEST:
        message = f"{text!r} is not a duration: write it as 90s, 15m, 2h or 7d, up to 36500d."
        raise argparse.ArgumentTypeError(message)
    return seconds


def duration(seconds: float | None) -> str:
    """Write a duration in its two largest units: ``3s``, ``2m 14s``, ``1h``, ``3d 04h``.

    Without a duration, write ``-``.
    """
    if seconds is None:
        return "-"
    for (unit, size), (smaller_unit, smaller_size) in NEIGHBOURS:
        if seconds >= size:
            number, rest = divmod(int(seconds), size)
            smaller_number = rest // smaller_size
            if smaller_number:
                return f"{number}{unit} {smaller_number:02d}{smaller_unit}"
            return f"{number}{unit}"
    return f"{int(seconds)}s"


def hold_time(seconds: float | None) -> str:
    """Write how long a lock was held, to the hundredth of a second if that was short."""
    if seconds is None or seconds >= 10:
        return duration(seconds)
    return f"{seconds:.2f}s"


def lasted(row: TaskLockEvent, now: datetime | None = None) -> str:
    """Write how long a hold lasted, or until ``now`` if it still lasts; never less than 0.

    If a renewed lease expired, only the time at which a sweep noticed it is known: ``≤2m``. The
    clocks of two hosts differ: the end that one of them wrote can lie before the beginning.
    """
    end = row.hold_ended_at
    if end is None:
        end = now
    if end is None:
        return "-"
    text = hold_time(max(0.0, (end - row.at).total_seconds()))
    if row.outcome == "expired" and not row.fixed:
        return f"≤{text}"
    return text


def clock_time(at: datetime | float, *, dated: bool = False, zone: bool = False) -> str:
    """Write a time, or a Unix time in seconds, to the second, in the time zone of the user.

    ``zone`` adds the name of that time zone.
    """
    if not isinstance(at, datetime):
        at = datetime.fromtimestamp(at, tz=UTC)
    form = "H:i:s"
    if dated:
        form = f"Y-m-d {form}"
    if zone:
        form += " T"
    return date_format(to_local(at), form)


def end_time(row: TaskLockEvent, clock: Callable[[datetime], str]) -> str:
    """Write when a hold ended, or when the last call came, or that a run goes on."""
    if row.outcome or row.is_counted:
        return clock(row.end)
    if row.state == "held":
        return str(_("running"))
    return "-"


def to_moment(text: str) -> datetime:
    """Read a time; without an offset it is in the time zone of the user. Raises ``ValueError``."""
    at = parse_datetime(text)
    if at is None:
        raise ValueError(text)
    if settings.USE_TZ:
        if is_naive(at):
            at = make_aware(at)
        return to_utc(at)
    if is_naive(at):
        return at
    return make_naive(at)


def to_local(at: datetime) -> datetime:
    if is_naive(at):
        return at
    return localtime(at)


def to_utc(at: datetime) -> datetime:
    if is_naive(at):
        return at
    return at.astimezone(UTC)


def process(run: Holder | TaskLockEvent) -> str:
    """Name the process of a run, as in ``web-1:8121``; empty if it has none, or none is known."""
    if run.host and run.pid:
        return f"{run.host}:{run.pid}"
    return ""


def place(run: Holder | TaskLockEvent, unknown: str = "-") -> str:
    """Name the process of a run, or else its host."""
    name = process(run)
    if name:
        return name
    if run.host:
        return run.host
    return unknown


def task_page(task_id: str | None) -> str:
    """Return the address of a task's page, as ``SINGLETASK_TASK_URL`` says; empty without one."""
    address = str(conf.task_url)
    if not task_id or not TASK_URL.fullmatch(address):
        return ""
    return address.replace("{task_id}", quote(task_id, safe=""))


def stop_command(task_id: str, *, queued: bool = False) -> str:
    """Return the shell command that stops a running task, or discards a queued call."""
    stop = "terminate SIGTERM"
    if queued:
        stop = "revoke"
    return f"celery -A {app_module()} control {stop} {shlex.quote(task_id)}"


def app_module() -> str:
    """Return the module that has the Celery application: its package, if that has it, too."""
    app = app_or_default()
    modules = []
    for name, module in sys.modules.copy().items():
        if name == "__main__":
            continue  # no other process can import it
        names = getattr(module, "__dict__", {})
        if any(names.get(each) is app for each in CELERY_APPS):
            modules.append(name)
    return min(modules, key=len, default="<app>")


def status(event: TaskLockEvent) -> str:
    """Return how a hold ended, or what else happened, as a code of ``WORDS``."""
    if event.is_counted:  # not a hold, but calls that met one
        return event.kind
    if event.outcome == "released" and event.result:
        return event.result
    if event.outcome:
        return event.outcome
    return event.state


def word(event: TaskLockEvent) -> str:
    """Return the status in the language of the user; as it is, if a later version wrote it."""
    code = status(event)
    return str(WORDS.get(code, code))


def headline(event: TaskLockEvent, until: datetime | None = None) -> str:
    """Say what happened and how often, or how a hold ended and after which time.

    Of a hold that goes on, ``until`` is now.
    """
    text = word(event)
    if event.count > 1:
        text = f"{text} × {event.count}"
    if event.hold_ended_at is not None:
        return _("{} after {}").format(text, lasted(event))
    if until is not None and status(event) == "held":
        return _("{} for {}").format(text, lasted(event, until))
    return text


def reason(event: TaskLockEvent) -> str:
    """Return why something happened; of a conflict, what became of the call, by which policy."""
    if event.kind != "conflict":
        return event.reason
    result = event.get_result_display()  # pyright: ignore[reportAttributeAccessIssue]
    if event.reason in ("skip", "raise", "wait"):
        return result  # the policy would say it twice
    return f"{result}: {event.reason}"


def witness(event: TaskLockEvent) -> str:
    """Say who cleared a lock, or who noticed how a hold ended; empty if the holder itself did."""
    if not event.actor:
        return ""
    text = _("noticed by {}")
    if event.outcome == "cleared":
        text = _("by {}")
    return str(text).format(event.actor)


def few(names: Sequence[str]) -> str:
    """Write the first five names, and how many more there are."""
    text = ", ".join(map(clean, names[:5]))
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 lock``, ``2 locks``."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"
