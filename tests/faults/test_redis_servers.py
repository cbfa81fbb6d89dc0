"""Locks in Redis with each client: what a process knows of its server, and its connections."""

from __future__ import annotations

import json
import threading

import pytest
import redis

from tests.processes import running
from tests.servers import Redis, Valkey, ask

pytestmark = pytest.mark.only_all("test_epoch.py shows it on one server")

CLIENTS = {"redis": Redis, "django_valkey": Valkey}


def at(server: Redis) -> dict[str, str]:
    return dict.fromkeys(("SINGLETASK_TEST_REDIS_URL", "SINGLETASK_TEST_VALKEY_URL"), server.url)


def take_after_a_return(
    alias: str, *, pool: tuple[str, ...] = (), loads_for: float = 0
) -> tuple[bool, dict]:
    """Let Redis return with an old snapshot; return what the taker and the holder know.

    The snapshot has the epoch of before, but not the lock that was taken since.
    """
    with (
        CLIENTS[alias]() as server,
        running("tests.snapshot", alias, "holder", **at(server)) as holder,
        running("tests.snapshot", alias, "taker", *pool, **at(server)) as taker,
    ):
        assert (holder.says(), taker.says()) == ("ready", "ready")
        for number in range(200):
            ask(server.port, f"SET other:{number} {'x' * 1000}\r\n".encode())
        assert ask(server.port, b"SAVE\r\n") == b"+OK\r\n"
        holder.go_on()
        assert holder.says() == "held"
        server.kill()
        server.config |= {
            "key_load_delay": int(loads_for * 1e6 / 200),
            "loading_process_events_interval_bytes": 1024,
        }
        taker.go_on()  # it asks again and again, so it comes as soon as the server is back
        server.start()
        taken = json.loads(taker.says())
        holder.go_on()
        return taken, json.loads(holder.says())


def test_a_taker_with_gevent_waits_until_the_live_holder_has_its_lock_back():
    taken, holder = take_after_a_return("redis", pool=("gevent",))
    assert (taken, holder) == (False, {"lost": False, "retaken": 1})


def test_a_taker_waits_also_after_a_server_that_loads_its_snapshot_for_long():
    """It says who it is from its start, but takes requests only when it has loaded."""
    taken, holder = take_after_a_return("django_valkey", loads_for=2)
    assert (taken, holder) == (False, {"lost": False, "retaken": 1})


class Observer(threading.Thread):
    """Note the greatest number of connections that a server has, without that of the observer."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.client = redis.Redis.from_url(url)
        self.ended = threading.Event()
        self.most = 0

    def run(self) -> None:
        while not self.ended.is_set():
            self.most = max(self.most, self.client.info("clients")["connected_clients"] - 1)
        self.client.close()

    def __enter__(self) -> Observer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ended.set()
        self.join()


@pytest.mark.parametrize("alias", CLIENTS)
def test_300_tasks_with_gevent_share_30_connections(alias):
    with (
        CLIENTS[alias]() as server,
        Observer(server.url) as observer,
        running("tests.greenlets", alias, "300", **at(server)) as process,
    ):
        assert process.says() == "held"
        process.go_on()
        assert process.says() == "300"
    assert 1 <= observer.most <= 30
