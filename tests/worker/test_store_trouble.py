"""The store forgets its entries, or goes down, while a task runs."""

from __future__ import annotations

import re
import time

import pytest

from django_singletask import LockUnavailable
from tests import servers
from tests.deadline import wait_for
from tests.testapp import tasks
from tests.testapp.celery import app
from tests.worker.harness import get


@pytest.fixture
def own_redis(request, settings, monkeypatch):
    """Run a Redis server for the locks of this test alone."""
    with servers.Redis(**getattr(request, "param", {})) as server:
        monkeypatch.setenv("SINGLETASK_TEST_OWN_REDIS_URL", server.url)
        backend = "django.core.cache.backends.redis.RedisCache"
        cache = {"BACKEND": backend, "LOCATION": server.url, "KEY_PREFIX": "own_redis"}
        settings.CACHES = {**settings.CACHES, "own_redis": cache}
        yield server


@pytest.fixture
def cache(own_redis):
    return "own_redis"


that_keeps_its_data = pytest.mark.parametrize(
    "own_redis", [{"appendonly": "yes", "appendfsync": "always"}], indirect=True, ids=["AOF"]
)


def test_a_store_restarted_empty_is_told_the_lock_again(start_worker, key, own_redis):
    worker = start_worker()
    lock = tasks.hold.lock(key)
    call, _ = worker.run(tasks.hold, key, lock_options={"lock_timeout": 3})
    token = lock.holder().token
    own_redis.restart_empty()
    assert wait_for(lock.holder, "it is held again").token == token
    wait_for(lambda: "taken again" in worker.text(), "the worker reports it")
    assert worker.call(tasks.hold, key) == "skipped"
    worker.end(key)
    assert get(call) == "ran"
    assert worker.overlaps() == 0


@pytest.mark.only_all("it waits for five seconds")
def test_a_store_that_is_down_for_5_seconds(start_worker, key, own_redis):
    worker = start_worker()
    call, _ = worker.run(tasks.hold, key, lock_options={"lock_timeout": 20})
    own_redis.kill()
    down = time.monotonic()
    failed = get(worker.send(tasks.hold, f"other {key}"), propagate=False)
    assert type(failed) is LockUnavailable
    assert "The cache 'own_redis' cannot be used: ConnectionError: " in str(failed)
    assert worker.call(tasks.regardless, f"other {key}") == "ran"
    worker.end(key)
    while time.monotonic() - down < 5:
        # The main process answers its broker all this time.
        replies = app.control.ping(destination=[worker.host], timeout=30, limit=1)
        assert replies, "the worker did not answer"
    # The body ended meanwhile, and could not give back its lock.
    assert get(call) == "ran"
    own_redis.start()
    wait_for(lambda: worker.call(tasks.hold, key) == "ran", "an equal call runs again")
    assert worker.overlaps() == 0


@pytest.mark.only_all("it starts a server and a worker")
@that_keeps_its_data
def test_calls_that_wait_while_the_store_is_down_run_when_it_is_back(start_worker, key, own_redis):
    """Of the calls that replace each other, the last one runs."""
    worker = start_worker()
    calls = {tasks.requeue: [], tasks.requeue_late: [], tasks.latest: []}
    locks = [task.lock(key) for task in calls]
    for lock in locks:
        assert lock.acquire()
    for value in range(1, 11):
        for task, of_task in calls.items():
            of_task.append(worker.send(task, key, 0, value))
    wait_for(lambda: len(worker.events("conflict")) == 30, "all have met the conflict")
    own_redis.kill()
    expiring = worker.send(tasks.requeue, f"other {key}", expires=3)
    # The expiring call may expire before a busy worker receives it.
    met = re.compile(rf"\(key='{key}'\) .*: the call of .* is postponed")
    # A slow machine needs more than the first hop for these calls: some are superseded already.
    wait_for(
        lambda: len(met.findall(worker.text())) >= waiting(calls), "all met the outage", deadline=60
    )
    wait_for(lambda: expiring.state == "REVOKED", "it has expired")
    own_redis.start()
    for lock in locks:
        lock.release()
    answers = {task: [get(call) for call in of_task] for task, of_task in calls.items()}
    assert answers[tasks.requeue] == answers[tasks.requeue_late] == ["ran"] * 10
    assert answers[tasks.latest] == ["superseded"] * 9 + ["ran"]
    assert not worker.events("start", key=f"other {key}")


def waiting(calls):
    return sum(not call.ready() for of_task in calls.values() for call in of_task)


@pytest.mark.only_all("it starts a server")
@that_keeps_its_data
def test_what_could_not_be_given_back_is_given_back_later(own_redis):
    lock = tasks.hold.lock("a")
    lock.acquire()
    own_redis.kill()
    with pytest.raises(LockUnavailable):
        lock.release()
    own_redis.start()
    wait_for(lambda: not lock.locked(), "it is given back")
