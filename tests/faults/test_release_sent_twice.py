"""A release that was sent twice, because its reply was lost, counts as made if it was made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connections
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkey.backoff import NoBackoff as ValkeyNoBackoff
from valkey.exceptions import ConnectionError as ValkeyConnectionError
from valkey.retry import Retry as ValkeyRetry

from django_singletask import TaskLock
from django_singletask.signals import LockEvent, lock_event
from tests.entries import private_store
from tests.proxy import Proxy
from tests.servers import Redis, Valkey

RETRY = {"retry": Retry(NoBackoff(), 3)}
# The cache's client sends a request again that failed: how each is told to.
OPTIONS: dict[str, dict[str, Any]] = {
    "redis": RETRY,
    "django_redis": {"CONNECTION_POOL_KWARGS": RETRY},
    "django_valkey": {
        "CONNECTION_POOL_KWARGS": {
            "retry": ValkeyRetry(ValkeyNoBackoff(), 3),
            "retry_on_error": [ValkeyConnectionError],
        }
    },
}
DATABASES = {"db_postgres": "default", "db_mariadb": "mariadb"}
LEASE = 60


@pytest.fixture
def events() -> Iterator[list[LockEvent]]:
    """Collect the events of locks."""
    collected: list[LockEvent] = []

    def note(event: LockEvent, **kwargs: object) -> None:
        collected.append(event)

    lock_event.connect(note)
    yield collected
    lock_event.disconnect(note)


@pytest.fixture
def server(alias: str) -> Iterator[Redis]:
    with Valkey() if alias == "django_valkey" else Redis() as server:
        yield server


@pytest.fixture
def behind(
    settings, monkeypatch, server, empty_cache, django_db_blocker
) -> Iterator[Callable[[str], Proxy]]:
    """Give the function that puts a proxy before the server of a cache."""
    settings.SINGLETASK_HISTORY = "off"
    with ExitStack() as stack:
        stack.enter_context(django_db_blocker.unblock())

        def put_behind(alias: str) -> Proxy:
            if alias in DATABASES:
                empty_cache(alias)
                database = DATABASES[alias]
                configuration = connections.settings[database]
                proxy = stack.enter_context(Proxy(configuration["PORT"]))
                changed = configuration | {"PORT": proxy.port}
                monkeypatch.setitem(connections.settings, database, changed)
                stack.enter_context(private_store(settings, alias))
            else:
                proxy = stack.enter_context(Proxy(server.port))
                url = f"redis://127.0.0.1:{proxy.port}/0"
                options = OPTIONS[alias]
                stack.enter_context(private_store(settings, alias, url, options=options))
            settings.SINGLETASK_CACHE = alias
            return proxy

        yield put_behind


def take() -> tuple[TaskLock, bytes]:
    """Return a lock that is held, and bytes that are in the request of its release only."""
    with TaskLock("first", timeout=LEASE):
        pass  # the connection is open, and the server knows the scripts
    lock = TaskLock("nightly", timeout=LEASE)
    assert lock.acquire()
    return lock, lock.token.encode()


def kinds(events: list[LockEvent], lock: TaskLock) -> list[str]:
    return [event.kind for event in events if event.name == lock.name]


on_each_cache = pytest.mark.parametrize("alias", [*OPTIONS, *DATABASES])


@on_each_cache
def test_a_release_whose_reply_was_lost_counts_as_made(alias, behind, events, caplog):
    proxy = behind(alias)
    lock, request = take()
    proxy.lose_reply_to(request)
    assert lock.release() is True
    assert proxy.lost == 1
    assert not lock.lost
    assert kinds(events, lock) == ["acquired", "released"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("alias", OPTIONS)
def test_control_a_cache_that_restarts_empty_between_the_two_has_lost_the_lock(
    alias, behind, server, events
):
    proxy = behind(alias)
    lock, request = take()
    with ThreadPoolExecutor() as threads:  # the server ends with the thread that starts it
        proxy.lose(request, meanwhile=lambda: threads.submit(server.restart_empty).result())
        assert lock.release() is False
        server.stop()
    assert proxy.lost == 1
    assert "lost" in kinds(events, lock)


@on_each_cache
def test_control_a_lock_that_was_cleared_between_the_two_is_lost(alias, behind, events):
    def clear() -> None:
        thread = threading.Thread(target=TaskLock("nightly").clear)
        thread.start()
        thread.join()

    proxy = behind(alias)
    lock, request = take()
    proxy.lose(request, meanwhile=clear)
    assert lock.release() is False
    assert proxy.lost == 1
    assert "lost" in kinds(events, lock)
