"""Measure django-singletask, its alternatives, and the floor.

    pip install -e . --group bench
    python benchmarks/run.py [--quick] [--only PART] [--beside TREE]

Starts servers on free ports, and writes benchmarks/RESULTS.rst and the picture of the README.
--quick takes a minute or two and only shows that everything works. --quick and --only print the
tables and write no file. --beside names the folder of another version of this project: in the part
"message", its workers take turns with those of this one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import servers

if TYPE_CHECKING:
    from benchmarks.report import Table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/RESULTS.rst"
PICTURE = ROOT / "docs/pictures/benchmarks.svg"
PARTS = ["redis", "loop", "memcached", "database", "conflict", "enqueue", "keys", "worker"]
PARTS += ["message", "history", "requeue", "held", "admin"]
BUSY_PARTS = ["redis", "memcached", "conflict", "worker"]
"""They are measured again while another process keeps one core busy: no user's machine is quiet."""

SPREAD_PARTS = ["worker", "message", "requeue", "admin"]
"""They use all cores, as workers do; in the others, the servers have a core of their own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute or two; writes no file")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; writes no file")
    parser.add_argument("--beside", type=Path, metavar="TREE", action="append", default=[])
    arguments = parser.parse_args()
    trees = [tree.resolve(strict=True) for tree in arguments.beside]
    began, load = time.monotonic(), os.getloadavg()[0]
    with running() as versions:
        tables_of = {}
        for part in arguments.only or PARTS:
            print(f"{part} …", file=sys.stderr, flush=True)
            with nullcontext() if part in SPREAD_PARTS else kept_apart():
                tables_of[part] = measure(part, arguments.quick, trees=trees)
            if part in BUSY_PARTS and not arguments.quick:
                with nullcontext() if part in SPREAD_PARTS else kept_apart(), one_core_busy():
                    tables_of[part] += measure(part, busy=True)
    from benchmarks import picture, report

    loads, minutes = (load, os.getloadavg()[0]), (time.monotonic() - began) / 60
    tables = list(itertools.chain.from_iterable(tables_of.values()))
    text = report.results(tables, versions, loads, minutes)
    print(text)
    if not arguments.only:
        drawing = picture.draw(tables_of["redis"][0].series, tables_of["worker"][0].series)
        if not arguments.quick:
            RESULTS.write_text(text)
            PICTURE.write_text(drawing)
            print(f"Written: {RESULTS.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")


@contextmanager
def running() -> Iterator[str]:
    """Start the servers, set their addresses in the environment, and yield their versions."""
    redis, memcached, postgres = servers.Redis(), servers.Memcached(), servers.PostgreSQL()
    with servers.running([redis, memcached, postgres]):
        os.environ.update(
            DJANGO_SETTINGS_MODULE="benchmarks.settings",
            PYTHONPATH=str(ROOT),
            BENCHMARK_REDIS=redis.url.removesuffix("/0"),
            BENCHMARK_MEMCACHED=memcached.address,
            BENCHMARK_POSTGRES_PORT=str(postgres.port),
            BENCHMARK_MARKS=os.devnull,
        )
        import django
        from django.core.management import call_command

        django.setup()
        from django_singletask.history import recorder

        call_command("migrate", verbosity=0)
        call_command("createcachetable", verbosity=0)
        try:
            yield ", ".join(map(version_of, (redis, memcached, postgres)))
        finally:
            recorder.stop()


@contextmanager
def kept_apart() -> Iterator[None]:
    """Give this process one core, and the servers another.

    Otherwise both ends of a connection share a core by chance, and on a small machine a trip on one
    connection takes three times as long as a trip on another.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    try:
        place(cores[-1:], cores[:1])
        yield
    finally:
        place(cores, cores)


def place(ours: list[int], theirs: list[int]) -> None:
    started = servers.children(os.getpid())
    started += [grandchild for child in started for grandchild in servers.children(child)]
    for pid, cores in [(os.getpid(), ours), *((pid, theirs) for pid in started)]:
        with suppress(OSError):  # the process has ended in the meantime
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)


@contextmanager
def one_core_busy() -> Iterator[None]:
    """Let another process compute all the time, on whichever core the system gives it."""
    # The launcher ends it when this process ends, as it does with the servers.
    launcher = [sys.executable, "-I", "-S", "-c", servers.LAUNCHER, str(os.getpid()), "", ""]
    spin = [str(int(signal.SIGTERM)), sys.executable, "-c", "while True: pass"]
    with subprocess.Popen([*launcher, *spin]) as process:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, range(os.cpu_count() or 1))
        try:
            yield
        finally:
            process.terminate()


def version_of(server: servers.Server) -> str:
    program = servers.find(server.program) or server.program
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    number = next(word for word in version.stdout.split() if word.lstrip("v=")[:1].isdigit())
    return f"{type(server).__name__} {number.lstrip('v=')}"


def measure(
    part: str, quick: bool = False, busy: bool = False, trees: Sequence[Path] = ()
) -> list[Table]:
    """Measure one part. "held" comes last, because many held locks slow down everything else."""
    from benchmarks import (
        admin_pages,
        calls,
        conflicts,
        held,
        history,
        locks,
        messages,
        requeue,
        workers,
    )

    rounds = 5 if quick else 300
    pages = {"postgresql": 5000 if quick else 10**7, "sqlite": 5000 if quick else 10**6}
    levels = [10, 100, 1000] if quick else [10, 100, 1000, 10_000, 100_000]
    parts: dict[str, Callable[[], list[Table]]] = {
        "redis": lambda: [locks.on_redis(rounds, busy)],
        "loop": lambda: [locks.in_a_loop(rounds)],
        "memcached": lambda: locks.on_memcached(rounds, busy),
        "database": lambda: [locks.in_database(rounds)],
        "conflict": lambda: [
            conflicts.conflict_on_redis(rounds, busy),
            *conflicts.conflict_on_memcached(rounds, busy),
        ],
        "enqueue": lambda: [calls.enqueue(rounds)],
        "keys": lambda: [calls.keys(rounds)],
        "worker": lambda: [
            workers.throughput(*((1, 50) if quick else (11, 1000)), busy),
            workers.working(*((1, 10) if quick else (11, 200)), busy),
        ],
        "message": lambda: [messages.messages(*((3, 50) if quick else (25, 200)), trees)],
        "history": lambda: history.cost(*((1, 200) if quick else (5, 3000))),
        "requeue": lambda: [requeue.requeue(100 if quick else 20_000)],
        "held": lambda: [held.held(rounds, levels)],
        "admin": lambda: [admin_pages.table(pages, times=1 if quick else 5)],
    }
    return parts[part]()


if __name__ == "__main__":
    main()
