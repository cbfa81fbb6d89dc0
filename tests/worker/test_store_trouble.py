"""The store forgets its entries, or goes down, while a task runs."""

from __future__ import annotations

import re
import time

import pytest

from django_singletask import LockUnavailable
from django_singletask.stores import get_store
from tests import servers
from tests.deadline import wait_for
from tests.deliveries import noted
from tests.testapp import log, tasks
from tests.testapp.celery import app


@pytest.fixture
def own_redis(request, settings, monkeypatch):
    """Run a Redis server for the locks of this test alone."""
    with servers.Redis(**getattr(request, "param", {})) as server:
        monkeypatch.setenv("SINGLETASK_TEST_OWN_REDIS_URL", server.url)
        backend = "django.core.cache.backends.redis.RedisCache"
        cache = {"BACKEND": backend, "LOCATION": server.url, "KEY_PREFIX": "own_redis"}
        settings.CACHES = {**settings.CACHES, "own_redis": cache}
        settings.SINGLETASK_CACHE = "own_redis"
        yield server


def test_a_store_restarted_empty_is_told_the_lock_again(start_worker, queue, own_redis, runs_log):
    worker = start_worker(cache="own_redis", concurrency=2)
    options = {"lock_timeout": 3}
    result = tasks.hold.apply_async(("a", 60), queue=queue, lock_options=options)
    wait_for(lambda: worker.events("start"), "it runs")
    token = tasks.hold.lock("a").holder().token
    own_redis.restart_empty()
    holder = wait_for(lambda: tasks.hold.lock("a").holder(), "it is held again")
    assert holder.token == token
    wait_for(lambda: "taken again" in worker.text(), "the worker reports it")
    assert tasks.hold.apply_async(("a", 0), queue=queue).get(timeout=30) == "skipped"
    worker.end("a")
    assert result.get(timeout=20) == "ran"
    assert log.overlaps(runs_log) == 0


@pytest.mark.only_all("it waits for five seconds")
def test_a_store_that_is_down_for_5_seconds(start_worker, queue, own_redis, runs_log):
    worker = start_worker(cache="own_redis", concurrency=2)
    options = {"lock_timeout": 20}
    result = tasks.hold.apply_async(("a", 3), queue=queue, lock_options=options)
    wait_for(lambda: worker.events("start"), "it runs")
    own_redis.kill()
    down = time.monotonic()
    failed = tasks.hold.apply_async(("b", 0), queue=queue).get(timeout=20, propagate=False)
    assert type(failed) is LockUnavailable
    assert "The cache 'own_redis' cannot be used: ConnectionError: " in str(failed)
    assert tasks.regardless.apply_async(("c",), queue=queue).get(timeout=20) == "ran"
    while time.monotonic() - down < 5:
        # The main process answers its broker all this time.
        replies = app.control.ping(destination=[f"one-{queue}@test"], timeout=30, limit=1)
        assert replies, "the worker did not answer"
    # The body ended meanwhile, and could not give back its lock.
    assert result.get(timeout=30) == "ran"
    own_redis.start()
    again = wait_for(
        lambda: tasks.hold.apply_async(("a", 0), queue=queue).get(timeout=30) == "ran",
        "an equal call runs again",
    )
    assert again
    assert log.overlaps(runs_log) == 0


@pytest.mark.only_all("it starts a worker")
@pytest.mark.parametrize(
    "own_redis", [{"appendonly": "yes", "appendfsync": "always"}], indirect=True, ids=["AOF"]
)
def test_calls_that_wait_while_the_store_is_down_run_when_it_is_back(
    start_worker, queue, own_redis, runs_log
):
    """The store keeps its data, so of the calls of rerun the last one runs."""
    worker = start_worker(cache="own_redis", concurrency=2)
    calls = {tasks.requeue: [], tasks.requeue_late: [], tasks.rerun: []}
    locks = [task.lock("a") for task in calls]
    for lock in locks:
        assert lock.acquire()
    for value in range(1, 11):
        for task, of_task in calls.items():
            of_task.append(task.apply_async(("a", 0, value), queue=queue))
        wait_for(lambda: noted("a") == value, "it has met the conflict")  # noqa: B023
    wait_for(lambda: len(worker.events("conflict")) == 30, "all have met the conflict")
    own_redis.kill()
    expiring = tasks.requeue.apply_async(("b",), queue=queue, expires=3)
    # The expiring call may expire before a busy worker receives it.
    met = re.compile(r"\(key='a'\) .*: the call of .* is postponed")
    # A slow machine needs more than the first hop for these calls: some are superseded already.
    wait_for(
        lambda: len(met.findall(worker.text())) >= waiting(calls), "all met the outage", deadline=60
    )
    wait_for(lambda: expiring.state == "REVOKED", "it has expired")
    own_redis.start()
    for lock in locks:
        lock.release()
    answers = {task: [call.get(timeout=60) for call in of_task] for task, of_task in calls.items()}
    assert answers[tasks.requeue] == answers[tasks.requeue_late] == ["ran"] * 10
    assert answers[tasks.rerun] == ["superseded"] * 9 + ["ran"]
    assert not any(line["key"] == "b" for line in worker.events("start"))


def waiting(calls):
    return sum(not call.ready() for of_task in calls.values() for call in of_task)


@pytest.mark.only_all("it starts a server")
def test_what_could_not_be_given_back_is_given_back_later(own_redis, transactional_db):
    lock = tasks.hold.lock("a")
    lock.acquire()
    value = lock._lease.value
    store = get_store("own_redis")
    own_redis.kill()
    with pytest.raises(LockUnavailable):
        lock.release()
    own_redis.start()
    store.add(lock.key, value, 20)  # as on a server that keeps its data
    wait_for(lambda: not lock.locked(), "it is given back")
