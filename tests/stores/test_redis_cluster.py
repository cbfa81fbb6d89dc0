"""Redis Cluster behind the clients that most projects have: when and how a store learns of it.

What a cluster does later is in tests/faults/test_cluster.py, with the same clients.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from redis import Redis as Client

from django_singletask import LockUnavailable, TaskLock, stores
from django_singletask.stores import cluster as stores_cluster
from django_singletask.stores import redis as stores_redis
from tests import inside
from tests.deadline import wait_for
from tests.endpoint import Endpoint
from tests.entries import in_child, private_store
from tests.servers import Cluster, Redis, Valkey, ask, free_port
from tests.stores.test_acl import LINE

CLIENTS = ["redis", "django_redis", "django_valkey"]
MY_CACHE = "django.core.cache.backends.redis.RedisCache"
on_each_client = pytest.mark.parametrize("alias", CLIENTS)


class MyStore(stores_redis.RedisStore):
    """A store of a project, with something of its own."""


@pytest.fixture(scope="module")
def lone() -> Iterator[Redis]:
    """Run a cluster of one server, which has all slots."""
    with Redis(cluster_enabled="yes", cluster_port=free_port()) as server:
        assert ask(server.port, b"CLUSTER ADDSLOTSRANGE 0 16383\r\n") == b"+OK\r\n"
        wait_for(
            lambda: b"cluster_state:ok" in ask(server.port, b"CLUSTER INFO\r\n"), "it is complete"
        )
        yield server


@pytest.fixture
def client(lone: Redis) -> Iterator[Client]:
    with Client.from_url(lone.url) as client:
        client.flushall()
        yield client


def use(store: Any) -> None:
    """Take locks of several groups, and list, fence and give back."""
    locks = [TaskLock(f"lock {number}", cache=store.cache_alias) for number in range(20)]
    for lock in locks:
        assert lock.acquire()
        assert not TaskLock(lock.name, cache=store.cache_alias).acquire(), "it is held"
    assert locks[0].fencing_token()
    assert {key for key, _ in store.entries()} == {lock.key for lock in locks}
    assert all(lock.release() for lock in locks)


@on_each_client
def test_a_node_of_a_cluster_keeps_the_locks_in_the_cluster(alias, lone, client, settings):
    with private_store(settings, alias, lone.url) as store:
        assert type(store) is stores_cluster.ClusterStore
        with TaskLock("nightly", cache=alias) as lock:
            [key] = client.scan_iter("*singletask:nightly*")
            assert key.decode() == store.group(lock.key).make_key(lock.key)
        use(store)


def test_a_process_asks_once(lone, settings, monkeypatch):
    settings.SINGLETASK_HISTORY = "off"
    asked = []
    read_many = stores_redis.RedisStore.read_many

    def note(store: Any, keys: Any) -> Any:
        if type(store) is stores_redis.RedisStore:
            asked.append(keys)
        return read_many(store, keys)

    def use_lock() -> bool:
        with TaskLock("nightly", cache="redis") as lock:
            return lock.owned()

    monkeypatch.setattr(stores_redis.RedisStore, "read_many", note)
    with private_store(settings, "redis", lone.url):
        assert use_lock()
        thread = threading.Thread(target=use_lock)
        thread.start()
        thread.join()
        assert in_child(lambda: use_lock() and len(asked) == 1)
        inside.close_connections()
        assert use_lock()
    assert len(asked) == 1


def test_where_info_is_forbidden_a_refusal_tells(lone, client, settings):
    user = LINE.replace("~shop:", "~redis:"), "+cluster|slots", "-info"
    client.execute_command(*" ".join(user).split())
    url = lone.url.replace("//", "//locks:secret@")
    with private_store(settings, "redis", url) as store:
        assert type(store) is stores_cluster.ClusterStore
        use(store)


def test_a_server_that_is_down_at_first_is_an_outage_and_is_asked_again(settings):
    server = Redis(cluster_enabled="yes", cluster_port=free_port())
    with server:
        assert ask(server.port, b"CLUSTER ADDSLOTSRANGE 0 16383\r\n") == b"+OK\r\n"
        server.kill()
        lock = TaskLock("nightly", cache="redis")
        settings.CACHES = {"redis": settings.CACHES["redis"] | {"LOCATION": server.url}}
        with pytest.raises(LockUnavailable, match=r"refused|connecting"):
            lock.acquire()
        server.start()
        wait_for(
            lambda: b"cluster_state:ok" in ask(server.port, b"CLUSTER INFO\r\n"), "it is complete"
        )
        with lock:
            assert type(inside.store_of("redis")) is stores_cluster.ClusterStore
        inside.close_connections()


@on_each_client
def test_another_node_tells_if_the_first_one_is_down(alias, lone, settings):
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    with private_store(settings, alias, [nobody, lone.url]) as store:
        assert type(store) is stores_cluster.ClusterStore
        use(store)


def test_a_replica_of_no_cluster_tells_nothing_if_its_primary_is_down(on_redis, settings):
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    replica = settings.CACHES["redis"]["LOCATION"]
    with (
        pytest.raises(LockUnavailable, match=r"refused|connecting"),
        private_store(settings, "redis", [nobody, replica]),
    ):
        pass


def test_a_server_that_says_nothing_is_asked_for_a_limited_time(settings, monkeypatch):
    """Also if the options of the cache set no limit: a worker asks before it starts."""
    monkeypatch.setattr(stores, "TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with (
            pytest.raises(LockUnavailable, match="Timeout"),
            private_store(settings, "redis", url, OPTIONS={"socket_timeout": None}),
        ):
            pass


def test_control_a_server_that_is_no_cluster_has_the_plain_store(on_redis):
    with TaskLock("nightly") as lock:
        assert lock.owned()
    assert type(inside.store_of("redis")) is stores_redis.RedisStore


# What cannot hold locks


@on_each_client
def test_another_database_is_named(alias, lone, settings):
    url = lone.url.replace("/0", "/1")
    with (
        pytest.raises(
            ImproperlyConfigured, match=r"has no database 1\. Use database 0 in LOCATION"
        ),
        private_store(settings, alias, url),
    ):
        pass


def test_a_unix_socket_is_refused(settings, tmp_path):
    path = tmp_path / "redis.sock"
    with (
        Redis(cluster_enabled="yes", cluster_port=free_port(), unixsocket=path),
        pytest.raises(ImproperlyConfigured, match="are not reached by a Unix socket"),
        private_store(settings, "redis", f"unix://{path}"),
    ):
        pass


def test_keys_that_would_choose_the_node_are_refused(lone, settings):
    with (
        pytest.raises(ImproperlyConfigured, match=r'KEY_FUNCTION puts "\{" into the keys'),
        private_store(settings, "redis", lone.url, KEY_PREFIX="{shop}"),
    ):
        pass


def test_a_store_of_a_project_is_not_replaced(lone, settings):
    settings.SINGLETASK_STORES = {MY_CACHE: f"{__name__}.MyStore"}
    with private_store(settings, "redis", lone.url) as store:
        assert type(store) is MyStore
        with pytest.raises(ImproperlyConfigured, match="MyStore is for a server in no cluster"):
            TaskLock("nightly", cache="redis").acquire()


def test_a_server_that_becomes_a_node_later_is_refused(lone, settings):
    """The locks of two processes would not meet."""
    with private_store(settings, "redis", lone.url) as store:
        plain = stores_redis.RedisStore(store.cache, "redis")
        with pytest.raises(ImproperlyConfigured, match="restart the process"):
            plain.read(TaskLock("nightly").key)


@pytest.mark.only_all("it starts processes")
@pytest.mark.django_db
def test_the_probe_says_what_the_cache_is_good_for(lone, monkeypatch):
    monkeypatch.setenv("SINGLETASK_TEST_REDIS_URL", lone.url)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
    command = [sys.executable, "-m", "django", "locks", "probe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    words = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert "the server is a node of a cluster, whose nodes keep the locks" in words
    assert "calls of caches['redis'] would meet redirects (MOVED)" in words


# Managed clusters


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(Redis, replicas=0) as both:
        yield both


@on_each_client
def test_an_endpoint_with_one_address_works(alias, three, settings):
    """CROSSSLOT is all that shows that it is a cluster."""
    with Endpoint(three) as endpoint, private_store(settings, alias, endpoint.url) as store:
        assert type(store) is stores_cluster.ClusterStore
        use(store)
        assert store.map.addresses == {f"127.0.0.1:{endpoint.port}"}


def test_control_the_plain_store_is_refused_by_that_endpoint(three, settings):
    with Endpoint(three) as endpoint, private_store(settings, "redis", endpoint.url) as store:
        plain = stores_redis.RedisStore(store.cache, "redis")
        with pytest.raises(ImproperlyConfigured, match="node of a cluster"):
            inside.take(plain, b"mine", TaskLock("nightly").key, waits=True)


@pytest.mark.parametrize("kind", [Redis, Valkey])
def test_one_name_leads_to_all_nodes(kind, settings):
    """As the configuration endpoint: each node is found by the first one."""
    with Cluster(kind, replicas=0) as both:
        with private_store(settings, "redis", both.primaries[1].url) as store:
            use(store)
            assert len(store.map.addresses) == 3


@pytest.mark.only_all("it starts a cluster")
def test_tls_and_a_password_on_each_node(certificate: tuple[Path, Path], settings):
    key, file = certificate
    files = {"tls_key_file": key, "tls_cert_file": file, "tls_ca_cert_file": file}
    both = Cluster(Redis, replicas=0, tls_cluster="yes", tls_auth_clients="no", **files)
    for node in both.nodes:
        node.config["tls_port"] = free_port()
    with both:
        for node in both.nodes:
            assert "OK" in both.say(node, LINE.replace("~shop:", "~*"), "+cluster|slots")
        ports = {node.config["tls_port"] for node in both.nodes}
        url = f"rediss://locks:secret@127.0.0.1:{min(ports)}/0"
        options = {"ssl_ca_certs": str(file), "ssl_check_hostname": False}
        with private_store(settings, "redis", url, options=options) as store:
            use(store)
            assert store.map.addresses == {f"127.0.0.1:{port}" for port in ports}
        pool = {"CONNECTION_POOL_KWARGS": options}
        with private_store(settings, "django_redis", url, options=pool) as store:
            use(store)
