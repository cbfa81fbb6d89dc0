"""A header that another program made up: the task fails with one clear error, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from django_singletask import TaskLock
from django_singletask.locks.keys import LockKey
from django_singletask.task.header import HEADER, VERSION, Header
from django_singletask.task.latest import take_ticket
from django_singletask.worker import startup
from django_singletask.worker.watcher import Watcher
from tests.deliveries import deliver
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]

KEY = {"name": "shared", "key": "singletask:shared:0"}
WRONG: list[dict[str, Any]] = [
    *({field: 7} for field in ("name", "key", "queued", "token", "was", "options", "ticket")),
    *({field: ["x"]} for field in ("name", "key", "queued", "token", "was", "options")),
    *({field: {"x": 1}} for field in ("name", "key", "queued", "token", "was", "ticket")),
    *({field: "x"} for field in ("options", "ticket", "due", "requeued_at", "hops")),
    *({field: ["x"]} for field in ("due", "requeued_at", "hops", "redelivered")),
    *({field: {}} for field in ("due", "requeued_at", "hops", "redelivered", "never_gives_way")),
    {"redelivered": "yes"},
    {"key": "x" * 100_000, "queued": 7},
    {"queued": ["x" * 100_000]},
]
each_wrong_header = pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:40])


def headers_of(task: Any, **fields: Any) -> dict[str, Any]:
    return {HEADER: {"id": "mine", "task": task.name, **KEY, **fields}}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the keys for which the body of a task ran."""
    keys: list[str] = []
    monkeypatch.setattr(tasks.requeue.__class__, "run", lambda task, key: keys.append(key))
    return keys


def test_of_a_newer_header_the_lock_is_read_and_nothing_else() -> None:
    newer = headers_of(tasks.requeue, version=VERSION + 1, hops={"of": "another kind"})
    header = Header.of(newer, "mine", tasks.requeue.name)
    assert header == Header("mine", tasks.requeue.name, **KEY)


def test_a_header_says_its_version() -> None:
    wire = Header("mine", tasks.requeue.name).into(None)[HEADER]
    assert wire["version"] == VERSION


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
    assert take_ticket(TaskLock(LockKey(*KEY.values()))._address, tasks.requeue.name)
    deliver(tasks.requeue, "a", headers=headers_of(tasks.requeue, ticket=ticket))
    assert ran == ["a"]


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(("name", "key", "options", "queued", "ticket", "was", "token")),
        {"name": None},
        {"queued": "\ud800"},
        {"due": 1, "hops": True, "a field of a later version": [1]},
    ],
    ids=["empty fields", "a key without a name", "a surrogate", "other numbers"],
)
def test_a_strange_header_that_can_be_read_is_read(fields: dict[str, Any], ran: list[str]) -> None:
    deliver(tasks.requeue, "a", headers=headers_of(tasks.requeue, **fields))
    assert ran == ["a"]


class TestMainProcess:
    """It goes on in silence, since the run tells what is wrong."""

    @pytest.fixture(autouse=True)
    def is_silent(self, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
        yield
        assert caplog.text == ""

    @each_wrong_header
    def test_a_message_is_handed_on(
        self, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = type("TaskPool", (), {"__module__": "celery.concurrency.prefork"})()
        pool_watcher = Watcher()
        monkeypatch.setattr(startup, "watcher", pool_watcher)
        headers = headers_of(tasks.requeue, **{"hops": 1, **wrong})
        request = Request(tasks.requeue, headers)
        stopped = SimpleNamespace(state=None)
        consumer = SimpleNamespace(pool=pool, hub=object(), blueprint=stopped)
        startup.hand_out_token(consumer, request)
        request.on_accepted(77, 0.5)
        request.on_success((True, SimpleNamespace(exception=ValueError()), 0.1))
        assert request.calls == ["accepted", "success"]
        assert pool_watcher.deliveries == {}  # if the run is killed, there is nothing to free

    @each_wrong_header
    def test_a_discarded_call_has_nothing_to_free(self, wrong: dict[str, Any]) -> None:
        headers = headers_of(tasks.unique, **{"queued": "an entry", **wrong})
        message = SimpleNamespace(headers={**headers, "id": "mine", "task": tasks.unique.name})
        startup.free_unreadable(message)
        startup.free_revoked(
            tasks.unique, SimpleNamespace(headers=message.headers, id="mine"), terminated=False
        )


class Request:
    """What a worker's main process has of a message."""

    id = "mine"
    eta = "2030-01-01"

    def __init__(self, task: Any, headers: dict[str, Any]) -> None:
        self.task, self.request_dict, self._payload = task, headers, (("a",), {}, {})
        self.calls: list[str] = []

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        self.calls.append("accepted")

    def on_success(self, outcome: Any) -> None:
        self.calls.append("success")
