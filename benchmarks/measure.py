"""Measure candidates in turns, so that anything that slows the machine slows all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from statistics import median

from django.test.utils import override_settings

from django_singletask.history import recorder

Step = Callable[[], object]

CALLS, WARM_UP = 10, 2
"""Calls in a turn, by default, and the number of first rounds that are not counted."""


class Series(dict[str, list[float]]):
    """The figures of each candidate: one for each round, at the same index for all candidates.

    ``processor`` has the processor times of the same rounds, if they were measured.
    """

    processor: Series | None = None

    def median(self, name: str) -> float:
        return median(self[name])

    def ratio(self, name: str, other: str) -> float:
        """Return the median of the ratios within a round: a slower machine does not change it."""
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
    """Return microseconds for a call, and how much of it this thread used a processor.

    In each round, the candidates have a turn in random order.

    A turn makes ``calls`` calls. The history is written in the background, except for the
    ``silent`` candidates. What is left to write after a turn is written before the next turn, so
    that it slows no other candidate; with ``until_written`` that time belongs to the turn, but not
    the processor time of the thread that writes.
    ``after`` cleans up after each turn, and is not measured.
    """
    series = Series({name: [] for name in candidates})
    series.processor = Series({name: [] for name in candidates})
    order = list(candidates.items())
    shuffle = random.Random(6).shuffle
    for number in range(-WARM_UP, rounds):
        shuffle(order)
        for name, step in order:
            with history("off" if name in silent else "background"):
                began = time.perf_counter()
                had_used = time.thread_time_ns()
                for _ in range(calls):
                    step()
                used = time.thread_time_ns() - had_used
                took = time.perf_counter() - began
                wait_for_history()
                if until_written:
                    took = time.perf_counter() - began
            if number >= 0:
                series[name].append(took / calls * 1e6)
                series.processor[name].append(used / calls / 1e3)
            if after is not None:
                after()
    return series


def history(mode: str) -> AbstractContextManager[object]:
    # override_settings() sends setting_changed: the setting may have been read before.
    return override_settings(SINGLETASK_HISTORY=mode)


def wait_for_history() -> None:
    if not recorder.flush(120):
        raise RuntimeError("The history could not be written within 120 s.")
