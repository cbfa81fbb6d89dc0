"""A message with inner headers, as Sentry and ddtrace send it, keeps the header of this package.

Celery then shows the inner ones as ``request.headers``. tests/worker/test_traced.py has the tools.
"""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import Retry

from django_singletask import TaskLock
from tests import inside
from tests.deliveries import collect_sent, deliver, header_of, held_by, wait_for_debts
from tests.inside import headers_for
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]

TRACES = {"trace-id": "1"}
LOCK = TaskLock("traced")


def messages(task: Any, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return what Celery makes a request of, for each way in which a header can travel."""
    header = headers_for(task, **{"name": LOCK.name, "key": LOCK.key, **fields})
    stale = headers_for(task, name="stale", key="singletask:stale:0")
    return {
        "protocol 2": header,
        "inner headers": {**header, "headers": TRACES},
        "a stale copy": {**header, "headers": {**TRACES, **stale}},
        "strange inner headers": {**header, "headers": dict.fromkeys(header, "x")},
        "apply() and protocol 1": {"headers": header},
        "protocol 1 with inner headers": {"headers": {**header, "headers": TRACES}},
    }


each_message = pytest.mark.parametrize("kind", messages(tasks.whose))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return collect_sent(tasks.requeue.app, monkeypatch)


@each_message
def test_the_run_has_the_lock_and_the_token_that_the_message_names(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main process puts the token where the run reads it."""
    seen = []

    def run(task: Any, key: str) -> None:
        lock = tasks.current_lock()
        seen.append((lock.key, lock.token))

    monkeypatch.setattr(tasks.requeue.__class__, "run", run)
    fields = inside.receive_in_main_process(tasks.requeue, messages(tasks.requeue)[kind])
    deliver(tasks.requeue, "a", **fields)
    token = inside.header_of(fields)["token"]
    assert seen == [(LOCK.key, token)]


@each_message
def test_a_hop_keeps_it(kind: str, sent: list[Any]) -> None:
    lock = tasks.requeue.lock("a")
    fields = {"name": lock.name, "key": lock.key, "options": {"lock_wait": 60}}
    with held_by("another", task=tasks.requeue):
        deliver(tasks.requeue, "a", **messages(tasks.requeue, **fields)[kind])
    [message] = sent
    assert header_of(message).items() >= {**fields, "hops": 1}.items()


@each_message
@pytest.mark.parametrize("arguments", [None, ("b",)], ids=["the same", "others"])
def test_a_retry_keeps_it(
    kind: str, arguments: Any, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(task: Any, key: str) -> None:
        task.retry(arguments, countdown=0)

    monkeypatch.setattr(tasks.requeue.__class__, "run", run)
    options = {"options": {"lock_wait": 60}}
    info = deliver(tasks.requeue, "a", **messages(tasks.requeue, **options)[kind]).info
    assert type(info.retval) is Retry
    [message] = sent
    key = tasks.requeue.lock("b").key if arguments else LOCK.key
    assert header_of(message).items() >= {"key": key, **options}.items()


@each_message
def test_a_body_that_has_begun_is_known_to_its_retry(
    kind: str, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery notes it in the header, where the retry reads it."""

    def run(task: Any, key: str) -> None:
        task.retry(countdown=0)

    monkeypatch.setattr(tasks.requeue.__class__, "run", run)
    ticket = inside.take_number(LOCK, tasks.requeue)
    deliver(tasks.requeue, "a", **messages(tasks.requeue, ticket=ticket)[kind])
    [message] = sent
    assert "ticket" not in header_of(message)


@each_message
def test_a_revoked_call_frees_its_entry(kind: str) -> None:
    entry = inside.queued_entry(tasks.unique, "a")
    inside.write(entry, b"queued")
    lock = tasks.unique.lock("a")
    fields = {"name": lock.name, "key": lock.key, "queued": "queued"}
    inside.discard(tasks.unique, messages(tasks.unique, **fields)[kind])
    wait_for_debts()
    assert inside.read(entry) is None
