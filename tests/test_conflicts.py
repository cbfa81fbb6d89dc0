"""What a message does that meets the lock of its own earlier run."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from celery.exceptions import Ignore, Reject
from django.db import connections

from django_singletask.conflicts import HEADER, LOOKS, WAITS, _hop
from django_singletask.exceptions import PutOff
from django_singletask.liveness import Holder
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture(autouse=True)
def on_redis(settings, empty_cache):
    settings.SINGLETASK_CACHE = "redis"
    empty_cache("redis")
    TaskLockEvent.objects.all().delete()


@pytest.fixture
def sent(monkeypatch):
    messages = []

    def send_task(name, args=None, kwargs=None, **options):
        messages.append({"args": args, **options})

    monkeypatch.setattr(tasks.hold.app, "send_task", send_task)
    return messages


@pytest.fixture
def state(monkeypatch):
    """Say what the result backend knows of every task."""
    known = SimpleNamespace(state="PENDING")
    task = type(tasks.hold._get_current_object())
    monkeypatch.setattr(task, "AsyncResult", lambda self, task_id: known)
    return known


def receive(task, *args, task_id="mine", header=None, **request):
    """Run a message as the worker's tracer does."""
    headers = {HEADER: {"id": task_id, **(header or {})}}
    facts = {"id": task_id, "args": args, "kwargs": {}, "retries": 0, "headers": headers}
    task.push_request(**{**facts, "called_directly": False, **request})
    try:
        return task(*args)
    finally:
        task.pop_request()


class held_by:
    """Let a task id hold the lock, from elsewhere."""

    def __init__(self, task_id, retries=0, task=tasks.hold):
        self.lock = task.lock("a")
        holder = Holder.new(self.lock.name, 60, task=task.name, task_id=task_id, retries=retries)
        self.value = holder.encode()

    def __enter__(self):
        assert get_store("redis").add(self.lock.key, self.value, 60) is None

    def __exit__(self, *exc):
        get_store("redis").release(self.lock.key, self.value)


def header_of(message):
    return message["headers"][HEADER]


def test_a_redelivery_is_put_off_not_skipped(sent):
    with held_by("mine"), pytest.raises(PutOff):
        receive(tasks.hold, "a")
    (message,) = sent
    assert message["task_id"] == "mine"
    assert message["retries"] == 0
    assert 0.7 <= message["countdown"] <= 1
    assert (header_of(message)["redelivered"], header_of(message)["hops"]) == (WAITS, 1)
    assert TaskLockEvent.objects.get(kind="skipped").reason == "redelivery"


def test_another_task_id_is_skipped(sent):
    """Negative control."""
    with held_by("another"):
        assert receive(tasks.hold, "a") == "skipped"
    assert not sent


def test_a_retry_that_meets_its_earlier_run_is_put_off_for_a_moment(sent):
    with held_by("mine", retries=0), pytest.raises(PutOff):
        receive(tasks.hold, "a", retries=1)
    assert sent[0]["countdown"] <= 0.05
    assert "redelivered" not in header_of(sent[0])
    assert sent[0]["retries"] == 1


def test_the_first_link_of_a_replacement_is_put_off(sent):
    with held_by("parent"), pytest.raises(PutOff):
        receive(tasks.hold, "a", parent_id="parent", replaced_task_nesting=1)
    assert sent[0]["countdown"] <= 0.05


def test_a_raising_task_does_not_raise(sent):
    with held_by("mine", task=tasks.insist), pytest.raises(PutOff):
        receive(tasks.insist, "a")


def test_a_waiting_task_does_not_wait(sent):
    header = {"options": {"on_conflict": "wait", "lock_wait": 60}}
    with held_by("mine"), pytest.raises(PutOff):
        receive(tasks.hold, "a", header=header)
    assert header_of(sent[0])["options"] == header["options"]


def test_when_it_is_free_there_is_one_more_hop(sent):
    with pytest.raises(PutOff):
        receive(tasks.hold, "a", header={"redelivered": WAITS, "hops": 5})
    assert header_of(sent[0])["redelivered"] == LOOKS
    assert not tasks.hold.lock("a").locked()
    assert TaskLockEvent.objects.get(kind="acquired").result == "put_off"


@pytest.mark.parametrize("known", ["SUCCESS", "RETRY"])
def test_what_is_done_is_dropped(sent, state, known):
    state.state = known
    with pytest.raises(Ignore):
        receive(tasks.hold, "a", header={"redelivered": LOOKS})
    assert not sent
    assert not tasks.hold.lock("a").locked()


@pytest.mark.parametrize("known", ["PENDING", "STARTED", "FAILURE"])
def test_what_is_not_known_to_be_done_runs(sent, state, known, monkeypatch, tmp_path):
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))
    state.state = known
    assert receive(tasks.hold, "a", header={"redelivered": LOOKS}) == "ran"


def test_behind_a_stranger_it_is_dropped_if_it_is_done(sent, state):
    state.state = "SUCCESS"
    with held_by("another"), pytest.raises(Ignore) as caught:
        receive(tasks.hold, "a", header={"redelivered": LOOKS})
    assert not isinstance(caught.value, PutOff)


def test_behind_a_stranger_it_hops_on_if_it_is_not(sent, state):
    with held_by("another"), pytest.raises(PutOff):
        receive(tasks.hold, "a", header={"redelivered": WAITS})
    assert header_of(sent[0])["redelivered"] == LOOKS


def test_a_failing_publish_gives_the_message_back(monkeypatch, caplog):
    def fail(*args, **options):
        raise OSError("the broker is away")

    monkeypatch.setattr(tasks.hold.app, "send_task", fail)
    with held_by("mine"), pytest.raises(Reject) as caught:
        receive(tasks.hold, "a")
    assert caught.value.requeue
    assert "could not be put off" in caplog.text


def test_what_is_hidden_stays_hidden(sent):
    header = {"key": tasks.hold.lock("a").key, "name": "hold(…)"}
    with held_by("mine"), pytest.raises(PutOff):
        receive(tasks.hold, "a", header=header, argsrepr="(…)", kwargsrepr="{}")
    assert (sent[0]["argsrepr"], header_of(sent[0])["name"]) == ("(…)", "hold(…)")


def test_hops_grow_to_a_quarter_of_the_lease(monkeypatch):
    lock = tasks.hold.lock("a")
    lock.blocker = Holder.new("n", 20, task=None, task_id=None, retries=0)
    monkeypatch.setattr("random.uniform", lambda low, high: 1)
    hops = [_hop(tasks.hold, lock, 1, number) for number in range(8)]
    assert hops == sorted(hops)
    assert hops[0] == 1
    assert hops[-1] == 5


def test_hops_are_shorter_than_the_visibility_timeout():
    lock = tasks.hold.lock("a")
    conf = SimpleNamespace(broker_transport_options={"visibility_timeout": 3})
    task = SimpleNamespace(app=SimpleNamespace(conf=conf))
    assert max(_hop(task, lock, 1, number) for number in range(30)) <= 1


def test_own_header_of_another_call_says_nothing(sent):
    done = []

    def run():
        done.append(receive(tasks.hold, "a", header={"id": "other", "redelivered": LOOKS}))
        connections.close_all()

    with held_by("another"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert done == ["skipped"]
