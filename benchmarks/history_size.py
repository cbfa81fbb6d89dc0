"""Measure how many bytes a row of the history takes on PostgreSQL, with its indexes.

    python benchmarks/history_size.py [--rows 100000]

Starts a private PostgreSQL server, and writes the rows as a worker does, 50 runs in a batch: first
of runs that begin and end in one batch, and then of runs that end in the next one, so that their
rows are changed once. Vacuums as often as PostgreSQL does by itself.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import servers

TABLE = "django_singletask_tasklockevent"
IN_BATCH = 50
PART = 0.2
"""The part of the rows that may be dead before they are vacuumed, as PostgreSQL has it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    with servers.PostgreSQL() as server:
        set_up(server.port)
        for what, is_long in (("short", False), ("longer than a batch", True)):
            total, table = (size / options.rows for size in fill(options.rows, is_long=is_long))
            print(f"{what}: {total:,.0f} bytes, {table:,.0f} of them in the table", flush=True)


def set_up(port: int) -> None:
    import django
    from django.conf import settings
    from django.core.management import call_command

    database = {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": "127.0.0.1",
        "PORT": port,
        "USER": "singletask",
        "NAME": "postgres",
    }
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django_singletask"],
        USE_TZ=True,
        DATABASES={"default": database},
    )
    django.setup()
    call_command("migrate", verbosity=0)


def fill(rows: int, *, is_long: bool) -> tuple[int, int]:
    """Write so many runs of 30 days; return the bytes of all, and those of the table alone."""
    from django_singletask.history.writing import write

    ask(f"TRUNCATE {TABLE}")
    at = datetime.now(UTC) - timedelta(days=30)
    ends: list[Any] = []
    for begin in range(0, rows, IN_BATCH):
        batch, ends = ends, []
        for number in range(begin, begin + IN_BATCH):
            at += timedelta(days=30) / rows
            acquired, released = run(at, number)
            batch.append(acquired)
            ends.append(released)
        if not is_long:
            batch, ends = batch + ends, []
        write(batch)
        if (begin + IN_BATCH) % int(PART * rows) == 0:
            ask(f"VACUUM {TABLE}")
    write(ends)
    [sizes] = ask(f"SELECT pg_total_relation_size('{TABLE}'), pg_relation_size('{TABLE}')")
    return sizes


def run(at: datetime, number: int) -> tuple[Any, Any]:
    """Return the two events of a run of a task with one argument."""
    from django_singletask.signals import LockEvent

    task = "shop.tasks.send_invoice"
    facts = {
        "name": f"{task}(invoice_id={1_000_000 + number})",
        "key": f"singletask:{task}:{number:032x}",
        "cache": "default",
        "task": task,
        "task_id": str(uuid.uuid4()),
        "token": uuid.uuid4().hex,
        "host": "worker-7d9f8b6c5d-x2x9k",
        "pid": 8121,
        "timeout": 60,
        "since": at,
    }
    end = {"at": at + timedelta(seconds=2), "outcome": "released", "result": "returned"}
    return LockEvent("acquired", at=at, **facts), LockEvent("released", **end, **facts)


def ask(statement: str) -> Any:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else ()


if __name__ == "__main__":
    main()
