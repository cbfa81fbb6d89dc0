"""Throughput of real workers: no-op tasks, prefork with two processes, no conflicts."""

from __future__ import annotations

import itertools
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import redis
from celery import Task

from benchmarks import app
from benchmarks.measure import Series
from benchmarks.report import Table, at_least, compared, titled
from benchmarks.settings import REDIS
from django_singletask.models import TaskLockEvent
from tests import servers

ROOT = Path(__file__).resolve().parents[1]
PLAIN = "plain Task"
LISTENING, SILENT = "django-singletask", "django-singletask, history off"
MARK = struct.calcsize("d")
TIMEOUT = 120
WAITING = "waiting"
"""The queue in which messages wait. A turn renames it to the queue of the worker."""


class Candidate(NamedTuple):
    name: str
    task: Task
    queue: str
    marks: Path
    history: bool
    process: subprocess.Popen[bytes]


class Turn(NamedTuple):
    rate: float
    """Tasks a second."""
    lag: float
    """Seconds from the last run until the history is written."""


Tasks = Mapping[str, tuple[Task, dict[str, str]]]
CANDIDATES: Tasks = {
    PLAIN: (app.plain, {"BENCHMARK_PEER": "yes"}),
    LISTENING: (app.ours, {"BENCHMARK_HISTORY": "background"}),
    SILENT: (app.ours, {"BENCHMARK_HISTORY": "off"}),
    "celery-singleton (no owner check)": (app.celery_singleton, {"BENCHMARK_PEER": "yes"}),
    "celery-once (no owner check)": (app.celery_once, {"BENCHMARK_PEER": "yes"}),
    "recipe, RedisCache (no owner check)": (app.recipe, {"BENCHMARK_PEER": "yes"}),
}
WORKING: Tasks = {
    PLAIN: (app.plain_works, {"BENCHMARK_PEER": "yes"}),
    LISTENING: (app.ours_works, {"BENCHMARK_HISTORY": "background"}),
    SILENT: (app.ours_works, {"BENCHMARK_HISTORY": "off"}),
}


def working(rounds: int, calls: int, busy: bool) -> Table:
    """Measure tasks that work, as most do."""
    series, _lags = rates(WORKING, rounds, calls)
    text = (
        f"Each task computes for {app.WORK * 1000:.0f} ms, by the clock of its thread. In each "
        f"turn, {calls:,} messages wait in the queue."
    )
    checks = [at_least(series, name, 0.985, PLAIN) for name in (LISTENING, SILENT)]
    title = titled(f"Throughput of a worker, {app.WORK * 1000:.0f} ms of work", busy)
    return compared(title, text, series, checks, "tasks/s")


def throughput(rounds: int, calls: int, busy: bool) -> Table:
    """Measure no-op tasks."""
    series, lags = rates(CANDIDATES, rounds, calls)
    checks = [
        at_least(series, LISTENING, 0.8 if busy else 0.9, PLAIN),
        at_least(series, SILENT, 0.88 if busy else 0.95, PLAIN),
    ]
    text = (
        f"In each turn, {calls:,} messages wait in the queue before the worker gets it. Measured "
        "from the first to the last run, by the clock of the tasks. Broker and locks are on one "
        "Redis, the history is in PostgreSQL: its last row is written "
        f"{median(lags) * 1000:.0f} ms after the last run. celery-singleton and celery-once "
        "take their lock when the call is sent: half of their work is not in this figure."
    )
    return compared(titled("Throughput of a worker", busy), text, series, checks, "tasks/s")


def rates(tasks: Tasks, rounds: int, calls: int) -> tuple[Series, list[float]]:
    """Let one worker at a time process its queue. The others are running, but idle.

    Return tasks a second, and the seconds from the last run until the history is written.
    """
    client = redis.Redis.from_url(f"{REDIS}/1")
    numbers = itertools.count()
    series = Series({name: [] for name in tasks})
    lags: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="singletask-") as folder,
        running(Path(folder), tasks) as order,
    ):
        shuffle = random.Random(6).shuffle
        for number in range(-1, rounds):  # the first round warms up all processes
            shuffle(order)
            for candidate in order:
                result = turn(client, candidate, numbers, calls)
                if number >= 0:
                    series[candidate.name].append(result.rate)
                    if candidate.history:
                        lags.append(result.lag)
    return series, lags


@contextmanager
def running(
    folder: Path, tasks: Tasks = CANDIDATES, processes: int = 2
) -> Iterator[list[Candidate]]:
    """Run a worker for each candidate. Print the workers' logs if something fails."""
    candidates: list[Candidate] = []
    try:
        for number, (name, (task, variables)) in enumerate(tasks.items()):
            queue = f"queue-{number}"
            marks = folder / f"{queue}.marks"
            process = start(queue, {**variables, "BENCHMARK_MARKS": str(marks)}, folder, processes)
            history = variables.get("BENCHMARK_HISTORY") == "background"
            candidates.append(Candidate(name, task, queue, marks, history, process))
        yield candidates
    except Exception:
        for log in sorted(folder.glob("*.log")):
            print(f"{log.name}:\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
        raise
    finally:
        for candidate in candidates:
            candidate.process.terminate()
        for candidate in candidates:
            try:
                candidate.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(candidate.process.pid, signal.SIGKILL)
                candidate.process.wait()


def start(
    queue: str, variables: dict[str, str], folder: Path, processes: int
) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "celery", "-A", "benchmarks.app", "worker", "-P", "prefork"),
        *("-c", str(processes), "-Q", queue, "-n", f"{queue}@benchmarks"),
        *("-l", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"),
    ]
    # The launcher ends the worker when this process ends, as it does with the servers.
    launcher = [sys.executable, "-I", "-S", "-c", servers.LAUNCHER, str(os.getpid()), "", ""]
    environment = {**os.environ, **variables}
    with (folder / f"{queue}.log").open("wb") as log:
        return subprocess.Popen(
            [*launcher, str(int(signal.SIGTERM)), *command],
            cwd=environment["PYTHONPATH"],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def turn(client: redis.Redis, candidate: Candidate, numbers: Iterator[int], calls: int) -> Turn:
    """Let a worker process this number of messages."""
    for number in itertools.islice(numbers, calls):
        candidate.task.apply_async((number,), queue=WAITING)
    # Count before the turn, so that rows of earlier turns do not count.
    rows = TaskLockEvent.objects.filter(outcome="released").count()
    client.rename(WAITING, candidate.queue)
    wait_until(lambda: done(candidate) >= calls, f"{candidate.name} processes its queue")
    times = sorted(struct.unpack(f"{calls}d", candidate.marks.read_bytes()))
    os.truncate(candidate.marks, 0)
    if candidate.history:
        # Wait for all rows: writing them would slow down the next turn.
        wait_until(
            lambda: TaskLockEvent.objects.filter(outcome="released").count() == rows + calls,
            "the history is written",
        )
    return Turn((calls - 1) / (times[-1] - times[0]), time.monotonic() - times[-1])


def done(candidate: Candidate) -> int:
    return candidate.marks.stat().st_size // MARK if candidate.marks.exists() else 0


def wait_until(condition: Callable[[], bool], what: str, seconds: float = TIMEOUT) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"Not within {seconds:.0f} s: {what}.")
        time.sleep(0.02)
