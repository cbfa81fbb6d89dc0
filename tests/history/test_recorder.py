"""The history that is written in the background."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import InternalError, OperationalError, connection, connections, transaction

from django_singletask import TaskLock
from django_singletask.history import recorder, writing
from django_singletask.models import TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from tests import inside, servers
from tests.deadline import wait_for
from tests.past_rows import keep_history_in
from tests.processes import running

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.django_db(databases="__all__", transaction=True)


@pytest.fixture(autouse=True)
def background(settings, empty_cache, monkeypatch):
    settings.SINGLETASK_HISTORY = "background"
    settings.SINGLETASK_CACHE = "locmem"
    empty_cache("locmem")
    TaskLockEvent.objects.all().delete()
    monkeypatch.setattr(recorder, "writer", recorder.Writer())
    yield recorder.writer
    recorder.stop()


def event(kind="acquired", **facts):
    now = datetime.datetime.now(datetime.UTC)
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
    """Yield the events of so many runs that end at once."""
    for _ in range(count):
        begun = event()
        yield begun
        yield dataclasses.replace(begun, kind="released", outcome="released", result="returned")


def skips(count, blocker="b"):
    """Yield the events of so many calls that meet one holder."""
    for _ in range(count):
        yield event("conflict", reason="skip", result="skipped", blocked_by=blocker, token="")


def rows(**facts):
    return list(TaskLockEvent.objects.filter(**facts))


def put(events):
    for each in events:
        recorder.receive(event=each)


def test_what_happens_is_written_soon():
    with TaskLock("nightly"):
        wait_for(lambda: rows(outcome=""), "the open row")
    wait_for(lambda: rows(outcome="released", result="returned"), "its end")


def test_run_that_ends_soon_is_written_once(background, monkeypatch):
    writes = []

    def note(events):
        writes.append(len(events))
        writing.write(events)

    monkeypatch.setattr(recorder, "write", note)
    monkeypatch.setattr(recorder, "GATHER", 60)
    begun, ended = runs(1)
    put([begun])
    wait_for(lambda: background.thread, "the thread collects events")
    put([ended])
    assert recorder.flush(30)
    assert writes == [2]
    assert len(rows(outcome="released")) == 1


def test_rows_are_written_beside_the_transaction_of_the_task():
    with transaction.atomic():
        with TaskLock("nightly"):
            pass
        assert recorder.flush(30)
        transaction.set_rollback(True)
    assert len(rows()) == 1


def test_10000_skips_against_one_holder_are_one_row():
    put(skips(10_000))
    assert recorder.flush(30)
    (row,) = rows()
    assert row.count == 10_000
    assert row.at < row.last_at


@pytest.mark.parametrize("alias", ["default", "mariadb"])
def test_skips_that_many_threads_write_at_once_are_all_counted(settings, alias, django_db_blocker):
    """As with many processes: each of them finds no row at first."""
    keep_history_in(settings, alias)
    barrier = threading.Barrier(8)

    def skip():
        with django_db_blocker.unblock():
            barrier.wait()
            for _ in range(5):
                writing.write(list(skips(2)))
            connections.close_all()

    threads = [threading.Thread(target=skip) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row.count for row in rows()] == [80]
    TaskLockEvent.objects.all().delete()


SLOWLY = """
CREATE FUNCTION slowly() RETURNS trigger AS
$$ BEGIN PERFORM pg_sleep(0.005); RETURN NEW; END $$ LANGUAGE plpgsql;
CREATE TRIGGER slowly BEFORE INSERT ON {0} FOR EACH ROW EXECUTE FUNCTION slowly();
"""


@pytest.fixture
def slow_rows():
    """Let PostgreSQL take 5 ms for each row, so that two that write at once meet in the middle."""
    with connection.cursor() as cursor:
        cursor.execute(SLOWLY.format(TaskLockEvent._meta.db_table))
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION slowly CASCADE")


@pytest.mark.usefixtures("slow_rows")
@pytest.mark.parametrize("orders", ["one order", "control: the order of the events"])
def test_processes_that_count_the_same_rows_do_not_deadlock(orders, django_db_blocker, monkeypatch):
    if orders != "one order":
        inside.write_in_the_order_of_events(monkeypatch)
    holders = [f"holder {number}" for number in range(30)]
    barrier, errors = threading.Barrier(2), []

    def skip(order):
        with django_db_blocker.unblock():
            with suppress(threading.BrokenBarrierError):
                for _ in range(5):
                    barrier.wait()  # both write at the same time
                    try:
                        writing.write([event for holder in order for event in skips(1, holder)])
                    except OperationalError as error:
                        errors.append(error)
                        barrier.abort()
            connections.close_all()

    threads = [threading.Thread(target=skip, args=[order]) for order in (holders, holders[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if orders == "one order":
        assert errors == []
        assert {row.count for row in rows()} == {10}
    else:
        assert "deadlock" in str(errors)


def test_flush_waits_for_no_more_events_of_a_later_batch(background, monkeypatch):
    monkeypatch.setattr(recorder, "AT_ONCE", 4)
    monkeypatch.setattr(recorder, "GATHER", 60)
    put(runs(5))
    assert recorder.flush(30)


def test_outage_amid_single_writes_doubles_nothing(background, monkeypatch):
    """One event cannot be written, so all are written singly; then the database goes away."""
    calls = []

    def fail(events):
        calls.append(len(events))
        if len(events) == 1 and calls.count(1) == 4:
            raise InternalError("cannot execute INSERT in a read-only transaction")
        writing.write(events)

    monkeypatch.setattr(recorder, "write", fail)
    monkeypatch.setattr(recorder, "RETRY", 0.01)
    background.events.extend([*skips(2, "x"), *skips(2, "y"), event(pid="no number"), *runs(1)])
    put(runs(1))
    assert recorder.flush(30)
    assert sorted(row.count for row in rows(kind="conflict")) == [2, 2]
    assert len(rows(outcome="released")) == 2


def test_write_whose_reply_is_lost_makes_no_second_row(monkeypatch):
    """Only a count may be too high."""
    replies = [OperationalError("the connection was closed before the reply")]

    def lose_reply(events):
        writing.write(events)
        if replies:
            raise replies.pop()

    monkeypatch.setattr(recorder, "write", lose_reply)
    monkeypatch.setattr(recorder, "RETRY", 0.01)
    put([*runs(2), *skips(3)])
    assert recorder.flush(30)
    assert replies == []
    assert sorted((row.kind, row.outcome) for row in rows()) == [
        ("conflict", ""),
        ("run", "released"),
        ("run", "released"),
    ]


def test_text_that_mysql_refuses_is_left_out(background, monkeypatch, caplog):

    def fail(events):
        if any(each.actor == "snowman" for each in events):
            raise OperationalError(1366, "Incorrect string value")
        writing.write(events)

    monkeypatch.setattr(recorder, "write", fail)
    put([*runs(1), event("cleared", actor="snowman"), *runs(1)])
    assert recorder.flush(30)
    assert len(rows()) == 2
    assert "not recorded" in caplog.text


def test_a_signal_before_the_thread_starts_costs_no_event(background, monkeypatch):
    def strike():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(background, "begin", strike)
        with pytest.raises(KeyboardInterrupt):
            recorder.receive(event=event())
    put(runs(1))
    wait_for(lambda: len(rows()) == 2, "both are written")


@pytest.mark.parametrize("way", ["looks again", "control: it ends"])
def test_event_that_comes_while_the_thread_ends_waits_for_no_other(background, monkeypatch, way):
    """For receive() the thread still runs, but it has looked for events already."""
    if way != "looks again":
        monkeypatch.delattr(recorder.Writer, "_run_thread")
    monkeypatch.setattr(recorder, "GATHER", 0.01)
    monkeypatch.setattr(recorder, "IDLE", 0.01)
    late, close = [event()], background.close

    def put_and_close():
        if late:
            recorder.receive(event=late.pop())
        close()

    monkeypatch.setattr(background, "close", put_and_close)
    background.begin()
    wait_for(lambda: not late, "it comes")
    if way == "looks again":
        wait_for(rows, "it is written")
    else:
        time.sleep(0.3)
        assert not rows()
        background.events.clear()


def test_stop_in_an_outage_keeps_the_events_and_ends_the_thread(background, monkeypatch):

    def fail(events):
        raise OperationalError("away")

    monkeypatch.setattr(recorder, "RETRY", 0.05)
    monkeypatch.setattr(recorder, "write", fail)
    put(runs(3))
    recorder.stop()
    wait_for(lambda: background.thread is None, "the thread has ended")
    monkeypatch.setattr(recorder, "write", writing.write)
    put(runs(1))
    assert recorder.flush(30)
    assert len(rows()) == 4


def test_event_that_cannot_be_written_costs_no_other(caplog):
    bad = event(pid="no number")
    put([*runs(2), bad, *runs(2)])
    assert recorder.flush(30)
    assert len(rows()) == 4
    line, end = caplog.messages
    assert "an event is not recorded" in line
    assert "events not recorded: 1" in end
    assert "migrate" not in line


@pytest.fixture
def busy_file(settings, monkeypatch):
    """Keep the history in an SQLite file, in which another connection has a transaction open."""
    keep_history_in(settings, "sqlite")
    monkeypatch.setitem(connections.databases["sqlite"]["OPTIONS"], "timeout", 0.01)
    monkeypatch.setattr(recorder, "RETRY", 0.01)
    other = sqlite3.connect(connections.databases["sqlite"]["NAME"], check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    yield other
    other.close()
    assert recorder.flush(30)
    TaskLockEvent.objects.all().delete()


def test_busy_sqlite_file_is_tried_again_quietly(background, busy_file, caplog):
    put(runs(1))
    assert not recorder.flush(0.3)
    busy_file.rollback()
    assert recorder.flush(30)
    assert len(rows(outcome="released")) == 1
    assert caplog.messages == []


def test_sqlite_file_that_stays_busy_is_logged_once_with_its_cure(
    background, busy_file, monkeypatch, caplog
):
    monkeypatch.setattr(recorder, "PATIENCE", 0.1)
    put(runs(1))
    wait_for(lambda: caplog.messages, "a line in the log")
    assert not recorder.flush(0.2)
    [line] = caplog.messages
    assert "OperationalError: database is locked" in line
    assert "transaction_mode" in line
    assert "migrate" not in line


@pytest.fixture
def away(monkeypatch):
    """Let the database be away until this event is cleared."""
    away = threading.Event()
    away.set()

    def fail(events):
        if away.is_set():
            raise OperationalError("the server is away")
        writing.write(events)

    monkeypatch.setattr(recorder, "write", fail)
    monkeypatch.setattr(recorder, "RETRY", 0.01)
    return away


def test_database_that_is_away_costs_no_event(background, away, caplog):
    put(runs(2000))
    assert not recorder.flush(0.1)
    put(skips(500))
    away.clear()
    assert recorder.flush(30)
    assert len(rows(outcome="released")) == 2000
    assert [row.count for row in rows(kind="conflict")] == [500]
    assert caplog.text.count("cannot be written") == 1
    assert caplog.text.count("written again") == 1


def test_of_too_many_events_the_oldest_are_dropped(background, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "BOUND", 100)
    with monkeypatch.context() as patch:
        patch.setattr(background, "begin", lambda: None)  # no thread takes some meanwhile
        put([event()])
        put(runs(100))
    assert recorder.flush(30)
    assert len(rows(outcome="released")) == len(rows()) == 50
    assert "events not recorded: 101" in caplog.text


def test_connection_is_closed_when_nothing_happens(background, monkeypatch):
    monkeypatch.setattr(recorder, "IDLE", 0.1)
    put(runs(1))
    assert recorder.flush(30)
    wait_for(lambda: not background.open_connections, "the connection is closed")
    put(runs(1))
    assert recorder.flush(30)
    assert len(rows()) == 2


def test_connection_that_an_outage_has_closed_is_not_noted(background, monkeypatch):
    """A forked child would keep it for ever."""
    noted = []

    def fail(events):
        noted.append(background.open_connections)
        writing.write(events)
        raise OperationalError("the reply is lost")

    monkeypatch.setattr(recorder, "RETRY", 0.01)
    put(runs(1))
    assert recorder.flush(30)
    wait_for(lambda: background.open_connections, "the connection is noted")
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "write", fail)
        put(runs(1))
        assert not recorder.flush(0.1)
        wait_for(lambda: len(noted) > 3, "attempts")
    assert len(noted[0]) == 1
    assert noted[1:4] == [[], [], []]
    assert recorder.flush(30)


def test_stop_writes_all_events_and_ends_the_thread(background):
    put(runs(10))
    recorder.stop()
    assert len(rows()) == 10
    assert background.thread is None
    put(runs(1))
    assert recorder.flush(30)
    assert len(rows()) == 11


CHILD = """
import os, sys
import django
django.setup()
from django.conf import settings
from django_singletask import TaskLock
from django_singletask.history import recorder

recorder.IDLE = 60.0  # the connection stays open, however long the child takes
router = {"db_for_write": lambda *args, **hints: sys.argv[2]}
settings.DATABASE_ROUTERS = [type("Router", (), router)()]
with TaskLock("before"):
    pass
assert recorder.flush(30)

def server_process():
    # Without a reference to the connection: the child must not keep it for the test's sake.
    [connection] = recorder.writer.open_connections
    if connection.vendor == "mysql":
        return connection.connection.thread_id()
    return connection.connection.info.backend_pid

first = server_process()
pid = os.fork()
if pid == 0:
    with TaskLock("in the child"):
        pass
    assert recorder.flush(30)
    sys.exit()  # all that the parent's thread had is deleted, connections too
_, status = os.waitpid(pid, 0)
assert status == 0, status
with TaskLock("after"):
    pass
if sys.argv[1] == "exit":
    sys.exit()  # the last events are written at exit
assert recorder.flush(30)
assert server_process() == first  # else the child has closed the connection
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


@pytest.mark.only_all("it starts processes")
@pytest.mark.needs("redis")
@pytest.mark.parametrize("alias", ["default", "mariadb"])
def test_forked_child_leaves_the_connection_of_its_parent(settings, alias):
    keep_history_in(settings, alias)
    with start(CHILD, "wait", alias) as process:
        output, errors = process.communicate(timeout=60)
    TaskLockEvent.objects.all().delete()
    assert (process.returncode, output, errors) == (0, "written\n", "")


@pytest.mark.needs("redis")
def test_forked_child_has_a_thread_of_its_own():
    with start(CHILD, "exit", "default") as process:
        _out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert {row.name for row in rows(outcome="released")} == {"before", "in the child", "after"}
    assert len(rows()) == 3


@pytest.mark.needs("redis")
def test_a_script_that_ends_at_once_loses_no_row():
    """Its thread may not have begun when the interpreter ends."""
    program = CHILD.partition('with TaskLock("before")')[0] + "TaskLock(str(os.getpid())).acquire()"
    for _ in range(3):
        with start(program, "exit", "default") as process:
            _out, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
    assert len(rows()) == 3


@pytest.mark.only_all("it starts processes")
@pytest.mark.needs("redis")
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing_lose_no_row(method):
    """They end by os._exit(), before their threads have written."""
    with running("tests.pooled", method) as program:
        assert program.process.wait(60) == 0
    assert {row.name for row in rows(outcome="released")} == {
        "before",
        "in a process",
        "in a pool",
    }


@pytest.mark.needs("redis")
def test_sigkill_loses_no_row_that_was_written():
    with start(CHILD, "wait", "default") as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert len(rows(outcome="released")) == 3


class TestMode:
    @pytest.fixture(autouse=True)
    def unset(self, settings):
        settings.SINGLETASK_HISTORY = "off"  # its end sends setting_changed
        del settings.SINGLETASK_HISTORY

    def test_in_tests_the_default_is_inline(self):
        assert inside.history_mode() == "inline"

    def test_a_mode_that_tests_choose_is_theirs(self, settings):
        settings.SINGLETASK_HISTORY = "background"
        assert inside.history_mode() == "background"

    def test_elsewhere_the_default_is_the_background(self, settings):
        settings.SINGLETASK_TESTING = False
        assert inside.history_mode() == "background"

    def test_no_event_is_made_when_the_history_is_off(self, settings):
        settings.SINGLETASK_HISTORY = "background"
        assert lock_event.disconnect(sender=LockEvent, dispatch_uid=recorder.LISTENER)
        recorder.connect()
        settings.SINGLETASK_HISTORY = "off"
        assert not lock_event.disconnect(sender=LockEvent, dispatch_uid=recorder.LISTENER)

    def test_server_without_threads_writes_inline(self, settings, monkeypatch, background):
        settings.SINGLETASK_HISTORY = "background"
        monkeypatch.setattr(recorder, "has_threads", lambda: False)
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
from django_singletask.history import recorder
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
assert recorder.flush(30)
connection.close()
print(calls, TaskLockEvent.objects.filter(outcome="released").count(), slowest)
"""


def test_a_server_that_stops_and_comes_back_loses_nothing():
    """Under load, for as many seconds as SINGLETASK_TEST_OUTAGE says."""
    with servers.PostgreSQL() as server:
        address = urlsplit(server.url)
        login = {"host": address.hostname, "port": address.port, "user": address.username}
        with psycopg.connect(**login, dbname="postgres", autocommit=True) as connection:
            connection.execute("CREATE DATABASE singletask")
        with start(LOAD, str(OUTAGE), SINGLETASK_TEST_POSTGRES=server.url) as process:
            assert process.stdout.readline() == "loaded\n"
            # Not killed: with synchronous_commit off the server would forget its last commits.
            server.process.send_signal(server.stop_signal)
            server.process.wait(20)
            # A run that waits for the server would never end: it starts only after this line.
            assert process.stdout.readline() == "enough\n"
            server.start()
            output, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    calls, written, slowest = output.split()
    print(f"{calls} runs while the database was away, the slowest took {slowest} s")
    assert calls == written
    assert errors.count("cannot be written") == errors.count("can be written again") == 1
