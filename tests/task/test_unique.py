"""What stops an equal call at enqueue, and what lets it through again."""

from __future__ import annotations

import os
import pickle
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest
from celery import chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.worker.request import Request
from django.db import transaction

from django_singletask import DuplicateTask, LockConflict, LockUnavailable
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.deliveries import (
    AWAITED,
    at_once,
    collect_sent,
    elsewhere,
    header_of,
    held_by,
    receive_sent,
    refuse,
    wait_for_debts,
)
from tests.entries import eventually
from tests.inside import postponed, queued_entry
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

unique, finish = tasks.unique, tasks.unique_to_the_end


@pytest.fixture
def sent(monkeypatch):
    """Collect what would be published."""
    return collect_sent(unique.app, monkeypatch)


@pytest.fixture(autouse=True)
def runs_log(monkeypatch, tmp_path):
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))


@pytest.fixture
def body(monkeypatch):
    """Let the next run do something; the runs after it do nothing."""

    def set_body(work):
        def run_once(*args, **facts):
            monkeypatch.setattr(tasks, "body", lambda *args, **facts: "ran")
            return work()

        monkeypatch.setattr(tasks, "body", run_once)

    return set_body


def deliver(message, task=unique, **request):
    """Run a message as the worker does."""
    return receive_sent(task, message, **request)


def id_of_queued(task):
    queued = task.queued("a")
    return queued and queued.id


class TestEnqueue:
    @pytest.mark.parametrize("task", [unique, finish], ids=["start", "finish"])
    def test_a_second_equal_call_returns_the_queued_one(self, cache_alias, sent, task):
        first = task.delay("a")
        second = task.apply_async(kwargs={"key": "a"})
        assert second.id == first.id
        assert len(sent) == 1
        assert task.queued("a").id == first.id

    def test_without_unique_until_both_are_sent(self, sent):
        """Negative control."""
        assert tasks.hold.delay("a").id != tasks.hold.delay("a").id
        assert len(sent) == 2

    def test_another_call_is_sent(self, sent):
        unique.delay("a")
        unique.delay("b")
        assert len(sent) == 2
        assert unique.queued("c") is None

    def test_another_task_on_the_same_lock_is_no_duplicate(self, sent):
        options = {"lock_name": "shared", "lock_on": None}
        unique.apply_async(("a",), lock_options=options)
        finish.apply_async(("a",), lock_options=options)
        unique.apply_async(("b",), lock_options=options)
        assert [message["name"] for message in sent] == [unique.name, finish.name]

    def test_on_duplicate_raise(self, sent):
        first = unique.delay("a")
        with pytest.raises(DuplicateTask) as caught:
            unique.apply_async(("a",), lock_options={"on_duplicate": "raise"})
        assert caught.value.task_id == first.id
        assert caught.value.name == unique.lock("a").name
        before = f"{caught.value.name}: an identical call was sent earlier, as task {first.id}"
        assert str(caught.value) == before
        assert pickle.loads(pickle.dumps(caught.value)).task_id == first.id

    def test_unique_until_in_the_options_of_one_call(self, sent):
        options = {"unique_until": "start"}
        first = tasks.hold.apply_async(("a",), lock_options=options)
        assert tasks.hold.apply_async(("a",), lock_options=options).id == first.id
        tasks.hold.apply_async(("a",))
        assert len(sent) == 2

    def test_threads_at_the_same_moment_send_one(self, cache_alias, sent):
        calls = at_once(unique.delay, ["a"] * 8)
        assert len({call.id for call in calls}) == 1
        assert len(sent) == 1

    def test_the_history_counts_duplicates(self, sent):
        first = unique.delay("a")
        for _ in range(3):
            unique.delay("a")
        row = TaskLockEvent.objects.get()
        assert (row.kind, row.count, row.reason) == ("duplicate", 3, "queued")
        assert row.blocked_by_task_id == first.id
        assert row.key == unique.lock("a").key
        assert row.task == unique.name

    def test_on_commit_duplicates_are_dropped_quietly(
        self, sent, monkeypatch, django_capture_on_commit_callbacks
    ):
        monkeypatch.setattr(unique.__class__, "on_duplicate", "raise")
        hooks = []
        with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
            assert unique.delay_on_commit("a") is None
            assert unique.delay_on_commit("a") is None
            unique.apply_async_on_commit(("a",))
            transaction.on_commit(lambda: hooks.append("the hook after them"))
            assert not sent
        assert len(sent) == 1
        assert hooks

    @pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
    def test_a_failed_publish_frees_the_entry(self, monkeypatch, error):
        def fail(*args, **options):
            raise error

        monkeypatch.setattr(unique.app, "send_task", fail)
        with pytest.raises(error):
            unique.delay("a")
        assert unique.queued("a") is None

    def test_arguments_that_do_not_fit_leave_no_entry(self, sent):
        with pytest.raises(TypeError):
            unique.delay("a", nonsense=1)
        assert unique.queued("a") is None

    def test_a_cache_that_is_down_fails_the_call(self, sent, settings, dead_redis):
        settings.SINGLETASK_CACHE = dead_redis
        with pytest.raises(Exception, match="refused"):
            unique.delay("a")
        assert not sent

    @pytest.mark.parametrize("error", [ConnectionError, KeyboardInterrupt])
    def test_an_entry_whose_reply_was_lost_is_given_back(self, sent, monkeypatch, error):
        def lose(take, *args, **options):
            take(*args, **options)
            raise error

        with monkeypatch.context() as patch:
            inside.answer(patch, "take", lose)
            with pytest.raises(error):
                unique.delay("a")
        assert not sent
        eventually(lambda: unique.queued("a") is None)

    def test_an_eager_call_is_never_queued(self, monkeypatch):
        monkeypatch.setitem(unique.app.conf, "task_always_eager", True)
        assert unique.delay("a").get() == "ran"
        assert unique.delay("a").get() == "ran"
        assert queued_entry(unique, "a").holder() is None


class TestOrder:
    """The sender adds the entry before it publishes, since a worker may be quicker than the sender.

    sender:  publish                              add -> queued, for nobody
    worker:          takes the lock, runs, frees
    """

    @pytest.fixture
    def run_at_once(self, monkeypatch):
        """Run each message before its sender goes on."""

        def send_task(name, args=None, kwargs=None, **options):
            deliver({"args": args, **options})
            return unique.AsyncResult(options["task_id"])

        monkeypatch.setattr(unique.app, "send_task", send_task)

    def test_a_run_that_is_quicker_than_the_sender_leaves_no_entry(self, run_at_once, cache_alias):
        first = unique.delay("a")
        assert unique.queued("a") is None
        assert unique.delay("a").id != first.id

    def test_an_entry_that_is_added_after_the_message_would_stay(self, run_at_once, monkeypatch):
        with monkeypatch.context() as patch:
            entries = inside.send_before_adding_entries(patch)
            first = unique.delay("a")
        for add in entries:
            add()
        assert unique.delay("a").id == first.id


class TestLease:
    @pytest.mark.parametrize(
        ("options", "least"),
        [
            ({}, 3600),
            ({"countdown": 600}, 4200),
            ({"eta": timedelta(hours=2)}, 3600 + 7000),
            ({"countdown": 10**8}, 30 * 24 * 3600 - 1),
        ],
    )
    def test_the_entry_lasts_for_unique_for_and_the_countdown(self, sent, options, least):
        if "eta" in options:
            options = {"eta": datetime.now(UTC) + options["eta"]}
        unique.apply_async(("a",), **options)
        assert least - 40 < queued_entry(unique, "a").remaining() < least + 300

    def test_the_entry_ends_by_itself(self, sent):
        options = {"unique_for": 0.2}
        unique.apply_async(("a",), lock_options=options)
        eventually(lambda: unique.queued("a") is None)
        unique.apply_async(("a",), lock_options=options)
        assert len(sent) == 2


def in_seconds(seconds):
    return datetime.now(UTC) + timedelta(seconds=seconds)


EXPIRES = {
    "a number": lambda: {"expires": 100},
    "a time": lambda: {"expires": in_seconds(100)},
    "another zone": lambda: {"expires": in_seconds(100).astimezone(ZoneInfo("Asia/Tokyo"))},
    "no zone": lambda: {"expires": in_seconds(100).replace(tzinfo=None)},
    "a text": lambda: {"expires": in_seconds(100).isoformat()},
    # It counts from the sending.
    "with a countdown": lambda: {"expires": 100, "countdown": 90},
    "longer than unique_for": lambda: {"expires": 1000, "lock_options": {"unique_for": 105}},
}
"""Calls whose entry lasts for 105 seconds."""


class TestExpires:
    """The entry of a call outlasts its ``expires`` by 5 seconds only: then no worker begins it.

    worker:    receives the call    killed                   expires: an identical call can be sent
    """

    def lasts(self, seconds, task=unique):
        """Return whether the entry lasts so long; a slow machine may have taken 40 seconds."""
        return seconds - 40 < queued_entry(task, "a").remaining() <= seconds

    @pytest.mark.parametrize("options", EXPIRES.values(), ids=EXPIRES)
    def test_the_entry_ends_soon_after_it(self, sent, options, monkeypatch):
        monkeypatch.setitem(unique.app.conf, "timezone", "Asia/Tokyo")
        unique.apply_async(("a",), **options())
        assert self.lasts(105)

    def test_celery_reads_a_time_without_a_zone_as_utc(self, monkeypatch):
        monkeypatch.setitem(unique.app.conf, "timezone", "Asia/Tokyo")
        when = in_seconds(100).replace(tzinfo=None).isoformat()
        headers = {"id": "mine", "task": unique.name, "expires": when}
        message = SimpleNamespace(headers=headers, delivery_info={}, properties={})
        options = {"headers": headers, "body": ((), {}, {}), "decoded": True}
        request = Request(message, app=unique.app, task=unique, **options)
        assert abs((request.expires - in_seconds(100)).total_seconds()) < 60

    def test_that_of_the_task_and_none_for_one_call(self, sent, monkeypatch):
        monkeypatch.setattr(unique, "expires", 100)
        unique.delay("a")
        assert self.lasts(105)
        queued_entry(unique, "a").clear()
        unique.apply_async(("a",), expires=None)
        assert self.lasts(3600)

    def test_that_of_a_schedule(self, sent):
        options = {"expires": 100}
        entry = ScheduleEntry(task=unique.name, args=("a",), schedule=300, options=options)
        Scheduler(unique.app, lazy=True).apply_async(entry)
        assert self.lasts(105)

    @pytest.mark.parametrize("expires", [0, -5, timedelta(seconds=-5)], ids=str)
    def test_a_call_that_has_expired_takes_no_entry_and_replaces_none(self, sent, expires):
        replace = {"on_duplicate": "replace"}
        first = unique.apply_async(("a",), lock_options=replace)
        if isinstance(expires, timedelta):
            expires = datetime.now(UTC) + expires
        expired = unique.apply_async(("a",), expires=expires, lock_options=replace)
        assert [message["task_id"] for message in sent] == [first.id, expired.id]
        assert unique.queued("a").id == first.id
        assert not {"queued", "ticket"} & header_of(sent[1]).keys()
        assert deliver(sent[0]) == "ran"

    @pytest.mark.parametrize(
        ("options", "left", "seconds"), [({}, 50, 55), ({"expires": 200}, 50, 205), ({}, -1, 0)]
    )
    def test_a_retry_keeps_it_or_has_another_one(self, sent, body, options, left, seconds):
        body(lambda: finish.retry(countdown=1, **options))
        finish.apply_async(("a",), expires=100)
        with pytest.raises(Retry):
            deliver(sent[0], finish, expires=in_seconds(left).isoformat())
        assert self.lasts(seconds, finish) if seconds else finish.queued("a") is None

    def test_a_message_that_goes_back_to_the_broker_keeps_it(self, sent, body, monkeypatch):
        body(reject_to_the_queue)
        monkeypatch.setattr(finish.__class__, "acks_late", True)
        finish.apply_async(("a",), expires=100)
        with pytest.raises(Reject):
            deliver(sent[0], finish, expires=in_seconds(50).isoformat())
        assert self.lasts(55, finish)

    def test_a_postponed_call_keeps_it(self, sent):
        unique.apply_async(("a",), expires=100, lock_options={"on_conflict": "requeue"})
        expires = in_seconds(50).isoformat()
        with held_by("another", task=unique), postponed():
            deliver(sent[0], expires=expires)
        assert sent[1]["expires"] == expires
        assert self.lasts(105)

    def test_a_run_may_last_longer(self, sent, body):
        """The lease of the entry is that of a run."""
        seen = []
        body(lambda: seen.append(finish.queued("a").id))
        first = finish.apply_async(("a",), expires=100, lock_options={"lock_timeout": 1000})
        deliver(sent[0], finish, expires=in_seconds(-50).isoformat())
        assert seen == [first.id]


def reject_to_the_queue():
    raise Reject(requeue=True)


class TestSuccessor:
    """A body sends a call with its own entry, such as the next page: the entry passes to it."""

    def test_it_is_sent_with_the_entry(self, cache_alias, sent, body):
        calls = []
        body(lambda: calls.append(finish.delay("a")))
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert [message["task_id"] for message in sent] == [first.id, calls[0].id]
        assert finish.queued("a").id == calls[0].id
        assert finish.delay("a").id == calls[0].id
        assert deliver(sent[1], finish) == "ran"
        assert finish.queued("a") is None

    def test_a_second_one_is_a_duplicate_of_the_first(self, sent, body):
        ids = []
        body(lambda: ids.extend([finish.delay("a").id, finish.delay("a").id]))
        finish.delay("a")
        deliver(sent[0], finish)
        assert ids == [sent[1]["task_id"]] * 2
        assert len(sent) == 2

    def test_a_call_from_another_thread_is_a_duplicate_of_the_run(self, sent, body):
        calls = []
        body(lambda: calls.append(elsewhere(finish.delay, "a")))
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert [call.id for call in calls] == [first.id]

    def test_a_call_from_a_fork_is_a_duplicate_of_the_run(self, sent, body):
        def fork():
            pid = os.fork()
            if not pid:
                is_duplicate = finish.delay("a").id == sent[0]["task_id"]
                os._exit(not is_duplicate)
            seen.append(os.waitpid(pid, 0)[1])
            seen.append(queued_entry(finish, "a").holder().pid)

        seen = []
        body(fork)
        finish.delay("a")
        deliver(sent[0], finish)
        assert seen == [0, os.getpid()]

    @pytest.mark.parametrize("how", ["skipped", "revoked"])
    def test_one_that_has_ended_before_the_run_leaves_no_entry(self, sent, body, how):
        """Therefore the entry passes before the message is published.

        run:          publishes the next page .......................... ends
        next page:                             is skipped: frees the entry
        """

        body(lambda: self.send_one_that_ends(sent, how))
        finish.delay("a")
        deliver(sent[0], finish)
        assert queued_entry(finish, "a").holder() is None

    def send_one_that_ends(self, sent, how):
        finish.delay("a")
        if how == "skipped":
            assert elsewhere(deliver, sent[1], finish) == "skipped"
        else:
            revoke(sent[1], finish)
            wait_for_debts()

    @pytest.mark.parametrize("how", ["skipped", "revoked"])
    def test_control_an_entry_that_passes_at_the_end_of_the_run_stays(
        self, sent, body, how, monkeypatch
    ):
        inside.pass_entries_at_the_end(monkeypatch)
        body(lambda: self.send_one_that_ends(sent, how))
        finish.delay("a")
        deliver(sent[0], finish)
        assert queued_entry(finish, "a").holder().task_id == sent[1]["task_id"]

    def test_it_keeps_the_entry_if_the_run_fails(self, sent, body):
        def send_and_fail():
            finish.delay("a")
            raise ZeroDivisionError

        body(send_and_fail)
        finish.delay("a")
        with pytest.raises(ZeroDivisionError):
            deliver(sent[0], finish)
        assert finish.queued("a").id == sent[1]["task_id"]
        deliver(sent[1], finish)
        assert finish.queued("a") is None

    @pytest.mark.parametrize("order", ["retry first", "retry last"])
    def test_a_retry_of_the_run_leaves_the_entry_to_it(self, sent, body, order):
        def send_and_retry():
            retry = {"countdown": 0, "throw": False}
            if order == "retry first":
                finish.retry(**retry)
            finish.delay("a")
            if order == "retry last":
                finish.retry(**retry)

        body(send_and_retry)
        first = finish.delay("a")
        deliver(sent[0], finish)
        (successor,) = [message for message in sent if message["task_id"] != first.id]
        (retry,) = [message for message in sent[1:] if message["task_id"] == first.id]
        assert finish.queued("a").id == successor["task_id"]
        deliver(retry, finish, retries=1)
        assert finish.queued("a").id == successor["task_id"]
        deliver(successor, finish)
        assert finish.queued("a") is None

    def test_one_that_on_skip_sends_takes_the_entry_of_the_skipped_call(self, sent, monkeypatch):
        def send_later(conflict, *args):
            return unique.apply_async(args, countdown=60).id

        monkeypatch.setattr(unique, "on_skip", send_later)
        first = unique.delay("a")
        with held_by("another", task=unique):
            successor = deliver(sent[0])
        assert [message["task_id"] for message in sent] == [first.id, successor]
        assert unique.queued("a").id == successor

    def test_an_entry_that_is_not_that_of_the_run_stays(self, sent, body):
        ids = []

        def send():
            queued_entry(finish, "a").clear()
            elsewhere(finish.delay, "a")
            ids.append(finish.delay("a").id)

        body(send)
        finish.delay("a")
        deliver(sent[0], finish)
        assert ids == [sent[1]["task_id"]]
        assert finish.queued("a").id == sent[1]["task_id"]

    def test_a_publishing_that_fails_gives_the_entry_back_to_the_run(self, sent, body, monkeypatch):
        seen = []

        def fail(*args, **options):
            seen.append(finish.queued("a").id)
            raise OSError("the broker is away")

        def send_and_go_on():
            with monkeypatch.context() as patch:
                patch.setattr(finish.app, "send_task", fail)
                with pytest.raises(OSError, match="away"):
                    finish.delay("a")
            holder = queued_entry(finish, "a").holder()
            seen.append((holder.task_id, holder.pid))
            finish.delay("a")

        body(send_and_go_on)
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert seen[0] != first.id
        assert seen[1] == (first.id, os.getpid())
        assert finish.queued("a").id == sent[1]["task_id"]

    @pytest.mark.parametrize("fails", [1, 2])
    def test_a_cache_that_goes_down_leaves_no_entry(self, sent, body, monkeypatch, fails):
        """It fails when the entry passes to the call, or back to the run."""
        requests = []

        def fail(replace, *args):
            requests.append(args)
            if len(requests) == fails:
                raise LockUnavailable("down")
            return replace(*args)

        def not_published(*args, **options):
            raise OSError("the broker is away")

        def send_and_go_on():
            inside.answer(monkeypatch, "replace", fail)
            monkeypatch.setattr(finish.app, "send_task", not_published)
            with pytest.raises(LockUnavailable if fails == 1 else OSError):
                finish.delay("a")

        finish.delay("a")
        body(send_and_go_on)
        deliver(sent[0], finish)
        assert len(requests) == fails
        eventually(lambda: queued_entry(finish, "a").holder() is None)

    def test_a_signal_after_it_took_over_the_entry_gives_the_entry_back(self, sent, body):
        """
        body:   sends its successor    soft time limit: goes on
        entry:  of the successor                                 of the run again
        """

        def send_and_go_on():
            inside.signal_after_taking_over(finish, SoftTimeLimitExceeded())
            with pytest.raises(SoftTimeLimitExceeded):
                finish.delay("a")
            seen.append(queued_entry(finish, "a").holder().pid)

        seen = []
        first = finish.delay("a")
        body(send_and_go_on)
        deliver(sent[0], finish)
        assert seen == [os.getpid()]
        assert [message["task_id"] for message in sent] == [first.id]
        assert finish.queued("a") is None


class TestAwaited:
    """A call whose end others wait for is sent, and adds the entry if there is none."""

    @pytest.mark.parametrize("options", AWAITED, ids=lambda options: next(iter(options)))
    def test_an_awaited_call_is_always_sent(self, sent, options):
        first = unique.delay("a")
        second = unique.apply_async(("a",), **options)
        assert second.id != first.id
        assert len(sent) == 2
        assert unique.queued("a").id == first.id
        assert "queued" not in header_of(sent[1])

    def test_an_awaited_call_stops_equal_ones(self, sent):
        unique.apply_async(("a",), task_id="mine")
        assert unique.delay("a").id == "mine"
        assert len(sent) == 1

    # Celery 5.4 with a newer client of Redis.
    @pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")
    def test_equal_members_of_canvases_are_all_sent(self, sent):
        members = [unique.si("a")] * 3
        group(members).apply_async()
        chord(members, tasks.plain.si("b")).apply_async()
        assert len([message for message in sent if message["name"] == unique.name]) == 6
        chain(members).apply_async()
        assert len(sent[-1]["chain"]) == 2


class TestStart:
    def test_the_entry_is_freed_once_the_run_has_its_lock(self, sent, body, cache_alias):
        seen = []
        body(lambda: seen.append((unique.queued("a"), unique.lock("a").locked())))
        unique.delay("a")
        deliver(sent[0])
        assert seen == [(None, True)]

    @pytest.mark.parametrize(
        "options",
        [{}, {"on_conflict": "raise"}, {"on_conflict": "requeue", "lock_wait": 0}],
        ids=str,
    )
    def test_a_run_without_its_lock_frees_the_entry(self, sent, options):
        unique.apply_async(("a",), lock_options=options)
        ends = pytest.raises(LockConflict, match="is held") if options else nullcontext()
        with held_by("another", task=unique), ends:
            assert deliver(sent[0]) == "skipped"
        assert unique.queued("a") is None

    @pytest.mark.parametrize(
        "options",
        [
            {"on_conflict": "wait"},
            {"on_conflict": "later"},
            {"on_conflict": ["skip"]},
            {"lock_timeout": -1},
            {"lock_timeout": {}},
        ],
    )
    def test_a_call_that_cannot_be_delivered_frees_the_entry(self, sent, options):
        """As if a worker of another version had sent it, or the system check were silenced."""
        unique.delay("a")
        header_of(sent[0])["options"] = options
        with pytest.raises((TypeError, ValueError), match=r"^(on_conf|lock_time).* in lock_opt"):
            deliver(sent[0])
        eventually(lambda: unique.queued("a") is None)

    def test_a_task_with_a_wrong_option_frees_the_entry(self, sent, monkeypatch):
        unique.delay("a")
        monkeypatch.setattr(unique, "lock_wait", -1)
        unique.bind(unique.app)  # as in a process that has not used it yet
        with pytest.raises(ValueError, match="lock_wait of"):
            deliver(sent[0])
        monkeypatch.undo()
        eventually(lambda: unique.queued("a") is None)

    def test_a_postponed_call_is_still_queued(self, sent):
        first = unique.apply_async(("a",), lock_options={"on_conflict": "requeue"})
        with held_by("another", task=unique), postponed():
            deliver(sent[0])
        assert unique.queued("a").id == first.id
        assert unique.delay("a").id == first.id
        deliver(sent[1])
        assert unique.queued("a") is None

    @pytest.mark.parametrize("task", [unique, finish], ids=["start", "finish"])
    def test_the_entry_of_another_call_stays(self, sent, task):
        """The entry of the delivered call has ended meanwhile."""
        task.delay("a")
        queued_entry(task, "a").clear()
        second = task.delay("a")
        deliver(sent[0], task)
        assert task.queued("a").id == second.id

    def test_a_cache_that_goes_down_does_not_fail_the_run(self, sent, monkeypatch, caplog):
        unique.delay("a")
        failed = []

        def fail_once(release, *args):
            if not failed:
                failed.append(args)
                raise LockUnavailable("down")
            return release(*args)

        inside.answer(monkeypatch, "release", fail_once)
        assert deliver(sent[0]) == "ran"
        assert "could not be released; trying again" in caplog.text
        eventually(lambda: unique.queued("a") is None)


def retry_and_go_on():
    with suppress(Retry):
        finish.retry(countdown=1)


def retry_under_another_lock():
    finish.retry(countdown=1, lock_options={"lock_name": "other", "lock_on": None})


def reject():
    raise Reject


ENDS = {
    "an error": (lambda: 1 / 0, False),
    "a retry": (lambda: finish.retry(countdown=1), True),
    "a retry that is not raised": (lambda: finish.retry(countdown=1, throw=False), True),
    "a retry that is caught": (retry_and_go_on, True),
    "a retry with equal arguments": (lambda: finish.retry(args=("a",), countdown=1), True),
    "a retry with other arguments": (lambda: finish.retry(args=("b",), countdown=1), False),
    "a retry under another lock": (retry_under_another_lock, False),
    "rejected": (reject, False),
    "back to the broker": (reject_to_the_queue, True),
}
"""How a body ends, and whether its call is tried again, with the same lock."""


class TestFinish:
    def test_the_entry_lasts_as_long_as_the_run_and_is_a_short_lease(self, sent, body, cache_alias):
        seen = []
        body(
            lambda: seen.append((id_of_queued(finish), queued_entry(finish, "a").holder().timeout))
        )
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert seen == [(first.id, 4)]
        assert finish.queued("a") is None

    def test_the_entry_is_freed_after_the_lock(self, sent, monkeypatch):
        """In the other order a call that is sent at once would be skipped."""
        freed = []

        def note(release, key, *rest):
            freed.append(key)
            return release(key, *rest)

        inside.answer(monkeypatch, "release", note)
        finish.delay("a")
        deliver(sent[0], finish)
        assert freed == [finish.lock("a").key, queued_entry(finish, "a").key]

    def test_the_entry_lasts_until_the_last_retry_has_ended(self, sent):
        first = finish.delay("a", 0, 2)
        for number in range(2):
            with pytest.raises(Retry):
                deliver(sent[number], finish, retries=number)
            assert not finish.lock("a", 0, 2).locked()
            assert finish.delay("a").id == first.id
            assert 3600 - 60 < queued_entry(finish, "a").remaining() <= 3601
        assert deliver(sent[2], finish, retries=2) == "ran"
        assert finish.queued("a") is None

    def test_the_entry_of_a_retry_is_queued_again_before_the_lock_is_free(self, sent, monkeypatch):
        """Otherwise the next try could begin first, and find the entry of this run."""
        pids = []

        def look(release, key, value, new, until):
            if not new:  # the lock
                pids.append(queued_entry(finish, "a").holder().pid)
            return release(key, value, new, until)

        inside.answer(monkeypatch, "release", look)
        finish.delay("a", 0, 2)
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert pids == [0]

    @pytest.mark.parametrize(("end", "stays"), ENDS.values(), ids=ENDS)
    def test_the_entry_stays_if_the_call_is_tried_again(self, sent, body, monkeypatch, end, stays):
        monkeypatch.setattr(finish.__class__, "acks_late", True)
        body(end)
        first = finish.delay("a")
        with suppress(Retry, Reject, ZeroDivisionError):
            deliver(sent[0], finish)
        assert id_of_queued(finish) == (first.id if stays else None)
        for retry in sent[1:]:
            assert ("queued" in header_of(retry)) == stays

    def test_a_redelivery_that_is_dropped_leaves_the_entry_to_the_retry(self, sent, monkeypatch):
        stored = SimpleNamespace(state="RETRY", result=None)
        first = finish.delay("a", 0, 2)
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        monkeypatch.setattr(finish.__class__, "AsyncResult", lambda *args: stored)
        header_of(sent[0]).update(inside.READS)
        with pytest.raises(Ignore):
            deliver(sent[0], finish)
        assert queued_entry(finish, "a").holder().task_id == first.id

    def test_an_entry_that_has_ended_meanwhile_is_added_again(self, sent, monkeypatch):
        seen = []
        monkeypatch.setattr(tasks, "body", lambda *args: seen.append(finish.queued("a").id))
        first = finish.delay("a")
        queued_entry(finish, "a").clear()
        deliver(sent[0], finish)
        assert seen == [first.id]

    def test_an_entry_that_is_gone_at_the_end_is_logged(self, sent, monkeypatch, caplog):
        monkeypatch.setattr(tasks, "body", lambda *args: queued_entry(finish, "a").clear())
        finish.delay("a")
        deliver(sent[0], finish)
        assert (
            "the cache lost this entry, so duplicates of the running call are possible"
            in caplog.text
        )
        assert not TaskLockEvent.objects.filter(outcome="lost").exists()

    def test_a_cache_that_goes_down_at_the_start_does_not_fail_the_run(
        self, sent, monkeypatch, caplog
    ):
        finish.delay("a")
        with monkeypatch.context() as patch:
            inside.answer(patch, "replace", refuse)
            assert deliver(sent[0], finish) == "ran"
        assert "duplicates of this call are not stopped" in caplog.text
        eventually(lambda: finish.queued("a") is None)

    def test_a_cache_that_goes_down_before_a_retry_does_not_fail_it(
        self, sent, body, monkeypatch, caplog
    ):
        def go_down_and_retry():
            inside.answer(monkeypatch, "change", refuse)
            finish.retry(countdown=1)

        body(go_down_and_retry)
        finish.delay("a")
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert "duplicates of the next try are not stopped" in caplog.text
        eventually(lambda: finish.queued("a") is None)

    def test_a_soft_time_limit_after_a_retry_was_sent_does_not_replace_it(
        self, sent, body, monkeypatch, caplog
    ):
        limits = [SoftTimeLimitExceeded()]

        def interrupt_once(release, *args):
            if limits:
                raise limits.pop()
            return release(*args)

        def retry():
            inside.answer(monkeypatch, "release", interrupt_once)
            finish.retry(countdown=1)

        body(retry)
        finish.delay("a")
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert not finish.lock("a").locked()
        assert caplog.text.count("came after the body had ended") == 1

    @pytest.mark.parametrize(("task", "request_"), [(unique, "release"), (finish, "replace")])
    def test_a_soft_time_limit_at_the_start_reaches_the_task(
        self, sent, monkeypatch, task, request_
    ):
        def interrupt(*args):
            raise SoftTimeLimitExceeded

        task.delay("a")
        with monkeypatch.context() as patch:
            inside.answer(patch, request_, interrupt)
            with pytest.raises(SoftTimeLimitExceeded):
                deliver(sent[0], task)
        eventually(lambda: task.queued("a") is None)
        eventually(lambda: not task.lock("a").locked())

    @pytest.mark.parametrize(("pid", "stops"), [(2**22 - 1, False), (os.getpid(), True)])
    def test_the_entry_of_a_run_stops_equal_calls_while_it_lives(self, sent, pid, stops):
        first = finish.delay("a")
        entry = queued_entry(finish, "a")
        inside.write(entry, replace(inside.holder_of(entry, finish, first.id), pid=pid).encode())
        assert id_of_queued(finish) == (first.id if stops else None)
        assert (finish.delay("a").id == first.id) == stops


def revoke(message, task=unique):
    inside.discard(task, message["headers"], message["task_id"])


class TestDiscard:
    def test_a_discarded_call_is_freed_in_the_background(self, sent, cache_alias):
        unique.delay("a")
        revoke(sent[0])
        eventually(lambda: unique.queued("a") is None)

    def test_no_other_call_is_freed(self, sent):
        unique.delay("a")
        queued_entry(unique, "a").clear()
        second = unique.delay("a")
        revoke(sent[0])
        inside.discard(unique, {}, second.id)
        wait_for_debts()
        assert unique.queued("a").id == second.id


@pytest.mark.parametrize(
    ("task", "sending", "running"), [(unique, 1, 3), (finish, 1, 4), (tasks.hold, 0, 2)]
)
def test_how_many_requests_the_cache_gets(sent, monkeypatch, task, sending, running):
    """A queued call costs two: when it is sent, and when it starts or ends."""
    for _ in range(2):
        task.delay("a")  # connects, and loads the scripts
    deliver(sent.pop(), task)
    trips = inside.collect_trips(monkeypatch)
    for number in (1, 2):  # with "unique_until" the second one is a duplicate
        task.delay("a")
        assert len(trips) == number * sending
    deliver(sent[-1], task)
    assert len(trips) == 2 * sending + running


def test_an_eager_call_with_the_headers_of_a_message_keeps_its_entry(sent):
    first = unique.delay("a")
    unique.apply(("a",), task_id=first.id, headers=sent[0]["headers"])
    assert unique.queued("a").id == first.id
