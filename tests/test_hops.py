"""A message that waits in the worker is started earlier when a run of its lock ends there."""

from __future__ import annotations

import gc
import time
import weakref
from types import SimpleNamespace

import pytest
from celery.bootsteps import CLOSE, RUN
from celery.exceptions import Ignore
from celery.worker import state
from kombu.asynchronous.timer import Timer

from django_singletask.exceptions import Postponed
from django_singletask.task.header import HEADER
from django_singletask.worker import hops, tokens
from tests.testapp import tasks

pytestmark = pytest.mark.skipif(
    not hasattr(state, "scheduled_requests"), reason="Celery 5.7 tells which messages wait"
)

WIRE = {"key": "key of a", "hops": 2}


class Request:
    def __init__(self, task=tasks.requeue):
        self.task, self.eta = task, "2030-01-01"
        self.on_success = lambda outcome: None


class Consumer:
    """A consumer that starts messages at their ETA, as Celery's does."""

    def __init__(self):
        self.timer, self.connection, self.hub = Timer(), object(), object()
        self.blueprint = SimpleNamespace(state=RUN)
        self.started, self.prefetch = [], 8

    def receive(self, waiting, wire=WIRE, task=tasks.requeue, seconds=60):
        request = Request(task)
        waiting.follow(self, request, wire)
        self.prefetch += 1
        entry = self.timer.call_after(seconds, self.apply_eta_task, (request,), priority=6)
        vars(request)["_eta_timer_entry"] = entry
        state.scheduled_requests.add(request)
        return request

    def apply_eta_task(self, *requests):
        state.scheduled_requests.difference_update(requests)
        self.started.extend(requests)
        self.prefetch -= 1

    def pass_time(self):
        """Let the timer do what is due."""
        for _wait, entry in self.timer:
            if entry is None:
                return
            self.timer.apply_entry(entry)


def end_run(consumer, waiting, outcome=(False, "a result", 0.1), wire=WIRE):
    """Let the pool report what became of a call that did not wait."""
    request = Request()
    waiting.follow(consumer, request, {**wire, "hops": 0})
    request.on_success(outcome)


@pytest.fixture
def consumer():
    yield Consumer()
    state.scheduled_requests.clear()


def test_the_end_of_a_run_starts_the_call_that_has_waited_longest(consumer):
    waiting = hops.Hops()
    requests = [consumer.receive(waiting) for _ in range(3)]
    consumer.receive(waiting, WIRE | {"key": "key of b"})
    end_run(consumer, waiting)
    assert consumer.started == requests[:1]
    end_run(consumer, waiting)
    assert consumer.started == requests[:2]


def test_a_call_that_was_started_early_is_not_started_again_at_its_eta(consumer):
    waiting = hops.Hops()
    consumer.receive(waiting, seconds=0.02)
    end_run(consumer, waiting)
    time.sleep(0.03)  # its ETA
    consumer.pass_time()
    assert (len(consumer.started), consumer.prefetch) == (1, 8)


def test_a_call_whose_hop_has_ended_is_not_started_again(consumer):
    waiting = hops.Hops()
    consumer.receive(waiting, seconds=0)
    later = consumer.receive(waiting)
    consumer.pass_time()
    end_run(consumer, waiting)
    assert consumer.started[1:] == [later]


def test_the_hop_goes_on_if_no_run_of_its_lock_ends_here(consumer):
    waiting = hops.Hops()
    consumer.receive(waiting, seconds=0)
    consumer.pass_time()
    assert (len(consumer.started), consumer.prefetch) == (1, 8)


@pytest.mark.parametrize(
    ("changes", "task"),
    [
        ({"hops": 0}, tasks.requeue),
        ({"redelivered": 1}, tasks.requeue),
        ({"key": None}, tasks.requeue),
        ({}, tasks.rerun),
    ],
    ids=["a countdown of the caller", "a redelivery", "no key", "rerun"],
)
def test_no_other_wait_is_shortened(consumer, changes, task):
    waiting = hops.Hops()
    consumer.receive(waiting, WIRE | changes, task)
    end_run(consumer, waiting)
    assert not consumer.started


@pytest.mark.parametrize("trouble", ["stops", "connection lost"])
def test_a_worker_that_stops_or_has_lost_its_connection_starts_none(consumer, trouble):
    waiting = hops.Hops()
    consumer.receive(waiting)
    if trouble == "stops":
        consumer.blueprint.state = CLOSE
    else:
        state.scheduled_requests.clear()  # as the consumer does
    end_run(consumer, waiting)
    assert not consumer.started


def test_locks_for_which_nobody_waits_are_forgotten(consumer, monkeypatch):
    monkeypatch.setattr(hops, "FEW", 3)
    waiting = hops.Hops()
    for number in range(20):
        consumer.receive(waiting, WIRE | {"key": f"key {number}"}, seconds=0)
        consumer.pass_time()
    assert len(waiting.calls) <= 4


def test_locks_whose_last_call_was_started_are_forgotten(consumer, monkeypatch):
    monkeypatch.setattr(hops, "FEW", 3)
    waiting = hops.Hops()
    for number in range(20):
        wire = WIRE | {"key": f"key {number}"}
        consumer.receive(waiting, wire)
        end_run(consumer, waiting, wire=wire)
    assert len(consumer.started) == 20
    assert len(waiting.calls) <= 4


def test_a_message_that_waits_no_longer_is_not_kept(consumer):
    waiting = hops.Hops()
    gone = weakref.ref(consumer.receive(waiting, seconds=0))
    consumer.pass_time()
    consumer.started.clear()
    gc.collect()  # Celery's request and its entry of the timer refer to each other
    assert gone() is None


def test_a_call_that_waits_for_its_rate_limit_is_not_started_a_second_time(consumer):
    """Celery lists it among those that wait for their ETA until it leaves the bucket."""
    waiting = hops.Hops()
    request = consumer.receive(waiting, seconds=0)
    vars(request)["_eta_timer_entry"].args = request, "a bucket", 1
    end_run(consumer, waiting)
    assert not consumer.started


@pytest.mark.parametrize(
    ("outcome", "started"),
    [
        ((True, SimpleNamespace(exception=ValueError()), 0.1), 1),
        ((True, SimpleNamespace(exception=Postponed()), 0.1), 0),
        ((True, SimpleNamespace(exception=SimpleNamespace(exc=Ignore())), 0.1), 0),
    ],
    ids=["raised", "postponed", "postponed, wrapped"],
)
def test_a_postponed_call_starts_no_other(consumer, outcome, started):
    waiting = hops.Hops()
    consumer.receive(waiting)
    end_run(consumer, waiting, outcome)
    assert len(consumer.started) == started


def test_the_end_of_a_run_of_a_queued_call_is_noted_as_well(consumer):
    consumer.pool = type("TaskPool", (), {"__module__": "celery.concurrency.prefork"})()
    request, reported = Request(), []
    request.id, request.on_accepted, request.on_success = "an id", None, reported.append
    wire = {"id": "an id", "task": tasks.requeue.name, "key": "key of a", "queued": "an entry"}
    request.request_dict = {HEADER: wire}
    tokens.hand_out_token(consumer, request)
    request.on_success((False, "a result", 0.1))
    assert len(reported) == 1
    assert "on_success" not in vars(request)
