"""Watch for a monitor: what must be known, is held for too long, or starves."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.management.base import CommandError

from django_singletask.history.queries import NoHistory
from django_singletask.management.tables import few, printable
from django_singletask.operators import names as calls
from django_singletask.operators.explain import HOLDING, why
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import starving
from django_singletask.operators.words import compact, in_words, plural

__all__ = ["held_over", "is_among", "must_be_known", "starving_over", "unknown"]


def must_be_known(names: Sequence[str], task: str | None, locks: Sequence[HeldLock]) -> None:
    """Raise if nothing is known of what a monitor watches: its name may be misspelled.

    Of a lock :class:`UnknownLock`, of a task ``CommandError``.
    """
    for name in names:
        if not is_among(name, locks):
            why(name)
    if task is None or any(lock.task == task for lock in locks) or calls.is_task(task):
        return
    raise CommandError(unknown("task", task, calls.nearest(task, calls.tasks())), returncode=2)


def unknown(noun: str, name: str, matches: Sequence[str]) -> str:
    """Say that there is no lock or task of a name, and which are like it."""
    like = ", or ".join(f'"{printable(match)}"' for match in matches)
    hint = f"Did you mean {like}?" if like else "'manage.py locks' lists what is held."
    return f"No {noun} is known as '{printable(name)}'. {hint}"


def held_over(locks: Sequence[HeldLock], limit: float | None) -> list[str]:
    """Return a sentence that names the locks held for longer than ``limit`` seconds, if any is."""
    if limit is None:
        return []
    over = [
        f"{lock.name} ({in_words(lock.held_for)})"
        for lock in locks
        if lock.state in HOLDING - {"kept"} and lock.held_for > limit
    ]
    return [f"Held for over {compact(limit)}: {few(over)}."] if over else []


def starving_over(
    names: Sequence[str], task: str | None, limits: tuple[float, int | None] | None
) -> list[str]:
    """Return a sentence that names the locks that starve, if any does."""
    if limits is None:
        return []
    longer_than, times = limits
    try:
        spelled = {each for name in names for each in calls.names_of(name)}
        states = starving(longer_than, times=times, names=spelled, task=task)
    except NoHistory as error:
        raise CommandError(f"--fail-if-starving needs the history. {error}") from error
    hungry = [
        f"{state.name} ({plural(state.skipped, 'call')} in {in_words(state.unmet)})"
        for state in states
    ]
    how = f"for {compact(longer_than)}" if times is None else f"{plural(times, 'time')} in a row"
    return [f"Starving {how} or more: {few(hungry)}."] if hungry else []


def is_among(name: str, locks: Sequence[HeldLock]) -> bool:
    """Say whether a name, as an operator writes it, is that of one of the locks."""
    keys = calls.keys_of(name)
    return any(lock.goes_by(name, keys) for lock in locks)
