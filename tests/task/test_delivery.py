"""What a delivery does that finds its lock held, or that follows a run of the same message."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace

import celery
import pytest
from celery import Celery
from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded
from kombu import Queue

from django_singletask import LockConflict, SingletonTask
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.deliveries import (
    at_the_first_pause,
    collect_sent,
    elsewhere,
    header_of,
    held_by,
    leave_lock,
    receive,
    refuse,
)
from tests.entries import listening
from tests.inside import READS, WAITS, dropped, postponed
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]


@pytest.fixture
def sent(monkeypatch):
    """Collect the messages that would be published."""
    return collect_sent(tasks.hold.app, monkeypatch)


@pytest.fixture(autouse=True)
def runs_log(monkeypatch, tmp_path):
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))


@pytest.fixture
def result(monkeypatch):
    """Let the result backend return this result for every task."""
    stored = SimpleNamespace(state="PENDING", date_done=None, result=None)
    monkeypatch.setattr(SingletonTask, "AsyncResult", lambda self, task_id: stored)
    return stored


def test_a_redelivery_is_postponed_not_skipped(sent):
    with held_by("mine"), postponed():
        receive(tasks.hold, "a")
    (message,) = sent
    assert message["task_id"] == "mine"
    assert message["retries"] == 0
    assert 0.7 <= message["countdown"] <= 1
    assert header_of(message).items() >= {**WAITS, "hops": 1}.items()
    row = TaskLockEvent.objects.get(kind="conflict")
    assert (row.reason, row.result) == ("redelivery", "waiting")


@pytest.mark.parametrize("task_id", ["m" * 300, "mi\tne"])
def test_a_redelivery_is_known_by_an_id_that_its_record_cannot_hold(sent, task_id):
    with held_by(task_id), postponed():
        receive(tasks.hold, "a", task_id=task_id)
    assert sent[0]["task_id"] == task_id


def test_a_message_of_another_call_is_skipped(sent):
    """Negative control."""
    with held_by("another"):
        assert receive(tasks.hold, "a") == "skipped"
    assert not sent


def test_a_retry_that_meets_its_earlier_run_is_postponed_for_a_moment(sent):
    with held_by("mine", retries=0), postponed():
        receive(tasks.hold, "a", retries=1)
    assert sent[0]["countdown"] <= 0.05
    assert "redelivered" not in header_of(sent[0])
    assert sent[0]["retries"] == 1
    assert TaskLockEvent.objects.get(kind="conflict").reason == "retry"


def test_the_first_link_of_a_replacement_is_postponed(sent):
    with held_by("parent"), postponed():
        receive(tasks.hold, "a", parent_id="parent", replaced_task_nesting=1)
    assert sent[0]["countdown"] <= 0.05


@pytest.mark.parametrize("policy", ["raise", "wait"])
def test_a_redelivery_is_postponed_with_each_policy(sent, policy):
    header = {"options": {"on_conflict": policy, "lock_wait": 60}}
    with held_by("mine"), postponed():
        receive(tasks.hold, "a", header=header)
    assert header_of(sent[0])["options"] == header["options"]


def test_a_redelivery_that_finds_the_lock_free_hops_once_more(sent):
    with postponed():
        receive(tasks.hold, "a", header={**WAITS, "hops": 5})
    assert READS.items() <= header_of(sent[0]).items()
    assert sent[0]["countdown"] <= 1
    assert not tasks.hold.lock("a").locked()
    assert TaskLockEvent.objects.get(kind="run").result == "postponed"


STATES = {"SUCCESS": True, "RETRY": True, "PENDING": False, "STARTED": False, "FAILURE": False}
"""The states of a result, and whether they say that the work of a message is done."""


@pytest.mark.parametrize(("state", "is_done"), STATES.items())
def test_a_redelivery_is_dropped_if_its_work_is_known_to_be_done(sent, result, state, is_done):
    result.state = state
    with dropped() if is_done else nullcontext():
        assert receive(tasks.hold, "a", header=READS) == "ran"
    assert not sent
    assert not tasks.hold.lock("a").locked()


@pytest.mark.parametrize("error", [NotImplementedError(), OSError("the result backend is away")])
def test_a_redelivery_whose_result_cannot_be_read_runs(sent, monkeypatch, error, caplog):
    class Result:
        @property
        def state(self):
            raise error

    monkeypatch.setattr(tasks.hold.__class__, "AsyncResult", lambda self, task_id: Result())
    assert receive(tasks.hold, "a", header=READS) == "ran"
    # Celery raises NotImplementedError where no backend is configured: that is no trouble.
    assert ("cannot be read" in caplog.text) == isinstance(error, OSError)


def test_a_redelivery_without_a_result_runs(sent, result):
    """With ignore_result the state in the backend says nothing about this message."""
    result.state = "SUCCESS"
    assert receive(tasks.hold, "a", header=READS, ignore_result=True) == "ran"


@pytest.mark.parametrize("where", ["result", "publish"])
def test_a_soft_time_limit_reaches_the_task(monkeypatch, where):
    def interrupt(*args, **options):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(tasks.hold.app, "send_task", interrupt)
    monkeypatch.setattr(tasks.hold.__class__, "AsyncResult", interrupt)
    header = READS if where == "result" else WAITS
    with pytest.raises(SoftTimeLimitExceeded):
        receive(tasks.hold, "a", header=header)
    assert not tasks.hold.lock("a").locked()


def test_a_redelivery_behind_another_call_is_dropped_if_its_work_is_done(sent, result):
    result.state = "SUCCESS"
    with held_by("another"), dropped():
        receive(tasks.hold, "a", header=READS)
    assert not sent


def test_a_redelivery_behind_another_call_hops_on_if_its_work_is_not_done(sent, result):
    with held_by("another"), postponed():
        receive(tasks.hold, "a", header=WAITS)
    assert READS.items() <= header_of(sent[0]).items()


def test_a_redelivery_that_cannot_be_published_goes_back_to_the_broker(monkeypatch, caplog):
    def fail(*args, **options):
        raise OSError("the broker is away")

    monkeypatch.setattr(tasks.hold.app, "send_task", fail)
    with held_by("mine"), pytest.raises(Reject) as caught:
        receive(tasks.hold, "a")
    assert caught.value.requeue
    assert "could not be postponed" in caplog.text


@pytest.mark.parametrize(
    "request_",
    [{"argsrepr": "(…)", "kwargsrepr": "{}"}, {"ignore_result": True}, {"expires": "2030-01-01"}],
    ids=str,
)
def test_a_postponed_message_keeps_its_own(sent, request_):
    header = {"key": tasks.hold.lock("a").key, "name": "hold(…)", "due": 7.5}
    with held_by("mine"), postponed():
        receive(tasks.hold, "a", header={**header, "token": "of this delivery"}, **request_)
    assert sent[0].items() >= request_.items()
    assert header_of(sent[0]).items() >= header.items()
    assert "token" not in header_of(sent[0])


def test_hops_grow_to_a_quarter_of_the_lease(sent, monkeypatch):
    monkeypatch.setattr("random.uniform", lambda low, high: 1)
    with held_by("another", task=tasks.requeue):
        for number in range(9):
            with postponed():
                receive(tasks.requeue, "a", header={"hops": number})
    hops = [message["countdown"] for message in sent]
    assert hops == sorted(hops)
    assert (hops[0], hops[-1]) == (1, 15)


def test_hops_are_shorter_than_the_visibility_timeout(sent, monkeypatch):
    options = {"visibility_timeout": 3}
    monkeypatch.setitem(tasks.requeue.app.conf, "broker_transport_options", options)
    with held_by("another", task=tasks.requeue), postponed():
        receive(tasks.requeue, "a", header={"hops": 9})
    assert sent[0]["countdown"] <= 1


HOUR = 3600
MANY = {"hops": 20}
"""The header of a message whose hops have grown to the longest."""
ON_BOTH = pytest.mark.parametrize("cache_alias", ["redis", "pymemcache"], indirect=True)


class TestHopsKnowTheEnd:
    """An hourly lock, of which some seconds are left: a quarter of its length is 15 minutes."""

    def hop(self, sent, alias, left, header=MANY, **changes):
        """Return the seconds of the hop; the record differs by the ``changes``."""
        leave_lock(tasks.requeue.lock("a"), alias, length=HOUR, left=left, **changes)
        with postponed():
            receive(tasks.requeue, "a", header=header)
        return sent[-1]["countdown"]

    @ON_BOTH
    @pytest.mark.parametrize("kept", [True, False], ids=["kept", "handed over"])
    def test_a_hop_is_not_longer_than_the_rest(self, cache_alias, sent, kept):
        assert self.hop(sent, cache_alias, left=20, kept=kept) == pytest.approx(20.05, abs=2)

    @ON_BOTH
    @pytest.mark.parametrize("met", [{}, {"met": "long"}], ids=["", "met"])
    def test_of_several_slots_the_first_end_counts(self, cache_alias, sent, met):
        """Also if the message was reported as waiting for the run that keeps another slot."""
        call = {"lock_slots": 2, "on_conflict": "requeue"}
        lock = tasks.hold.lock("a")
        leave_lock(lock, cache_alias, length=HOUR, left=HOUR - 100, kept=True, token="long")
        leave_lock(lock, cache_alias, slot=1, length=HOUR, left=20, kept=True, token="short")
        with postponed():
            receive(tasks.hold, "a", header={**MANY, **met, "options": call})
        assert sent[-1]["countdown"] == pytest.approx(20.05, abs=2)

    @ON_BOTH
    def test_a_retry_waits_for_the_slot_of_its_own_try(self, cache_alias, sent):
        call = {"lock_slots": 2, "lock_at_least": HOUR}
        lock = tasks.hold.lock("a")
        leave_lock(lock, cache_alias, length=HOUR, left=20, kept=True, token="other")
        leave_lock(lock, cache_alias, slot=1, length=HOUR, left=100, kept=True, task_id="mine")
        with postponed():
            receive(tasks.hold, "a", header={**MANY, "options": call}, retries=1)
        assert sent[-1]["countdown"] == pytest.approx(100.05, abs=2)

    @ON_BOTH
    def test_hops_grow_as_ever_meanwhile(self, cache_alias, sent):
        """What is freed earlier is found."""
        assert self.hop(sent, cache_alias, left=20, header={}, kept=True) <= 1

    @ON_BOTH
    def test_a_hop_shortly_before_the_end_takes_a_second(self, cache_alias, sent):
        assert self.hop(sent, cache_alias, left=0.1, kept=True) == 1

    def test_a_hop_is_longer_if_there_were_many(self, sent):
        """Otherwise each of many messages would hop at the end of each of many slots."""
        assert self.hop(sent, "redis", left=0.1, header={"hops": 200}, kept=True) == 10

    @pytest.mark.parametrize("cache_alias", ["pymemcache"], indirect=True)
    def test_a_hop_after_the_end_of_the_record_takes_a_second(self, cache_alias, sent):
        """memcached counts whole seconds, and ends the entry later."""
        assert self.hop(sent, cache_alias, left=-1, kept=True) == 1

    @pytest.mark.parametrize("cache_alias", ["pymemcache"], indirect=True)
    @pytest.mark.parametrize("changes", [{"pid": 7}, {"token": ""}], ids=["alive", "unknown"])
    def test_a_holder_that_lives_has_no_end_in_its_record(self, cache_alias, sent, changes):
        """Nor has an entry that another program wrote."""
        hop = self.hop(sent, cache_alias, left=20, host="elsewhere", **changes)
        assert hop > 0.7 * HOUR / 4

    @ON_BOTH
    @pytest.mark.parametrize(("age", "seconds"), [(0, 20.05), (5, 15.05)])
    def test_a_run_may_keep_its_lock_for_the_rest_of_its_time(
        self, cache_alias, sent, age, seconds
    ):
        """If its body ends before, the lock is free then."""
        header = {**MANY, "options": {"lock_at_least": 20}}
        run = {"left": HOUR - age, "pid": 7, "host": "elsewhere"}
        assert self.hop(sent, cache_alias, header=header, **run) == pytest.approx(seconds, abs=2)

    def test_the_end_of_a_run_that_is_longer_is_unknown(self, sent):
        header = {**MANY, "options": {"lock_at_least": 20}}
        hop = self.hop(sent, "redis", HOUR - 30, header, pid=7, host="elsewhere")
        assert hop > 0.7 * HOUR / 4

    def test_the_end_of_a_fixed_lease_counts(self, sent):
        """The store reports it, and the host of its holder may be gone."""
        hop = self.hop(sent, "redis", left=20, pid=7, host="elsewhere")
        assert hop == pytest.approx(20.05, abs=2)

    def test_on_quorum_queues_it_does_not_wait_in_the_worker(self, delayed, monkeypatch):
        sent = collect_sent(delayed.app, monkeypatch)
        pauses = at_the_first_pause(monkeypatch, lambda: None)
        leave_lock(delayed.lock("a"), "redis", length=HOUR, left=0.3, kept=True)
        with postponed():
            receive(delayed, "a", header=MANY)
        assert sent[0]["countdown"] == 1
        assert max(pauses) < 0.1


def test_a_header_that_was_passed_on_to_another_call_is_ignored(sent):
    header = {"id": "other", **READS}
    with held_by("another"):
        assert elsewhere(lambda: receive(tasks.hold, "a", header=header)) == "skipped"


@pytest.fixture
def delayed():
    """Give a task that is sent to a quorum queue of RabbitMQ, which delays messages itself."""
    if celery.VERSION < (5, 5):
        pytest.skip("Celery 5.4 does not know quorum queues")
    with Celery("quorum", set_as_current=False, broker="pyamqp://") as app:
        app.conf.task_queues = [Queue("q", queue_arguments={"x-queue-type": "quorum"})]

        @app.task(base=SingletonTask, shared=False, on_conflict="requeue")
        def delayed(key): ...

        yield delayed


def test_hops_on_quorum_queues_take_a_second_at_least(delayed, monkeypatch):
    """Celery lets RabbitMQ delay such a message, and refuses less than a second."""
    sent = collect_sent(delayed.app, monkeypatch)
    for arguments, least in (({"x-queue-type": "quorum"}, 1), ({}, 0.03)):
        delayed.app.amqp.queues["q"].queue_arguments = arguments
        with held_by("mine", task=delayed), postponed():
            receive(delayed, "a", retries=1)
        assert least <= sent[-1]["countdown"] <= max(least, 0.05)


def test_a_hop_on_quorum_queues_is_not_longer_than_it_may_be(delayed, monkeypatch):
    """The rest of ``lock_wait`` is waited for in the worker."""
    sent = collect_sent(delayed.app, monkeypatch)
    pauses = at_the_first_pause(monkeypatch, lambda: None)
    with held_by("another", task=delayed):
        for seconds in (0.2, 60):
            with postponed():
                receive(delayed, "a", header={"options": {"lock_wait": seconds}})
    assert [message["countdown"] for message in sent] == [0, 1]
    assert max(pauses) == pytest.approx(0.2, abs=0.1)


NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
DUE = {"due": NOW.timestamp()}
MARKED = {"delivery_info": {"redelivered": True}}


class TestMarkedByTheBroker:
    """The broker says that it has delivered the message before."""

    @pytest.fixture
    def succeeded(self, result):
        """Let the call have succeeded two seconds after its message was due."""
        result.state, result.date_done = "SUCCESS", NOW + timedelta(seconds=2)
        return result

    @pytest.mark.parametrize("state", ["SUCCESS", "RETRY"])
    def test_a_call_that_has_succeeded_or_retries_is_dropped(self, succeeded, caplog, state):
        """After a retry, the message of the next try is on its way."""
        caplog.set_level("INFO", "django_singletask")
        succeeded.state = state
        with dropped():
            receive(tasks.hold, "a", header=DUE, **MARKED)
        assert not TaskLockEvent.objects.exists()
        assert "Task mine was delivered again, but its work is done: dropped." in caplog.text

    def test_it_is_dropped_while_another_call_has_the_lock(self, succeeded):
        with held_by("another"), dropped():
            receive(tasks.hold, "a", header=DUE, **MARKED)
        assert not TaskLockEvent.objects.exists()

    def test_it_is_dropped_before_it_is_superseded(self, succeeded, sent):
        """A result of "superseded" would replace the one of the run."""
        older, _newer = tasks.latest.delay("a"), tasks.latest.delay("a")
        header = {**header_of(sent[0]), **DUE}
        with dropped():
            receive(tasks.latest, "a", task_id=older.id, header=header, **MARKED)

    @pytest.mark.parametrize("info", [None, {}, {"redelivered": False}], ids=str)
    def test_a_message_without_the_mark_asks_for_no_result(self, monkeypatch, info):
        monkeypatch.setattr(tasks.hold.__class__, "AsyncResult", lambda *args: 1 / 0)
        assert receive(tasks.hold, "a", header=DUE, delivery_info=info) == "ran"

    @pytest.mark.parametrize("state", ["PENDING", "STARTED", "FAILURE"])
    def test_a_call_that_has_not_succeeded_hops_once_and_runs(self, succeeded, sent, state):
        """Its first run may have ended, and not have stored its result yet."""
        succeeded.state = state
        with postponed():
            receive(tasks.hold, "a", header=DUE, **MARKED)
        assert 0.7 <= sent[0]["countdown"] <= 1
        assert not tasks.hold.lock("a").locked()
        assert receive(tasks.hold, "a", header=header_of(sent[0])) == "ran"

    def test_a_result_that_is_stored_during_the_hop_counts(self, succeeded, sent):
        succeeded.state = "PENDING"
        with postponed():
            receive(tasks.hold, "a", header=DUE, **MARKED)
        succeeded.state = "SUCCESS"
        with dropped():
            receive(tasks.hold, "a", header=header_of(sent[0]))

    @pytest.mark.parametrize("facts", [MARKED, {}], ids=["marked", "met its first run"])
    def test_a_run_that_celery_cancelled_runs_again(self, succeeded, sent, facts):
        """Then no other message is on its way (worker_cancel_long_running_tasks_…)."""
        succeeded.state, succeeded.result = "RETRY", Retry("cancelled by Celery")
        header = {**DUE, **READS, "marked": bool(facts)}
        assert receive(tasks.hold, "a", header=header, **facts) == "ran"

    def test_without_a_result_it_does_not_hop(self):
        """A hop would tell nothing: at least once."""
        assert receive(tasks.hold, "a", header=DUE, ignore_result=True, **MARKED) == "ran"

    def test_without_a_result_backend_it_does_not_hop(self, monkeypatch):
        def no_backend(*args):
            raise NotImplementedError

        monkeypatch.setattr(tasks.hold.__class__, "AsyncResult", no_backend)
        assert receive(tasks.hold, "a", header=DUE, **MARKED) == "ran"

    @pytest.mark.parametrize(
        ("done", "newer"),
        [
            (NOW - timedelta(days=1), "no"),
            (NOW + timedelta(seconds=0.9), "not certain"),
            (NOW - timedelta(seconds=0.9), "not certain"),
            (NOW.replace(tzinfo=None) + timedelta(hours=1), "not certain"),
            (None, "not certain"),
            (NOW.astimezone(timezone(timedelta(hours=2))) + timedelta(seconds=2), "yes"),
        ],
        ids=["yesterday", "1 s after", "1 s before", "no zone", "no time", "another zone"],
    )
    def test_only_a_newer_result_says_something(self, succeeded, sent, done, newer):
        """An id that is used again each day still runs; one that met its first run is known."""
        succeeded.date_done = done
        for task_id, header, drops in (
            ("marked", {**DUE, **READS, "marked": True}, newer == "yes"),
            ("met", {**DUE, **READS}, newer != "no"),
        ):
            if drops:
                with dropped():
                    receive(tasks.hold, "a", task_id=task_id, header=header)
            else:
                assert receive(tasks.hold, "a", task_id=task_id, header=header) == "ran"

    def test_a_message_that_does_not_say_when_it_was_due_runs(self, succeeded):
        """It is of an older version, or was sent by ``send_task``."""
        header = {**READS, "marked": True}
        assert receive(tasks.hold, "a", header=header) == "ran"

    def test_a_conflict_with_another_call_is_not_its_own_run(self, sent, result):
        """It is skipped, and a call of "requeue" stays marked."""
        with held_by("another"):
            assert receive(tasks.hold, "a", header=DUE, **MARKED) == "skipped"
        with held_by("another", task=tasks.requeue), postponed():
            receive(tasks.requeue, "a", header=DUE, **MARKED)
        assert header_of(sent[0])["marked"]
        assert "redelivered" not in header_of(sent[0])
        with postponed():
            receive(tasks.requeue, "a", header=header_of(sent[0]))
        assert READS.items() <= header_of(sent[1]).items()

    def test_the_entry_of_a_queued_call_stays(self, succeeded):
        """The first run gave its own back. A later call may have one by now."""
        entry = inside.queued_entry(tasks.unique, "a")
        value = inside.holder_of(entry, tasks.unique, "mine").encode()
        inside.write(entry, value)
        with dropped():
            receive(tasks.unique, "a", header={**DUE, "queued": value.decode()}, **MARKED)
        assert inside.read(entry).value == value


class TestSeveralDeliveries:
    """The message has waited in workers for longer than the visibility timeout."""

    @pytest.fixture(autouse=True)
    def ran(self, monkeypatch, result):
        """Collect the results that the backend had when a body ran."""
        states = []
        monkeypatch.setattr(tasks, "body", lambda *args, **facts: states.append(result.state))
        return states

    LATE = {"due": time.time() - 60}

    def waited(self, seconds):
        return {**self.LATE, "received": time.time() - seconds}

    def test_the_first_one_runs_at_once(self, sent, ran):
        receive(tasks.hold, "a", header=self.waited(3601))
        assert ran == ["PENDING"]

    def test_the_first_one_is_dropped_if_another_one_has_run(self, ran, result):
        result.state, result.date_done = "SUCCESS", datetime.now(UTC)
        with dropped():
            receive(tasks.hold, "a", header=self.waited(3601))

    def test_control_a_message_that_waited_for_less_asks_for_no_result(self, ran, monkeypatch):
        monkeypatch.setattr(tasks.hold.__class__, "AsyncResult", lambda *args: 1 / 0)
        receive(tasks.hold, "a", header=self.waited(3500))
        assert len(ran) == 1

    def test_the_visibility_timeout_of_the_project_counts(self, ran, monkeypatch, result):
        options = {"visibility_timeout": 3}
        monkeypatch.setitem(tasks.hold.app.conf, "broker_transport_options", options)
        result.state, result.date_done = "SUCCESS", datetime.now(UTC)
        with dropped():
            receive(tasks.hold, "a", header=self.waited(4))

    def test_two_that_have_hopped_do_not_both_run(self, sent, ran, result):
        """The second one takes the lock before the result of the first one is stored."""
        header = {**self.LATE, **READS, "marked": True}
        receive(tasks.hold, "a", header=header)
        with postponed():
            receive(tasks.hold, "a", header=header)
        assert len(ran) == 1
        result.state, result.date_done = "SUCCESS", datetime.now(UTC)
        with dropped():
            receive(tasks.hold, "a", header=header_of(sent[0]))

    def test_one_that_has_hopped_waits_behind_another_call(self, sent, ran):
        """It had the lock, and gave it up to look at the result again."""
        header = {**self.LATE, **READS, "marked": True}
        with held_by("another"), postponed():
            receive(tasks.hold, "a", header=header)
        receive(tasks.hold, "a", header=header_of(sent[0]))
        assert len(ran) == 1

    def test_control_one_that_has_not_had_the_lock_is_skipped(self, sent, ran):
        with held_by("another"):
            receive(tasks.hold, "a", header=self.LATE, **MARKED)
        assert (sent, ran) == ([], [])

    def test_control_without_the_note_both_run(self, ran, monkeypatch):
        def write_no_note(add, key, *args):
            return None if "@ended:" in key else add(key, *args)

        inside.answer(monkeypatch, "add", write_no_note)
        for _ in range(2):
            receive(tasks.hold, "a", header={**self.LATE, **READS, "marked": True})
        assert len(ran) == 2

    def test_the_note_of_another_call_says_nothing(self, ran):
        for task_id in ("mine", "yours"):
            header = {**self.LATE, **READS}
            receive(tasks.hold, "a", task_id=task_id, header=header)
        assert len(ran) == 2

    def test_an_ordinary_run_writes_no_note(self, ran):
        receive(tasks.hold, "a", header=self.LATE)
        assert len(ran) == 1
        assert not inside.end_is_noted(tasks.hold.lock("a"), "mine")

    def test_a_killed_run_costs_no_hop(self, sent, ran):
        """But only the first delivery that has the lock then."""
        inside.note_death(tasks.hold.lock("a"), "mine")
        receive(tasks.hold, "a", header=self.LATE, **MARKED)
        assert len(ran) == 1
        with postponed():
            receive(tasks.hold, "a", header=self.LATE, **MARKED)

    def test_a_run_that_ends_replaces_the_note_of_a_death(self, sent, ran, monkeypatch):
        """Another worker may prove the death, and let the next delivery run before the note.

        first run:  SIGKILL
        B:                   frees the lock, runs                   notes its end    result SUCCESS
        main:                                      notes the death
        C:                                                                     takes: must hop
        """
        lock = tasks.hold.lock("a")
        monkeypatch.setattr(tasks, "body", lambda *args, **facts: inside.note_death(lock, "mine"))
        receive(tasks.hold, "a", header={**self.LATE, **READS})
        with postponed():
            receive(tasks.hold, "a", header=self.LATE, **MARKED)

    def test_a_cache_that_goes_down_costs_a_hop(self, sent, ran, monkeypatch):
        def fail(request, key, *args):
            return refuse() if "@ended:" in key else request(key, *args)

        header = {**self.LATE, **READS}
        with monkeypatch.context() as patch:
            inside.answer(patch, "add", fail)
            receive(tasks.hold, "a", header=header)
        assert len(ran) == 1
        inside.answer(monkeypatch, "release", fail)
        with postponed():
            receive(tasks.hold, "a", header=header)
        assert not tasks.hold.lock("a").locked()

    def test_on_every_store(self, cache_alias, sent, ran):
        header = {**self.LATE, **READS}
        receive(tasks.hold, "a", header=header)
        with postponed():
            receive(tasks.hold, "a", header=header)


class TestWhenAMessageIsDue:
    @pytest.mark.parametrize(("when", "seconds"), [("now", 0), ("countdown", 60), ("eta", 60)])
    def test_the_sender_says_when(self, sent, when, seconds):
        in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
        ways = {"now": {}, "countdown": {"countdown": 60}, "eta": {"eta": in_a_minute}}
        tasks.hold.apply_async(("a",), **ways[when])
        header = header_of(sent[0])
        assert header["due"] == pytest.approx(time.time() + seconds, abs=20)
        assert header.get("delay", 0) == pytest.approx(seconds, abs=20)

    @pytest.mark.parametrize(("delay", "drops"), [(5, True), (0, False)])
    def test_a_result_is_certain_if_it_is_newer_than_the_sending(self, sent, result, delay, drops):
        """However soon after its ETA the call succeeded."""
        result.state, result.date_done = "SUCCESS", NOW + timedelta(seconds=0.1)
        header = {**DUE, "delay": delay, **READS, "marked": True}
        with dropped() if drops else nullcontext():
            assert receive(tasks.hold, "a", header=header) == "ran"

    def test_the_next_message_of_a_retry_has_its_own(self, sent, monkeypatch):
        """A success before that is not of its run."""
        monkeypatch.setattr(tasks, "body", lambda *args, **facts: tasks.hold.retry(countdown=30))
        before = time.time()
        with pytest.raises(Retry):
            receive(tasks.hold, "a", header={"due": before - 60})
        assert header_of(sent[0])["due"] >= before + 29.9


class TestRequeue:
    def test_a_conflict_postpones_the_message(self, sent):
        with held_by("another", task=tasks.requeue), postponed():
            receive(tasks.requeue, "a", retries=3)
        (message,) = sent
        assert (message["task_id"], message["retries"]) == ("mine", 3)
        assert 0.7 <= message["countdown"] <= 1
        assert header_of(message)["hops"] == 1

    def test_the_conflict_is_reported_once_for_all_hops(self, sent):
        self.hop_behind("another", sent, {})
        row = TaskLockEvent.objects.get()
        facts = row.kind, row.reason, row.result, row.count
        assert facts == ("conflict", "requeue", "waiting", 1)

    def hop_behind(self, holder, sent, header):
        """Deliver a message three times while another call holds its lock; return its header."""
        with held_by(holder, task=tasks.requeue):
            for _hop in range(3):
                with postponed():
                    receive(tasks.requeue, "a", header=header)
                header = header_of(sent[-1])
        return header

    def test_each_holder_that_it_waits_for_has_its_conflict(self, sent):
        """Otherwise nobody would see behind which holder the call waits now."""
        header = self.hop_behind("first", sent, {})
        self.hop_behind("second", sent, header)
        rows = TaskLockEvent.objects.filter(kind="conflict").order_by("pk")
        assert [(row.blocked_by_task_id, row.count) for row in rows] == [
            ("first", 1),
            ("second", 1),
        ]

    def test_lock_wait_counts_from_the_first_conflict(self, sent):
        header = {"options": {"lock_wait": 30}}
        with held_by("another", task=tasks.requeue):
            for _hop in range(2):
                with postponed():
                    receive(tasks.requeue, "a", header=header)
                header = header_of(sent[-1])
            since = header["requeued_at"]
            assert header_of(sent[0])["requeued_at"] == since
            header["requeued_at"] = since - 31
            with pytest.raises(LockConflict, match=r"; gave up after 30 s \(lock_wait\)$"):
                receive(tasks.requeue, "a", header=header)
        assert since == pytest.approx(time.time(), abs=60)
        assert len(sent) == 2

    def test_the_wait_counts_from_the_first_conflict(self, sent):
        """Of a run that gets its lock, and of a call that gives up."""
        header = {"options": {"lock_wait": 30}, "requeued_at": time.time() - 20}
        with listening() as events:
            assert receive(tasks.requeue, "a", header=header) == "ran"
            header["requeued_at"] -= 20
            with held_by("another", task=tasks.requeue), pytest.raises(LockConflict):
                receive(tasks.requeue, "a", header=header)
        waited = {event.kind: event.waited for event in events if event.task_id == "mine"}
        assert waited["acquired"] == pytest.approx(20, abs=10)
        assert waited["conflict"] == pytest.approx(40, abs=10)

    def test_a_call_that_gives_up_knows_whether_its_holder_has_counted_it(self, sent):
        header = {"options": {"lock_wait": 30}}
        with listening() as events:
            with held_by("first", task=tasks.requeue):
                with postponed():
                    receive(tasks.requeue, "a", header=header)
                header = header_of(sent[-1])
                header["requeued_at"] -= 31
                with pytest.raises(LockConflict):
                    receive(tasks.requeue, "a", header=header)
            with held_by("second", task=tasks.requeue), pytest.raises(LockConflict):
                receive(tasks.requeue, "a", header=header)
        conflicts = [
            (event.result, event.blocked_by_task_id, event.was_waiting)
            for event in events
            if event.kind == "conflict"
        ]
        assert conflicts == [
            ("waiting", "first", False),
            ("failed", "first", True),
            ("failed", "second", False),
        ]

    def test_the_last_hop_ends_with_lock_wait(self, sent):
        header = {"options": {"lock_wait": 0.3}, "hops": 9}
        with held_by("another", task=tasks.requeue), postponed():
            receive(tasks.requeue, "a", header=header)
        assert 0.2 <= sent[0]["countdown"] < 0.31  # a hop of 15 s otherwise

    @pytest.mark.parametrize("limit", [None, "inf"])
    def test_without_a_limit_it_is_postponed_for_ever(self, sent, limit):
        header = {"options": {"lock_wait": limit}, "requeued_at": time.time() - 1e6}
        with held_by("another", task=tasks.requeue), postponed():
            receive(tasks.requeue, "a", header=header)

    def test_a_message_that_waits_for_its_own_run_does_not_count(self, sent):
        header = {"options": {"lock_wait": 30}, "requeued_at": time.time() - 31}
        with held_by("mine", task=tasks.requeue), postponed():
            receive(tasks.requeue, "a", header=header)
        assert "requeued_at" not in header_of(sent[0])

    @pytest.fixture
    def soon_free(self, monkeypatch):
        """Let another run hold the lock until a call pauses; return the pauses."""
        inside.wait_longer_before_postponing(monkeypatch)
        with held_by("another", task=tasks.requeue) as held:
            yield at_the_first_pause(monkeypatch, held.free)

    def test_it_waits_a_moment_before_it_is_postponed(self, sent, soon_free):
        assert receive(tasks.requeue, "a") == "ran"
        assert len(soon_free) == 1
        assert not sent
        assert not TaskLockEvent.objects.filter(kind="conflict").exists()

    @pytest.mark.parametrize("on_outage", ["raise", "run", "skip"])
    def test_a_cache_that_goes_down_while_it_waits(self, sent, soon_free, monkeypatch, on_outage):
        def take_once(take, *args, **options):
            return refuse() if soon_free else take(*args, **options)

        inside.answer(monkeypatch, "take", take_once)
        with postponed():
            receive(tasks.requeue, "a", header={"options": {"on_outage": on_outage}})
        assert len(soon_free) == len(sent) == 1

    def test_a_postponed_call_has_not_given_up(self, sent, caplog):
        caplog.set_level("INFO", "django_singletask")
        with held_by("another", task=tasks.requeue), postponed():
            receive(tasks.requeue, "a", id="the-call")
        assert re.search("policy for task the-call on .*: requeue.$", caplog.text.strip())

    @pytest.mark.parametrize("call", ["direct", "apply"])
    def test_a_call_without_a_message_raises(self, sent, call):
        task = tasks.requeue
        with held_by("another", task=task), pytest.raises(LockConflict):
            task("a") if call == "direct" else task.apply(("a",), throw=True)
        assert not sent
        row = TaskLockEvent.objects.get()
        assert (row.reason, row.result) == ("raise", "failed")


class TestBrokerIsAway:
    @pytest.fixture(autouse=True)
    def broker_away(self, monkeypatch):
        def fail(*args, **options):
            raise OSError("the broker is away")

        monkeypatch.setattr(tasks.hold.app, "send_task", fail)

    def test_a_message_that_is_acknowledged_fails_visibly(self):
        with held_by("another", task=tasks.requeue), pytest.raises(OSError, match="away"):
            receive(tasks.requeue, "a")

    def test_a_message_with_late_acks_goes_back_to_the_broker(self, monkeypatch):
        monkeypatch.setattr(tasks.requeue.__class__, "acks_late", True)
        with held_by("another", task=tasks.requeue), pytest.raises(Reject) as caught:
            receive(tasks.requeue, "a")
        assert caught.value.requeue
