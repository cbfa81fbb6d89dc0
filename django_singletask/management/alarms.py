"""Watch for a monitor: what is held for too long, or starves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django.core.management.base import CommandError

from django_singletask.history.queries import NoHistory
from django_singletask.management.output import few
from django_singletask.operators.explain import HOLDING
from django_singletask.operators.names import Selector
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.starving import Starving, starving
from django_singletask.operators.words import compact, in_words, plural

UNKNOWN = 3
"""Exit code if nothing can be said; Django itself uses 1, for broken settings."""


class Alarm(CommandError):
    """What a monitor must know."""


def watch(
    locks: Sequence[HeldLock],
    selectors: Sequence[Selector],
    *,
    held_over: float | None,
    starving_for: float | None,
) -> None:
    """Raise :class:`Alarm`, which names the locks, if a limit is reached."""
    sentences = []
    if held_over is not None:
        held = [
            f"{lock.name} ({in_words(lock.held_for)})"
            for lock in locks
            if lock.state in HOLDING - {"kept"} and lock.held_for > held_over
        ]
        sentences += [f"Held for more than {compact(held_over)}: {few(held)}."] if held else []
    if starving_for is not None:
        try:
            hungry = [
                f"{state.name} ({plural(state.conflicts, 'conflict')} in {in_words(state.unmet)})"
                for state in _starving(selectors, starving_for)
            ]
        except NoHistory as error:
            message = f"--fail-if-starving needs the history. {error}"
            raise CommandError(message, returncode=UNKNOWN) from error
        limit = compact(starving_for)
        sentences += [f"Starving for {limit} or more: {few(hungry)}."] if hungry else []
    if sentences:
        raise Alarm(" ".join(sentences), returncode=2)


def _starving(selectors: Sequence[Selector], longer_than: float) -> Iterable[Starving]:
    states = [] if selectors else starving(longer_than)
    for selector in selectors:
        if "*" in selector.text:
            every = starving(longer_than)
            states += [state for state in every if selector.covers(state.name, state.task)]
        else:
            states += starving(longer_than, names=selector.names) if selector.names else []
            states += starving(longer_than, task=selector.task) if selector.task else []
    return dict.fromkeys(states)
