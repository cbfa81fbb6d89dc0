"""Watch for a monitor: what is held for too long, or starves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

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

Limit = TypeVar("Limit")
Exceeded = tuple[str, list[tuple[str, str]]]
"""What is wrong, and each lock with its measure."""


def watch(
    locks: Sequence[HeldLock],
    selectors: Sequence[Selector],
    *,
    held_over: Sequence[float],
    starving: Sequence[tuple[float, int]],
) -> None:
    """Raise :class:`Alarm` if a limit is exceeded: WARNING by the first, CRITICAL by the second."""

    def held(limit: float) -> Exceeded:
        return f"Held for more than {compact(limit)}", [
            (lock.name, in_words(lock.held_for))
            for lock in locks
            if lock.state in HOLDING - {"kept"} and lock.held_for > limit
        ]

    def hungry(limit: tuple[float, int]) -> Exceeded:
        longer_than, times = limit
        by_time = longer_than < math.inf
        how = compact(longer_than) if by_time else plural(times, "call")
        return f"Starving for {how} or more", [
            (state.name, f"{plural(state.skipped, 'call')} skipped in {in_words(state.unmet)}")
            for state in _starving(selectors, longer_than, times)
        ]

    try:
        exceeded = [*_by_level(held_over, held), *_by_level(starving, hungry)]
    except NoHistory as error:
        message = f"--fail-if-starving needs the history. {error}"
        raise CommandError(message, returncode=UNKNOWN) from error
    if exceeded:
        level, _sentence = max(exceeded)
        sentences = " ".join(sentence for _level, sentence in exceeded)
        raise Alarm(f"{('WARNING', 'CRITICAL')[level - 1]}: {sentences}", returncode=level)


def _by_level(
    limits: Sequence[Limit], ask: Callable[[Limit], Exceeded]
) -> Iterator[tuple[int, str]]:
    """Yield for each limit, the highest first, its level and a sentence that names the locks."""
    named: set[str] = set()
    for level, limit in reversed([*enumerate(limits, 1)]):
        problem, locks = ask(limit)
        if shown := [f"{name} ({how})" for name, how in locks if name not in named]:
            yield level, f"{problem}: {few(shown)}."
        named.update(name for name, _how in locks)


def _starving(selectors: Sequence[Selector], longer_than: float, times: int) -> Iterable[Starving]:
    ask = partial(starving, longer_than, times=times)
    states = [] if selectors else ask()
    for selector in selectors:
        if "*" in selector.text:
            states += [state for state in ask() if selector.covers(state.name, state.task)]
        else:
            states += ask(names=selector.names) if selector.names else []
            states += ask(task=selector.task) if selector.task else []
    return dict.fromkeys(states)
