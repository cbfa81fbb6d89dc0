"""A cache that stops answering ends no lock in another cache of the same process."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_singletask import TaskLock
from tests.processes import running
from tests.proxy import Proxy
from tests.servers import Memcached, Redis
from tests.two_caches import LEASE, NAME

MEMCACHED, REDIS = "SINGLETASK_TEST_OWN_MEMCACHED", "SINGLETASK_TEST_OWN_REDIS_URL"
POSTGRES = "SINGLETASK_TEST_POSTGRES"


@contextmanager
def taking_again_and_again(name: str) -> Iterator[list[bool]]:
    """Try to take a lock in another process than its holder's; collect what comes of it."""
    results: list[bool] = []
    ended = threading.Event()

    def take() -> None:
        while not ended.wait(0.05):
            results.append(TaskLock(name, cache="redis", timeout=LEASE).acquire())

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield results
    finally:
        ended.set()
        thread.join()


@contextmanager
def server_of(alias: str) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """Yield the address of a server as an environment variable, and what lets it hang."""
    if alias == "db_postgres":
        with Proxy(int(os.environ[POSTGRES].rpartition(":")[2])) as proxy:
            yield {POSTGRES: f"postgresql://singletask@127.0.0.1:{proxy.port}"}, proxy.hang
        return
    with Redis() if alias == "own_redis" else Memcached() as server:

        def hang() -> None:
            server.pause()
            os.waitpid(server.process.pid, os.WUNTRACED)

        yield {REDIS: server.url} if alias == "own_redis" else {MEMCACHED: server.address}, hang


def with_one_that_hangs(alias: str, what: str, seconds: float) -> dict[str, Any]:
    """Let a process hold locks in a cache that hangs and in Redis; return what it knows."""
    arguments = [alias, "redis", what, str(seconds)]
    with (
        server_of(alias) as (address, hang),
        running("tests.two_caches", *arguments, **address) as process,
    ):
        assert process.says() == "held"
        hang()
        process.go_on()
        with taking_again_and_again(NAME) as results:
            result: dict[str, Any] = json.loads(process.says())
        assert results
        return {**result, "taken": results.count(True)}


@pytest.mark.only_all("shown on another cache", "own_redis", "db_postgres", "own_pylibmc")
@pytest.mark.usefixtures("on_redis")
@pytest.mark.parametrize("alias", ["own_pymemcache", "own_pylibmc", "own_redis", "db_postgres"])
def test_a_lock_in_a_healthy_cache_stays_held_for_two_leases(alias):
    result = with_one_that_hangs(alias, "hold", 2 * LEASE)
    assert result == {"lost": False, "longest": 0.0, "taken": 0}


@pytest.mark.only_all("it waits for two leases")
@pytest.mark.usefixtures("on_redis")
@pytest.mark.parametrize("alias", ["own_pymemcache", "db_postgres"])
def test_a_lock_in_a_healthy_cache_is_extended_at_once(alias):
    result = with_one_that_hangs(alias, "extend", 2 * LEASE)
    assert result["longest"] < LEASE
    assert (result["lost"], result["taken"]) == (False, 0)
