"""``on_duplicate="replace"`` with ``unique_for``: a run starts in time although calls go on.

A series is the calls that replace each other, from the first one until the run of the last one.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

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
)
from tests.inside import postponed
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

task = tasks.unique
SERIES = {"on_duplicate": "replace", "unique_for": 60, "on_conflict": "requeue"}


class Clock:
    """The clock of this host, which goes on when a test says so."""

    def __init__(self) -> None:
        self.now = self.begin = float(int(time.time()))

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def since_begin(self, moment: float) -> float:
        return round(moment - self.begin, 3)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    stopped = Clock()
    monkeypatch.setattr("time.time", lambda: stopped.now)
    return stopped


@pytest.fixture
def sent(monkeypatch):
    return collect_sent(task.app, monkeypatch)


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """Collect the values with which the body ran."""
    values: list[int] = []
    monkeypatch.setattr(
        tasks, "body", lambda key, seconds, task_id, value: values.append(value) or "ran"
    )
    return values


@pytest.fixture
def start(clock):
    """Give the function that returns when a message is to start, in seconds since the begin."""

    def start_of(message):
        header = header_of(message)
        planned = header["due"]
        if message.get("eta") is not None:
            assert message["countdown"] is None
            assert message["eta"].timestamp() == pytest.approx(planned)
        return clock.since_begin(planned)

    return start_of


def send(value: int, countdown: float = 20, lock_options: Any = None, **options: Any) -> Any:
    lock_options = {**SERIES, **(lock_options or {})}
    return task.apply_async(
        ("a", 0, value), countdown=countdown, lock_options=lock_options, **options
    )


def deliver(message: Any, **request: Any) -> Any:
    return receive_sent(task, message, **request)


def deliver_all(messages: Any) -> list[Any]:
    return [deliver(message) for message in messages]


def send_each(clock: Clock, period: float, number: int, **options: Any) -> None:
    """Send so many calls, one in each period."""
    for value in range(number):
        send(value, **options)
        clock.pass_by(period)


class TestWhenItStarts:
    def test_a_steady_stream_runs_at_the_end_of_each_series(self, sent, clock, start):
        """Each call is sent 10 seconds after the one before it, and would start 20 s later."""
        send_each(clock, 10, 6)
        assert [start(message) for message in sent] == [20, 30, 40, 50, 60, 60]
        assert deliver_all(sent) == ["skipped"] * 5 + ["ran"]
        send_each(clock, 10, 6)
        assert [start(message) for message in sent[6:]] == [80, 90, 100, 110, 120, 120]

    def test_control_without_unique_for_each_starts_at_its_own_time(self, sent, clock, start):
        send_each(clock, 10, 7, lock_options={"unique_for": None})
        assert [start(message) for message in sent] == [20, 30, 40, 50, 60, 70, 80]

    def test_a_time_that_the_call_has_is_changed_too(self, sent, clock, start):
        send(1)
        clock.pass_by(50)
        send(2, countdown=None, eta=datetime.now(UTC) + timedelta(seconds=55))
        assert start(sent[1]) == 60
        assert header_of(sent[1])["delay"] == pytest.approx(10, abs=5)

    def test_after_a_pause_it_starts_at_its_own_time(self, sent, clock, start):
        send(1)
        deliver(sent[0])
        clock.pass_by(50)
        send(2)
        clock.pass_by(50)
        send(3)
        assert [start(message) for message in sent] == [20, 70, 110]

    def test_expires_goes_on_counting(self, sent, clock):
        send(1)
        clock.pass_by(50)
        send(2, expires=100)
        assert sent[1]["expires"] == 100
        assert inside.queued_entry(task, "a").remaining() > 60

    @pytest.mark.parametrize("options", AWAITED, ids=lambda options: next(iter(options)))
    def test_a_call_for_which_others_wait_starts_at_its_own_time(self, sent, clock, start, options):
        send(1)
        clock.pass_by(50)
        send(2, **options)
        assert start(sent[1]) == 70
        assert deliver(sent[0]) == "ran"  # in time

    def test_a_call_for_which_others_wait_ends_its_series(self, sent, clock, start):
        """It replaces the call before it, and no worker notes that it has it."""
        send(1)
        send(2, task_id="awaited")
        assert deliver_all(sent) == ["skipped", "ran"]
        clock.pass_by(50)
        send(3)
        assert start(sent[2]) == 70

    def test_without_an_entry_it_starts_at_its_own_time(self, sent, clock, start, monkeypatch):
        send(1)
        clock.pass_by(50)
        inside.answer(monkeypatch, "replace", refuse)
        send(2, lock_options={"on_outage": "run"})
        assert start(sent[1]) == 70


class TestALongerDelayThanUniqueFor:
    """A call whose own delay is at least ``unique_for`` starts at its own time."""

    def test_beside_a_queued_series_it_begins_a_new_one(self, sent, clock, start, ran):
        send(1)
        send(2, countdown=100)
        clock.pass_by(10)
        send(3, countdown=200)
        send(4, countdown=80)
        assert [start(message) for message in sent] == [20, 100, 210, 90]
        assert deliver_all(sent) == ["ran", "ran", "skipped", "ran"]
        assert ran == [1, 2, 4]

    def test_it_does_not_replace_a_call_that_is_being_published(
        self, sent, ran, monkeypatch, settings
    ):
        """
        A: takes 1                                       publishes: due soon
        B:           takes 2, publishes: due much later
        """
        settings.SINGLETASK_HISTORY = "off"
        send_task = task.app.send_task

        def sleep_and_send(*args, **options):
            monkeypatch.setattr(task.app, "send_task", send_task)
            elsewhere(send, 2, 500)
            return send_task(*args, **options)

        monkeypatch.setattr(task.app, "send_task", sleep_and_send)
        send(1)
        late, early = sent
        assert [deliver(early), deliver(late)] == ["ran", "ran"]
        assert ran == [1, 2]

    def test_it_does_not_let_others_wait(self, sent, clock, start):
        send(0, countdown=500)
        send_each(clock, 10, 6)
        assert [start(message) for message in sent[1:]] == [20, 30, 40, 50, 60, 60]

    @pytest.mark.parametrize("countdown", [60, 100])
    def test_a_steady_stream_of_them_runs_too(self, sent, clock, start, ran, countdown):
        """The first series ends ``unique_for`` after the own time of its first call."""
        send_each(clock, 10, 9, countdown=countdown)
        own = [countdown + 10 * number for number in range(9)]
        assert [start(message) for message in sent] == own
        assert deliver_all(sent) == ["skipped"] * 5 + ["ran"] + ["skipped"] * 2 + ["ran"]


class TestTheEndHasPassed:
    """The last call of a series is due, but has not begun: the workers are busy."""

    def test_a_call_begins_a_new_series(self, cache_alias, sent, clock, start, ran):
        send(1)
        send(2)
        clock.pass_by(61)
        send(3)
        clock.pass_by(50)
        send(4)
        assert [start(message) for message in sent] == [20, 20, 81, 121]
        assert deliver_all(sent) == ["skipped", "ran", "skipped", "ran"]
        assert ran == [2, 4]

    @pytest.mark.parametrize("are_separate", [True, False], ids=["", "control"])
    def test_a_steady_stream_with_a_backlog_runs(self, sent, clock, ran, monkeypatch, are_separate):
        """The worker is always one series behind.

        producer:  S1 …  last of S1 |  S2 …  last of S2 |  S3 …
        worker:                          last of S1          last of S2: does not give way to S3
        """
        if not are_separate:
            inside.keep_no_last_call(monkeypatch)
        received = 0
        for value in range(40):
            send(value)
            clock.pass_by(10)
            while received < len(sent) - 6:
                deliver(sent[received])
                received += 1
        assert ran == ([5, 11, 17, 23, 29] if are_separate else [])

    def test_no_older_arguments_run_after_newer_ones(self, sent, clock, ran):
        send(1)
        clock.pass_by(61)
        send(2)
        assert deliver(sent[1]) == "ran"
        assert deliver(sent[0]) == "skipped"
        assert ran == [2]

    def test_behind_a_long_run_one_call_waits(self, sent, clock, ran):
        """Otherwise runs that take longer than ``unique_for`` would fall behind more and more.

        run:       has the lock ..................................................... ends
        last of S1:     hops                     hops: S2 waits -> ends
        last of S2:                    hops                            hops            runs
        """
        waiting = None
        with held_by("another", task=task):
            for value in range(5):
                send(value)
                with postponed():
                    deliver(sent[-1])
                if waiting:
                    assert deliver(waiting) == "skipped"
                waiting = sent[-1]
                clock.pass_by(61)
        assert deliver(waiting) == "ran"
        assert ran == [4]

    @pytest.mark.parametrize("is_noted", [True, False], ids=["noted", "received first"])
    def test_a_call_that_waits_is_not_replaced_by_one_that_is_not_due(
        self, sent, clock, ran, is_noted
    ):
        """
        run:    has the lock ........................... ends
        first:     received, hops                              runs at its next hop
        second:                      published: due later

        The worker may receive the first call before its producer notes it.
        """
        with nullcontext() if is_noted else inside.killed_before_the_note():
            send(1)
        with held_by("another", task=task), postponed():
            deliver(sent[0])
        clock.pass_by(10)
        send(2)
        assert deliver_all(sent[1:]) == ["ran", "ran"]
        assert ran == [1, 2]


def test_a_call_without_unique_for_has_no_series(sent, clock, start):
    """It replaces what is queued, starts at its own time, and the next series begins after it."""
    send(1)
    clock.pass_by(50)
    send(2, lock_options={"unique_for": None})
    clock.pass_by(5)
    send(3)
    clock.pass_by(50)
    send(4)
    assert [start(message) for message in sent] == [20, 70, 75, 115]
    assert deliver_all(sent) == ["skipped", "ran", "skipped", "ran"]


class TestFinish:
    """With ``unique_until="finish"``, calls that other code sends during a run have no entry."""

    FINISH = {"unique_until": "finish"}

    def test_the_calls_during_a_run_are_a_series(self, sent, clock, start, ran, monkeypatch):
        def body(key, seconds, task_id, value):
            ran.append(value)
            if value == 1:
                for number in (2, 3):
                    elsewhere(send, number, 20, self.FINISH)
                    clock.pass_by(50)

        monkeypatch.setattr(tasks, "body", body)
        send(1, lock_options=self.FINISH)
        deliver(sent[0])
        assert [start(message) for message in sent] == [20, 20, 60]
        send(4, lock_options=self.FINISH)
        deliver_all(sent[1:])
        assert ran == [1, 3, 4]

    def test_a_series_begins_and_ends_as_with_start(self, sent, clock, start, ran):
        send_each(clock, 10, 7, lock_options=self.FINISH)
        assert [start(message) for message in sent[4:]] == [60, 60, 80]
        deliver_all(sent)
        assert ran == [5, 6]

    def test_the_entry_of_the_next_series_stays_when_the_last_call_begins(self, sent, clock, ran):
        send(1, lock_options=self.FINISH)
        clock.pass_by(61)
        second = send(2, lock_options=self.FINISH)
        assert deliver(sent[0]) == "ran"
        assert task.queued("a").id == second.id
        assert deliver(sent[1]) == "ran"
        assert task.queued("a") is None

    def test_the_next_page_begins_a_series(self, sent, clock, start, monkeypatch):
        def body(key, seconds, task_id, value):
            if value < 3:
                send(value + 1, lock_options=self.FINISH)
                clock.pass_by(50)

        monkeypatch.setattr(tasks, "body", body)
        send(1, lock_options=self.FINISH)
        deliver(sent[0])
        send(7, lock_options=self.FINISH)
        assert [start(message) for message in sent] == [20, 20, 60]


class TestRaces:
    def test_two_producers_at_the_end_begin_one_series(self, sent, clock, ran, settings):
        """
        A: reads S1: over   writes S2
        B: reads S1: over               refused   reads S2: belongs to it
        """
        settings.SINGLETASK_HISTORY = "off"  # else the threads wait for the test's transaction
        send(9)
        clock.pass_by(61)
        at_once(send, [[value] for value in range(4)])
        assert inside.series_that_wait(task.lock("a"), task) == 1
        assert sorted(deliver_all(sent)) == ["ran"] * 2 + ["skipped"] * 3
        assert ran[0] == 9

    def test_the_end_passes_before_the_call_is_published(
        self, sent, clock, ran, start, monkeypatch, settings
    ):
        """
        A: takes 2 in S1   sleeps ............................. publishes: gives way to 3
        B:                          the end   takes 3, begins S2
        """
        settings.SINGLETASK_HISTORY = "off"
        send_task = task.app.send_task

        def sleep_and_send(*args, **options):
            monkeypatch.setattr(task.app, "send_task", send_task)
            clock.pass_by(61)
            elsewhere(send, 3)
            return send_task(*args, **options)

        send(1)
        clock.pass_by(50)
        monkeypatch.setattr(task.app, "send_task", sleep_and_send)
        send(2)
        assert [start(message) for message in sent] == [20, 131, 60]
        assert [deliver(sent[number]) for number in (0, 2, 1)] == ["ran", "skipped", "ran"]
        assert ran == [1, 3]

    def test_the_queued_call_begins_before_the_number_is_taken(
        self, sent, clock, ran, start, monkeypatch
    ):
        """
        producer: reads S1                          refused   reads that all are received: begins S2
        worker:              receives the call of S1
        """

        send(1)
        clock.pass_by(50)
        with monkeypatch.context() as patch:

            def begin_first(replace, *args, **options):
                patch.undo()
                deliver(sent[0])
                return replace(*args, **options)

            inside.answer(patch, "replace", begin_first)
            send(2)
        assert [start(message) for message in sent] == [20, 70]
        assert deliver(sent[1]) == "ran"
        assert ran == [1, 2]

    def test_the_queued_call_begins_after_the_number_is_taken(
        self, sent, clock, ran, start, monkeypatch
    ):
        """
        producer: takes 2 in S1                            publishes: runs, at the end of S1
        worker:                   receives the call of S1
        """
        send_task = task.app.send_task

        def receive_and_send(*args, **options):
            deliver(sent[0])
            return send_task(*args, **options)

        send(1)
        clock.pass_by(50)
        monkeypatch.setattr(task.app, "send_task", receive_and_send)
        send(2)
        assert [start(message) for message in sent] == [20, 60]
        assert deliver(sent[1]) == "ran"
        assert ran == [1, 2]

    def test_a_producer_is_killed_before_it_publishes(self, sent, clock, ran, start):
        """Its number is not noted, so the call before it runs; the end of the series stays.

        A: publishes, notes 1                      runs
        B:                      takes 2   killed
        """
        send(1)
        clock.pass_by(50)
        with inside.killed_before_publishing(task.app):
            send(2)
        assert deliver(sent[0]) == "ran"
        send(3)
        assert start(sent[1]) == 60

    def test_control_noted_before_it_publishes_the_series_would_be_lost(self, sent, ran, clock):
        send(1)
        with inside.killed_before_publishing(task.app, notes=True):
            send(2)
        assert deliver(sent[0]) == "skipped"
        assert ran == []

    @pytest.mark.parametrize(("skew", "runs"), [(1, [1, 2]), (-1, [2])], ids=["ahead", "behind"])
    def test_the_clock_of_a_producer_differs_by_a_second(self, sent, clock, ran, start, skew, runs):
        """One that is ahead begins a new series earlier; one that is behind still joins it."""
        send(1)
        clock.pass_by(60 - skew / 2)
        clock.pass_by(skew)
        send(2)
        assert start(sent[1]) == (80.5 if skew == 1 else 60)
        deliver_all(sent)
        assert ran == runs

    def test_the_cache_loses_the_entry(self, sent, clock, ran, start):
        """The series goes on, since its end is beside the numbers."""
        send(1)
        clock.pass_by(50)
        inside.forget(inside.queued_entry(task, "a"))
        send(2)
        assert [start(message) for message in sent] == [20, 60]
        assert deliver_all(sent) == ["skipped", "ran"]

    def test_the_cache_loses_the_numbers(self, sent, clock, ran, start):
        """The next call begins a new series in a new epoch, and replaces those before it."""
        send(1)
        clock.pass_by(50)
        inside.forget_numbers(task.lock("a"), task)
        send(2)
        assert [start(message) for message in sent] == [20, 70]
        assert deliver_all(sent) == ["skipped", "ran"]

    def test_the_cache_loses_the_numbers_after_the_last_call(self, sent, ran):
        send(1)
        inside.forget_numbers(task.lock("a"), task)
        assert deliver_all(sent) == ["ran"]


def test_busy_workers_run_one_call_of_an_earlier_series(sent, clock, ran):
    """And then the newest one, however many series there could have been."""
    for value in range(9):
        send(value)
        clock.pass_by(61)
    deliver_all(sent)
    assert ran == [0, 8]
    send(9)
    assert inside.series_that_wait(task.lock("a"), task) == 0
