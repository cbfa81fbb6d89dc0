"""Locks with each reader of redis-py and valkey-py, in both protocols, by TLS and Unix sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.connection
import valkey.connection

from django_singletask import LockUnavailable
from django_singletask.stores.base import Outcome, Store
from tests import inside, servers
from tests.entries import holder, key_of, private_store
from tests.proxy import Interposed

A, B = holder("a"), holder("b")
KEY, OTHER, THIRD = key_of("nightly"), key_of("other"), key_of("third")
CLIENTS: dict[str, Any] = {"redis": redis.connection, "django_valkey": valkey.connection}
SWITCHES = {"redis": "HIREDIS_AVAILABLE", "django_valkey": "LIBVALKEY_AVAILABLE"}
PARSERS = {
    "redis": {"parser_class": "redis._parsers._RESP2Parser"},
    "django_valkey": {"PARSER_CLASS": "valkey._parsers._RESP2Parser"},
}
PUSHED = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nx\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Redis]:
    own = servers.Redis()
    with servers.running([own]):
        yield own


@pytest.fixture(params=[2, 3])
def protocol(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(params=["compiled", "python"])
def reader(request: pytest.FixtureRequest, alias: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a client read and pack by hiredis or libvalkey, or as if they were not installed."""
    switch = SWITCHES[alias]
    if request.param == "python":
        monkeypatch.setattr(CLIENTS[alias], switch, False)
    elif not getattr(CLIENTS[alias], switch):
        pytest.skip("hiredis or libvalkey is not installed")
    name: str = request.param
    return name


@pytest.fixture(params=CLIENTS)
def alias(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def store(
    server: servers.Redis, alias: str, protocol: int, reader: str, settings: Any
) -> Iterator[Any]:
    options: dict[str, Any] = {"protocol": protocol, "socket_timeout": 2}
    if alias == "django_valkey":
        options = {"CONNECTION_POOL_KWARGS": options}
    database = protocol  # django-valkey keeps the connections, and their options, of each URL
    if reader == "python":
        options |= PARSERS[alias]
        database += 2
    url = f"redis://127.0.0.1:{server.port}/{database}"
    with private_store(settings, alias, url, options=options) as store:
        store.client.flushall()
        store.look()
        inside.emptied_long_ago(alias)
        assert store.add(KEY, A, 60) is None
        yield store


def use(store: Store) -> None:
    """Send every kind of request of a lock."""
    key = key_of("used")
    assert inside.take(store, A, key, waits=True) == key
    blockers = inside.take(store, B, key, waits=True)
    assert blockers == {key: A}
    assert store.read(key_of("nobody's")) is None
    assert store.renew_many([(key, A, 60), (key, B, 60)]) == [Outcome.OK, Outcome.TAKEN]
    assert store.replace(key, A, B, 60)
    assert {each: entry.value for each, entry in store.entries()}[key] == B
    assert store.fence(key, B)
    assert store.release(key, B) is Outcome.OK
    assert store.release(key, B) is Outcome.GONE


def test_the_reader_is_the_one_of_this_case(store: Any, reader: str, protocol: int) -> None:
    connection = store.connections[-1]
    assert type(connection._parser).__name__.startswith("_RESP") is (reader == "python")
    assert int(connection.protocol) == protocol


def test_every_request_is_understood(store: Store) -> None:
    use(store)


def test_a_refusal_in_a_batch_is_the_reply_of_its_own_request(store: Any) -> None:
    keys = [KEY, OTHER, THIRD]
    for key in keys[1:]:
        assert store.add(key, A, 60) is None
    others = [f"~{store.make_key(key)}" for key in (KEY, THIRD)]
    store.client.execute_command("ACL", "SETUSER", "default", "resetkeys", *others)
    try:
        first, second, third = store.renew_many([(key, A, 600) for key in keys])
        assert (first, third) == (Outcome.OK, Outcome.OK)
        assert isinstance(second, LockUnavailable)
        assert isinstance(second.__cause__, store.errors.NoPermissionError)
        assert store.connections  # it is in order, and kept
    finally:
        store.client.execute_command("ACL", "SETUSER", "default", "allkeys")


def test_a_reply_behind_the_reply_makes_both_doubtful(store: Any) -> None:
    """It is asked for again on another connection, and none of the two is believed."""
    connection = store.connections[-1]
    sock = connection._sock
    Interposed(connection, recv=lambda size: b":0\r\n" + sock.recv(size))
    assert inside.take(store, B, KEY, waits=True) != KEY
    assert store.was_sent_twice
    assert store.read(KEY).value == A


def test_a_reply_that_nobody_asked_for_is_not_read(store: Any) -> None:
    """The server sends a message between two requests: the second one has a new connection."""
    connection = store.connections[-1]
    number = connection._sock.getsockname()
    connection.waiting = lambda seconds: [1]
    assert inside.take(store, B, KEY, waits=True) != KEY
    assert store.connections[-1]._sock.getsockname() != number
    assert not store.was_sent_twice


@pytest.mark.parametrize("protocol", [3], indirect=True)
def test_a_push_message_before_a_reply_is_no_reply(store: Any) -> None:
    connection = store.connections[-1]
    sock, pushed = connection._sock, [PUSHED]
    Interposed(connection, recv=lambda size: pushed.pop() if pushed else sock.recv(size))
    assert inside.take(store, B, KEY, waits=True) != KEY
    assert store.read(KEY).value == A


@pytest.mark.parametrize("protocol", [3], indirect=True)
def test_a_server_that_pushes_messages_after_each_change_keeps_locks(store: Any) -> None:
    """They come behind the reply, or later; each takes the request to a new connection."""
    connection = store.connections[-1]
    connection.send_command("CLIENT", "TRACKING", "ON", "BCAST")
    assert connection.read_response() in {b"OK", "OK"}
    store.client.set("other", "value")
    use(store)
    assert store.read(KEY).value == A


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("alias", ["redis"], indirect=True)
def test_tls(certificate: tuple[Path, Path], reader: str, settings: Any) -> None:
    key, file = certificate
    tls: dict[str, object] = {"tls-port": servers.free_port(), "tls-auth-clients": "no"}
    tls |= {"tls-key-file": key, "tls-cert-file": file, "tls-ca-cert-file": file}
    options: dict[str, Any] = {"ssl_ca_certs": str(file), "ssl_check_hostname": False}
    if reader == "python":
        options |= PARSERS["redis"]
    with servers.Redis(**tls):
        url = f"rediss://127.0.0.1:{tls['tls-port']}/0"
        with private_store(settings, "redis", url, options=options) as store:
            use(store)
            many = [key_of(str(number)) for number in range(500)]
            assert all(store.add(each, A, 60) is None for each in many)
            assert len(store.read_many(many)) == 500  # in several records of TLS
            assert {*store.renew_many([(each, A, 60) for each in many])} == {Outcome.OK}


@pytest.mark.parametrize("alias", CLIENTS, indirect=True)
def test_a_unix_socket(alias: str, reader: str, settings: Any, tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with servers.Redis(unixsocket=path):
        with private_store(settings, alias, f"unix://{path}?db=1") as store:
            use(store)
            assert store.place == f"{path} database 1"
