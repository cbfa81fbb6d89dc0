"""The history that is written in the background."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import InternalError, OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_singletask import TaskLock, conf
from django_singletask.history import recorder as writer
from django_singletask.history.writing import write
from django_singletask.models import TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from tests import servers
from tests.deadline import wait_for

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.django_db(databases="__all__", transaction=True)


@pytest.fixture(autouse=True)
def background(settings, empty_cache, monkeypatch):
    settings.SINGLETASK_HISTORY = "background"
    settings.SINGLETASK_CACHE = "locmem"
    empty_cache("locmem")
    TaskLockEvent.objects.all().delete()
    own = writer.Writer()
    monkeypatch.setattr(writer, "_writer", own)
    yield own
    own.stop()


def event(kind="acquired", **facts):
    now = datetime.datetime.now(datetime.timezone.utc)
    return LockEvent(
        **{
            "kind": kind,
            "name": "feeds.tasks.import_feed(feed_id=7)",
            "key": "singletask:feeds.tasks.import_feed:0",
            "at": now,
            "task": "feeds.tasks.import_feed",
            "task_id": str(uuid.uuid4()),
            "token": uuid.uuid4().hex,
            "host": "web-3",
            "pid": 8121,
            "timeout": 60,
            **facts,
        }
    )


def runs(count):
    """Give the events of so many runs that end at once."""
    for _ in range(count):
        begun = event()
        yield begun
        yield dataclasses.replace(begun, kind="released", outcome="released", result="returned")


def skips(count, blocker="b"):
    for _ in range(count):
        yield event("skipped", reason="skip", blocked_by=blocker, token="")


def rows(**facts):
    return list(TaskLockEvent.objects.filter(**facts))


def put(events):
    for each in events:
        writer.receive(event=each)


def test_what_happens_is_written_soon():
    with TaskLock("nightly"):
        wait_for(lambda: rows(outcome=""), "the open row")
    wait_for(lambda: rows(outcome="released", result="returned"), "its end")


def test_it_is_beside_the_transaction_of_the_task():
    with transaction.atomic():
        with TaskLock("nightly"):
            pass
        assert writer.flush()
        transaction.set_rollback(True)
    assert len(rows()) == 1


def test_inline_is_part_of_it(settings):
    """Negative control."""
    settings.SINGLETASK_HISTORY = "inline"
    with transaction.atomic():
        with TaskLock("nightly"):
            pass
        transaction.set_rollback(True)
    assert rows() == []


def test_10000_skips_against_one_holder_are_one_row():
    put(skips(10_000))
    assert writer.flush(30)
    (row,) = rows()
    assert row.count == 10_000
    assert row.at < row.last_at


def through(settings, alias):
    """Let the history be written to one of the databases."""
    settings.DATABASE_ROUTERS = [type("Router", (), {"db_for_write": lambda *a, **k: alias})()]
    TaskLockEvent.objects.using(alias).all().delete()
    return TaskLockEvent.objects.using(alias)


@pytest.mark.parametrize("alias", ["default", "mariadb"])
def test_so_they_are_when_many_threads_write_them(settings, alias, django_db_blocker):
    """As many processes do: each finds no row at first."""
    objects = through(settings, alias)
    barrier = threading.Barrier(8)

    def skip():
        with django_db_blocker.unblock():
            barrier.wait()
            for _ in range(5):
                write(list(skips(2)))
            connections.close_all()

    threads = [threading.Thread(target=skip) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = [row.count for row in objects.all()]
    assert sum(counts) == 80
    # MySQL has no constraint for it; what is counted is right all the same.
    assert len(counts) == 1 or alias == "mariadb"
    objects.all().delete()


def test_two_that_count_the_same_rows_in_different_orders_do_not_deadlock(django_db_blocker):
    holders = [f"holder {number}" for number in range(30)]
    barrier, errors = threading.Barrier(2), []

    def skip(order):
        with django_db_blocker.unblock():
            barrier.wait()
            for _ in range(10):
                try:
                    write([event for holder in order for event in skips(1, holder)])
                except OperationalError as error:
                    errors.append(error)
            connections.close_all()

    threads = [threading.Thread(target=skip, args=[order]) for order in (holders, holders[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {row.count for row in rows()} == {20}


@pytest.mark.parametrize("alias", ["sqlite", "mariadb", "default"])
def test_no_statement_of_a_write_reads_the_table(settings, alias):
    objects = through(settings, alias)
    objects.bulk_create(
        TaskLockEvent(kind="acquired", outcome="released", name="n", key="k", at=event().at)
        for _ in range(5000)
    )
    one, gone = event(), event()
    write([one, gone, *skips(1)])
    connection = connections[alias]
    with connection.cursor() as cursor:
        table = TaskLockEvent._meta.db_table
        cursor.execute(f"ANALYZE {'TABLE ' if alias == 'mariadb' else ''}{table}")
    with CaptureQueriesContext(connection) as captured:
        write(
            [
                dataclasses.replace(one, kind="released", outcome="released"),
                *skips(2),
                dataclasses.replace(gone, kind="expired", outcome="dead"),
            ]
        )
    plans = []
    for query in captured.captured_queries:
        if query["sql"].startswith(("SELECT", "UPDATE")):
            with connection.cursor() as cursor:
                how = "EXPLAIN QUERY PLAN" if alias == "sqlite" else "EXPLAIN"
                cursor.execute(f"{how} {query['sql'].replace('%', '%%')}")
                plans.append(str(cursor.fetchall()))
    objects.all().delete()
    assert len(plans) >= 5
    indexes = ("singletask_token", "singletask_blocked_by", "PRIMARY", "pkey", "(id = ")
    for plan in plans:
        assert any(index in plan for index in indexes), plan


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_a_batch_says_what_single_events_say(settings, alias):
    settings.DATABASE_ROUTERS = [type("Router", (), {"db_for_write": lambda *a, **k: alias})()]
    objects = TaskLockEvent.objects.using(alias)
    long, gone, cleared = event(), event(), event()
    ended = {"outcome": "released", "result": "raised", "longest_renewal_gap": 2.5}
    events = [
        *runs(3),
        long,
        gone,
        cleared,
        *skips(2),
        dataclasses.replace(gone, kind="expired", outcome="dead", reason="process 1 is gone"),
        *skips(2),
        dataclasses.replace(cleared, kind="cleared", actor="ada"),
        dataclasses.replace(cleared, kind="released", outcome="lost", result="returned"),
        dataclasses.replace(long, kind="released", **ended),
        event("skipped", reason="skip", token=""),
        event("skipped", reason="skip", token=""),
    ]

    def told():
        fields = ("kind", "outcome", "result", "reason", "count", "token", "longest_renewal_gap")
        return sorted(map(str, objects.values_list(*fields)))

    objects.all().delete()
    for each in events:
        write([each])
    single = told()
    objects.all().delete()
    write(events)
    assert told() == single
    objects.all().delete()


def test_a_second_attempt_writes_no_run_twice():
    """The first was committed, and the reply lost."""
    events = list(runs(3))
    write(events[:5])
    write(events, again=True)
    assert [row.outcome for row in rows()] == ["released"] * 3


def test_a_second_attempt_counts_nothing_twice():
    gone = event()
    events = [
        *skips(3),
        event("skipped", reason="skip", token=""),
        dataclasses.replace(gone, kind="cleared", actor="ada"),
    ]
    write(events)
    write(events, again=True)
    assert sorted((row.kind, row.count) for row in rows()) == [
        ("cleared", 1),
        ("skipped", 1),
        ("skipped", 3),
    ]


def test_an_outage_amid_single_writes_doubles_nothing(background, monkeypatch):
    """One event cannot be written, so all are written singly; then the database goes away."""
    real, calls = writer.write, []

    def fail(events, **options):
        calls.append(len(events))
        if len(events) == 1 and calls.count(1) == 4:
            raise InternalError("cannot execute INSERT in a read-only transaction")
        real(events, **options)

    monkeypatch.setattr(writer, "write", fail)
    monkeypatch.setattr(writer, "RETRY", 0.01)
    background.events.extend([*skips(2, "x"), *skips(2, "y"), event(pid="no number"), *runs(2)])
    background.start()
    background.there.set()
    assert writer.flush(20)
    assert sorted(row.count for row in rows(kind="skipped")) == [2, 2]
    assert len(rows(outcome="released")) == 2


def test_a_text_that_mysql_refuses_is_left_out(background, monkeypatch, caplog):
    real = writer.write

    def fail(events, **options):
        if any(each.actor == "snowman" for each in events):
            raise OperationalError(1366, "Incorrect string value")
        real(events, **options)

    monkeypatch.setattr(writer, "write", fail)
    put([*runs(1), event("cleared", actor="snowman"), *runs(1)])
    assert writer.flush(10)
    assert len(rows()) == 2
    assert "not recorded" in caplog.text


def test_stop_in_an_outage_keeps_the_events_and_ends_the_thread(background, monkeypatch):
    real = writer.write

    def fail(events, **options):
        raise OperationalError("away")

    monkeypatch.setattr(writer, "RETRY", 0.05)
    monkeypatch.setattr(writer, "write", fail)
    put(runs(3))
    thread = background.thread
    writer.stop()
    thread.join(5)
    assert not thread.is_alive()
    monkeypatch.setattr(writer, "write", real)
    put(runs(1))
    assert writer.flush(10)
    assert len(rows()) == 4


def test_one_that_cannot_be_written_costs_no_other(caplog):
    bad = event(pid="no number")
    put([*runs(2), bad, *runs(2)])
    assert writer.flush(10)
    assert len(rows()) == 4
    assert caplog.text.count("not recorded") >= 1


@pytest.fixture
def away(monkeypatch):
    """Let the database be away until this is cleared."""
    real, away = writer.write, threading.Event()
    away.set()

    def fail(events, **options):
        if away.is_set():
            raise OperationalError("the server is away")
        real(events, **options)

    monkeypatch.setattr(writer, "write", fail)
    monkeypatch.setattr(writer, "RETRY", 0.01)
    return away


def test_a_database_that_is_away_costs_nothing(background, away, caplog):
    put(runs(2000))
    assert not writer.flush(0.1)
    put(skips(500))
    away.clear()
    assert writer.flush(30)
    assert len(rows(outcome="released")) == 2000
    assert [row.count for row in rows(kind="skipped")] == [500]
    assert caplog.text.count("cannot be written") == 1
    assert caplog.text.count("written again") == 1


def test_what_is_kept_is_bounded_and_told(background, away, monkeypatch, caplog):
    monkeypatch.setattr(writer, "BOUND", 100)
    monkeypatch.setattr(writer, "AT_ONCE", 10)
    put([event()])
    wait_for(lambda: background.unwritten == 1, "the first is on its way")
    put(runs(100))
    away.clear()
    assert writer.flush(10)
    assert len(rows()) == 1 + 50
    assert "100 events were dropped" in caplog.text


def test_the_connection_is_closed_when_nothing_happens(background, monkeypatch):
    monkeypatch.setattr(writer, "IDLE", 0.1)
    put(runs(1))
    assert writer.flush()
    wait_for(lambda: not background.open, "it is closed")
    put(runs(1))
    assert writer.flush()
    assert len(rows()) == 2


def test_stop_writes_what_is_left_and_ends_the_thread(background):
    put(runs(10))
    writer.stop()
    assert len(rows()) == 10
    assert background.thread is None
    put(runs(1))
    assert writer.flush()
    assert len(rows()) == 11


CHILD = """
import os, sys
import django
django.setup()
from django_singletask import TaskLock
from django_singletask.history import recorder as writer
from django.db import connection

with TaskLock("before"):
    pass
assert writer.flush()
pid = os.fork()
if pid == 0:
    with TaskLock("in the child"):
        pass
    assert writer.flush()
    sys.exit()  # which drops what the parent's thread had, connections too
_, status = os.waitpid(pid, 0)
assert status == 0, status
with TaskLock("after"):
    pass
if sys.argv[1] == "exit":
    sys.exit()  # the rest is written on the way out
assert writer.flush()
print("written", flush=True)
sys.stdin.read()
"""


def start(program, *arguments, **env):
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **env}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_fork_has_a_thread_of_its_own_and_leaves_the_parents_connection():
    with start(CHILD, "exit") as process:
        _out, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert {row.name for row in rows(outcome="released")} == {"before", "in the child", "after"}
    assert len(rows()) == 3


def test_sigkill_loses_nothing_that_was_written():
    with start(CHILD, "wait") as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert len(rows(outcome="released")) == 3


class TestMode:
    @pytest.fixture(autouse=True)
    def unset(self, settings):
        del settings.SINGLETASK_HISTORY

    def test_in_tests_the_default_is_inline(self):
        assert conf.conf.history == "inline"

    def test_elsewhere_it_is_the_background(self, monkeypatch):
        monkeypatch.setattr(conf, "_is_test", lambda: False)
        assert conf.conf.history == "background"

    def test_without_a_history_no_event_is_made(self, settings):
        settings.SINGLETASK_HISTORY = "background"
        assert lock_event.disconnect(sender=LockEvent, dispatch_uid=writer.LISTENER)
        writer.connect()
        settings.SINGLETASK_HISTORY = "off"
        assert not lock_event.disconnect(sender=LockEvent, dispatch_uid=writer.LISTENER)

    def test_a_server_without_threads_writes_inline(self, settings, monkeypatch, background):
        settings.SINGLETASK_HISTORY = "background"
        monkeypatch.setattr(writer, "has_threads", lambda: False)
        put(runs(1))
        assert len(rows()) == 1
        assert background.thread is None


OUTAGE = float(os.environ.get("SINGLETASK_TEST_OUTAGE", "3"))
LOAD = """
import sys, time
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from django_singletask import TaskLock
from django_singletask.history import recorder as writer
from django_singletask.models import TaskLockEvent

call_command("migrate", verbosity=0)
slowest = calls = 0
until = None
while until is None or time.monotonic() < until:
    began = time.perf_counter()
    with TaskLock("nightly", cache="locmem"):
        pass
    slowest = max(slowest, time.perf_counter() - began)
    calls += 1
    if calls == 100:
        print("loaded", flush=True)
        until = time.monotonic() + float(sys.argv[1])
    time.sleep(0.005)
print("enough", flush=True)
sys.stdin.readline()
assert writer.flush(30)
connection.close()
print(calls, TaskLockEvent.objects.filter(outcome="released").count(), slowest)
"""


def test_a_server_that_stops_and_comes_back_loses_nothing():
    """Under load; with SINGLETASK_TEST_OUTAGE=60 for as long as that."""
    with servers.PostgreSQL() as server:
        address = urlsplit(server.url)
        own = {"host": address.hostname, "port": address.port, "user": address.username}
        with psycopg.connect(**own, dbname="postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE singletask")
        with start(LOAD, str(OUTAGE), SINGLETASK_TEST_POSTGRES=server.url) as process:
            assert process.stdout.readline() == "loaded\n"
            # Not killed: with synchronous_commit off it would itself forget the last commits.
            server.process.send_signal(server.stop_signal)
            server.process.wait(20)
            assert process.stdout.readline() == "enough\n"
            server.start()
            told, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    calls, written, slowest = told.split()
    print(f"{calls} runs while the database was away, the slowest took {slowest} s")
    assert calls == written
    assert float(slowest) < 1
    assert errors.count("cannot be written") == errors.count("is written again") == 1


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_rates(settings, alias, capsys):
    """Print what one process writes in a second; slow machines fail no build."""
    settings.DATABASE_ROUTERS = [type("Router", (), {"db_for_write": lambda *a, **k: alias})()]
    together = list(runs(5000))
    apart = list(runs(2500))
    objects = TaskLockEvent.objects.using(alias)
    for what, events in (("short runs", [together]), ("long runs", [apart[::2], apart[1::2]])):
        began = time.perf_counter()
        for some in events:
            put(some)
            assert writer.flush(60)
        took = time.perf_counter() - began
        with capsys.disabled():
            print(f"\n{alias}, {what}: {sum(map(len, events)) / took:.0f} events/s")
    assert objects.filter(outcome="released").count() == 7500
    objects.all().delete()
