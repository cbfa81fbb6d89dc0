"""Real workers with RabbitMQ as their broker, on a classic and on a quorum queue."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import Celery
from celery.result import AsyncResult
from kombu import Connection, Exchange, Queue

from tests import servers
from tests.deadline import wait_for
from tests.testapp import tasks
from tests.worker.harness import Worker, get

KINDS = ["classic", "quorum"]
if celery.VERSION < (5, 5):
    KINDS.remove("quorum")

CONFIRM = {"confirm_publish": True}
"""Wait for each message until RabbitMQ has stored it, as the docs say."""

pytestmark = [
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.only_all("RabbitMQ takes long to start, and few have it"),
]


class Site:
    """A worker on a queue of its own, and how to send calls to it."""

    def __init__(self, broker: servers.RabbitMQ, kind: str, folder: Path) -> None:
        name = f"{kind}-{uuid.uuid4().hex[:12]}"
        quorum = kind == "quorum"
        # Celery lets RabbitMQ delay messages where there are quorum queues on topic exchanges.
        exchange = Exchange(name, type="topic" if quorum else "direct")
        arguments = {"x-queue-type": "quorum"} if quorum else None
        self.queue = Queue(name, exchange, routing_key=name, queue_arguments=arguments)
        self.url = broker.url
        conf = {
            "task_default_queue_type": kind,
            "task_default_exchange_type": exchange.type,
            "broker_transport_options": CONFIRM,
        }
        env = {"SINGLETASK_TEST_BROKER": broker.url}
        self.worker = Worker(folder, name, name=kind, concurrency=4, conf=conf, env=env)

    def send(self, task: Any, seconds: float = 0, key: str = "", **options: Any) -> AsyncResult:
        """Send a call. Another worker's calls have other keys."""
        facts = {"args": (self.worker.name + key, seconds), "queue": self.queue}
        with Connection(self.url, transport_options=CONFIRM) as connection:
            return task.apply_async(**facts, connection=connection, **options)

    def start(self, *args: Any, **options: Any) -> AsyncResult:
        """Send a call and wait until it runs."""
        result = self.send(*args, **options)
        self.wait_for("start", result)
        return result

    def wait_for(self, event: str, result: AsyncResult, times: int = 1) -> None:
        wait_for(lambda: len(self.events(event, result)) >= times, f"{event} {times}")

    def events(self, event: str, result: AsyncResult) -> list[dict[str, Any]]:
        return self.worker.events(event, task_id=result.id)

    def wait_for_redelivery(self, result: AsyncResult) -> None:
        line = f"[{result.id}] received"
        wait_for(lambda: self.worker.text().count(line) > 1, "it is delivered again", deadline=120)

    def wait_for_drop(self, result: AsyncResult) -> None:
        line = f"{result.id} was delivered again, but its work is done"
        wait_for(lambda: line in self.worker.text(), "it is dropped", deadline=60)


@pytest.fixture(scope="module")
def broker():
    with servers.RabbitMQ() as server:
        yield server


@pytest.fixture(scope="module")
def sites(broker, tmp_path_factory, django_db_setup):
    sites = {kind: Site(broker, kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}
    try:
        for site in sites.values():
            site.worker.start()
        yield sites
    finally:
        for site in sites.values():
            site.worker.kill_group()
            print(site.worker.text())


@pytest.fixture
def site(sites, kind):
    return sites[kind]


def requeue(site, key):
    """Send two calls of which the second must wait for the first."""
    first = site.start(tasks.requeue, 0.5, key)
    second = site.send(tasks.requeue, 0, key)
    assert [get(first), get(second)] == ["ran", "ran"]
    (end,), (start,) = site.events("end", first), site.events("start", second)
    assert end["t"] <= start["t"]


def test_requeue(site):
    requeue(site, "")


def test_replace(site):
    first = site.start(tasks.latest, 1)
    later = []
    for _ in range(3):
        later.append(site.send(tasks.latest))
        site.wait_for("conflict", later[-1])
    answers = [get(result) for result in [first, *later]]
    assert answers == ["ran", "superseded", "superseded", "ran"]


def test_revoke(site, kind):
    control = Celery("revokes", broker=site.url, set_as_current=False).control
    control.revoke(site.start(tasks.long, 60).id, terminate=True)
    wait_for(lambda: not tasks.long.lock(kind).locked(), "the lock is free")
    assert get(site.send(tasks.long)) == "ran"


def test_a_killed_child(site):
    """The broker delivers the message again; the work is done once."""
    result = site.start(tasks.late, 1)
    os.kill(site.events("start", result)[0]["pid"], signal.SIGKILL)
    assert get(result) == "ran"
    assert len(site.events("start", result)) == 2
    assert len(site.events("end", result)) == 1


def test_a_killed_worker_and_an_id_that_was_used_before(broker, kind, tmp_path):
    """The result of the call before says nothing about the message that is delivered again."""
    site = Site(broker, kind, tmp_path)
    with site.worker as worker:
        result = site.send(tasks.late, 0, "before")
        assert get(result) == "ran"
        site.send(tasks.late, 1, "again", task_id=result.id)
        site.wait_for("start", result, times=2)
        worker.kill_group()
        worker.start()
        site.wait_for("end", result, times=2)
    assert len(site.events("start", result)) == 3


@pytest.fixture(scope="module")
def after_the_kill(broker, sites):
    """Kill the broker while calls run, and start it again with its data.

    Two calls succeed while it is away, so their messages cannot be acknowledged. The third one
    still runs when its message is delivered again.
    """
    calls = {}
    for site in sites.values():
        # A delayed message has arrived, so RabbitMQ has stored Celery's queues for these. If it is
        # killed 0.2 s after they were declared, it confirms no delayed message after its restart.
        requeue(site, "before")
    for kind, site in sites.items():
        calls[kind] = {
            "succeeded": site.start(tasks.late, 2, "succeeded"),
            "unknown": site.start(tasks.late, 2, "unknown", ignore_result=True),
            "long": site.start(tasks.late, 200, "long"),
        }
    broker.kill()
    for kind, site in sites.items():
        for name in ("succeeded", "unknown"):
            assert not site.events("end", calls[kind][name]), "it ended too early"
    # The two end before the broker has started, and the worker tries to connect after 2 and 6 s.
    broker.start()
    for kind, site in sites.items():
        for result in calls[kind].values():
            site.wait_for_redelivery(result)
    return calls


def test_a_call_that_succeeded_and_could_not_be_acknowledged(site, kind, after_the_kill):
    result = after_the_kill[kind]["succeeded"]
    site.wait_for_drop(result)
    assert len(site.events("start", result)) == 1


def test_control_without_a_result_it_runs_again(site, kind, after_the_kill):
    site.wait_for("end", after_the_kill[kind]["unknown"], times=2)


def test_a_redelivery_beside_its_live_first_run(site, kind, after_the_kill):
    result = after_the_kill[kind]["long"]
    site.wait_for("conflict", result)
    site.worker.end(f"{kind}long")
    site.wait_for_drop(result)
    assert len(site.events("start", result)) == 1
