"""The history that each caller writes itself: no row is locked while its transaction is open."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.auth.models import User
from django.core.signals import request_finished
from django.db import DatabaseError, OperationalError, connection, connections, transaction

from django_singletask import TaskLock
from django_singletask.history import recorder
from django_singletask.models import TaskLockEvent
from tests.past_rows import keep_history_in

ROOT = Path(__file__).parents[2]
HOLDERS = ["first", "second", "third"]
pytestmark = pytest.mark.django_db(databases="__all__", transaction=True)


@pytest.fixture(autouse=True)
def outside_tests(settings, empty_cache, monkeypatch):
    """Let each caller write its events as in production, about locks that others hold."""
    settings.SINGLETASK_TESTING = False
    settings.SINGLETASK_HISTORY = "inline"
    settings.SINGLETASK_CACHE = "locmem"
    empty_cache("locmem")
    TaskLockEvent.objects.all().delete()
    User.objects.all().delete()
    held = [TaskLock(name) for name in HOLDERS]
    for lock in held:
        lock.acquire()
    TaskLockEvent.objects.all().delete()
    monkeypatch.setattr(recorder, "writer", recorder.Writer())
    yield
    for lock in held:
        lock.release()
    recorder.stop()
    TaskLockEvent.objects.all().delete()


def skip(name="first"):
    """Be skipped by the holder of a lock."""
    assert not TaskLock(name, on_conflict="skip").acquire()


def counted(*names):
    """Return how many calls were counted against the holders, as another connection sees it."""
    rows = TaskLockEvent.objects.filter(kind="conflict").values_list("name", "count")
    counts = dict(rows)
    return [counts.get(name, 0) for name in names or ["first"]]


def at_once(*bodies):
    """Run each body in a thread, in a transaction; return their errors."""
    errors = []

    def run(body):
        try:
            with transaction.atomic():
                body()
        except DatabaseError as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=[body]) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


def crosswise(rounds=3):
    """Let two strangers meet two holders in another order, and change the same row of their own.

    Each has written once when the other goes on.
    """
    user = User.objects.create(username="shared")
    errors = []
    for _ in range(rounds):
        barrier = threading.Barrier(2)

        def meet(first, then, barrier=barrier):
            skip(first)
            barrier.wait(60)
            skip(then)

        def meet_and_change(barrier=barrier):
            skip("third")
            barrier.wait(60)
            User.objects.filter(pk=user.pk).update(first_name="x")

        def change_and_meet(barrier=barrier):
            User.objects.filter(pk=user.pk).update(first_name="y")
            barrier.wait(60)
            skip("third")

        errors += at_once(lambda: meet("first", "second"), lambda: meet("second", "first"))
        barrier.reset()
        errors += at_once(meet_and_change, change_and_meet)
    return errors


def test_strangers_that_meet_two_holders_crosswise_do_not_wait(caplog):
    assert crosswise() == []
    assert caplog.messages == []
    assert counted(*HOLDERS) == [6, 6, 6]


def test_control_rows_in_the_transactions_deadlock(settings, caplog):
    settings.SINGLETASK_TESTING = True
    errors = [str(error) for error in crosswise(1)]
    assert "deadlock detected" in "".join([*errors, *caplog.messages])
    assert counted(*HOLDERS) != [2, 2, 2]


def test_row_is_written_at_once_without_a_transaction():
    skip()
    assert counted() == [1]
    with TaskLock("nightly"):
        assert TaskLockEvent.objects.filter(name="nightly", outcome="").exists()


@pytest.mark.parametrize("mode", ["inline", "no threads"])
def test_row_is_written_when_the_outermost_block_commits(settings, monkeypatch, mode):
    if mode == "no threads":
        settings.SINGLETASK_HISTORY = "background"
        monkeypatch.setattr(recorder, "has_threads", lambda: False)
    with transaction.atomic():
        with transaction.atomic():
            skip()
        skip()
        assert counted() == [0]
    assert counted() == [2]


def test_many_events_of_a_transaction_are_one_hook():
    with transaction.atomic():
        for _ in range(20):
            skip()
        assert len(connection.run_on_commit) == 1
    assert counted() == [20]


def test_more_events_than_one_statement_takes_are_all_written(monkeypatch):
    monkeypatch.setattr(recorder, "AT_ONCE", 2)
    with transaction.atomic():
        for _ in range(7):
            skip()
    assert counted() == [7]


def test_rollback_of_a_savepoint_keeps_the_events():
    """It drops the hook, which the next event adds again."""
    with transaction.atomic():
        with transaction.atomic():
            skip()
            transaction.set_rollback(True)
        assert connection.run_on_commit == []
        skip()
    assert counted() == [2]


def roll_back():
    with transaction.atomic():
        User.objects.create(username="rolled back")
        skip()
        transaction.set_rollback(True)
    assert counted() == [0]
    assert not User.objects.exists()


def test_after_a_rollback_the_next_event_writes_all():
    roll_back()
    skip()
    assert counted() == [2]


def test_after_a_rollback_the_end_of_the_request_writes_all():
    roll_back()
    request_finished.send(sender=None)
    assert connection.connection is None  # as CONN_MAX_AGE says
    assert counted() == [1]


def test_after_a_rollback_flush_writes_all():
    roll_back()
    assert recorder.flush(30)
    assert counted() == [1]


def test_transaction_without_autocommit_is_left_alone():
    transaction.set_autocommit(False)
    try:
        User.objects.create(username="rolled back")
        skip()
        transaction.rollback()
        assert counted() == [0]
        transaction.rollback()
    finally:
        transaction.set_autocommit(True)
    assert not User.objects.exists()
    skip()
    assert counted() == [2]


@pytest.mark.parametrize("alias", ["mariadb", "sqlite"])
def test_only_a_transaction_of_the_database_with_the_history_is_waited_for(settings, alias):
    keep_history_in(settings, alias)
    with transaction.atomic("default"):
        with transaction.atomic(alias):
            skip()
            assert counted() == [0]
        assert counted() == [1]
        skip()
        assert counted() == [2]
    TaskLockEvent.objects.all().delete()


def test_failure_at_the_commit_harms_nobody_and_loses_nothing(monkeypatch, caplog):
    def fail(events):
        raise OperationalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "write", fail)
        with transaction.atomic():
            User.objects.create(username="committed")
            skip()
    assert User.objects.filter(username="committed").exists()
    assert "kept and written later" in caplog.text
    skip()
    assert counted() == [2]
    assert "events not recorded: 0" in caplog.text


def test_busy_sqlite_file_costs_no_event(settings, monkeypatch, caplog):
    keep_history_in(settings, "sqlite")
    connections["sqlite"].close()
    monkeypatch.setitem(connections.databases["sqlite"]["OPTIONS"], "timeout", 0.01)
    other = sqlite3.connect(connections.databases["sqlite"]["NAME"])
    other.execute("BEGIN IMMEDIATE")
    skip()
    other.close()
    skip()
    assert counted() == [2]
    assert caplog.messages == []
    TaskLockEvent.objects.all().delete()
    connections["sqlite"].close()


def test_of_too_many_events_in_a_transaction_the_oldest_are_dropped(monkeypatch, caplog):
    monkeypatch.setattr(recorder, "BOUND", 5)
    with transaction.atomic():
        skip("second")
        for _ in range(5):
            skip()
    assert counted("first", "second") == [5, 0]
    assert "events not recorded: 1." in caplog.text


def test_soft_time_limit_at_the_commit_is_raised_and_loses_nothing(monkeypatch):
    def strike(events):
        raise SoftTimeLimitExceeded

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "write", strike)
        with pytest.raises(SoftTimeLimitExceeded), transaction.atomic():
            skip()
    skip()
    assert counted() == [2]


def test_threads_that_write_each_others_events_count_each_once():
    def body():
        for _ in range(10):
            skip()

    def loop():
        for _ in range(5):
            with transaction.atomic():
                body()
            body()
        connections.close_all()

    threads = [threading.Thread(target=loop) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert recorder.flush(30)
    assert counted() == [6 * 5 * 20]


PROGRAM = """
import os, sys
import django
django.setup()
from django.conf import settings
settings.SINGLETASK_HISTORY = "inline"
settings.SINGLETASK_CACHE = "locmem"
from django.db import connection, transaction
from django_singletask import TaskLock

with transaction.atomic():
    with TaskLock("before the fork"):
        pass
    pid = os.fork()
    if pid == 0:
        connection.run_on_commit.pop()[1]()  # what a commit does
        inherited, connection.connection = connection.connection, None
        connection.in_atomic_block = False
        with TaskLock("in the child"):
            pass
        connection.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
try:
    with transaction.atomic():
        with TaskLock("rolled back"):
            TaskLock("rolled back", on_conflict="skip").acquire()
        1 / 0
except ZeroDivisionError:
    pass
"""


def test_end_of_a_process_writes_what_a_rollback_left_and_a_child_nothing_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = TaskLockEvent.objects.order_by("name", "kind").values_list("name", "kind", "outcome")
    assert list(rows) == [
        ("before the fork", "run", "released"),
        ("in the child", "run", "released"),
        ("rolled back", "conflict", ""),
        ("rolled back", "run", "released"),
    ]
