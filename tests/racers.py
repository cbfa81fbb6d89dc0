"""Processes that take turns with one lock, while its entries move to another node of a cluster.

A program, so that it forks from a process without threads. It prints what happened as JSON:

    python -m tests.racers <alias> <seconds>
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import django

PROCESSES = 16
GIVE_UP = 90  # seconds
FEW = 10  # runs

fork = multiprocessing.get_context("fork")


def run(work: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Run ``work(number, barrier, *args)`` in that many processes and return the results."""
    barrier = fork.Barrier(count)
    results = fork.SimpleQueue()

    def body(number: int) -> None:
        try:
            results.put((number, work(number, barrier, *args), None))
        except BaseException:
            barrier.abort()
            results.put((number, None, traceback.format_exc()))

    processes = [fork.Process(target=body, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    ended = sorted((results.get() for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
    errors = [error for _, _, error in ended if error]
    if errors:
        errors.sort(key=lambda error: "BrokenBarrierError" in error)
        sys.exit(errors[0])
    return [result for _, result, _ in ended]


def moves(alias: str, seconds: float) -> dict[str, Any]:
    """Let all take and give back one lock while its entries move; what is refused counts apart.

    They go on for this time, and until some runs were made.
    """
    from django.conf import settings

    from django_singletask import LockUnavailable, TaskLock

    settings.SINGLETASK_HISTORY = "off"
    inside, total = fork.Value("i", 0), fork.Value("i", 0)

    def work(number: int, barrier: Any) -> tuple[int, int, int, int]:
        runs = met = lost = refused = 0
        barrier.wait(GIVE_UP)
        began = time.monotonic()
        while (spent := time.monotonic() - began) < seconds or (
            total.value <= FEW and spent < GIVE_UP / 2
        ):
            lock = TaskLock("moves", cache=alias, timeout=60)
            try:
                if not lock.acquire():
                    continue
            except LockUnavailable:
                refused += 1
                continue
            with inside.get_lock():
                inside.value += 1
                met += inside.value != 1
            with inside.get_lock():
                inside.value -= 1
                total.value += 1
            try:
                lost += not lock.release()
            except LockUnavailable:
                refused += 1
            runs += 1
        return runs, met, lost, refused

    runs, met, lost, refused = map(sum, zip(*run(work, PROCESSES), strict=True))
    return {"runs": runs, "met": met, "lost": lost, "refused": refused}


if __name__ == "__main__":
    django.setup()
    alias, seconds = sys.argv[1:]
    print(json.dumps(moves(alias, float(seconds))))
