"""A server that hangs keeps nobody for long, although no option of the cache says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_singletask import LockUnavailable, TaskLock
from tests.entries import holder, key_of, private_store
from tests.proxy import Proxy
from tests.servers import Memcached, Redis, Valkey

A, KEY = holder("a"), key_of("nightly")
BOTH = "socket_timeout", "socket_connect_timeout"
NONE: dict[str, Any] = {"SOCKET_TIMEOUT": None, "SOCKET_CONNECT_TIMEOUT": None}

Limits = tuple[float | None, float | None]


def limits_of(store: Any) -> Limits:
    """Return the seconds for a reply and to connect, of the connection that is open."""
    if store.family == "redis":
        connection = store.connections[-1]
        return connection._sock.gettimeout(), connection.socket_connect_timeout
    return store.client.timeout, store.client.connect_timeout


@pytest.mark.parametrize(
    ("alias", "options", "limits"),
    [
        ("redis", {}, (5, 5)),
        ("redis", {"socket_timeout": 1, "socket_connect_timeout": 2}, (1, 2)),
        ("redis", {"socket_timeout": 1}, (1, 5)),
        ("redis", dict.fromkeys(BOTH), (None, None)),
        ("django_redis", {}, (5, 5)),
        ("django_redis", {"SOCKET_TIMEOUT": 1, "SOCKET_CONNECT_TIMEOUT": 2}, (1, 2)),
        ("django_redis", NONE, (None, None)),
        ("django_valkey", {}, (5, 5)),
        ("django_valkey", NONE, (None, None)),
        ("pymemcache", {}, (5, 5)),
        ("pymemcache", {"timeout": 1, "connect_timeout": 2}, (1, 2)),
        ("pymemcache", dict.fromkeys(("timeout", "connect_timeout")), (None, None)),
    ],
)
def test_a_request_has_five_seconds_unless_the_options_say_otherwise(
    alias: str, options: dict[str, Any], limits: Limits, settings: Any
) -> None:
    # Not the pool of other tests, which django-redis keeps by its URL.
    kind = {"redis": Redis, "django_redis": Redis, "django_valkey": Valkey}.get(alias, Memcached)
    with kind() as server:
        location = getattr(server, "url", None) or f"127.0.0.1:{server.port}"
        with private_store(settings, alias, location, options=options) as store:
            store.read(KEY)
            assert limits_of(store) == limits


def test_a_node_of_a_cluster_has_five_seconds(cluster: Any, settings: Any) -> None:
    with private_store(settings, "cluster") as store:
        store.read(KEY)
        pools = store.pools.values()  # type: ignore[attr-defined]
        # A connection that was closed as the map of the cluster changed has no socket.
        sockets = [each._sock for pool in pools for each in pool if each._sock]
        assert {sock.gettimeout() for sock in sockets} == {5}


@pytest.mark.parametrize("alias", ["pylibmc", "pylibmc_binary"])
def test_libmemcached_has_limits_of_its_own(alias: str, settings: Any) -> None:
    with private_store(settings, alias) as store:
        behaviors = store.client.behaviors  # type: ignore[attr-defined]
        assert (behaviors["connect_timeout"], behaviors["_poll_timeout"]) == (4000, 5000)


@pytest.mark.parametrize("options", [{}, {"connect_timeout": 2}, {"tcp_user_timeout": None}])
@pytest.mark.django_db(databases="__all__")
def test_postgresql_notices_a_network_that_is_gone(
    options: dict[str, Any], settings: Any, monkeypatch: Any
) -> None:
    chosen = connections.settings["default"]
    changed = {**chosen, "OPTIONS": {**chosen.get("OPTIONS", {}), **options}}
    monkeypatch.setitem(connections.settings, "default", changed)
    with private_store(settings, "db_postgres") as store:
        store.read(KEY)
        facts = store.connection.connection.info.get_parameters()  # type: ignore[attr-defined]
        expected = {"connect_timeout": 5, "tcp_user_timeout": 5000} | options
        for name, value in expected.items():
            assert facts.get(name) == (None if value is None else str(value))
        assert "options" not in facts or "statement_timeout" not in facts["options"]


@pytest.mark.parametrize(
    ("alias", "kind", "location", "option"),
    [
        ("redis", Redis, "redis://127.0.0.1:{}/0", "socket_timeout"),
        ("pymemcache", Memcached, "127.0.0.1:{}", "timeout"),
    ],
)
def test_a_server_that_hangs_is_an_outage_in_time(
    alias: str, kind: Callable[[], Any], location: str, option: str, settings: Any
) -> None:
    with kind() as server, Proxy(server.port) as proxy:
        place = location.format(proxy.port)
        with private_store(settings, alias, place, options={option: 0.2}) as store:
            assert store.add(KEY, A, 60) is None
            proxy.hang()
            with pytest.raises(LockUnavailable):
                store.read(KEY)


@pytest.mark.parametrize("port", ["abc", "99999", "-1"])
@pytest.mark.parametrize(
    ("alias", "location"),
    [
        ("redis", "redis://127.0.0.1:{}/0"),
        ("django_valkey", "redis://127.0.0.1:{}/0"),
        ("cluster", "redis://127.0.0.1:{}"),
        ("pymemcache", "127.0.0.1:{}"),
        ("pylibmc", "127.0.0.1:{}"),
    ],
)
def test_a_bad_port_is_a_mistake_in_the_settings(
    alias: str, location: str, port: str, settings: Any
) -> None:
    settings.SINGLETASK_CACHE = alias
    configuration = settings.CACHES[alias] | {"LOCATION": location.format(port)}
    settings.CACHES = settings.CACHES | {alias: configuration}
    began = time.monotonic()
    with pytest.raises((ImproperlyConfigured, LockUnavailable), match=r"[Pp]ort|valid|refused"):
        TaskLock("nightly").acquire()
    assert time.monotonic() - began < 30
