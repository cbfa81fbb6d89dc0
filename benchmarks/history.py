"""What the history of a run costs: processor time of this process and of the database's."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from django.core.management import call_command
from django.db import connections
from django.test.utils import override_settings

from benchmarks.measure import history, wait_for_history
from benchmarks.report import Check, Table, figure
from django_singletask import TaskLock
from django_singletask.history import recorder
from tests import servers

SCHEDSTAT = Path("/proc/self/schedstat")
WORK = 0.02


class Case(NamedTuple):
    """Runs that follow each other, and the most microseconds that the history of one may cost."""

    name: str
    alias: str
    work: float
    bound: float | None = None


CASES = [
    Case("PostgreSQL, no-op runs", "default", 0, 100),
    Case("PostgreSQL, runs of 20 ms", "default", WORK),
    Case("SQLite, no-op runs", "sqlite", 0, 150),
    Case("SQLite, runs of 20 ms", "sqlite", WORK),
]


class Router:
    """Send the history to one database."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_write(self, *args: object, **hints: object) -> str:
        return self.alias


def cost(rounds: int, runs: int) -> list[Table]:
    if not SCHEDSTAT.exists():  # only Linux has it
        return []
    cells, checks = [], []
    with tempfile.TemporaryDirectory() as folder:
        connections.databases["sqlite"]["NAME"] = f"{folder}/history.sqlite3"
        call_command("migrate", database="sqlite", verbosity=0)
        for case in CASES:
            with override_settings(DATABASE_ROUTERS=[Router(case.alias)]):
                client, server = extra(case, rounds, runs // 20 if case.work else runs)
            recorder.stop()
            both = client + server
            cells.append((case.name, *(f"{figure(part)} µs" for part in (client, server, both))))
            if case.bound:
                target = f"{case.name}: ≤ {case.bound:.0f} µs"
                checks.append(Check(target, f"{figure(both)} µs", both <= case.bound))
        connections["sqlite"].close()
    text = (
        "Processor time, not time that passes: with the history minus without it, for the events, "
        "the thread that writes them and all processes of the database server."
    )
    head = ("Runs", "client", "server", "together")
    return [Table("What the history of a run costs", text, head, cells, checks)]


def extra(case: Case, rounds: int, runs: int) -> tuple[float, float]:
    """Return the microseconds of client and server for the history of one run."""
    turn("background", case.work, 20)
    differences = []
    for _ in range(rounds):
        on, off = (turn(mode, case.work, runs) for mode in ("background", "off"))
        differences.append([(one - two) / runs * 1e6 for one, two in zip(on, off, strict=True)])
    client, server = map(median, zip(*differences, strict=True))
    return client, max(server, 0)


def turn(mode: str, work: float, runs: int) -> tuple[float, float]:
    """Return the seconds that this process and the database server compute for some runs."""
    with history(mode):
        client, server = time.process_time(), server_time()
        for _ in range(runs):
            with TaskLock("nightly"):
                if work:
                    time.sleep(work)
        wait_for_history()
        return time.process_time() - client, server_time() - server


def server_time() -> float:
    """Return the seconds that all processes of PostgreSQL have computed."""
    started = servers.children(os.getpid())
    started += [grandchild for child in started for grandchild in servers.children(child)]
    seconds = 0.0
    for pid in started:
        folder = Path(f"/proc/{pid}")
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if (folder / "comm").read_text() == "postgres\n":
                seconds += int((folder / "schedstat").read_text().split()[0]) / 1e9
    return seconds
