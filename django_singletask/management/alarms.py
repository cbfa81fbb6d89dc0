"""Watch for a monitor: what is held for too long, or starves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from django.core.management.base import CommandError

from django_singletask.history.queries import NoHistory
from django_singletask.management.process import UNKNOWN, Alarm
from django_singletask.management.tables import few
from django_singletask.operators.explain import HOLDING
from django_singletask.operators.names import Selector
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import Starving, starving
from django_singletask.operators.words import compact, in_words, plural

__all__ = ["watch"]


def watch(
    locks: Sequence[HeldLock],
    selectors: Sequence[Selector],
    *,
    held_over: Sequence[float],
    starving: Sequence[tuple[float, int]],
) -> None:
    """Raise :class:`Alarm` if a limit is exceeded: WARNING by the first, CRITICAL by the second."""
    try:
        hungry = list(_starving_over(selectors, starving))
    except NoHistory as error:
        message = f"--fail-if-starving needs the history. {error}"
        raise CommandError(message, returncode=UNKNOWN) from error
    if exceeded := [*_held_over(locks, held_over), *hungry]:
        level = max(level for level, _sentence in exceeded)
        sentences = " ".join(sentence for _level, sentence in exceeded)
        raise Alarm(f"{('WARNING', 'CRITICAL')[level - 1]}: {sentences}", returncode=level)


def _held_over(locks: Sequence[HeldLock], limits: Sequence[float]) -> Iterator[tuple[int, str]]:
    """Yield for each limit, the highest first, its level and a sentence that names the locks."""
    below = math.inf
    for level, limit in reversed([*enumerate(limits, 1)]):
        over = [
            f"{lock.name} ({in_words(lock.held_for)})"
            for lock in locks
            if lock.state in HOLDING - {"kept"} and limit < lock.held_for <= below
        ]
        if over:
            yield level, f"Held for over {compact(limit)}: {few(over)}."
        below = limit


def _starving_over(
    selectors: Sequence[Selector], limits: Sequence[tuple[float, int]]
) -> Iterator[tuple[int, str]]:
    """Yield for each limit, the highest first, its level and a sentence that names the locks."""
    named: set[str] = set()
    for level, (longer_than, times) in reversed([*enumerate(limits, 1)]):
        states = [
            state for state in _starving(selectors, longer_than, times) if state.name not in named
        ]
        named.update(state.name for state in states)
        hungry = [
            f"{state.name} ({plural(state.skipped, 'call')} skipped in {in_words(state.unmet)})"
            for state in states
        ]
        by_time = longer_than < math.inf
        how = f"for {compact(longer_than)}" if by_time else f"{plural(times, 'time')} in a row"
        if hungry:
            yield level, f"Starving {how} or more: {few(hungry)}."


def _starving(selectors: Sequence[Selector], longer_than: float, times: int) -> Iterable[Starving]:
    ask = partial(starving, longer_than, times=times)
    states = [] if selectors else ask()
    for selector in selectors:
        if selector.is_pattern:
            states += [state for state in ask() if selector.covers(state.name, state.task)]
        else:
            states += ask(names=selector.names()) if selector.names() else []
            states += ask(task=selector.task) if selector.task else []
    return dict.fromkeys(states)
