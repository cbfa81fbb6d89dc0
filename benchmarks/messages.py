"""The processor time that a message costs a worker: its main process, and the one of its pool."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import redis

from benchmarks.report import Check, Table, figure
from benchmarks.settings import REDIS
from benchmarks.workers import CANDIDATES, LISTENING, PLAIN, SILENT, Candidate, running, turn
from tests.servers import children

RECIPE = "recipe, RedisCache (no owner check)"
MAIN, CHILD = 25, 180
"""The most microseconds that a message costs each process over a plain task."""


class Cost(NamedTuple):
    """Microseconds of processor time for a message."""

    main: float
    child: float


def messages(rounds: int, calls: int, trees: Sequence[Path]) -> Table:
    """Measure no-op messages in a prefork worker with one process.

    ``trees`` are other versions of this project, whose workers take turns with those of this one.
    """
    tasks = {name: CANDIDATES[name] for name in (PLAIN, LISTENING, SILENT, RECIPE)}
    for tree in trees:
        for name in (LISTENING, SILENT):
            task, variables = CANDIDATES[name]
            tasks[f"{name}, {tree.name}"] = task, {**variables, "PYTHONPATH": str(tree)}
    costs: dict[str, list[Cost]] = {name: [] for name in tasks}
    client = redis.Redis.from_url(f"{REDIS}/1")
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory(prefix="singletask-") as folder,
        running(Path(folder), tasks, processes=1) as order,
    ):
        shuffle = random.Random(6).shuffle
        for number in range(-1, rounds):  # the first round warms up all processes
            shuffle(order)
            for candidate in order:
                before = processor_times(candidate)
                turn(client, candidate, numbers, calls)
                after = processor_times(candidate)
                if number >= 0:
                    used = [
                        (end - start) / calls / 1e3
                        for start, end in zip(before, after, strict=True)
                    ]
                    costs[candidate.name].append(Cost(*used))
    return table(costs, rounds, calls)


def processor_times(candidate: Candidate) -> list[int]:
    """Return nanoseconds of the main process of a worker and of its child, of all their threads."""
    main = candidate.process.pid
    return [processor_time(pid) for pid in (main, *children(main))]


def processor_time(pid: int) -> int:
    """Return for how many nanoseconds the threads of a process have used a processor (Linux)."""
    clock = (~pid << 3) | 2  # as clock_getcpuclockid(3) computes it; /proc counts only 1/100 s
    return time.clock_gettime_ns(clock)


def table(costs: dict[str, list[Cost]], rounds: int, calls: int) -> Table:
    plain = costs[PLAIN]
    cells = []
    over: dict[str, Cost] = {}
    for name, series in costs.items():
        pairs = list(zip(series, plain, strict=True))
        over[name] = Cost(
            median(cost.main - base.main for cost, base in pairs),
            median(cost.child - base.child for cost, base in pairs),
        )
        mains, childs = zip(*series, strict=True)
        cells.append(
            (
                name,
                f"{figure(median(mains))} µs",
                f"{over[name].main:+.0f} µs",
                f"{figure(median(childs))} µs",
                f"{over[name].child:+.0f} µs",
            )
        )
    checks = []
    for name in (LISTENING, SILENT):
        main, child = over[name]
        checks.append(Check(f"{name}: main ≤ {MAIN} µs over plain", f"{main:.0f} µs", main <= MAIN))
        checks.append(
            Check(f"{name}: child ≤ {CHILD} µs over plain", f"{child:.0f} µs", child <= CHILD)
        )
    text = (
        f"A prefork worker with one process in its pool; {rounds} turns of {calls:,} messages that "
        "do nothing. The time is that of all threads of a process, with the one that writes the "
        "history. *over plain*: the median of the differences within a round. The main process "
        "limits how many messages a worker can take."
    )
    head = ("Candidate", "main process", "over plain", "child", "over plain")
    return Table("Processor time of a message in a worker", text, head, cells, checks)
