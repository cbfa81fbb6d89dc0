"""A header that another program made up: the task fails with one clear error, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import signals

from django_singletask import TaskLock
from tests import inside
from tests.deliveries import deliver
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]

LOCK = TaskLock("shared")
KEY = {"name": LOCK.name, "key": LOCK.key}
WRONG: list[dict[str, Any]] = [
    *({field: 7} for field in ("name", "key", "queued", "token", "was", "options", "ticket")),
    *({field: ["x"]} for field in ("name", "key", "queued", "token", "was", "options")),
    *({field: {"x": 1}} for field in ("name", "key", "queued", "token", "was", "ticket")),
    *({field: "x"} for field in ("options", "ticket", "due", "requeued_at", "hops")),
    *({field: ["x"]} for field in ("due", "requeued_at", "hops", "redelivered")),
    *({field: {}} for field in ("due", "requeued_at", "hops", "redelivered", "marked")),
    {"redelivered": "yes"},
    {"key": "x" * 100_000, "queued": 7},
    {"queued": ["x" * 100_000]},
]
each_wrong_header = pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])


def headers_of(task: Any, /, **fields: Any) -> dict[str, Any]:
    return inside.headers_for(task, **{**KEY, **fields})


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the keys of the locks under which the body of a task ran."""
    keys: list[str] = []

    def run(task: Any, key: str) -> None:
        keys.append(tasks.current_lock().key)

    monkeypatch.setattr(tasks.requeue.__class__, "run", run)
    return keys


def test_of_a_newer_header_the_lock_is_read_and_nothing_else(ran: list[str]) -> None:
    newer = headers_of(tasks.requeue, version=2, hops={"of": "another kind"})
    deliver(tasks.requeue, "a", headers=newer)
    assert ran == [LOCK.key]


@each_wrong_header
def test_the_task_fails_with_one_error_that_names_the_header(
    wrong: dict[str, Any], ran: list[str]
) -> None:
    info = deliver(tasks.requeue, "a", headers=headers_of(tasks.requeue, **wrong)).retval
    error = getattr(info.exception, "exc", info.exception)
    field, value = [*wrong.items()][-1]
    text = f"The message header 'singletask' has an invalid {field!r}, "
    assert (type(error), str(error)) == (ValueError, f"{text}of type {type(value).__name__}.")
    assert ran == []


@pytest.mark.parametrize("ticket", [[], ["x", "1"], [1, 2], ["x", 1, 2], [["x"], 1], [None]])
def test_a_strange_ticket_replaces_no_call(ticket: Any, ran: list[str]) -> None:
    assert inside.take_number(LOCK, tasks.requeue)
    deliver(tasks.requeue, "a", headers=headers_of(tasks.requeue, ticket=ticket))
    assert ran == [LOCK.key]


@pytest.mark.parametrize(
    ("fields", "lock"),
    [
        (dict.fromkeys(("name", "key", "options", "queued", "ticket", "was", "token")), "own"),
        ({"name": None}, "shared"),
        ({"queued": "\ud800"}, "shared"),
        ({"due": 1, "hops": True, "a field of a later version": [1]}, "shared"),
    ],
    ids=["empty fields", "a key without a name", "a surrogate", "other numbers"],
)
def test_a_strange_header_that_can_be_read_is_read(
    fields: dict[str, Any], lock: str, ran: list[str]
) -> None:
    deliver(tasks.requeue, "a", headers=headers_of(tasks.requeue, **fields))
    assert ran == [LOCK.key if lock == "shared" else tasks.requeue.lock("a").key]


@each_wrong_header
def test_the_main_process_goes_on_in_silence(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The run tells what is wrong. A discarded call has nothing to free."""
    headers = headers_of(tasks.unique, **{"queued": "an entry", **wrong})
    fields = {"id": "mine", "task": tasks.unique.name, **headers}
    assert inside.receive_in_main_process(tasks.unique, dict(fields)) == fields
    message = SimpleNamespace(headers=fields)
    signals.task_unknown.send(sender=None, message=message)  # logs the error of a receiver
    inside.discard(tasks.unique, fields)
    assert caplog.text == ""
