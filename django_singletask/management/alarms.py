"""Watch for a monitor: what must be known, is held for too long, or starves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from django.core.management.base import CommandError

from django_singletask.history.queries import NoHistory
from django_singletask.management.tables import few
from django_singletask.operators.explain import HOLDING
from django_singletask.operators.names import Selector
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import Starving, starving
from django_singletask.operators.words import compact, in_words, plural

__all__ = ["held_over", "starving_over"]


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
    selectors: Sequence[Selector],
    task: Selector | None,
    limits: tuple[float, int | None] | None,
) -> list[str]:
    """Return a sentence that names the locks that starve, if any does."""
    if limits is None:
        return []
    longer_than, times = limits
    try:
        states = _starving(selectors, task, longer_than, times)
    except NoHistory as error:
        raise CommandError(f"--fail-if-starving needs the history. {error}") from error
    hungry = [
        f"{state.name} ({plural(state.skipped, 'call')} in {in_words(state.unmet)})"
        for state in states
    ]
    how = f"for {compact(longer_than)}" if times is None else f"{plural(times, 'time')} in a row"
    return [f"Starving {how} or more: {few(hungry)}."] if hungry else []


def _starving(
    selectors: Sequence[Selector], task: Selector | None, longer_than: float, times: int | None
) -> list[Starving]:
    ask = partial(starving, longer_than, times=times)
    states = [] if selectors or (task and not task.is_pattern) else ask()
    for selector in selectors or filter(None, [task]):
        if selector.is_pattern:
            states += [state for state in ask() if selector.covers(state.name, state.task)]
        if names := selector.names():
            states += ask(names=names)
        if selector.task and not selector.is_pattern:
            states += ask(task=selector.task)
    return [
        state
        for state in dict.fromkeys(states)
        if task is None or task.covers(state.name, state.task)
    ]
