from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import random
import socket
import threading

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from django.contrib.auth.models import User
from django.db import connection, connections, models, transaction

from django_singletask import LockConflict, SingletonTask, TaskLock
from django_singletask.history import recorder, writing
from django_singletask.models import TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from tests import inside
from tests.admin_pages import TABLE, drop_table
from tests.past_rows import keep_history_in
from tests.servers import free_port

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


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
def logged(caplog):
    caplog.set_level(logging.INFO, "django_singletask")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "django_singletask" and "history" in record.getMessage()
    ]


def event(kind="acquired", **facts):
    since = None if kind in ("conflict", "duplicate") else NOW
    facts = {"name": "n", "key": "k", "at": NOW, "token": "t", "since": since, **facts}
    return LockEvent(kind=kind, **facts)


def rows(**conditions):
    return list(TaskLockEvent.objects.filter(**conditions).order_by("id"))


# Runs


def test_running_task_has_an_open_row():
    with TaskLock("nightly", timeout=30) as lock:
        token = lock.token
        [row] = rows()
    assert (row.kind, row.outcome, row.result) == ("run", "", "")
    assert (row.name, row.key, row.token) == (lock.name, lock.key, token)
    assert (row.host, row.pid, row.timeout) == (socket.gethostname(), os.getpid(), 30)
    assert row.ended_at is None


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
    work.apply((error,), task_id="the-id")
    [row] = rows()
    assert (row.kind, row.outcome, row.result) == ("run", "released", result)
    assert (row.task, row.task_id) == ("work", "the-id")
    assert row.ended_at >= row.at


def test_skipped_run_says_who_was_in_the_way():
    with TaskLock("shared") as lock:
        TaskLock("shared", on_conflict="skip").acquire()
        token = lock.token
    [row] = rows(kind="conflict")
    assert (row.name, row.key, row.blocked_by) == ("shared", lock.key, token)
    assert (row.reason, row.result, row.count) == ("skip", "skipped", 1)
    assert (row.blocked_by_task_id, row.outcome) == ("", "")
    assert (row.host, row.pid, row.token) == (socket.gethostname(), os.getpid(), "")


def test_skipped_task_names_itself_and_the_task_in_the_way(work):
    @work.app.task(base=SingletonTask, name="first", shared=False, lock_on=[])
    def first():
        return first.apply(task_id="second-id").get()

    first.apply(task_id="first-id")
    [row] = rows(kind="conflict")
    assert (row.task, row.task_id, row.blocked_by_task_id) == ("first", "second-id", "first-id")


def test_skips_against_two_holders_are_two_rows():
    for _ in range(2):
        with TaskLock("shared"):
            TaskLock("shared").acquire()
    assert [row.count for row in rows(kind="conflict")] == [1, 1]


def test_calls_with_two_ends_are_two_rows():
    with TaskLock("shared"):
        TaskLock("shared").acquire()
        with pytest.raises(LockConflict):
            TaskLock("shared").__enter__()
    assert {row.result: row.count for row in rows(kind="conflict")} == {"skipped": 1, "failed": 1}


def test_each_call_that_met_an_unknown_holder_has_a_row():
    calls = [event("conflict", token="", reason="skip", task_id=each) for each in "ab"]
    writing.write(calls)
    writing.write(calls)
    assert [row.count for row in rows(kind="conflict")] == [2, 2]  # the second time as well


def test_duplicates_are_counted_like_conflicts():
    for _ in range(2):
        writing.write([event("duplicate", token="", blocked_by="b")])
    assert [(row.kind, row.count) for row in rows()] == [("duplicate", 2)]


# Trouble


def test_cleared_run_says_by_whom_and_keeps_that_when_it_ends():
    with TaskLock("nightly") as lock:
        token = lock.token
        TaskLock("nightly").clear(actor="ada")
        [open_row] = rows()
        assert (open_row.outcome, open_row.result) == ("cleared", "")
    [row] = rows()
    assert (row.outcome, row.actor, row.token) == ("cleared", "ada", token)
    assert (row.result, row.noticed_at) == ("returned", open_row.noticed_at)
    assert row.ended_at > row.noticed_at == row.hold_ended_at


def test_row_of_a_lost_lock_says_how():
    with TaskLock("nightly") as lock:
        token = lock.token
        inside.forget(lock)
    [row] = rows()
    assert (row.outcome, row.result, row.token) == ("lost", "returned", token)
    assert row.reason == "gone from the cache (evicted, flushed or restarted empty)"


def test_lock_lost_to_another_run_names_it():
    with TaskLock("nightly") as lock:
        inside.forget(lock)
        other = TaskLock("nightly")
        other.acquire()
    [lost] = rows(outcome="lost")
    assert lost.reason.startswith("taken by ")
    assert lost.blocked_by == other.token


@pytest.mark.parametrize("kind", ["dead", "expired"])
def test_row_of_a_run_that_cannot_say_its_end_says_who_noticed_and_how(kind):
    writing.write([event(host="web-1", pid=7)])
    writing.write([event(kind, host="web-1", pid=7, reason="no such process")])
    [row] = rows()
    assert (row.outcome, row.noticed_at, row.reason) == (kind, NOW, "no such process")
    assert row.actor == f"{socket.gethostname()}:{os.getpid()}"
    assert (row.host, row.pid, row.ended_at) == ("web-1", 7, None)


def test_run_without_its_lock_is_a_row_that_is_not_open():
    writing.write([event("unguarded", reason="the cache is down")])
    assert [row.troubles for row in rows()] == [["unguarded"]]
    assert not TaskLockEvent.objects.open().exists()


def test_trouble_of_an_unknown_holder_closes_no_row():
    writing.write([event()])
    writing.write([event("cleared", token="", since=None)])
    assert sorted(row.outcome for row in rows()) == ["", "cleared"]


# Any order, and twice

LATER = [NOW + datetime.timedelta(seconds=second) for second in range(9)]
EVENTS = [
    event(fixed=True, waited=2.5),
    event("retaken", at=LATER[1], retaken=1),
    event("retaken", at=LATER[2], retaken=2),
    event("expired", at=LATER[3], reason="its lease ended"),
    event("dead", at=LATER[4], reason="process 7 is gone"),
    event("lost", at=LATER[5], reason="taken by another", blocked_by="b"),
    event("cleared", at=LATER[6], reason="hung", actor="ada"),
    event("released", at=LATER[7], outcome="released", result="raised", longest_renewal_gap=2.5),
]
STRONGEST = ["cleared", "lost", "released", "dead", "expired", "retaken", "acquired"]
FIELDS = [
    "at",
    "happened_at",
    "ended_at",
    "noticed_at",
    "retaken_at",
    "waited",
    "outcome",
    "result",
    "reason",
    "actor",
    "retaken",
]
FIELDS += ["blocked_by", "longest_renewal_gap", "count", "fixed"]


def written(batches):
    """Write batches, each of them twice; return the row of the run."""
    TaskLockEvent.objects.all().delete()
    for batch in batches:
        writing.write(batch)
        writing.write(batch)
    [row] = TaskLockEvent.objects.values(*FIELDS)
    return row


def in_any_order(events, chance):
    """Return the events in another order, in batches of any size."""
    events, batches = chance.sample(events, len(events)), []
    while events:
        size = chance.randint(1, len(events))
        batches.append(events[:size])
        events = events[size:]
    return batches


@pytest.fixture(params=["default", "mariadb", "sqlite"])
def alias(request, settings):
    """Keep the history in each kind of database; give its alias."""
    keep_history_in(settings, request.param)
    return request.param


@pytest.mark.only_all("shown on SQLite", "default", "mariadb")
def test_events_in_any_order_and_twice_make_the_same_row(alias):
    chance = random.Random(alias)
    for _ in range(10):
        events = chance.sample(EVENTS, chance.randint(1, len(EVENTS)))
        kinds = [each.kind for each in events]
        row = written(in_any_order(events, chance))
        for _ in range(5):
            assert written(in_any_order(events, chance)) == row, kinds
        strongest = min(events, key=lambda each: STRONGEST.index(each.kind))
        ends = strongest.kind not in ("acquired", "retaken")
        assert row["outcome"] == (strongest.kind if ends else ""), kinds
        assert row["reason"] == strongest.reason
        assert (row["actor"] == "ada") == ("cleared" in kinds)
        assert row["retaken"] == max(each.retaken for each in events)
        assert row["happened_at"] == max(each.at for each in events)
        retaken_at = [each.at for each in events if each.kind == "retaken"]
        assert row["retaken_at"] == max(retaken_at, default=None)
        assert row["waited"] == max(each.waited for each in events)
        assert (row["ended_at"], row["result"]) == (
            (LATER[7], "raised") if "released" in kinds else (None, "")
        )
        assert (row["at"], row["count"]) == (NOW, 1)


def test_the_end_of_a_lost_run_that_comes_first_leaves_room_for_the_reason(alias):
    ended = event("released", at=LATER[7], outcome="lost", result="returned")
    lost = event("lost", at=LATER[5], reason="taken by another", blocked_by="b")
    assert written([[ended], [lost]]) == written([[lost], [ended]])
    assert TaskLockEvent.objects.get().reason == "taken by another"


def test_of_two_ends_the_earlier_one_is_that_of_the_run(alias):
    """A sweep has found the entry that a run keeps, whose own end is written later."""
    facts = {"outcome": "released", "result": "returned"}
    by_run = event("released", at=LATER[1], reason="kept for 5 s", **facts)
    by_sweep = event("released", at=LATER[8], pid=0, **facts)
    assert written([[by_run], [by_sweep]]) == written([[by_sweep], [by_run]])
    row = TaskLockEvent.objects.get()
    assert (row.ended_at, row.reason) == (LATER[1], "kept for 5 s")


def test_a_run_whose_kept_lock_is_cleared_stays_completed():
    writing.write(
        [event(pid=7, timeout=60), event("cleared", at=LATER[5], actor="ada", timeout=600)]
    )
    facts = {"outcome": "released", "result": "returned", "pid": 7, "timeout": 60}
    writing.write([event("released", at=LATER[1], **facts)])
    [row] = rows()
    assert (row.outcome, row.pid, row.timeout) == ("cleared", 7, 60)
    assert row.is_completed
    assert row.hold_ended_at == LATER[1]


def test_control_an_outcome_that_any_event_overwrites_depends_on_the_order(alias, monkeypatch):
    monkeypatch.setitem(writing.RULES, "outcome", "excluded.{0}")
    assert written([[EVENTS[4]], [EVENTS[7]]]) != written([[EVENTS[7]], [EVENTS[4]]])


def test_calls_in_any_order_are_counted_in_one_row(alias):
    calls = [dataclasses.replace(call, waited=0.5) for call in conflicts(6)]
    for batch in in_any_order(calls, random.Random(alias)):
        writing.write(batch)
    [row] = TaskLockEvent.objects.all()
    assert (row.count, row.at, row.last_at) == (6, calls[0].at, calls[5].at)
    assert (row.happened_at, row.waited) == (row.last_at, 3)
    writing.write(calls[:2])  # its commit was not lost: the documented price
    assert TaskLockEvent.objects.get().count == 8


# Less of it


def test_history_off_writes_nothing(settings, work):
    settings.SINGLETASK_HISTORY = "off"
    work.apply()
    TaskLock("nightly").acquire()
    TaskLock("nightly").clear()
    assert rows() == []


def test_quiet_task_leaves_no_row_of_its_runs_and_skips(work):
    work.lock_history = False
    work.apply()
    with work.lock():
        work.apply()
    assert rows() == []


def test_trouble_of_a_quiet_task_is_recorded(work):
    work.lock_history = False
    with work.lock() as lock:
        inside.forget(lock)
    [row] = rows()
    assert (row.outcome, row.result) == ("lost", "returned")


def test_row_of_a_quiet_run_that_was_retaken_does_not_stay_open():
    recorder.receive(event=event("acquired", quiet=True))
    recorder.receive(event=event("retaken", quiet=True, retaken=1))
    recorder.receive(event=event("released", quiet=True, retaken=1, outcome="released"))
    assert [(row.retaken, row.outcome) for row in rows()] == [(1, "released")]


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


def test_missing_table_breaks_neither_task_nor_transaction(work):
    drop_table()
    with transaction.atomic():
        assert work.apply().state == "SUCCESS"
        User.objects.create(username="made after the failure")
    assert User.objects.filter(username="made after the failure").exists()


def test_missing_table_is_one_log_line(work, logged):
    drop_table()
    for _ in range(3):
        work.apply()
    [line] = logged()
    assert f'relation "{TABLE}" does not exist' in line
    assert "Run 'manage.py migrate'." in line
    assert "\n" not in line


def test_table_of_an_earlier_version_is_met_by_the_page_with_both_steps(alias, monkeypatch, logged):
    """The columns are those of the first development version."""
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE TABLE singletask_old (id integer, kind varchar(10), token text)")
        try:
            monkeypatch.setattr(TaskLockEvent._meta, "db_table", "singletask_old")
            recorder.receive(event=event())
        finally:
            monkeypatch.undo()
            cursor.execute("DROP TABLE singletask_old")
    assert "'Deploying' in the documentation says what to do first" in logged()[0]


def test_end_of_an_outage_is_one_log_line(work, logged):
    drop_table()
    work.apply()
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE}_gone RENAME TO {TABLE}")
    work.apply()
    work.apply()
    assert logged()[1:] == ["The lock history can be written again; events not recorded: 2."]


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


def test_texts_longer_than_the_columns_are_cut(alias):
    texts = [f.name for f in TaskLockEvent._meta.fields if isinstance(f, models.CharField)]
    texts = [name for name in texts if name not in ("kind", "ref")]
    facts = {**dict.fromkeys(texts, "\N{SNOWMAN}" * 300), "outcome": "released", "token": "t" * 99}
    writing.write([event("released", **facts)])
    [row] = TaskLockEvent.objects.all()
    assert (len(row.name), len(row.reason), len(row.host), len(row.token)) == (255, 255, 255, 64)


def test_characters_that_no_text_column_holds_are_escaped(alias):
    facts = {"outcome": "released", "task_id": "a\x00b\ud800c", "reason": "\x00"}
    writing.write([event("released", **facts)])
    [row] = TaskLockEvent.objects.all()
    assert (row.task_id, row.reason) == ("a\\x00b\\ud800c", "\\x00")


def test_cut_tokens_are_found_again():
    for _ in range(2):
        writing.write([event("conflict", token="", blocked_by="b" * 99, reason="r" * 999)])
    assert [row.count for row in rows()] == [2]


def test_local_times_are_stored_where_the_project_has_no_time_zones(alias, settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Tokyo"
    writing.write([event()])
    writing.write([event("released", outcome="released")])
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


def conflicts(count):
    """Yield the events of so many calls that meet one holder."""
    for second in range(count):
        at = NOW + datetime.timedelta(seconds=second)
        yield event("conflict", reason="skip", result="skipped", blocked_by="b", token="", at=at)


def test_a_batch_says_what_single_events_say(alias):
    raised, dead, cleared = (event(token=token) for token in ("raised", "dead", "cleared"))
    ending = {"outcome": "released", "result": "raised", "longest_renewal_gap": 2.5}
    events = [
        *runs(3),
        raised,
        dead,
        cleared,
        *conflicts(2),
        dataclasses.replace(dead, kind="dead", reason="process 1 is gone"),
        *conflicts(2),
        dataclasses.replace(cleared, kind="cleared", actor="ada"),
        dataclasses.replace(cleared, kind="released", outcome="lost", result="returned"),
        dataclasses.replace(raised, kind="released", **ending),
        event("conflict", reason="skip", result="skipped", token=""),
    ]

    def contents():
        fields = ("kind", "outcome", "result", "reason", "count", "ref", "longest_renewal_gap")
        return sorted(map(str, TaskLockEvent.objects.values_list(*fields)))

    for each in events:
        writing.write([each])
    single = contents()
    TaskLockEvent.objects.all().delete()
    writing.write(events)
    assert contents() == single


def test_many_runs_end_in_one_statement(django_assert_num_queries):
    events = list(runs(25))
    writing.write(events[::2])
    with django_assert_num_queries(2 + 1):  # the savepoint, and the ends
        writing.write(events[1::2])
    assert {(row.outcome, row.result) for row in rows()} == {("released", "returned")}


def test_run_that_another_process_has_written_of_is_met_in_its_row():
    events = list(runs(3))
    writing.write([event("dead", token="run 1", reason="no such process")])
    writing.write(events)
    assert [(row.outcome, row.result) for row in rows()] == [("released", "returned")] * 3


def test_a_row_in_a_transaction_that_has_not_ended_is_not_waited_for(work):
    """Another thread releases a lock that was taken in this transaction."""
    lock, taken = TaskLock("nightly"), []
    lock.acquire()
    token = lock.token

    def release():
        lock.release()
        with TaskLock("nightly") as other:
            taken.append(other.token)
        connection.close()

    thread = threading.Thread(target=release)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [row.outcome for row in rows(ref=token)] == [""]
    TaskLockEvent.objects.filter(ref=taken[0]).delete()
