from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import socket

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from django.contrib.auth.models import User
from django.db import connection, connections, models, transaction

from django_singletask import LockConflict, SingletonTask, TaskLock
from django_singletask.history import recorder
from django_singletask.history.writing import write
from django_singletask.models import TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores import get_store
from tests.past_rows import keep_history_in
from tests.plans import plans
from tests.servers import free_port

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
TABLE = TaskLockEvent._meta.db_table


@pytest.fixture(autouse=True)
def locks_in_memory(settings, empty_cache):
    settings.SINGLETASK_CACHE = "locmem"
    empty_cache("locmem")


@pytest.fixture(autouse=True)
def no_outage_outlives_its_test(monkeypatch):
    monkeypatch.setattr(recorder, "writer", recorder.Writer())


@pytest.fixture
def work():
    """Return a task that raises its argument, or returns if that is None."""
    with Celery("recorded", set_as_current=False, broker="memory://") as app:

        @app.task(base=SingletonTask, name="work", shared=False, lock_on=[])
        def work(error=None):
            if error is not None:
                raise error

        yield work


@pytest.fixture
def no_table():
    """Take the table away until the transaction of the test is rolled back."""
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO {TABLE}_gone")


@pytest.fixture
def logged(caplog):
    caplog.set_level(logging.INFO, "django_singletask")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "django_singletask" and "history" in record.getMessage()
    ]


def lose(lock):
    """Let the cache forget the lock, as by an eviction."""
    store = get_store("locmem")
    store.release(lock.key, store.read(lock.key).value)


def event(kind="acquired", **facts):
    return LockEvent(**{"kind": kind, "name": "n", "key": "k", "at": NOW, "token": "t", **facts})


def rows(**conditions):
    return list(TaskLockEvent.objects.filter(**conditions).order_by("id"))


# Runs


def test_running_task_has_an_open_row():
    with TaskLock("nightly", timeout=30) as lock:
        [row] = rows()
    assert (row.kind, row.outcome, row.result) == ("acquired", "", "")
    assert (row.name, row.key, row.token) == (lock.name, lock.key, row.token)
    assert (row.host, row.pid, row.timeout) == (socket.gethostname(), os.getpid(), 30)
    assert row.ended_at is None


def test_row_of_a_task_names_task_and_id(work):
    work.apply(task_id="the-id")
    [row] = rows()
    assert (row.task, row.task_id) == ("work", "the-id")


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, "returned"),
        (ValueError(), "raised"),
        (Retry(), "retried"),
        (Ignore(), "ignored"),
        (Reject(), "ignored"),
    ],
)
def test_row_is_closed_in_place(work, error, result):
    work.apply((error,))
    [row] = rows()
    assert (row.kind, row.outcome, row.result) == ("acquired", "released", result)
    assert row.ended_at >= row.at


def test_each_run_has_a_row_of_its_own(work):
    work.apply()
    work.apply()
    assert [row.outcome for row in rows()] == ["released", "released"]


def test_skipped_run_says_who_was_in_the_way():
    with TaskLock("shared") as lock:
        TaskLock("shared", on_conflict="skip").acquire()
        token = lock.token
    [row] = rows(kind="skipped")
    assert (row.name, row.key, row.blocked_by) == ("shared", lock.key, token)
    assert (row.reason, row.count, row.blocked_by_task_id) == ("skip", 1, "")
    assert (row.host, row.pid, row.token) == (socket.gethostname(), os.getpid(), "")


def test_skipped_task_names_itself_and_the_task_in_the_way(work):
    @work.app.task(base=SingletonTask, name="first", shared=False, lock_on=[])
    def first():
        return first.apply(task_id="second-id").get()

    first.apply(task_id="first-id")
    [row] = rows(kind="skipped")
    assert (row.task, row.task_id, row.blocked_by_task_id) == ("first", "second-id", "first-id")


def test_repeated_skips_are_counted_in_one_row():
    with TaskLock("shared"):
        for _ in range(3):
            TaskLock("shared").acquire()
    [row] = rows(kind="skipped")
    assert row.count == 3
    assert row.last_at > row.at


def test_skips_against_two_holders_are_two_rows():
    for _ in range(2):
        with TaskLock("shared"):
            TaskLock("shared").acquire()
    assert [row.count for row in rows(kind="skipped")] == [1, 1]


def test_skips_for_two_reasons_are_two_rows():
    with TaskLock("shared"):
        TaskLock("shared").acquire()
        with pytest.raises(LockConflict):
            TaskLock("shared").__enter__()
    assert {row.reason: row.count for row in rows(kind="skipped")} == {"skip": 1, "raise": 1}


def test_skip_against_an_unknown_holder_has_a_row():
    write([event("skipped", token="", reason="skip")])
    write([event("skipped", token="", reason="skip")])
    assert [row.count for row in rows(kind="skipped")] == [1, 1]


def test_duplicates_are_counted_like_skips():
    for _ in range(2):
        write([event("duplicate", token="", blocked_by="b")])
    assert [(row.kind, row.count) for row in rows()] == [("duplicate", 2)]


# Trouble


def test_cleared_lock_has_a_row_with_the_actor():
    lock = TaskLock("nightly")
    lock.acquire()
    TaskLock("nightly").clear(actor="ada")
    [acquired, cleared] = rows()
    assert (acquired.outcome, acquired.result) == ("cleared", "")
    assert (cleared.kind, cleared.actor, cleared.token) == ("cleared", "ada", lock.token)
    assert acquired.ended_at == cleared.at


def test_cleared_run_stays_cleared_when_it_ends():
    with TaskLock("nightly"):
        TaskLock("nightly").clear(actor="ada")
    [acquired, cleared, lost] = rows()
    assert (acquired.outcome, acquired.result) == ("cleared", "returned")
    assert acquired.ended_at == cleared.at
    assert (acquired.kind, cleared.kind, lost.kind) == ("acquired", "cleared", "lost")


def test_lost_lock_has_a_row_that_says_how():
    with TaskLock("nightly") as lock:
        lose(lock)
    [acquired, lost] = rows()
    assert (acquired.outcome, acquired.result) == ("lost", "returned")
    assert (lost.kind, lost.reason, lost.token) == (
        "lost",
        "gone from the cache (evicted, flushed or restarted empty)",
        acquired.token,
    )


def test_lock_lost_to_another_run_names_it():
    with TaskLock("nightly") as lock:
        lose(lock)
        other = TaskLock("nightly")
        other.acquire()
    [lost] = rows(kind="lost")
    assert lost.reason.startswith("taken by ")
    assert lost.blocked_by == other.token


@pytest.mark.parametrize("outcome", ["dead", "expired"])
def test_expired_lease_closes_the_row_and_says_how_it_is_known(outcome):
    write([event()])
    write([event("expired", outcome=outcome, reason="no such process")])
    [acquired, expired] = rows()
    assert (acquired.outcome, acquired.ended_at) == (outcome, NOW)
    assert (expired.kind, expired.outcome, expired.reason) == ("expired", "", "no such process")


def test_run_has_the_last_word_about_its_row():
    write([event()])
    write([event("expired")])
    write([event("released", outcome="released", result="returned")])
    assert [row.outcome for row in rows(kind="acquired")] == ["released"]


@pytest.mark.parametrize("task_id", ["", "i"])
@pytest.mark.parametrize("run_is_first", [True, False])
def test_run_has_the_last_word_against_a_sweep_that_found_its_kept_entry(task_id, run_is_first):
    ending = {"task_id": task_id, "outcome": "released", "result": "returned"}
    by_run = event("released", reason="kept for 5 s", **ending)
    by_sweep = event("released", at=NOW + datetime.timedelta(minutes=1), **ending)
    write([event(task_id=task_id)])
    for each in [by_run, by_sweep] if run_is_first else [by_sweep, by_run]:
        write([each])
    assert [(row.ended_at, row.reason) for row in rows()] == [(NOW, "kept for 5 s")]


def test_trouble_of_an_unknown_holder_closes_no_row():
    write([event(token="")])
    write([event("cleared", token="")])
    assert [row.outcome for row in rows(kind="acquired")] == [""]


def test_longest_renewal_gap_is_kept():
    write([event()])
    write([event("released", outcome="released", longest_renewal_gap=7.5)])
    assert rows()[0].longest_renewal_gap == 7.5


# Less of it


def test_history_off_writes_nothing(settings, work):
    settings.SINGLETASK_HISTORY = "off"
    work.apply()
    TaskLock("nightly").acquire()
    TaskLock("nightly").clear()
    assert rows() == []


def test_quiet_task_leaves_no_row(work):
    work.lock_history = False
    work.apply()
    assert rows() == []


def test_quiet_task_leaves_no_row_of_its_skips(work):
    work.lock_history = False
    with work.lock():
        work.apply()
    assert rows() == []


def test_trouble_of_a_quiet_task_is_recorded(work):
    work.lock_history = False
    with work.lock() as lock:
        lose(lock)
    assert [row.kind for row in rows()] == ["lost"]


def test_hidden_arguments_are_in_no_row(settings, work):
    settings.SINGLETASK_RECORD_ARGUMENTS = False

    @work.app.task(base=SingletonTask, name="login", shared=False)
    def login(password):
        login.apply((password,))

    login.apply(("secret",))
    TaskLock("x").acquire()
    assert len(rows()) == 3
    assert "secret" not in str(list(TaskLockEvent.objects.values()))


# Failures


def test_missing_table_breaks_neither_task_nor_transaction(work, no_table):
    with transaction.atomic():
        assert work.apply().state == "SUCCESS"
        User.objects.create(username="made after the failure")
    assert User.objects.filter(username="made after the failure").exists()


def test_missing_table_is_one_log_line(work, no_table, logged):
    for _ in range(3):
        work.apply()
    [line] = logged()
    assert f'relation "{TABLE}" does not exist' in line
    assert "Run 'manage.py migrate'." in line
    assert "\n" not in line


def test_end_of_an_outage_is_one_log_line(work, logged):
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO {TABLE}_gone")
        work.apply()
        cursor.execute(f"ALTER TABLE {TABLE}_gone RENAME TO {TABLE}")
    work.apply()
    work.apply()
    assert logged()[1:] == ["The lock history can be written again; 2 events were not recorded."]


@pytest.mark.django_db(databases=["default"], transaction=True)
def test_database_that_is_down_breaks_no_task(work, logged, monkeypatch):
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "PORT", free_port())
        assert work.apply().state == "SUCCESS"
        assert not work.lock().locked()
        connection.close()
    assert len(logged()) == 1
    assert "OperationalError" in logged()[0]
    work.apply()
    assert [row.outcome for row in rows()] == ["released"]


def test_failed_row_leaves_the_rows_before_it():
    recorder.receive(event=event())
    recorder.receive(event=event(pid="no number"))
    assert len(rows()) == 1


def test_row_is_part_of_the_transaction_of_the_caller(work):
    with transaction.atomic():
        work.apply()
        transaction.set_rollback(True)
    assert rows() == []


def test_soft_time_limit_is_not_taken_for_a_failure(monkeypatch, logged):
    def interrupt(events):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(recorder, "write", interrupt)
    with pytest.raises(SoftTimeLimitExceeded):
        recorder.receive(event=event())
    assert logged() == []


# What others wrote


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_texts_longer_than_the_columns_are_cut(settings, alias):
    keep_history_in(settings, alias)
    texts = [f.name for f in TaskLockEvent._meta.fields if isinstance(f, models.CharField)]
    texts.remove("kind")
    write([event(**dict.fromkeys(texts, "\N{SNOWMAN}" * 300))])
    [row] = TaskLockEvent.objects.all()
    assert (len(row.name), len(row.reason), len(row.host), len(row.token)) == (255, 255, 255, 32)


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_characters_that_no_text_column_holds_are_escaped(settings, alias):
    keep_history_in(settings, alias)
    write([event(task_id="a\x00b\ud800c", reason="\x00")])
    [row] = TaskLockEvent.objects.all()
    assert (row.task_id, row.reason) == ("a\\x00b\\ud800c", "\\x00")


def test_cut_tokens_are_found_again():
    for _ in range(2):
        write([event("skipped", token="", blocked_by="b" * 99, reason="r" * 999)])
    assert [row.count for row in rows()] == [2]


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_local_times_are_stored_where_the_project_has_no_time_zones(settings, alias):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Tokyo"
    keep_history_in(settings, alias)
    write([event()])
    write([event("released", outcome="released")])
    [row] = TaskLockEvent.objects.all()
    assert row.at == row.ended_at == datetime.datetime(2026, 1, 2, 12, 4, 5)


def test_history_is_a_receiver_that_can_be_taken_off(work):
    lock_event.disconnect(sender=LockEvent, dispatch_uid="django_singletask.history")
    try:
        work.apply()
    finally:
        recorder.connect()
    assert rows() == []


# Several events at once


def runs(count):
    """Yield the events of so many runs that end at once."""
    for number in range(count):
        begun = event(token=f"run {number}")
        yield begun
        yield dataclasses.replace(begun, kind="released", outcome="released", result="returned")


def skips(count):
    """Yield the events of so many calls that meet one holder."""
    for second in range(count):
        at = NOW + datetime.timedelta(seconds=second)
        yield event("skipped", reason="skip", blocked_by="b", token="", at=at)


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_no_statement_of_a_write_reads_the_table(settings, alias):
    keep_history_in(settings, alias)
    TaskLockEvent.objects.bulk_create(
        TaskLockEvent(kind="acquired", outcome="released", name="n", key="k", at=NOW)
        for _ in range(5000)
    )
    run, dead = event(token="run"), event(token="dead")
    write([run, dead, *skips(1)])
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ANALYZE {'TABLE ' if alias == 'mariadb' else ''}{TABLE}")
    events = [
        dataclasses.replace(run, kind="released", outcome="released"),
        *skips(2),
        dataclasses.replace(dead, kind="expired", outcome="dead"),
    ]
    statements = plans(alias, lambda: write(events))
    TaskLockEvent.objects.all().delete()
    assert len(statements) >= 4
    indexes = (
        "singletask_token",
        "singletask_blocked_by",
        "singletask_counted",
        "PRIMARY",
        "pkey",
        "(id = ",
    )
    for statement in statements:
        assert any(index in statement.text for index in indexes), statement


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_a_batch_says_what_single_events_say(settings, alias):
    keep_history_in(settings, alias)
    raised, dead, cleared = (event(token=token) for token in ("raised", "dead", "cleared"))
    ending = {"outcome": "released", "result": "raised", "longest_renewal_gap": 2.5}
    events = [
        *runs(3),
        raised,
        dead,
        cleared,
        *skips(2),
        dataclasses.replace(dead, kind="expired", outcome="dead", reason="process 1 is gone"),
        *skips(2),
        dataclasses.replace(cleared, kind="cleared", actor="ada"),
        dataclasses.replace(cleared, kind="released", outcome="lost", result="returned"),
        dataclasses.replace(raised, kind="released", **ending),
        event("skipped", reason="skip", token=""),
        event("skipped", reason="skip", token=""),
    ]

    def contents():
        fields = ("kind", "outcome", "result", "reason", "count", "token", "longest_renewal_gap")
        return sorted(map(str, TaskLockEvent.objects.values_list(*fields)))

    for each in events:
        write([each])
    single = contents()
    TaskLockEvent.objects.all().delete()
    write(events)
    assert contents() == single
    TaskLockEvent.objects.all().delete()


def test_many_runs_end_in_one_statement(django_assert_num_queries):
    events = list(runs(25))
    write(events[::2])
    with django_assert_num_queries(2 + 1):  # the savepoint, and the ends
        write(events[1::2])
    assert {(row.outcome, row.result) for row in rows()} == {("released", "returned")}


def test_run_that_ended_otherwise_keeps_no_others_open():
    events = list(runs(3))
    write(events[::2])
    write([event("expired", token="run 1", reason="no such process")])
    write(events[1::2])
    assert [(row.kind, row.outcome) for row in rows()] == [("acquired", "released")] * 3


# A second attempt, since the reply to the first was lost


def test_second_attempt_writes_no_run_twice():
    events = list(runs(3))
    write(events[:5])
    write(events, again=True)
    assert [row.outcome for row in rows()] == ["released"] * 3


def test_second_attempt_counts_nothing_twice():
    events = [
        *skips(3),
        event("skipped", reason="skip", token=""),
        event("cleared", actor="ada"),
    ]
    write(events)
    write(events, again=True)
    assert sorted((row.kind, row.count) for row in rows()) == [
        ("cleared", 1),
        ("skipped", 1),
        ("skipped", 3),
    ]
