"""Time candidates in turns, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from statistics import median

from django.test.utils import override_settings

from django_singletask.history import recorder as writer

Step = Callable[[], object]

CALLS, WARM_UP = 10, 2
"""Calls a turn, unless said otherwise, and rounds that are not counted."""


class Series(dict[str, list[float]]):
    """The figures of each candidate, one a round; those of one round belong together."""

    def median(self, name: str) -> float:
        return median(self[name])

    def ratio(self, name: str, other: str) -> float:
        """Return the median of the ratios within a round, on which no drift has an influence."""
        return median(one / two for one, two in zip(self[name], self[other], strict=True))


def in_turns(
    candidates: Mapping[str, Step],
    rounds: int,
    *,
    calls: int = CALLS,
    silent: Collection[str] = (),
    after: Step | None = None,
    until_written: bool = False,
) -> Series:
    """Return microseconds a call: each turn is some calls of one candidate, in any order a round.

    The history listens, in the background, but for the ``silent`` ones. What it still has to write
    after a turn is written before the next one, so that nobody else pays for it; with
    ``until_written`` that counts as time of the turn. ``after`` cleans up after each turn, untimed.
    """
    found = Series({name: [] for name in candidates})
    order = list(candidates.items())
    shuffle = random.Random(6).shuffle
    for number in range(-WARM_UP, rounds):
        shuffle(order)
        for name, step in order:
            with history("off" if name in silent else "background"):
                began = time.perf_counter()
                for _ in range(calls):
                    step()
                took = time.perf_counter() - began
                wait_for_history()
                if until_written:
                    took = time.perf_counter() - began
            if number >= 0:
                found[name].append(took / calls * 1e6)
            if after is not None:
                after()
    return found


def history(mode: str) -> AbstractContextManager[object]:
    # As tests do it: a setting that is only assigned may have been read before.
    return override_settings(SINGLETASK_HISTORY=mode)


def wait_for_history() -> None:
    if not writer.flush(120):
        raise RuntimeError("The history is not written.")
