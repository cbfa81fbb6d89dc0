"""What stops an equal call at enqueue, and what lets it through again."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import pytest
from celery import chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.worker.request import Request
from django.db import connections, transaction

from django_singletask import DuplicateTask, TaskLock, clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.holder import Holder
from django_singletask.locks.address import Run
from django_singletask.locks.keys import QUEUED, name_key
from django_singletask.locks.lease import Lease, Postponed
from django_singletask.models import TaskLockEvent
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.base import Store
from django_singletask.task.header import HEADER, READS
from django_singletask.task.unique import LATE, QueuedCall, discard, seconds_until
from tests.deliveries import AWAITED, held_by, receive, wait_for_debts
from tests.entries import eventually
from tests.proxy import Interposed
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

unique, finish = tasks.unique, tasks.unique_to_the_end


@pytest.fixture
def sent(monkeypatch):
    """Collect what would be published."""
    messages = []

    def send_task(name, args=None, kwargs=None, **options):
        messages.append(SimpleNamespace(name=name, args=args, kwargs=kwargs, **options))
        return unique.AsyncResult(options["task_id"])

    monkeypatch.setattr(unique.app, "send_task", send_task)
    return messages


@pytest.fixture(autouse=True)
def runs_log(monkeypatch, tmp_path):
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))


def entry_of(task, *args):
    """Return a TaskLock that reads and clears the entry of a queued call."""
    return TaskLock(task.lock(*args)._lock_key.beside(QUEUED, task.name))


def deliver(message, task=unique, **request):
    """Run a message as the worker does."""
    header = message.headers[HEADER]
    return receive(task, *message.args, task_id=message.task_id, header=header, **request)


def refuse(*args):
    raise LockUnavailable("down")


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
        assert [message.name for message in sent] == [unique.name, finish.name]

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
        barrier = threading.Barrier(8)
        ids = []

        def send():
            barrier.wait()
            ids.append(unique.delay("a").id)
            connections.close_all()
            close_stores()

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(ids)) == 1
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

    def test_a_failed_publish_frees_the_entry(self, monkeypatch):
        def fail(*args, **options):
            raise OSError("the broker is away")

        monkeypatch.setattr(unique.app, "send_task", fail)
        with pytest.raises(OSError, match="away"):
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

    def test_an_entry_whose_reply_was_lost_is_given_back(self, sent, monkeypatch):
        store = get_store("redis")
        take = store.take

        def lose(*args, **options):
            take(*args, **options)
            raise ConnectionError("lost")

        monkeypatch.setattr(store, "take", lose)
        with pytest.raises(ConnectionError):
            unique.delay("a")
        eventually(lambda: unique.queued("a") is None)

    def test_a_signal_between_the_entry_and_the_message_leaves_no_entry(self, sent, monkeypatch):
        take = Lease.take

        def interrupt(lease):
            take(lease)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Lease, "take", interrupt)
            with pytest.raises(KeyboardInterrupt):
                unique.delay("a")
        assert not sent
        eventually(lambda: unique.queued("a") is None)

    def test_an_eager_call_is_never_queued(self, monkeypatch):
        monkeypatch.setitem(unique.app.conf, "task_always_eager", True)
        assert unique.delay("a").get() == "ran"
        assert unique.delay("a").get() == "ran"
        assert entry_of(unique, "a").holder() is None


class TestOrder:
    """The sender adds the entry before it publishes, since a worker may be quicker than the sender.

    sender:  publish                              add -> queued, for nobody
    worker:          takes the lock, runs, frees
    """

    @pytest.fixture
    def run_at_once(self, monkeypatch):
        """Run each message before its sender goes on."""

        def send_task(name, args=None, kwargs=None, **options):
            deliver(SimpleNamespace(args=args, **options))
            return unique.AsyncResult(options["task_id"])

        monkeypatch.setattr(unique.app, "send_task", send_task)

    def test_a_run_that_is_quicker_than_the_sender_leaves_no_entry(self, run_at_once, cache_alias):
        first = unique.delay("a")
        assert unique.queued("a") is None
        assert unique.delay("a").id != first.id

    def test_an_entry_that_is_added_after_the_message_would_stay(self, run_at_once, monkeypatch):
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(QueuedCall, "add", lambda *facts: calls.append(facts))
            first = unique.delay("a")
        for call, delay in calls:
            call.add(delay)
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
        assert least - 2 < entry_of(unique, "a").remaining() < least + 300

    def test_the_entry_ends_by_itself(self, sent):
        options = {"unique_for": 0.2}
        unique.apply_async(("a",), lock_options=options)
        eventually(lambda: unique.queued("a") is None)
        unique.apply_async(("a",), lock_options=options)
        assert len(sent) == 2

    @pytest.mark.parametrize(
        ("when", "seconds"),
        [
            (lambda now: 5, 5),
            (lambda now: -5, -5),
            (lambda now: now - timedelta(hours=1), -3600),
            (lambda now: (now + timedelta(hours=1)).isoformat(), 3600),
            (lambda now: (now + timedelta(hours=1)).replace(tzinfo=None), 3600),
        ],
    )
    def test_the_seconds_until_a_time(self, when, seconds):
        assert seconds - 60 <= seconds_until(when(datetime.now(UTC))) <= seconds


def in_seconds(seconds):
    return datetime.now(UTC) + timedelta(seconds=seconds)


EXPIRES = {
    "a number": lambda: 100,
    "a time": lambda: in_seconds(100),
    "a time in another zone": lambda: in_seconds(100).astimezone(ZoneInfo("Asia/Tokyo")),
    "a time without a zone": lambda: in_seconds(100).replace(tzinfo=None),
    "a text": lambda: in_seconds(100).isoformat(),
}
"""What Celery takes as ``expires``."""


class TestExpires:
    """The entry of a call outlasts its ``expires`` by :data:`LATE` only: then no worker begins it.

    worker:    receives the call    killed                   expires: an identical call can be sent
    """

    def lasts(self, seconds, task=unique):
        """Return whether the entry lasts so long; a slow machine may have taken a minute."""
        return seconds - 60 < entry_of(task, "a").remaining() <= seconds

    @pytest.mark.parametrize("expires", EXPIRES.values(), ids=EXPIRES)
    def test_the_entry_ends_soon_after_it(self, sent, expires, monkeypatch):
        monkeypatch.setitem(unique.app.conf, "timezone", "Asia/Tokyo")
        unique.apply_async(("a",), expires=expires())
        assert self.lasts(100 + LATE)

    def test_control_without_it_the_entry_lasts_for_unique_for(self, sent, monkeypatch):
        monkeypatch.setattr("django_singletask.task.unique.LATE", 10_000)
        unique.apply_async(("a",), expires=100)
        assert not self.lasts(100 + LATE)
        assert self.lasts(3600)

    def test_celery_reads_a_time_without_a_zone_as_utc(self, monkeypatch):
        monkeypatch.setitem(unique.app.conf, "timezone", "Asia/Tokyo")
        when = EXPIRES["a time without a zone"]()
        headers = {"id": "mine", "task": unique.name, "expires": when.isoformat()}
        message = SimpleNamespace(headers=headers, delivery_info={}, properties={})
        options = {"headers": headers, "body": ((), {}, {}), "decoded": True}
        request = Request(message, app=unique.app, task=unique, **options)
        assert abs((request.expires - in_seconds(0)).total_seconds() - seconds_until(when)) < 60

    def test_unique_for_is_still_the_longest_time(self, sent):
        unique.apply_async(("a",), expires=1000, lock_options={"unique_for": 100})
        assert self.lasts(100)

    def test_it_counts_from_the_sending_and_not_from_the_countdown(self, sent):
        unique.apply_async(("a",), countdown=500, expires=600)
        assert self.lasts(600 + LATE)

    def test_that_of_the_task(self, sent, monkeypatch):
        monkeypatch.setattr(unique, "expires", 100)
        unique.delay("a")
        assert self.lasts(100 + LATE)

    def test_none_for_one_call(self, sent, monkeypatch):
        monkeypatch.setattr(unique, "expires", 100)
        unique.apply_async(("a",), expires=None)
        assert self.lasts(3600)

    def test_that_of_a_schedule(self, sent):
        options = {"expires": 100}
        entry = ScheduleEntry(task=unique.name, args=("a",), schedule=300, options=options)
        Scheduler(unique.app, lazy=True).apply_async(entry)
        assert self.lasts(100 + LATE)

    @pytest.mark.parametrize("expires", [0, -5, timedelta(seconds=-5)], ids=str)
    def test_a_call_that_has_expired_takes_no_entry_and_replaces_none(self, sent, expires):
        replace = {"on_duplicate": "replace"}
        first = unique.apply_async(("a",), lock_options=replace)
        if isinstance(expires, timedelta):
            expires = datetime.now(UTC) + expires
        expired = unique.apply_async(("a",), expires=expires, lock_options=replace)
        assert [message.task_id for message in sent] == [first.id, expired.id]
        assert unique.queued("a").id == first.id
        assert not {"queued", "ticket"} & sent[1].headers[HEADER].keys()
        assert deliver(sent[0]) == "ran"

    def test_a_retry_keeps_it(self, sent):
        finish.apply_async(("a", 0, 1), expires=100)
        with pytest.raises(Retry):
            deliver(sent[0], finish, expires=in_seconds(50).isoformat())
        assert self.lasts(50 + LATE, finish)

    def test_a_retry_with_another_one(self, sent, monkeypatch):
        def body(*args):
            raise finish.retry(countdown=1, expires=200)

        monkeypatch.setattr(tasks, "body", body)
        finish.apply_async(("a",), expires=100)
        with pytest.raises(Retry):
            deliver(sent[0], finish, expires=in_seconds(50).isoformat())
        assert self.lasts(200 + LATE, finish)

    def test_a_retry_that_has_expired_frees_the_entry(self, sent):
        finish.apply_async(("a", 0, 1), expires=100)
        with pytest.raises(Retry):
            deliver(sent[0], finish, expires=in_seconds(-1).isoformat())
        assert finish.queued("a") is None

    def test_a_message_that_goes_back_to_the_broker_keeps_it(self, sent, monkeypatch):
        def body(*args):
            raise Reject(requeue=True)

        monkeypatch.setattr(tasks, "body", body)
        monkeypatch.setattr(finish.__class__, "acks_late", True)
        finish.apply_async(("a",), expires=100)
        with pytest.raises(Reject):
            deliver(sent[0], finish, expires=in_seconds(50).isoformat())
        assert self.lasts(50 + LATE, finish)

    def test_a_postponed_call_keeps_it(self, sent):
        unique.apply_async(("a",), expires=100, lock_options={"on_conflict": "requeue"})
        expires = in_seconds(50).isoformat()
        with held_by("another", task=unique), pytest.raises(Postponed):
            deliver(sent[0], expires=expires)
        assert sent[1].expires == expires
        assert self.lasts(100 + LATE)

    def test_a_run_may_last_longer(self, sent, monkeypatch):
        """The lease of the entry is that of a run."""
        seen = []
        monkeypatch.setattr(tasks, "body", lambda *args: seen.append(finish.queued("a").id))
        first = finish.apply_async(("a",), expires=100, lock_options={"lock_timeout": 1000})
        deliver(sent[0], finish, expires=in_seconds(-50).isoformat())
        assert seen == [first.id]


class TestSuccessor:
    """A body sends a call with its own entry, such as the next page: the entry passes to it."""

    @pytest.fixture
    def body(self, monkeypatch):
        """Let the next run do something; the runs after it do nothing."""

        def set_body(work):
            def run_once(*args, **facts):
                monkeypatch.setattr(tasks, "body", lambda *args, **facts: "ran")
                return work()

            monkeypatch.setattr(tasks, "body", run_once)

        return set_body

    def test_it_is_sent_with_the_entry(self, cache_alias, sent, body):
        calls = []
        body(lambda: calls.append(finish.delay("a")))
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert [message.task_id for message in sent] == [first.id, calls[0].id]
        assert finish.queued("a").id == calls[0].id
        assert finish.delay("a").id == calls[0].id
        assert deliver(sent[1], finish) == "ran"
        assert finish.queued("a") is None

    def test_control_without_the_entry_of_the_run_it_would_be_lost(self, sent, body, monkeypatch):
        monkeypatch.setattr(QueuedCall, "_take_over", lambda *args: False)
        body(lambda: finish.delay("a"))
        finish.delay("a")
        deliver(sent[0], finish)
        assert len(sent) == 1

    def test_a_second_one_is_a_duplicate_of_the_first(self, sent, body):
        ids = []
        body(lambda: ids.extend([finish.delay("a").id, finish.delay("a").id]))
        finish.delay("a")
        deliver(sent[0], finish)
        assert ids == [sent[1].task_id] * 2
        assert len(sent) == 2

    def test_a_call_from_another_thread_is_a_duplicate_of_the_run(self, sent, body):
        ids = []

        def send():
            ids.append(finish.delay("a").id)
            connections.close_all()
            close_stores()

        def in_a_thread():
            thread = threading.Thread(target=send)
            thread.start()
            thread.join()

        body(in_a_thread)
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert ids == [first.id]

    def test_a_call_from_a_fork_is_a_duplicate_of_the_run(self, sent, body):
        def fork():
            pid = os.fork()
            if not pid:
                is_duplicate = finish.delay("a").id == sent[0].task_id
                os._exit(not is_duplicate)
            seen.append(os.waitpid(pid, 0)[1])
            seen.append(entry_of(finish, "a").holder().pid)

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

        def send_and_end():
            finish.delay("a")
            self.end(sent[1], how)

        body(send_and_end)
        finish.delay("a")
        deliver(sent[0], finish)
        assert entry_of(finish, "a").holder() is None

    def end(self, message, how):
        """Let a message end as another process does."""

        def work():
            if how == "revoked":
                discard(message.headers, message.task_id, finish.name)
                wait_for_debts()
            else:
                assert deliver(message, finish) == "skipped"
            connections.close_all()
            close_stores()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    @pytest.mark.parametrize("how", ["skipped", "revoked"])
    def test_control_an_entry_that_passes_at_the_end_of_the_run_stays(
        self, sent, body, how, monkeypatch
    ):
        def pass_at_the_end(call, of_sender, blocker):
            until = clock.now() + 60
            leave = of_sender.leave
            monkeypatch.setattr(
                of_sender, "give_back", lambda **_: leave(new=call.lease.value, until=until)
            )
            call.lease.held = True
            return True

        def send_and_end():
            finish.delay("a")
            self.end(sent[1], how)

        monkeypatch.setattr(QueuedCall, "_take_over", pass_at_the_end)
        body(send_and_end)
        finish.delay("a")
        deliver(sent[0], finish)
        assert entry_of(finish, "a").holder().task_id == sent[1].task_id

    def test_it_keeps_the_entry_if_the_run_fails(self, sent, body):
        def send_and_fail():
            finish.delay("a")
            raise ZeroDivisionError

        body(send_and_fail)
        finish.delay("a")
        with pytest.raises(ZeroDivisionError):
            deliver(sent[0], finish)
        assert finish.queued("a").id == sent[1].task_id
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
        (successor,) = [message for message in sent if message.task_id != first.id]
        (retry,) = [message for message in sent[1:] if message.task_id == first.id]
        assert finish.queued("a").id == successor.task_id
        deliver(retry, finish, retries=1)
        assert finish.queued("a").id == successor.task_id
        deliver(successor, finish)
        assert finish.queued("a") is None

    def test_one_that_on_skip_sends_takes_the_entry_of_the_skipped_call(self, sent, monkeypatch):
        def send_later(conflict, *args):
            return unique.apply_async(args, countdown=60).id

        monkeypatch.setattr(unique, "on_skip", send_later)
        first = unique.delay("a")
        with held_by("another", task=unique):
            successor = deliver(sent[0])
        assert [message.task_id for message in sent] == [first.id, successor]
        assert unique.queued("a").id == successor

    def test_an_entry_that_is_not_that_of_the_run_stays(self, sent, body):
        ids = []

        def send():
            entry_of(finish, "a").clear()
            thread = threading.Thread(target=send_elsewhere)
            thread.start()
            thread.join()
            ids.append(finish.delay("a").id)

        def send_elsewhere():
            finish.delay("a")
            connections.close_all()
            close_stores()

        body(send)
        finish.delay("a")
        deliver(sent[0], finish)
        assert ids == [sent[1].task_id]
        assert finish.queued("a").id == sent[1].task_id

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
            holder = entry_of(finish, "a").holder()
            seen.append((holder.task_id, holder.pid))
            finish.delay("a")

        body(send_and_go_on)
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert seen[0] != first.id
        assert seen[1] == (first.id, os.getpid())
        assert finish.queued("a").id == sent[1].task_id

    @pytest.mark.parametrize("fails", [1, 2])
    def test_a_cache_that_goes_down_leaves_no_entry(self, sent, body, monkeypatch, fails):
        """It fails when the entry passes to the call, or back to the run."""
        replace, requests = Store.replace, []

        def fail(store, *args):
            requests.append(args)
            if len(requests) == fails:
                raise LockUnavailable("down")
            return replace(store, *args)

        def not_published(*args, **options):
            raise OSError("the broker is away")

        def send_and_go_on():
            monkeypatch.setattr(type(get_store("redis")), "replace", fail)
            monkeypatch.setattr(finish.app, "send_task", not_published)
            with pytest.raises(LockUnavailable if fails == 1 else OSError):
                finish.delay("a")

        finish.delay("a")
        body(send_and_go_on)
        deliver(sent[0], finish)
        assert len(requests) == fails
        eventually(lambda: entry_of(finish, "a").holder() is None)


class TestAwaited:
    """A call whose end others wait for is sent, and adds the entry if there is none."""

    @pytest.mark.parametrize("options", AWAITED, ids=lambda options: next(iter(options)))
    def test_an_awaited_call_is_always_sent(self, sent, options):
        first = unique.delay("a")
        second = unique.apply_async(("a",), **options)
        assert second.id != first.id
        assert len(sent) == 2
        assert unique.queued("a").id == first.id
        assert "queued" not in sent[1].headers[HEADER]

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
        assert len([message for message in sent if message.name == unique.name]) == 6
        chain(members).apply_async()
        assert len(sent[-1].chain) == 2


class TestStart:
    def test_the_entry_is_freed_once_the_run_has_its_lock(self, sent, monkeypatch, cache_alias):
        seen = []

        def body(*args, **kwargs):
            seen.append((unique.queued("a"), unique.lock("a").locked()))

        monkeypatch.setattr(tasks, "body", body)
        unique.delay("a")
        deliver(sent[0])
        assert seen == [(None, True)]

    def test_a_skipped_run_frees_the_entry(self, sent):
        unique.delay("a")
        with held_by("another", task=unique):
            assert deliver(sent[0]) == "skipped"
        assert unique.queued("a") is None

    def test_a_raised_conflict_frees_the_entry(self, sent):
        unique.apply_async(("a",), lock_options={"on_conflict": "raise"})
        with held_by("another", task=unique), pytest.raises(Exception, match="is held"):
            deliver(sent[0])
        assert unique.queued("a") is None

    @pytest.mark.parametrize(
        "options", [{"on_conflict": "wait"}, {"on_conflict": "later"}, {"lock_timeout": -1}]
    )
    def test_a_call_that_cannot_be_delivered_frees_the_entry(self, sent, options):
        """As if a worker of another version had sent it, or the system check were silenced."""
        unique.delay("a")
        sent[0].headers[HEADER]["options"] = options
        with pytest.raises(ValueError, match=r"on_conflict|timeout"):
            deliver(sent[0])
        assert unique.queued("a") is None

    def test_a_requeued_call_that_gives_up_frees_the_entry(self, sent):
        unique.apply_async(("a",), lock_options={"on_conflict": "requeue", "lock_wait": 0})
        with held_by("another", task=unique), pytest.raises(Exception, match="is held"):
            deliver(sent[0])
        assert unique.queued("a") is None

    @pytest.mark.parametrize("policy", ["requeue", "rerun"])
    def test_a_postponed_call_is_still_queued(self, sent, policy):
        first = unique.apply_async(("a",), lock_options={"on_conflict": policy})
        with held_by("another", task=unique), pytest.raises(Postponed):
            deliver(sent[0])
        assert unique.queued("a").id == first.id
        assert unique.delay("a").id == first.id
        deliver(sent[1])
        assert unique.queued("a") is None

    def test_the_entry_of_another_call_stays(self, sent):
        """The entry of the delivered call has ended meanwhile."""
        unique.delay("a")
        entry_of(unique, "a").clear()
        second = unique.delay("a")
        deliver(sent[0])
        assert unique.queued("a").id == second.id

    def test_a_cache_that_goes_down_does_not_fail_the_run(self, sent, monkeypatch, caplog):
        unique.delay("a")
        store = get_store("redis")
        release, failed = store.release, []

        def fail_once(*args):
            if not failed:
                failed.append(args)
                raise LockUnavailable("down")
            return release(*args)

        monkeypatch.setattr(store, "release", fail_once)
        assert deliver(sent[0]) == "ran"
        assert "could not be released; trying again" in caplog.text
        eventually(lambda: unique.queued("a") is None)


class TestFinish:
    def test_the_entry_lasts_as_long_as_the_run_and_is_a_short_lease(
        self, sent, monkeypatch, cache_alias
    ):
        seen = []

        def body(*args):
            seen.append((finish.queued("a").id, entry_of(finish, "a").holder().timeout))

        monkeypatch.setattr(tasks, "body", body)
        first = finish.delay("a")
        deliver(sent[0], finish)
        assert seen == [(first.id, 4)]
        assert finish.queued("a") is None

    def test_the_entry_is_freed_after_the_lock(self, sent, monkeypatch):
        """In the other order a call that is sent at once would be skipped."""
        freed = []
        store = get_store("redis")
        release = store.release
        monkeypatch.setattr(
            store, "release", lambda key, *rest: (freed.append(key), release(key, *rest))[1]
        )
        finish.delay("a")
        deliver(sent[0], finish)
        assert freed == [finish.lock("a").key, entry_of(finish, "a").key]

    def test_an_error_frees_the_entry(self, sent, monkeypatch):
        monkeypatch.setattr(tasks, "body", lambda *args: 1 / 0)
        finish.delay("a")
        with pytest.raises(ZeroDivisionError):
            deliver(sent[0], finish)
        assert finish.queued("a") is None

    def test_the_entry_lasts_until_the_last_retry_has_ended(self, sent):
        first = finish.delay("a", 0, 2)
        for number in range(2):
            with pytest.raises(Retry):
                deliver(sent[number], finish, retries=number)
            assert not finish.lock("a", 0, 2).locked()
            assert finish.delay("a").id == first.id
            assert 3600 - 60 < entry_of(finish, "a").remaining() <= 3601
        assert deliver(sent[2], finish, retries=2) == "ran"
        assert finish.queued("a") is None

    def test_the_entry_of_a_retry_is_queued_again_before_the_lock_is_free(self, sent, monkeypatch):
        """Otherwise the next try could begin first, and find the entry of this run."""
        pids = []
        store = get_store("redis")
        release = store.release

        def look(key, value, new, until):
            if not new:  # the lock
                pids.append(entry_of(finish, "a").holder().pid)
            return release(key, value, new, until)

        monkeypatch.setattr(store, "release", look)
        finish.delay("a", 0, 2)
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert pids == [0]

    @pytest.mark.parametrize("how", ["throw=False", "caught", "equal arguments"])
    def test_the_entry_stays_whichever_way_the_call_is_tried_again(self, sent, monkeypatch, how):
        def body(*args):
            if how == "throw=False":
                finish.retry(countdown=1, throw=False)
            elif how == "equal arguments":
                finish.retry(args=("a",), countdown=1)
            else:
                with suppress(Retry):
                    finish.retry(countdown=1)

        monkeypatch.setattr(tasks, "body", body)
        first = finish.delay("a")
        with suppress(Retry):
            deliver(sent[0], finish)
        assert finish.queued("a").id == first.id
        assert sent[1].headers[HEADER]["queued"] == sent[0].headers[HEADER]["queued"]

    def test_a_retry_under_another_lock_frees_the_entry(self, sent, monkeypatch):
        def body(*args):
            finish.retry(countdown=1, lock_options={"lock_name": "other", "lock_on": None})

        monkeypatch.setattr(tasks, "body", body)
        finish.delay("a")
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert finish.queued("a") is None
        assert "queued" not in sent[1].headers[HEADER]

    def test_a_redelivery_that_is_dropped_leaves_the_entry_to_the_retry(self, sent, monkeypatch):
        stored = SimpleNamespace(state="RETRY", result=None)
        first = finish.delay("a", 0, 2)
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        monkeypatch.setattr(finish.__class__, "AsyncResult", lambda *args: stored)
        sent[0].headers[HEADER]["redelivered"] = READS
        with pytest.raises(Ignore):
            deliver(sent[0], finish)
        assert entry_of(finish, "a").holder().task_id == first.id

    def test_a_message_that_goes_back_to_the_broker_is_still_queued(self, sent, monkeypatch):
        def body(*args):
            raise Reject(requeue=True)

        monkeypatch.setattr(tasks, "body", body)
        monkeypatch.setattr(finish.__class__, "acks_late", True)
        first = finish.delay("a")
        with pytest.raises(Reject):
            deliver(sent[0], finish)
        assert finish.queued("a").id == first.id

    def test_a_retry_with_other_arguments_frees_the_entry(self, sent, monkeypatch):
        def body(*args):
            raise finish.retry(args=("b",), countdown=1)

        monkeypatch.setattr(tasks, "body", body)
        finish.delay("a")
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert finish.queued("a") is None

    def test_a_rejected_message_frees_the_entry(self, sent, monkeypatch):
        def body(*args):
            raise Reject

        monkeypatch.setattr(tasks, "body", body)
        finish.delay("a")
        with pytest.raises(Reject):
            deliver(sent[0], finish)
        assert finish.queued("a") is None

    def test_an_entry_that_has_ended_meanwhile_is_added_again(self, sent, monkeypatch):
        seen = []
        monkeypatch.setattr(tasks, "body", lambda *args: seen.append(finish.queued("a").id))
        first = finish.delay("a")
        entry_of(finish, "a").clear()
        deliver(sent[0], finish)
        assert seen == [first.id]

    def test_the_entry_of_another_call_stays(self, sent):
        finish.delay("a")
        entry_of(finish, "a").clear()
        second = finish.delay("a")
        deliver(sent[0], finish)
        assert finish.queued("a").id == second.id

    def test_an_entry_that_is_gone_at_the_end_is_logged(self, sent, monkeypatch, caplog):
        monkeypatch.setattr(tasks, "body", lambda *args: entry_of(finish, "a").clear())
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
            patch.setattr(get_store("redis"), "replace", refuse)
            assert deliver(sent[0], finish) == "ran"
        assert "duplicates of this call are not stopped" in caplog.text
        eventually(lambda: finish.queued("a") is None)

    def test_a_cache_that_goes_down_before_a_retry_does_not_fail_it(
        self, sent, monkeypatch, caplog
    ):
        finish.delay("a", 0, 2)

        def body(*args):
            monkeypatch.setattr(get_store("redis"), "change", refuse)

        monkeypatch.setattr(tasks, "body", body)
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert "duplicates of the next try are not stopped" in caplog.text
        eventually(lambda: finish.queued("a") is None)

    def test_a_soft_time_limit_after_a_retry_was_sent_does_not_replace_it(
        self, sent, monkeypatch, caplog
    ):
        leave = Lease.leave

        def interrupt(*args, **options):
            monkeypatch.setattr(Lease, "leave", leave)
            raise SoftTimeLimitExceeded

        def body(*args):
            monkeypatch.setattr(Lease, "leave", interrupt)

        finish.delay("a", 0, 2)
        monkeypatch.setattr(tasks, "body", body)
        with pytest.raises(Retry):
            deliver(sent[0], finish)
        assert not finish.lock("a").locked()
        assert caplog.text.count("came after the body had ended") == 1

    @pytest.mark.parametrize("task", [unique, finish], ids=["start", "finish"])
    def test_a_soft_time_limit_at_the_start_reaches_the_task(self, sent, monkeypatch, task):
        def interrupt(*args):
            raise SoftTimeLimitExceeded

        task.delay("a")
        with monkeypatch.context() as patch:
            name = "release" if task is unique else "replace"
            patch.setattr(get_store("redis"), name, interrupt)
            with pytest.raises(SoftTimeLimitExceeded):
                deliver(sent[0], task)
        eventually(lambda: task.queued("a") is None)
        eventually(lambda: not task.lock("a").locked())

    def test_the_entry_of_a_dead_run_stops_nobody(self, sent):
        first = finish.delay("a")
        entry = entry_of(finish, "a")
        queued = get_store("redis").read(entry.key).value
        dead = Run(finish.name, first.id).holder("n", 60)
        value = Holder(**{**vars(dead), "pid": 2**22 - 1}).encode()
        assert get_store("redis").replace(entry.key, queued, value, 60)
        assert finish.queued("a") is None
        assert finish.delay("a").id != first.id
        assert len(sent) == 2

    def test_the_entry_of_a_live_run_stops_equal_calls(self, sent):
        """Negative control."""
        first = finish.delay("a")
        entry = entry_of(finish, "a")
        queued = get_store("redis").read(entry.key).value
        value = Run(finish.name, first.id).holder("n", 60).encode()
        assert get_store("redis").replace(entry.key, queued, value, 60)
        assert finish.delay("a").id == first.id


class TestDiscard:
    def test_a_discarded_call_is_freed_in_the_background(self, sent, cache_alias):
        unique.delay("a")
        discard(sent[0].headers, sent[0].task_id, unique.name)
        eventually(lambda: unique.queued("a") is None)

    def test_no_other_call_is_freed(self, sent):
        unique.delay("a")
        entry_of(unique, "a").clear()
        second = unique.delay("a")
        discard(sent[0].headers, sent[0].task_id, unique.name)
        discard({}, second.id, unique.name)
        wait_for_debts()
        assert unique.queued("a").id == second.id


def test_keys_beside_a_lock_are_no_lock_of_any_name():
    beside = unique.lock("a")._lock_key.beside(QUEUED, unique.name).key
    assert beside.startswith("singletask:@queued:tests.testapp.tasks.unique:")
    assert not TaskLock("@queued:x").key.startswith(QUEUED)
    assert len(name_key("x" * 255).beside(QUEUED, "t" * 500).key) <= len("singletask:") + 133


class TestTrips:
    """A queued call costs two requests to the cache: when it is sent, and when it starts."""

    @pytest.fixture
    def trips(self, monkeypatch):
        # Only what the store sends: on Celery 5.4 the result backend asks Redis meanwhile.
        get_store("redis").look()  # connects
        connection, sent = get_store("redis").connections[-1], []
        monkeypatch.setattr(connection, "_sock", connection._sock)

        def sendall(packed):
            sent.append(packed)
            interposed.sock.sendall(packed)

        interposed = Interposed(connection, sendall=sendall)

        def count(work):
            before = len(sent)
            work()
            return len(sent) - before

        return count

    def test_a_call_takes_one_trip(self, sent, trips):
        for _ in range(2):
            unique.delay("warm")  # connects, loads the script
        assert trips(lambda: unique.delay("a")) == 1
        assert trips(lambda: unique.delay("a")) == 1

    def test_a_run_takes_three_trips(self, sent, trips):
        unique.delay("a")
        deliver(sent.pop())  # loads the scripts
        unique.delay("a")
        assert trips(lambda: deliver(sent[0])) == 3

    def test_without_unique_until_there_are_two_trips(self, sent, trips):
        tasks.hold.delay("a")
        deliver(sent.pop(), tasks.hold)
        assert trips(lambda: tasks.hold.delay("a")) == 0
        assert trips(lambda: deliver(sent[0], tasks.hold)) == 2


def test_an_eager_call_with_the_headers_of_a_message_keeps_its_entry(sent):
    first = unique.delay("a")
    unique.apply(("a",), task_id=first.id, headers=sent[0].headers)
    assert unique.queued("a").id == first.id
