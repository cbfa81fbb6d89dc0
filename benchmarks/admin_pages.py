"""Time the admin's pages on a large history.

    python benchmarks/admin_pages.py [--rows 1000000] [--times 5] [--only postgresql|sqlite]

Starts a private PostgreSQL server, and fills the history as a busy site does within 30 days. Then
requests each page several times with Django's test client, and prints the median and the worst time
in milliseconds and the number of queries. Does the same with an SQLite file. ``run.py`` runs this
as a process for each database, since Django can be set up only once in a process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests import servers

if TYPE_CHECKING:
    from benchmarks.report import Table

LIMIT = 300
"""Milliseconds that a page may take."""
SUMS, SUMS_LIMIT = "per task", 6000
"""The page that sums up millions of rows, and the milliseconds that it may take."""
NAMES = {"postgresql": "PostgreSQL", "sqlite": "SQLite"}
WORDS = ["held", "returned", "raised", "skipped", "released", "dead", "expired", "lost", "cleared"]
WORDS += ["conflict", "duplicate", "retaken", "trouble"]
COLUMNS = (
    "ref, kind, outcome, result, name, key, cache, task, task_id, host, pid, at, ended_at, "
    "noticed_at, happened_at, retaken, retaken_at, timeout, fixed, count, last_at, waited, "
    "blocked_by, blocked_by_task_id, actor, reason"
)
# n counts back in time, so that the newest row is written last. 1 row in 5 is a conflict with the
# run of row n + 1. 3 runs in 10,000 had trouble. There are 19 tasks with 2,003 feeds each, and
# a rare task. Runs last 0 to 40 seconds, and the newest 50 have not ended. The numbers have no
# common factors, so that all combinations occur.
ROW = """
    CASE WHEN n % 5 = 4 THEN {blocker} || ':skip:skipped' ELSE {token} END,
    CASE WHEN n % 5 = 4 THEN 'conflict' ELSE 'run' END,
    CASE WHEN n % 5 = 4 OR n <= 50 THEN '' WHEN n % 10000 = 0 THEN 'expired'
        WHEN n % 10000 = 1 THEN 'dead' ELSE 'released' END,
    CASE WHEN n % 5 = 4 THEN 'skipped' WHEN n % 10000 < 2 OR n <= 50 THEN '' ELSE 'returned' END,
    {name}, 'singletask:' || {name}, 'default', {task}, {task_id}, 'web-' || (n % 9), n % 30000,
    {at}, CASE WHEN n % 5 = 4 OR n % 10000 < 2 OR n <= 50 THEN NULL ELSE {ended_at} END,
    CASE WHEN n % 10000 < 2 AND n > 50 THEN {ended_at} END,
    CASE WHEN n % 5 = 4 OR n <= 50 THEN {at} ELSE {ended_at} END,
    CASE WHEN n % 10000 = 2 THEN 1 ELSE 0 END, CASE WHEN n % 10000 = 2 THEN {at} END, 60, false,
    CASE WHEN n % 5 = 4 THEN 1 + n % 7 ELSE 1 END, CASE WHEN n % 5 = 4 THEN {at} END, 0,
    CASE WHEN n % 5 = 4 THEN {blocker} ELSE '' END,
    CASE WHEN n % 5 = 4 THEN {blocker_id} ELSE '' END, '',
    CASE WHEN n % 5 = 4 THEN 'skip' ELSE '' END
"""
OF = "(CASE WHEN n % 5 = 4 THEN n + 1 ELSE n END)"  # the row that gives a row its name
TASK = f"""(CASE WHEN {OF} % 50003 = 7 THEN 'reports.tasks.nightly'
    ELSE 'feeds.tasks.import_' || ({OF} % 19) END)"""
NAME = f"""(CASE WHEN {OF} % 50003 = 7 THEN 'reports.tasks.nightly()'
    ELSE 'feeds.tasks.import_' || ({OF} % 19) || '(feed_id=' || ({OF} % 2003) || ')' END)"""


def fill_postgresql(rows: int) -> None:
    from django.db import connection

    step = 30 * 86_400 / rows
    row = ROW.format(
        name=NAME,
        task=TASK,
        task_id="md5('i' || n)",
        token="md5(n::text)",
        at=f"now() - n * interval '{step} seconds'",
        ended_at=f"now() - n * interval '{step} seconds' + (n % 40) * interval '1 second'",
        blocker="md5((n + 1)::text)",
        blocker_id="md5('i' || (n + 1))",
    )
    with connection.cursor() as cursor:
        table = "django_singletask_tasklockevent"
        cursor.execute(f"SELECT indexname, indexdef FROM pg_indexes WHERE tablename = '{table}'")
        kept = ("_pkey", "_ref")  # those of constraints
        indexes = [(name, how) for name, how in cursor.fetchall() if not name.endswith(kept)]
        for name, _how in indexes:
            cursor.execute(f"DROP INDEX {name}")
        cursor.execute(
            f"INSERT INTO {table} ({COLUMNS}) SELECT {row} FROM generate_series({rows}, 1, -1) n"
        )
        cursor.execute("SET maintenance_work_mem = '1GB'")
        for _name, how in indexes:
            cursor.execute(how)
        cursor.execute(f"VACUUM ANALYZE {table}")


def fill_sqlite(rows: int) -> None:
    from django.db import connection

    step = 30 * 86_400 / rows

    def at(seconds: str) -> str:
        return f"strftime('%Y-%m-%d %H:%M:%f', 'now', ({seconds}) || ' seconds')"

    row = ROW.format(
        name=NAME,
        task=TASK,
        task_id="printf('%08x-0000-4000-8000-000000000000', n)",
        token="printf('%032x', n)",
        at=at(f"-n * {step}"),
        ended_at=at(f"-n * {step} + (n % 40)"),
        blocker="printf('%032x', n + 1)",
        blocker_id="printf('%08x-0000-4000-8000-000000000000', n + 1)",
    )
    with connection.cursor() as cursor:
        # Not every build of SQLite has generate_series().
        cursor.execute(
            f"WITH RECURSIVE series(n) AS (SELECT {rows} UNION ALL SELECT n - 1 FROM series "
            f"WHERE n > 1) INSERT INTO django_singletask_tasklockevent ({COLUMNS}) "
            f"SELECT {row} FROM series"
        )


def past(days: int, hours: int) -> dict[str, str]:
    """Return the parameters of a window that began so many days ago."""
    begin = datetime.now(UTC) - timedelta(days=days)
    end = begin + timedelta(hours=hours)
    return {"from": f"{begin:%Y-%m-%dT%H:%M:%S}Z", "to": f"{end:%Y-%m-%dT%H:%M:%S}Z"}


def pages(rows: int) -> dict[str, tuple[str, dict[str, str]]]:
    from django_singletask.models import TaskLockEvent

    row = TaskLockEvent.objects.get(pk=rows // 2)
    feeds, nightly = "feeds.tasks.import_3", "reports.tasks.nightly"
    lists = {
        "list": {},
        "page 2": {"p": "2"},
        "last page": {"p": "20"},
        **{f"past {span}": {"range": span} for span in ("15m", "1h", "24h", "7d")},
        "an hour four days ago": past(4, 1),
        "a day four days ago": past(4, 24),
        "a week three weeks ago": past(21, 168),
        "a day four days ago, returned": {"what": "returned", **past(4, 24)},
        "a day four days ago, failed": {"what": "failed", **past(4, 24)},
        "a day four days ago, trouble": {"what": "trouble", **past(4, 24)},
        "a day four days ago, task": {"task": feeds, **past(4, 24)},
        "a day four days ago, rare task": {"task": nightly, **past(4, 24)},
        **{f"what: {word}": {"what": word} for word in WORDS},
        "frequent task": {"task": feeds},
        "rare task": {"task": nightly},
        "no such task": {"task": "none.such"},
        "what and time": {"what": "expired", "range": "24h"},
        "what and short time": {"what": "expired", "range": "15m"},
        "lost and time": {"what": "lost", "range": "7d"},
        "what and task": {"what": "dead", "task": feeds},
        "what and rare task": {"what": "dead", "task": nightly},
        "task, what and time": {"task": feeds, "what": "conflict", "range": "24h"},
        "rare task and time": {"task": nightly, "range": "1h"},
        "search name": {"q": row.name},
        "search pattern": {"q": "*import_3(feed_id=1*"},
        "search all names": {"q": "f*"},
        "search host": {"q": "web-3"},
        "search task": {"q": feeds},
        "search rare": {"q": nightly},
        "search task id": {"q": row.task_id},
        "search nothing": {"q": "zzz"},
        "search and what": {"q": feeds, "what": "expired"},
        "search and time": {"q": feeds, "range": "15m"},
        "search rare and what": {"q": nightly, "what": "expired"},
        "search all and what": {"q": "f*", "what": "cleared"},
        "search all and conflicts": {"q": "f*", "what": "conflict"},
        "search nothing and time": {"q": "*zzz*", **past(4, 24)},
        "search nothing and task": {"q": "*zzz*", "task": feeds},
    }
    requests = {f"history: {label}": ("history/", query) for label, query in lists.items()}
    for span in ("15m", "1h", "24h", "7d"):
        requests[f"timeline {span}"] = ("timeline/", {"range": span})
    requests["timeline of a task, 7d"] = ("timeline/", {"range": "7d", "task": feeds})
    requests["timeline of a rare task, 7d"] = ("timeline/", {"range": "7d", "task": nightly})
    requests["timeline of a lock, 7d"] = ("timeline/", {"range": "7d", "name": row.name})
    requests["page of a lock, with its event"] = (
        "timeline/",
        {"name": row.name, "event": str(row.pk)},
    )
    for span in ("24h", "7d"):
        requests[f"{SUMS} {span}"] = ("per-task/", {"range": span})
    requests["held now"] = ("", {})
    return requests


def register_tasks() -> None:
    """Register the tasks, so that the filter offers them."""
    from celery import shared_task

    from django_singletask import SingletonTask

    def body(feed_id: int) -> None: ...

    names = [f"feeds.tasks.import_{number}" for number in range(19)]
    for name in [*names, "reports.tasks.nightly", "none.such"]:
        shared_task(name=name, base=SingletonTask)(body)


def measure(rows: int, times: int) -> list[tuple[str, float, float]]:
    """Return each page with its median and its worst time, in milliseconds; print them."""
    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    results = []
    print(f"{'PAGE':<40} {'MEDIAN':>8} {'WORST':>8}  QUERIES  ANSWER")
    for label, (page, query) in pages(rows).items():
        address = f"/admin/django_singletask/tasklockevent/{page}?{urlencode(query)}".rstrip("?")
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            response = client.get(address)
            taken.append(1000 * (time.perf_counter() - began))
            assert response.status_code == 200, (address, response.status_code)
        with CaptureQueriesContext(connection) as queries:
            client.get(address)
        median, worst = statistics.median(taken), max(taken)
        results.append((label, median, worst))
        limit = SUMS_LIMIT if label.startswith(SUMS) else LIMIT
        size = f"{len(response.content) / 1000:.0f} kB"
        print(
            f"{label:<40} {median:>5.0f} ms {worst:>5.0f} ms  "
            f"{len(queries):>7}  {size}{'   SLOW' if worst > limit else ''}",
            flush=True,
        )
    return results


def run(rows: int, times: int, database: dict[str, Any], fill: Any) -> None:
    """Create the tables, fill and measure them. Django can be set up only once in a process."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    from tests import settings as of_tests

    apps = [app for app in of_tests.INSTALLED_APPS if not app.startswith("tests.")]
    settings.configure(
        INSTALLED_APPS=apps,
        MIDDLEWARE=of_tests.MIDDLEWARE,
        TEMPLATES=of_tests.TEMPLATES,
        ROOT_URLCONF="tests.urls",
        STATIC_URL="static/",
        SECRET_KEY="only here",
        ALLOWED_HOSTS=["*"],
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        DATABASES={"default": database},
        CACHES={"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
    )
    django.setup()
    register_tasks()
    call_command("migrate", verbosity=0)
    began = time.perf_counter()
    fill(rows)
    print(f"\n{database['ENGINE'].rpartition('.')[2]}, {rows:,} rows, filled in ", end="")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    results = measure(rows, times)
    print(f"Slowest answer: {max(worst for _label, _median, worst in results):.0f} ms")
    print(json.dumps(results))


def table(rows: dict[str, int], times: int) -> Table:
    """Measure the pages on each of the databases with so many rows."""
    from benchmarks.report import Check, Table

    cells, checks = [], []
    for database, count in rows.items():
        command = [sys.executable, __file__, "--only", database]
        command += ["--rows", str(count), "--times", str(times)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results = json.loads(done.stdout.splitlines()[-1])
        name = f"{NAMES[database]}, {count:,} rows"
        results.sort(key=lambda page: page[1], reverse=True)
        cells += [(name, *(label, f"{m:.0f} ms", f"{w:.0f} ms")) for label, m, w in results[:5]]
        middle = statistics.median(median for _label, median, _worst in results)
        cells.append((name, f"median of all {len(results)}", f"{middle:.0f} ms", ""))
        slowest = next(m for label, m, _worst in results if not label.startswith(SUMS))
        target = f"{name}: every page, filter and search < {LIMIT} ms, but for {SUMS}"
        checks.append(Check(target, f"{slowest:.0f} ms", slowest < LIMIT))
        slowest = max(m for label, m, _worst in results if label.startswith(SUMS))
        target = f"{name}: {SUMS} < {SUMS_LIMIT} ms"
        checks.append(Check(target, f"{slowest:.0f} ms", slowest < SUMS_LIMIT))
    text = (
        "The five slowest of the pages, filters and searches of the admin, each requested "
        f"{times} times: the median and the worst time until the whole answer is there. The "
        "history is that of a busy site: 1 row in 5 is a conflict, 3 runs in 10,000 had trouble."
    )
    return Table("Admin pages", text, ("Database", "page", "median", "worst"), cells, checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", choices=["postgresql", "sqlite"])
    options = parser.parse_args()
    for kind in ("postgresql", "sqlite"):
        if options.only in (None, kind) and os.fork() == 0:
            globals()[f"on_{kind}"](options.rows, options.times)
            return
        if options.only in (None, kind):
            os.wait()


def on_postgresql(rows: int, times: int) -> None:
    with servers.PostgreSQL() as server:
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "HOST": "127.0.0.1",
            "PORT": server.port,
            "USER": "singletask",
            "NAME": "postgres",
            "CONN_MAX_AGE": None,
        }
        run(rows, times, database, fill_postgresql)


def on_sqlite(rows: int, times: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/history.sqlite3"}
        run(rows, times, database, fill_sqlite)


if __name__ == "__main__":
    main()
