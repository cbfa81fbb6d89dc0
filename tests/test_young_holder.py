"""A call of "requeue" whose lock is held by a run that has just begun."""

from __future__ import annotations

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from django_singletask import LockConflict, LockUnavailable
from django_singletask.exceptions import Postponed
from django_singletask.holder import Holder
from django_singletask.locks import blocks
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store
from django_singletask.task import delivery_lock, rerun
from tests.deliveries import collect_sent, receive
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]


@pytest.fixture
def sent(monkeypatch):
    """Collect the messages that would be published."""
    return collect_sent(tasks.requeue.app, monkeypatch)


class Held:
    """The lock of ``requeue("a")``, held by another run that ends at the given sleep."""

    def __init__(self, monkeypatch, *, age=0.0, ends_at=0, task_id="another", **fields):
        self.key, self.sleeps, self.ends_at = tasks.requeue.lock("a").key, [], ends_at
        holder = Holder.new("a", 60, task=tasks.requeue.name, task_id=task_id, retries=0)
        vars(holder).update(fields)
        self.value = holder.encode()
        assert get_store("redis").add(self.key, self.value, 60) is None
        monkeypatch.setattr(delivery_lock, "sleep", self.sleep)
        monkeypatch.setattr(delivery_lock, "time", lambda: holder.since + age)

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        if len(self.sleeps) == self.ends_at:
            self.end()

    def end(self):
        get_store("redis").release(self.key, self.value)


@pytest.fixture
def held(monkeypatch):
    """Let the lock be held; free it in the end."""
    runs = []

    def hold(**facts):
        runs.append(Held(monkeypatch, **facts))
        return runs[-1]

    yield hold
    for run in runs:
        run.end()


def test_the_call_runs_in_this_delivery_when_the_holder_ends_at_once(
    sent, held, tmp_path, monkeypatch
):
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "runs.log"))
    run = held(ends_at=2)
    assert receive(tasks.requeue, "a") == "ran"
    assert len(run.sleeps) == 2
    assert not sent
    assert tasks.requeue.lock("a").holder() is None
    assert not TaskLockEvent.objects.filter(kind="skipped").exists()


def test_it_waits_in_place_for_a_few_hundredths_of_a_second_at_most(sent, held):
    run = held()
    with pytest.raises(Postponed):
        receive(tasks.requeue, "a")
    assert 0 < sum(run.sleeps) <= 2 * delivery_lock.YOUNG
    assert len(run.sleeps) < 20
    assert len(sent) == 1
    assert TaskLockEvent.objects.get().reason == "requeue"


@pytest.mark.parametrize(
    "facts",
    [{"age": 0.2}, {"age": -5}, {"kept": True}, {"task_id": "mine"}],
    ids=["old", "another clock", "kept", "its own earlier run"],
)
def test_any_other_holder_is_not_waited_for_in_place(sent, held, facts):
    run = held(**facts)
    with pytest.raises(Postponed):
        receive(tasks.requeue, "a")
    assert not run.sleeps


@pytest.mark.parametrize("call", ["direct", "apply"])
def test_a_call_that_cannot_be_postponed_does_not_wait(held, call):
    run = held()
    with pytest.raises(LockConflict):
        tasks.requeue("a") if call == "direct" else tasks.requeue.apply(("a",), throw=True)
    assert not run.sleeps


def test_a_signal_while_it_waits_leaves_nothing_behind(held, monkeypatch):
    """The signal strikes right after the take, when the entry is there and the block is not."""
    held(ends_at=1)

    def strike(lock):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(blocks, "enter", strike)
    with pytest.raises(SoftTimeLimitExceeded):
        receive(tasks.requeue, "a")
    assert tasks.requeue.lock("a").holder() is None


def test_a_call_that_cannot_look_again_is_postponed(sent, held, monkeypatch):
    """Its conflict is known. To look again is for speed, and must cost no call its run."""
    run, take = held(), get_store("redis").take

    def take_once(*args, **kwargs):
        if run.sleeps:
            raise LockUnavailable("down")
        return take(*args, **kwargs)

    monkeypatch.setattr(get_store("redis"), "take", take_once)
    with pytest.raises(Postponed):
        receive(tasks.requeue, "a")
    assert len(run.sleeps) == len(sent) == 1


def test_it_gives_way_to_a_later_call_that_ran_while_it_waited(held, monkeypatch):
    run = held(ends_at=1)
    answers = iter([False, True])
    monkeypatch.setattr(rerun, "is_superseded", lambda *args: next(answers))
    header = {"ticket": ["epoch", 1]}
    assert receive(tasks.requeue, "a", header=header) is None
    assert run.sleeps
    assert tasks.requeue.lock("a").holder() is None
