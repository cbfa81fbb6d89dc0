"""``on_duplicate="replace"``: of equal calls in the queue, the latest arguments win."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from celery.exceptions import Retry
from django.db.models import F

from django_singletask import LockConflict, TaskLock
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.command_line import locks_as_json
from tests.deliveries import (
    AWAITED,
    at_once,
    at_the_first_pause,
    collect_sent,
    elsewhere,
    header_of,
    held_by,
    receive_sent,
    refuse,
    wait_for_debts,
)
from tests.inside import READS, postponed
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

task = tasks.unique
REPLACE = {"on_duplicate": "replace"}


@pytest.fixture
def sent(monkeypatch):
    return collect_sent(task.app, monkeypatch)


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
    return receive_sent(task, message, **request)


def retry_at_once(*args, **facts):
    raise task.retry(countdown=1)


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
    with held_by("another", task=task), postponed():
        deliver(sent[0])
    again = sent[-1]
    send(2)
    assert deliver(again) == "skipped"
    assert deliver(sent[-1]) == "ran"


@pytest.mark.parametrize("policy", ["wait", "requeue"])
def test_a_call_that_waited_in_its_slot_looks_again_when_it_has_the_lock(
    sent, ran, monkeypatch, policy
):
    """Without that the older arguments would be the last:

    older:  looks   waits for the lock ............................ runs
    newer:                     published, noted   runs
    """
    inside.wait_longer_before_postponing(monkeypatch)
    send(1, {"on_conflict": policy, "lock_wait": 20})
    lock = task.lock("a")
    assert lock.acquire()

    def newer():
        elsewhere(send, 2)
        lock.release()

    at_the_first_pause(monkeypatch, newer)
    assert deliver(sent[0]) == "skipped"
    assert not ran
    assert deliver(sent[1]) == "ran"


@pytest.mark.parametrize("sender", ["another process", "the body"])
def test_a_run_until_it_is_finished_is_not_replaced(sent, monkeypatch, sender):
    """Of the calls that its body sends the last has the entry of the run."""
    until_finish = {"unique_until": "finish"}
    values = []

    def body(key, seconds, task_id, value):
        values.append(value)
        if value == 1 and sender == "the body":
            send_two()
        elif value == 1:
            elsewhere(send_two)
            assert task.queued("a").id == sent[0]["task_id"]

    def send_two():
        send(2, until_finish)
        send(3, until_finish)

    monkeypatch.setattr(tasks, "body", body)
    send(1, until_finish)
    deliver(sent[0])
    if sender == "the body":
        assert task.queued("a").id == sent[2]["task_id"]
    assert deliver(sent[1]) == "skipped"
    deliver(sent[2])
    assert values == [1, 3]
    assert task.queued("a") is None


def test_a_retry_of_a_call_that_has_begun_is_not_replaced(sent, monkeypatch):
    monkeypatch.setattr(tasks, "body", retry_at_once)
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
        monkeypatch.setattr(task, "on_skip", retry_at_once)
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
    assert "ticket" not in header_of(sent[1])


class TestConflicts:
    """With ``on_conflict="requeue"`` the last call runs, and those that are not replaced."""

    REQUEUE = {"on_conflict": "requeue"}

    def conflict(self, sent, number, **request):
        with held_by("another", task=task), postponed():
            deliver(sent[number], **request)

    def test_while_the_lock_is_held_the_last_call_hops_and_the_others_end(self, sent, ran):
        for value in (1, 2):
            send(value, self.REQUEUE)
        for number in (1, 2):
            self.conflict(sent, number)
        with held_by("another", task=task):
            assert deliver(sent[0]) == "skipped"
        header = header_of(sent[-1])
        assert (header["hops"], header["ticket"]) == (2, header_of(sent[1])["ticket"])
        assert deliver(sent[-1]) == "ran"
        assert ran == [2]

    def test_a_replaced_call_takes_no_lock(self, sent):
        """Another task that wants the lock at this moment would be skipped for nothing."""
        send(1, self.REQUEUE)
        self.conflict(sent, 0)
        send(2)
        assert deliver(sent[1]) == "skipped"
        assert not TaskLockEvent.objects.filter(kind="run").exists()

    def test_a_call_for_which_others_wait_runs(self, sent, ran):
        send(1, self.REQUEUE, link=tasks.plain.si("a"))
        send(2, self.REQUEUE)
        self.conflict(sent, 0)
        self.conflict(sent, 1)
        assert [deliver(message) for message in sent[2:]] == ["ran", "ran"]
        assert ran == [1, 2]

    def test_a_retry_of_a_call_that_has_begun_runs(self, sent, monkeypatch, ran):
        with monkeypatch.context() as patch:
            patch.setattr(tasks, "body", retry_at_once)
            send(1, self.REQUEUE)
            with pytest.raises(Retry):
                deliver(sent[0])
        send(2, self.REQUEUE)
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

    def redeliver():
        with postponed():
            deliver(sent[0], delivery_info={"redelivered": True})

    def body(key, seconds, task_id, value):
        send(2)
        elsewhere(redeliver)
        return "ran"

    monkeypatch.setattr(tasks, "body", body)
    send(1)
    assert deliver(sent[0]) == "ran"


@pytest.mark.parametrize("facts", [{**READS, "marked": True}, READS], ids=str)
def test_a_redelivery_gives_way_once_it_has_the_lock(sent, ran, facts):
    """Its first run was killed."""
    send(1)
    send(2)
    header_of(sent[0]).update(facts)
    assert deliver(sent[0]) == "skipped"
    assert not task.lock("a").locked()
    assert not ran


class TestNoWorkIsLost:
    def test_killed_between_the_message_and_its_note(self, sent, ran):
        """
        A: takes 1, publishes, notes 1              runs
        B:                  takes 2, publishes, killed        notes 2, runs
        """
        send(1)
        with inside.killed_before_the_note():
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

        def note_and_fail(name, *args, **message):
            inside.note_number(task.lock("a"), task, header_of(message)["ticket"])
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
            inside.answer(patch, "read", refuse)
            return send_task(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(task.app, "send_task", send_and_go_down)
            call = send(1)
        assert call.id == sent[0]["task_id"]
        assert deliver(sent[0]) == "ran"

    def test_no_number_is_left(self, sent, ran, monkeypatch):
        """Others were faster each time."""
        with monkeypatch.context() as patch:
            inside.answer(patch, "replace", lambda *args: False)
            inside.answer(patch, "add", lambda *args: "the entry of another")
            send(1)
        send(2)
        assert [deliver(message) for message in sent] == ["ran", "ran"]

    def test_of_two_producers_at_the_same_time_one_message_runs(self, sent, ran, cache_alias):
        at_once(send, [[value] for value in range(4)])
        assert sorted(deliver(message) for message in sent) == ["ran"] + ["skipped"] * 3
        numbers = {message["args"][2]: header_of(message)["ticket"][1] for message in sent}
        assert numbers[ran[0]] == 4


def state():
    """Return the highest number taken and noted."""
    return inside.numbers(task.lock("a"), task)


def note(message):
    """Go on where a process has slept that had published this message."""
    inside.note_number(task.lock("a"), task, header_of(message)["ticket"])


class TestNumbers:
    def test_two_producers_are_killed_before_they_note_their_messages(self, sent, ran):
        send(1)
        with inside.killed_before_the_note():
            send(2)
            send(3)
        assert state() == (3, 1)
        answers = [deliver(sent[number]) for number in (1, 2, 0, 1)]
        assert answers == ["ran", "ran", "skipped", "skipped"]
        assert ran == [2, 3]
        assert state() == (3, 3)

    def test_the_first_message_is_noted_after_a_later_one(self, sent, ran):
        """Its process sleeps until it has run, and a later call is noted."""
        with inside.killed_before_the_note():
            send(1)
        deliver(sent[0])
        send(2)
        note(sent[0])
        deliver(sent[1])
        assert ran == [1, 2]

    def test_a_message_that_is_noted_late_does_not_displace_the_last(self, sent, ran):
        send(1)
        with inside.killed_before_the_note():
            send(2)
        send(3)
        note(sent[1])
        assert state() == (3, 3)
        assert [deliver(message) for message in sent] == ["skipped", "skipped", "ran"]
        assert ran == [3]

    def test_the_number_is_taken_before_the_message_is_sent(self, sent, ran, monkeypatch, settings):
        """Of two producers, the one that takes its number later has the call that runs."""
        settings.SINGLETASK_HISTORY = "off"  # else the thread waits for the transaction of the test
        send_task = task.app.send_task

        def slow(*args, **options):
            monkeypatch.setattr(task.app, "send_task", send_task)
            elsewhere(send, 2)
            return send_task(*args, **options)

        monkeypatch.setattr(task.app, "send_task", slow)
        send(1)
        assert [message["args"][2] for message in sent] == [2, 1]
        assert [deliver(message) for message in sent] == ["ran", "skipped"]
        assert ran == [2]

    @pytest.mark.parametrize("request_", ["read", "replace"])
    def test_a_message_runs_if_the_numbers_cannot_be_read_or_noted(
        self, sent, ran, monkeypatch, request_
    ):
        with inside.killed_before_the_note():
            send(1)
        answer = refuse if request_ == "read" else lambda *args: False
        with monkeypatch.context() as patch:
            inside.answer(patch, request_, answer)
            deliver(sent[0])
        assert ran == [1]

    def test_a_cache_that_forgets_lets_each_run(self, sent, ran, empty_cache):
        for value in (1, 2):
            send(value)
        empty_cache("redis")
        for message in sent:
            deliver(message)
        assert ran == [1, 2]

    def test_a_new_epoch_is_later_than_the_one_before(self, sent, ran, empty_cache):
        for value in (1, 2):
            send(value)
        empty_cache("redis")
        send(3)
        assert [deliver(message) for message in sent] == ["skipped", "skipped", "ran"]
        assert ran == [3]

    @pytest.mark.parametrize(
        "nonsense",
        [b"\xff nonsense", b"7", b'["e", "x", 1, 1, 0, [], ""]', b'["e", 1, 1, 1, 0, 7, ""]'],
    )
    def test_an_entry_that_something_else_wrote_is_replaced(self, sent, ran, nonsense):
        inside.spoil_numbers(task.lock("a"), task, nonsense)
        send(1)
        deliver(sent[0])
        assert ran == [1]

    def test_threads_never_take_the_same_number(self, cache_alias):
        lock = TaskLock("shared")

        def take_five():
            return [inside.take_number(lock, task)[1] for _ in range(5)]

        numbers = at_once(take_five, [()] * 8)
        assert sorted(itertools.chain(*numbers)) == list(range(1, 41))


def test_a_replaced_call_that_is_revoked_leaves_the_entry_of_the_newer_one(sent):
    first, second = send(1), send(2)
    inside.discard(task, sent[0]["headers"], first.id)
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
    assert locks_as_json("why", rows[0].name)["starving"]["conflicts"] == 2


def test_without_replace_no_number_is_taken(sent):
    task.apply_async(("a",))
    assert inside.numbers(task.lock("a"), task) is None
