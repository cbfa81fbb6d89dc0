"""A message with inner headers, as Sentry and ddtrace send it, keeps the header of this package.

Celery then shows the inner ones as ``request.headers``. tests/worker/test_traced.py has the tools.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.task import Context
from celery.exceptions import Retry

from django_singletask.locks.address import Address
from django_singletask.locks.keys import QUEUED, LockKey
from django_singletask.stores import get_store
from django_singletask.task.header import HEADER, Header
from django_singletask.task.latest import take_ticket
from django_singletask.worker import startup
from tests.deliveries import collect_sent, deliver, held_by, wait_for_debts
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]

TRACES = {"trace-id": "1"}
NAME, KEY = "traced", "singletask:traced:0"


def wire(task: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "mine", "task": task.name, "name": NAME, "key": KEY, **fields}


def messages(task: Any, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return what Celery makes a request of, for each way in which a header can travel."""
    header, stale = wire(task, **fields), wire(task, key="singletask:stale:0", name="stale")
    return {
        "protocol 2": {HEADER: header},
        "inner headers": {HEADER: header, "headers": TRACES},
        "a stale copy": {HEADER: header, "headers": {**TRACES, HEADER: stale}},
        "strange inner headers": {HEADER: header, "headers": {HEADER: "x"}},
        "apply() and protocol 1": {"headers": {HEADER: header}},
        "protocol 1 with inner headers": {"headers": {HEADER: header, "headers": TRACES}},
    }


each_message = pytest.mark.parametrize("kind", messages(tasks.whose))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the keys of the locks under which the body ran."""
    keys: list[str] = []
    body = lambda task, key: keys.append(tasks.current_lock().key)  # noqa: E731
    monkeypatch.setattr(tasks.requeue.__class__, "run", body)
    return keys


@each_message
def test_the_run_has_the_lock_that_the_message_names(kind: str, ran: list[str]) -> None:
    deliver(tasks.requeue, "a", **messages(tasks.requeue)[kind])
    assert ran == [KEY]


def test_control_a_reader_of_request_headers_alone_loses_it(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Header.of

    def of_headers(fields: Any, task_id: str, task: str) -> Header | None:
        headers = fields.get("headers") or {}
        return of({HEADER: headers.get(HEADER)}, task_id, task)

    monkeypatch.setattr(Header, "of", of_headers)
    kinds = messages(tasks.requeue)
    for kind in kinds:
        deliver(tasks.requeue, "a", **kinds[kind])
    assert ran.count(KEY) < len(kinds)


@each_message
def test_a_hop_keeps_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = collect_sent(tasks.requeue.app, monkeypatch)
    lock = tasks.requeue.lock("a")
    fields = {"name": lock.name, "key": lock.key, "options": {"lock_wait": 60}}
    with held_by("another", task=tasks.requeue):
        deliver(tasks.requeue, "a", **messages(tasks.requeue, **fields)[kind])
    [message] = sent
    header = Header.of(message["headers"], "mine", tasks.requeue.name)
    assert (header.key, header.options, header.hops) == (lock.key, {"lock_wait": 60}, 1)


@each_message
@pytest.mark.parametrize("arguments", [None, ("b",)], ids=["the same", "others"])
def test_a_retry_keeps_it(kind: str, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(task: Any, key: str) -> None:
        task.retry(arguments, countdown=0)

    sent = collect_sent(tasks.requeue.app, monkeypatch)
    monkeypatch.setattr(tasks.requeue.__class__, "run", run)
    options = {"options": {"lock_wait": 60}}
    info = deliver(tasks.requeue, "a", **messages(tasks.requeue, **options)[kind]).info
    assert type(info.retval) is Retry
    [message] = sent
    header = Header.of(message["headers"], "mine", tasks.requeue.name)
    other = tasks.requeue.lock("b").key
    assert (header.key, header.options) == (other if arguments else KEY, {"lock_wait": 60})


@each_message
def test_a_body_that_has_begun_is_known_to_its_retry(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery notes it in the header, where the retry reads it."""

    def run(task: Any, key: str) -> None:
        task.retry(countdown=0)

    sent = collect_sent(tasks.requeue.app, monkeypatch)
    monkeypatch.setattr(tasks.requeue.__class__, "run", run)
    ticket = take_ticket(Address("redis", LockKey(NAME, KEY)), tasks.requeue.name)
    deliver(tasks.requeue, "a", **messages(tasks.requeue, ticket=ticket)[kind])
    [message] = sent
    assert Header.of(message["headers"], "mine", tasks.requeue.name).never_gives_way


def queued_entry(task: Any) -> tuple[str, str]:
    key = LockKey(NAME, KEY).beside(QUEUED, task.name).key
    assert get_store("redis").add(key, b"queued", 60) is None
    return key, "queued"


@each_message
def test_a_revoked_call_frees_its_entry(kind: str) -> None:
    key, queued = queued_entry(tasks.unique)
    request = Context(messages(tasks.unique, queued=queued)[kind], id="mine")
    startup.free_revoked(tasks.unique, request, terminated=False)
    wait_for_debts()
    assert get_store("redis").read(key) is None


@each_message
def test_the_process_gets_the_token_of_the_main_process(kind: str) -> None:
    fields = messages(tasks.requeue)[kind]
    request = SimpleNamespace(task=tasks.requeue, id="mine", request_dict=fields)
    request.on_accepted = request.on_success = lambda *args: None
    pool = type("TaskPool", (), {"__module__": "celery.concurrency.prefork"})()
    startup.hand_out_token(SimpleNamespace(pool=pool), request)
    header = Header.of(vars(Context(fields, id="mine")), "mine", tasks.requeue.name)
    assert header.key == KEY
    assert len(header.token or "") == 32
