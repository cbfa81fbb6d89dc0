"""Calls that wait behind one holder: they are postponed, and run when the lock is free."""

from __future__ import annotations

import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import redis

from benchmarks import app, workers
from benchmarks.report import Check, Table, figure
from benchmarks.settings import REDIS
from benchmarks.workers import PLAIN, wait_until
from django_singletask import TaskLock

OURS = 'on_conflict="requeue"'
DELIVERIES, RATE = 4, 0.4
"""The targets: deliveries a call, and the rate as a part of that of plain tasks."""
PLAIN_CALLS = 5000
LONG = 900.0
"""Seconds within which all calls must have run."""


class Drain(NamedTuple):
    hops: list[int]
    """For each delivery, how often its message was postponed before."""
    held: float
    """Seconds for which the holder held the lock."""
    took: float
    """Seconds from the end of the holder to the last run."""


def requeue(calls: int) -> Table:
    """Let one worker run plain tasks, then as many that all want one lock, which is held."""
    client = redis.Redis.from_url(f"{REDIS}/1")
    with tempfile.TemporaryDirectory(prefix="singletask-") as folder:
        deliveries = Path(folder) / "deliveries"
        variables = {"BENCHMARK_DELIVERIES": str(deliveries)}
        worker = partial(workers.running, Path(folder), {PLAIN: (app.plain, variables)})
        with worker() as (candidate,):
            numbers = itertools.count()
            workers.turn(client, candidate, numbers, 100)  # warms up
            plain = workers.turn(client, candidate, numbers, min(calls, PLAIN_CALLS)).rate
        for number in range(calls):
            # Not by another queue: a message is postponed in the queue to which it was sent.
            app.requeued.apply_async((number,), queue=candidate.queue)
        with app.requeued.lock(0) as lock, worker():
            drain = behind_one_holder(lock, deliveries, calls)
    rate, mean = calls / drain.took, len(drain.hops) / calls
    text = (
        f"{calls:,} calls wait in the queue of a worker with two processes. The lock that all of "
        f"them want is held until each was delivered once ({drain.held:.0f} s here). The rate is "
        "measured from there to the last run; each call ran once. Before, a worker of the same "
        f"kind runs {min(calls, PLAIN_CALLS):,} plain tasks. Broker and locks are on one Redis."
    )
    cells = [
        (PLAIN, f"{figure(plain)} tasks/s", "1.00", "1.0", "1"),
        (OURS, f"{figure(rate)} tasks/s", f"{rate / plain:.2f}", f"{mean:.1f}"),
    ]
    cells[1] += (str(max(drain.hops) + 1),)
    checks = [
        Check(f"{OURS}: ≥ {RATE:.2f} × {PLAIN}", f"{rate / plain:.2f}", rate >= RATE * plain),
        Check(f"{OURS}: ≤ {DELIVERIES} deliveries a call", f"{mean:.1f}", mean <= DELIVERIES),
    ]
    head = ("Candidate", "rate", "ratio", "deliveries a call", "most")
    return Table("A queue behind one lock", text, head, cells, checks)


def behind_one_holder(lock: TaskLock, deliveries: Path, calls: int) -> Drain:
    def notes() -> list[tuple[int, int, float]]:
        data = deliveries.read_bytes() if deliveries.exists() else b""
        return list(app.NOTE.iter_unpack(data[: len(data) // app.NOTE.size * app.NOTE.size]))

    def ran() -> list[int]:
        return [number for number, hops, _ in notes() if hops == app.RUNS]

    wait_until(notes, "the worker is ready")
    began = notes()[0][2]
    wait_until(
        lambda: len({number for number, _, _ in notes()}) == calls, "each is delivered", LONG
    )
    lock.release()
    free = time.monotonic()
    wait_until(lambda: len(ran()) >= calls, "all calls have run", LONG)
    if sorted(ran()) != list(range(calls)):
        raise RuntimeError("A call ran twice, or not at all.")
    last = max(at for _, hops, at in notes() if hops == app.RUNS)
    return Drain([hops for _, hops, _ in notes() if hops != app.RUNS], free - began, last - free)
