"""``on_duplicate="replace"``: of equal calls in the queue, the latest arguments win."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from celery.exceptions import Retry
from django.db import connections
from django.db.models import F

from django_singletask.exceptions import LockConflict, LockUnavailable
from django_singletask.locks.keys import LATEST
from django_singletask.locks.lease import Postponed
from django_singletask.models import TaskLockEvent
from django_singletask.operators.starving import starvation
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.base import Entry
from django_singletask.task import latest, unique
from django_singletask.task.header import HEADER, READS
from django_singletask.task.unique import discard
from tests.deliveries import AWAITED, collect_sent, held_by, receive, wait_for_debts
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

task = tasks.unique
REPLACE = {"on_duplicate": "replace"}


@pytest.fixture
def sent(monkeypatch):
    return collect_sent(task.app, monkeypatch, SimpleNamespace)


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """Collect the values with which the body ran."""
    values = []
    monkeypatch.setattr(
        tasks, "body", lambda key, seconds, task_id, value: values.append(value) or "ran"
    )
    return values


def send(value=0, lock_options=None, **options):
    lock_options = {**REPLACE, **(lock_options or {})}
    return task.apply_async(("a", 0, value), lock_options=lock_options, **options)


def deliver(message, **request):
    header = message.headers[HEADER]
    return receive(task, *message.args, task_id=message.task_id, header=header, **request)


def test_of_three_calls_the_last_runs(cache_alias, sent, ran):
    for value in (1, 2, 3):
        call = send(value)
        assert task.queued("a").id == call.id
    assert [deliver(message) for message in sent] == ["skipped", "skipped", "ran"]
    assert ran == [3]
    assert task.queued("a") is None
    send(4)
    assert deliver(sent[-1]) == "ran"


def test_the_older_call_gives_way_although_the_newer_one_has_run(sent, ran):
    send(1, countdown=60)
    send(2)
    assert deliver(sent[1]) == "ran"
    assert deliver(sent[0]) == "skipped"
    assert ran == [2]


def test_calls_that_follow_each_other_all_run(sent, ran):
    """Negative control."""
    for value in (1, 2):
        send(value)
        deliver(sent[-1])
    assert ran == [1, 2]


@pytest.mark.parametrize("options", AWAITED, ids=lambda options: next(iter(options)))
def test_a_call_for_which_others_wait_runs_all_the_same(sent, ran, options):
    send(1, **options)
    send(2)
    assert [deliver(message) for message in sent] == ["ran", "ran"]


def test_a_call_for_which_others_wait_replaces_the_one_before(sent, ran):
    send(1)
    send(2, task_id="mine")
    assert [deliver(message) for message in sent] == ["skipped", "ran"]


def test_while_a_call_waits_for_the_lock_it_can_be_replaced(sent, ran):
    send(1, {"on_conflict": "requeue"})
    with held_by("another", task=task), pytest.raises(Postponed):
        deliver(sent[0])
    again = sent[-1]
    send(2)
    assert deliver(again) == "skipped"
    assert deliver(sent[-1]) == "ran"


def test_a_call_that_waited_in_its_slot_looks_again_when_it_has_the_lock(sent, ran):
    """Without that the older arguments would be the last:

    older:  looks   waits for the lock ............................ runs
    newer:                     published, noted   runs
    """
    send(1, {"on_conflict": "wait", "lock_wait": 20})
    lock = task.lock("a")
    assert lock.acquire()

    def newer():
        send(2)
        lock.release()
        connections.close_all()
        close_stores()

    timer = threading.Timer(0.2, newer)
    timer.start()
    assert deliver(sent[0]) == "skipped"
    timer.join()
    assert not ran
    assert deliver(sent[1]) == "ran"


def test_a_run_until_it_is_finished_is_not_replaced(sent, monkeypatch):
    finish, until_finish = tasks.unique, {"unique_until": "finish"}
    values = []

    def body(key, seconds, task_id, value):
        values.append(value)
        if value == 1:
            others = threading.Thread(target=send_two)
            others.start()
            others.join()
            assert finish.queued("a").id == sent[0].task_id

    def send_two():
        """As another process does."""
        send(2, until_finish)
        send(3, until_finish)
        connections.close_all()
        close_stores()

    monkeypatch.setattr(tasks, "body", body)
    send(1, until_finish)
    deliver(sent[0])
    assert deliver(sent[1]) == "skipped"
    deliver(sent[2])
    assert values == [1, 3]


def test_of_the_calls_that_a_body_sends_the_last_runs_with_the_entry_of_the_run(sent, monkeypatch):
    until_finish = {"unique_until": "finish"}
    values = []

    def body(key, seconds, task_id, value):
        values.append(value)
        if value == 1:
            send(2, until_finish)
            send(3, until_finish)

    monkeypatch.setattr(tasks, "body", body)
    send(1, until_finish)
    deliver(sent[0])
    assert task.queued("a").id == sent[2].task_id
    assert deliver(sent[1]) == "skipped"
    deliver(sent[2])
    assert values == [1, 3]
    assert task.queued("a") is None


def test_a_retry_of_a_call_that_has_begun_is_not_replaced(sent, monkeypatch):
    def body(*args, **facts):
        raise task.retry(countdown=1)

    monkeypatch.setattr(tasks, "body", body)
    send(1)
    with pytest.raises(Retry):
        deliver(sent[0])
    send(2)
    monkeypatch.setattr(tasks, "body", lambda *args, **facts: "ran")
    assert deliver(sent[2]) == deliver(sent[1], retries=1) == "ran"


@pytest.mark.parametrize("way", ["autoretry_for", "on_skip"])
def test_a_retry_of_a_call_that_has_not_begun_is_replaced(sent, ran, monkeypatch, way):
    """
    older:  conflict -> retry() .................. again: must not run, its arguments are old
    newer:                        published, runs
    """
    if way == "on_skip":

        def try_again(conflict, *args):
            raise task.retry(countdown=1)

        monkeypatch.setattr(task, "on_skip", try_again)
    else:
        monkeypatch.setattr(task, "autoretry_for", (LockConflict,), raising=False)
    send(1, {"on_conflict": "skip" if way == "on_skip" else "raise"})
    with held_by("another", task=task), pytest.raises(Retry):
        deliver(sent[0])
    send(2)
    assert deliver(sent[2]) == "ran"
    assert deliver(sent[1], retries=1) == "skipped"
    assert ran == [2]


def test_a_retry_for_another_lock_leaves_its_place(sent, monkeypatch):
    def try_again(conflict, *args):
        raise task.retry(args=("b", 0, 1), countdown=1)

    monkeypatch.setattr(task, "on_skip", try_again)
    send(1)
    with held_by("another", task=task), pytest.raises(Retry):
        deliver(sent[0])
    assert not {"ticket", "never_gives_way"} & sent[1].headers[HEADER].keys()


class TestRerunsAfterAConflict:
    """With ``on_conflict="rerun"`` a call that gives way to no other must not displace the newest.

    awaited or begun:  conflict: must take no number ........... runs
    newest:                        conflict ....................... the highest -> runs
    """

    RERUN = {"on_conflict": "rerun"}

    def conflict(self, sent, number, **request):
        with held_by("another", task=task), pytest.raises(Postponed):
            deliver(sent[number], **request)

    def test_a_call_for_which_others_wait(self, sent, ran):
        send(1, self.RERUN, link=tasks.plain.si("a"))
        send(2, self.RERUN)
        self.conflict(sent, 0)
        self.conflict(sent, 1)
        assert [deliver(message) for message in sent[2:]] == ["ran", "ran"]
        assert ran == [1, 2]

    def test_a_retry_of_a_call_that_has_begun(self, sent, monkeypatch, ran):
        def body(*args, **facts):
            raise task.retry(countdown=1)

        with monkeypatch.context() as patch:
            patch.setattr(tasks, "body", body)
            send(1, self.RERUN)
            with pytest.raises(Retry):
                deliver(sent[0])
        send(2, self.RERUN)
        self.conflict(sent, 1, retries=1)
        self.conflict(sent, 2)
        assert [deliver(sent[3], retries=1), deliver(sent[4])] == ["ran", "ran"]
        assert ran == [1, 2]


def test_a_redelivery_beside_its_first_run_leaves_the_result_to_it(sent, monkeypatch):
    """
    first run:   takes the lock ................................. returns its result
    newer call:                   published, noted
    redelivery:                                     must not answer with skip_result
    """

    postponed = []

    def redeliver():
        with pytest.raises(Postponed):
            deliver(sent[0], delivery_info={"redelivered": True})
        postponed.append(True)
        connections.close_all()
        close_stores()

    def body(key, seconds, task_id, value):
        send(2)
        redelivery = threading.Thread(target=redeliver)
        redelivery.start()
        redelivery.join()
        return "ran"

    monkeypatch.setattr(tasks, "body", body)
    send(1)
    assert deliver(sent[0]) == "ran"
    assert postponed


@pytest.mark.parametrize(
    "facts", [{"redelivered": READS, "marked": True}, {"redelivered": READS}], ids=str
)
def test_a_redelivery_gives_way_once_it_has_the_lock(sent, ran, facts):
    """Its first run was killed."""
    send(1)
    send(2)
    sent[0].headers[HEADER] |= facts
    assert deliver(sent[0]) == "skipped"
    assert not task.lock("a").locked()
    assert not ran


class TestNoWorkIsLost:
    def test_killed_between_the_message_and_its_note(self, sent, ran, monkeypatch):
        """
        A: takes 1, publishes, notes 1              runs
        B:                  takes 2, publishes, killed        notes 2, runs
        """
        send(1)
        with monkeypatch.context() as patch:
            patch.setattr(unique, "gives_way", lambda *args: False)
            send(2)
        assert [deliver(message) for message in sent] == ["ran", "ran"]
        assert ran == [1, 2]

    def test_not_published(self, sent, ran, monkeypatch):
        send(1)

        def fail(*args, **options):
            raise OSError("the broker is away")

        with monkeypatch.context() as patch:
            patch.setattr(task.app, "send_task", fail)
            with pytest.raises(OSError, match="away"):
                send(2)
        assert deliver(sent[0]) == "ran"
        assert task.queued("a") is None

    def test_control_noted_before_it_is_published_it_would_be(self, sent, ran, monkeypatch):
        """
        A: takes 1, publishes, notes 1                       2 is noted -> ends
        B:                            takes 2, notes 2, killed          nobody is left
        """
        send(1)

        def note_and_fail(name, *args, headers, **options):
            ticket = headers[HEADER]["ticket"]
            latest.gives_way(task.lock("a")._address, task.name, ticket)
            raise OSError("the broker is away")

        with monkeypatch.context() as patch:
            patch.setattr(task.app, "send_task", note_and_fail)
            with pytest.raises(OSError, match="away"):
                send(2)
        assert deliver(sent[0]) == "skipped"
        assert not ran

    def test_a_cache_that_is_down_after_the_message_costs_no_call(self, sent, ran, monkeypatch):
        send_task = task.app.send_task

        def send_and_go_down(*args, **options):
            patch.setattr(get_store("redis"), "read", fail)
            return send_task(*args, **options)

        def fail(*args):
            raise LockUnavailable("down")

        with monkeypatch.context() as patch:
            patch.setattr(task.app, "send_task", send_and_go_down)
            call = send(1)
        assert call.id == sent[0].task_id
        assert deliver(sent[0]) == "ran"

    def test_no_number_is_left(self, sent, ran, monkeypatch):
        """Others were faster each time."""
        with monkeypatch.context() as patch:
            patch.setattr(get_store("redis"), "replace", lambda *args: False)
            entry = Entry(b"another", 60)
            patch.setattr(get_store("redis"), "add", lambda *args: entry)
            send(1)
        send(2)
        assert [deliver(message) for message in sent] == ["ran", "ran"]

    def test_of_two_producers_at_the_same_time_one_message_runs(self, sent, ran, cache_alias):
        barrier = threading.Barrier(4)

        def one(value):
            barrier.wait()
            send(value)
            connections.close_all()
            close_stores()

        threads = [threading.Thread(target=one, args=(value,)) for value in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(deliver(message) for message in sent) == ["ran"] + ["skipped"] * 3
        numbers = {message.args[2]: message.headers[HEADER]["ticket"][1] for message in sent}
        assert numbers[ran[0]] == 4


def test_a_replaced_call_that_is_revoked_leaves_the_entry_of_the_newer_one(sent):
    first, second = send(1), send(2)
    discard(sent[0].headers, first.id, task.name)
    wait_for_debts()
    assert task.queued("a").id == second.id


def test_the_history_says_which_calls_came_to_nothing(sent):
    calls = [send(value) for value in range(3)]
    for message in sent[:2]:
        deliver(message)
    rows = TaskLockEvent.objects.filter(kind="conflict")
    rows.update(at=F("at") - timedelta(hours=2))
    assert {(row.reason, row.task_id) for row in rows} == {
        ("superseded", call.id) for call in calls[:2]
    }
    starving = starvation(rows[0].name, rows)
    assert starving is not None
    assert starving.conflicts == 2


def test_without_replace_no_number_is_taken(sent):
    task.apply_async(("a",))
    key = task.lock("a")._lock_key.beside(LATEST, task.name).key
    assert get_store("redis").read(key) is None
