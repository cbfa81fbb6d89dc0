"""A call for which lock_name returns None takes no lock."""

from __future__ import annotations

import pytest
from celery import Celery

from django_singletask import LockError, SingletonTask, current_lock
from django_singletask.testing import hold
from tests import inside
from tests.deliveries import receive
from tests.entries import listening

pytestmark = pytest.mark.usefixtures("on_redis")


@pytest.fixture
def asked():
    """Give the arguments for which lock_name was called."""
    return []


@pytest.fixture
def sent():
    return []


@pytest.fixture
def events():
    """Give the events of the locks."""
    with listening() as seen:
        yield seen


@pytest.fixture
def task(asked, sent, monkeypatch):
    app = Celery("unlocked", set_as_current=False, broker="memory://")
    monkeypatch.setattr(app, "send_task", lambda *args, **options: sent.append(options))

    def lock_name(customer):
        asked.append(customer)
        return None if customer == 0 else f"customer:{customer}"

    @app.task(base=SingletonTask, shared=False, lock_name=lock_name, unique_until="start")
    def bill(customer):
        return current_lock() and current_lock().name

    return bill


@pytest.mark.parametrize("run", [lambda task: task(0), lambda task: task.apply((0,)).get()])
def test_the_body_runs_without_a_lock_and_without_an_event(task, events, run):
    assert run(task) is None
    assert events == []
    assert task(1) == "customer:1"
    assert [event.kind for event in events] == ["acquired", "released"]


def test_a_message_says_so_and_stops_no_other(task, sent, asked):
    task.delay(0)
    task.delay(0)
    assert len(sent) == 2
    assert task.queued(0) is None
    assert list(inside.store_of("redis").entries()) == []
    asked.clear()
    header = inside.header_of(sent[0]["headers"])
    assert receive(task, 0, task_id=sent[0]["task_id"], header=header) is None
    assert asked == []


def test_a_message_without_a_header_asks_the_worker(task, events):
    assert receive(task, 0) is None
    assert events == []


@pytest.mark.parametrize("ask", [lambda task: task.lock(0), lambda task: hold(task, 0).enable()])
def test_there_is_no_lock_to_be_asked_for(task, ask):
    with pytest.raises(LockError, match="returned None: this call takes no lock"):
        ask(task)


def test_the_watcher_has_no_lock_to_free(task, sent):
    task.delay(0)
    [message] = sent
    accepted = inside.accepted(task, message["headers"])
    assert accepted.find_lock() is None
