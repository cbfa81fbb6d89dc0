"""No reply counts for another request: not one that comes twice, late, malformed or not at all."""

from __future__ import annotations

import errno
import select
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from django_singletask import LockUnavailable
from django_singletask.stores import redis
from django_singletask.stores.base import Outcome, Store
from tests import inside
from tests.deadline import wait_for
from tests.entries import holder, key_of, private_store
from tests.proxy import Interposed, Proxy
from tests.servers import Memcached, Redis, Server

A, B = holder("a"), holder("b")
KEY, OTHER = key_of("nightly"), key_of("other")
on_each_client = pytest.mark.parametrize("alias", ["redis", "pymemcache"])


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with Redis() as redis, Memcached() as memcached:
        yield {"redis": redis, "pymemcache": memcached}


@pytest.fixture
def proxy(alias: str, servers: dict[str, Server]) -> Iterator[Proxy]:
    with Proxy(servers[alias].port) as proxy:
        yield proxy


@pytest.fixture
def store(alias: str, proxy: Proxy, settings: Any) -> Iterator[Store]:
    """Open a store behind the proxy, with the lock held by A."""
    location = f"127.0.0.1:{proxy.port}"
    location = f"redis://{location}/0" if alias == "redis" else location
    options = {"redis": {"socket_timeout": 1}, "pymemcache": {"timeout": 1}}[alias]
    with private_store(settings, alias, location, options=options) as store:
        for key in (KEY, OTHER):
            if entry := store.read(key):
                store.release(key, entry.value)
        assert store.add(KEY, A, 60) is None
        yield store


def is_readable(store: Any) -> bool:
    client = store.connections[-1]._sock if store.family == "redis" else store.client.sock
    return bool(select.select([client], [], [], 0)[0])


def repeat_a_take(store: Store, proxy: Proxy) -> None:
    """Take a lock that is free, and let the reply ("yours") come once more."""
    assert inside.take(store, B, OTHER) == OTHER
    proxy.say_again()
    wait_for(lambda: is_readable(store), "the reply is there again")


@on_each_client
def test_a_reply_that_comes_again_is_no_answer_to_the_next_request(store, proxy) -> None:
    repeat_a_take(store, proxy)
    assert inside.take(store, B, KEY) != KEY
    assert store.read(KEY).value == A


@on_each_client
def test_control_without_the_look_a_held_lock_is_taken(store, proxy, monkeypatch) -> None:
    if store.family == "redis":
        store.connections[-1].waiting = lambda seconds: []
        store.connections[-1].has_more = lambda seconds: False
        monkeypatch.setattr(redis, "MALFORMED", ())
        sock = store.connections[-1]._sock
        assert inside.take(store, B, OTHER) == OTHER
        Interposed(store.connections[-1], recv=lambda size: sock.recv(len(b":0\r\n")))
    else:
        monkeypatch.setattr(select, "poll", lambda: mock.Mock(poll=lambda seconds: []))
        assert inside.take(store, B, OTHER) == OTHER
    proxy.say_again()
    wait_for(lambda: is_readable(store), "the reply is there again")
    assert inside.take(store, B, KEY) == KEY
    store.close()
    assert store.read(KEY).value == A


@pytest.mark.parametrize("alias", ["redis"])
def test_a_reply_that_comes_twice_at_once_is_asked_for_on_another_connection(store, proxy) -> None:
    proxy.twice = True
    connections = len(proxy.sockets)
    with pytest.raises(LockUnavailable, match="Malformed"):  # also there
        inside.take(store, B, KEY)
    assert len(proxy.sockets) > connections
    proxy.twice = False
    assert inside.take(store, B, KEY) != KEY


@pytest.mark.parametrize("alias", ["redis"])
def test_the_reply_of_a_server_that_is_ready_counts_for_no_request(
    store, proxy, monkeypatch
) -> None:
    def known_server() -> bytes:
        proxy.twice = True
        return b"another"  # so the next request on the new connection asks whether it is ready

    monkeypatch.setattr(store, "known_server", known_server)
    store.close()
    with pytest.raises(LockUnavailable, match="another reply"):
        store.read(KEY)


@on_each_client
def test_the_first_request_on_a_connection_that_was_dropped_is_sent_again(store, proxy) -> None:
    proxy.drop()
    assert inside.take(store, B, KEY) != KEY
    proxy.drop()
    assert store.release(KEY, A) in {Outcome.OK, Outcome.SENT_TWICE}


@pytest.mark.parametrize("alias", ["redis"])
def test_a_connection_that_the_system_gives_up_is_replaced(store, proxy) -> None:
    """With ``socket_timeout`` None the client waits until then."""

    def give_up(size: int) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    connection = store.connections[-1]
    connection.socket_timeout = None
    Interposed(connection, recv=give_up)
    assert store.read(KEY).value == A


@pytest.mark.parametrize("alias", ["redis"])
def test_a_server_that_hangs_is_asked_twice_within_ten_seconds(store, proxy, monkeypatch) -> None:
    monkeypatch.setattr(type(store), "patience", 1.5)
    proxy.hang()
    began = time.monotonic()
    with pytest.raises(LockUnavailable):
        store.read(KEY)
    assert time.monotonic() - began >= 1.4
    assert not store.connections
    # The first request has all the time.
    with pytest.raises(LockUnavailable):
        store.read(KEY)


@on_each_client
def test_a_background_thread_asks_once(store, proxy) -> None:
    store.limit(0.5)
    assert store.read(KEY).value == A
    proxy.drop()
    with pytest.raises(LockUnavailable):
        store.read(KEY)
    assert store.read(KEY).value == A


MALFORMED = [
    b":1x\r\n",
    b"!oops\r\n",
    b"*1\r\n" * 2000,
    b":7\r\n",
    b"$-1\r\n",
    b"*0\r\n",
    b"+OK\r\n",
]
MALFORMED += [b"$9\r\n0 1 5 xyz\r\n", b"$9\r\n7 1 3 xyz\r\n"]
REQUESTS: dict[str, Callable[[Store], object]] = {
    "take": lambda store: inside.take(store, B, KEY),
    "change": lambda store: store.change(KEY, A, B, 60),
    "renew": lambda store: store.renew(KEY, A, 60),
    "read": lambda store: store.read(KEY),
    "fence": lambda store: store.fence(KEY, A),
    "entries": lambda store: [*store.entries()],
    "look": lambda store: store.look(),
}


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("alias", ["redis"])
def test_a_malformed_reply_is_an_outage_and_its_connection_is_closed(store, request_name) -> None:
    reads = REQUESTS[request_name]
    fit = {"fence": {b":7\r\n", b"$-1\r\n"}}
    for reply in MALFORMED:
        if reply in fit.get(request_name, ()):
            continue
        store.read(KEY)
        connection = store.connections[-1]
        opened = connection.connect
        Interposed(connection, recv=lambda size: reply)  # noqa: B023
        connection.connect = lambda: (opened(), Interposed(connection, recv=lambda _: reply))  # noqa: B023
        with pytest.raises(LockUnavailable, match="Malformed reply"):
            print(reply, reads(store))
        assert not store.connections
