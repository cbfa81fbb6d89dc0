"""What can go wrong only with locks in Redis. The contract is in test_stores.py."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.cache import caches
from redis import Redis as Client

from django_singletask import LockUnavailable, TaskLock
from django_singletask.stores import redis as stores_redis
from django_singletask.stores.base import Outcome, Store
from tests import inside
from tests.entries import eventually, holder, key_of, private_store
from tests.proxy import Interposed, Proxy
from tests.servers import Redis

A, B = holder("a"), holder("b")
KEY = key_of("nightly")
on_each_client = pytest.mark.parametrize("alias", ["redis", "django_redis", "django_valkey"])


@pytest.fixture
def redis() -> Iterator[Redis]:
    with Redis() as server:
        yield server


@pytest.fixture
def client(redis: Redis) -> Iterator[Client]:
    with Client.from_url(redis.url) as client:
        yield client


def sha(script: str) -> bytes:
    return hashlib.sha1(script.encode()).hexdigest().encode()


GREETINGS = ("HELLO", "CLIENT", "SELECT")
"""Commands of a new connection."""


def requests(client: Client, work: Callable[[], Any]) -> list[str]:
    """Return the commands that clients sent meanwhile, without those that scripts ran."""
    commands: list[str] = []
    with client.monitor() as monitor:
        work()
        client.echo("the end")
        for seen in monitor.listen():
            if "the end" in seen["command"]:
                return [command for command in commands if command not in GREETINGS]
            if seen["client_type"] != "lua":
                commands.append(seen["command"].split()[0])
    raise AssertionError("unreachable")


@on_each_client
def test_take_and_give_back_are_two_requests(alias, redis, client, settings) -> None:
    def take_and_give_back() -> None:
        assert inside.take(store, A, KEY, waits=True) == KEY
        assert store.release(KEY, A) is Outcome.OK

    with private_store(settings, alias, redis.url) as store:
        take_and_give_back()
        assert requests(client, take_and_give_back) == ["EVALSHA", "EVALSHA"]


@on_each_client
def test_a_conflict_is_one_request(alias, redis, client, settings) -> None:
    with private_store(settings, alias, redis.url) as store:
        inside.take(store, A, KEY)
        assert requests(client, lambda: inside.take(store, B, KEY)) == ["EVALSHA"]


def test_all_scripts_are_loaded_once(redis, client, settings) -> None:
    def take_and_give_back() -> None:
        with private_store(settings, "redis", redis.url) as store:
            inside.take(store, A, KEY)
            store.release(KEY, A)

    assert requests(client, take_and_give_back).count("SCRIPT") == len(stores_redis.LOADS)
    # Another process finds the scripts on the server. A new connection asks which server this is,
    # and the first one also whether the server is a node of a cluster.
    assert requests(client, take_and_give_back) == ["INFO", *["EVALSHA"] * 3]


@on_each_client
def test_a_fencing_token_is_one_request(alias, redis, client, settings) -> None:
    with private_store(settings, alias, redis.url) as store:
        store.add(KEY, A, 60)
        store.fence(KEY, A)
        assert requests(client, lambda: store.fence(KEY, A)) == ["EVALSHA"]


def test_control_a_script_that_adds_in_lua_gives_one_number_twice(redis, client) -> None:
    in_lua = (
        "redis.call('SET', KEYS[1], string.format('%.0f', redis.call('GET', KEYS[1]) + 1))"
        "return redis.call('GET', KEYS[1])"
    )
    client.set("last", 2**53)
    assert client.eval(in_lua, 1, "last") == client.eval(in_lua, 1, "last")


def test_a_server_that_restarted_empty_gets_the_scripts_again(redis, settings) -> None:
    with private_store(settings, "redis", redis.url) as store:
        store.add(KEY, A, 60)
        redis.restart_empty()
        assert eventually(lambda: renewed(store)) is Outcome.RETAKEN


def renewed(store: Store) -> Outcome | None:
    try:
        return store.renew(KEY, A, 60)
    except LockUnavailable:  # the server is not back yet
        return None


def test_a_server_that_refuses_info_tells_by_its_epoch_that_it_forgot(
    redis, client, settings
) -> None:
    client.execute_command("ACL", "SETUSER", "default", "-info")
    with private_store(settings, "redis", redis.url) as store:
        assert inside.take(store, A, KEY, waits=True) == KEY
        changes = store.epoch.changes
        client.flushall()
        assert inside.take(store, A, KEY, waits=True) == KEY
        assert store.epoch.changes == changes + 1


def test_the_client_and_its_connection_are_kept(redis, client, settings) -> None:
    with private_store(settings, "redis", redis.url) as store:
        store.read(KEY)
        before = client.info("stats")["total_connections_received"]
        client_before = store.client
        for _ in range(20):
            store.add(KEY, A, 60)
            store.release(KEY, A)
        assert store.client is client_before
        # The client itself opens one more, to load scripts that the server does not know.
        assert client.info("stats")["total_connections_received"] <= before + 1


@on_each_client
def test_an_idle_connection_that_the_server_closed_causes_no_error_and_no_pause(
    alias, redis, client, settings, monkeypatch
) -> None:
    pauses: list[float] = []
    for package in ("redis", "valkey"):
        monkeypatch.setattr(f"{package}.retry.sleep", pauses.append)
    with private_store(settings, alias, redis.url) as store:
        for _ in range(2):
            assert store.add(KEY, A, 60) is None
            client.client_kill_filter(_type="normal", skipme=True)
            assert store.release(KEY, A) is Outcome.OK
    assert pauses == []


def test_a_repeatable_request_is_sent_again_if_the_connection_was_closed(
    redis, client, settings
) -> None:
    """By a server that was restarted, for example."""
    with private_store(settings, "redis", redis.url) as store:
        store.read(KEY)
        client.client_kill_filter(_type="normal", skipme=True)
        assert store.add(KEY, A, 60) is None
        store.read(KEY)
        client.client_kill_filter(_type="normal", skipme=True)
        assert store.replace(KEY, A, B, 60)


@pytest.mark.parametrize(
    "request_",
    [sha(stores_redis.CHANGE), sha(stores_redis.READ), b"NX"],
    ids=["change", "read", "add"],
)
def test_a_renewal_whose_reply_was_lost_does_not_hide_that_the_lock_was_gone(
    request_, redis, settings
) -> None:
    with Proxy(redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with private_store(settings, "redis", url) as store:
            store.renew(KEY, A, 60)  # the server knows the scripts
            store.release(KEY, A)
            proxy.lose_reply_to(request_)
            assert store.renew(KEY, A, 60) is Outcome.RETAKEN
            assert proxy.lost == 1


def before_replies(store: Any, strike: Callable[[], object]) -> None:
    """Call ``strike`` between each request of a store's connection and its reply."""

    def recv(size: int) -> bytes:
        strike()
        received: bytes = interposed.sock.recv(size)
        return received

    interposed = Interposed(store.connections[-1], recv=recv)


def test_a_signal_handler_may_take_a_lock_in_the_middle_of_a_call(redis, settings) -> None:
    with private_store(settings, "redis", redis.url) as store:
        assert store.add(KEY, A, 60) is None
        answers = []
        before_replies(store, lambda: answers or answers.append(store.add(key_of("other"), B, 60)))
        entry = store.read(KEY)
        assert entry is not None
        assert entry.value == A
        assert answers == [None]


def test_a_reply_may_arrive_byte_by_byte(redis, settings) -> None:
    with private_store(settings, "redis", redis.url) as store:
        assert store.add(KEY, A, 60) is None
        connection = store.connections[-1]
        interposed = Interposed(connection, recv=lambda size: interposed.sock.recv(1))
        assert dict(store.entries())[KEY].value == A  # arrays, in arrays
        assert store.read(key_of("other")) is None
        assert store.renew_many([(KEY, A, 60), (KEY, B, 60)]) == [Outcome.OK, Outcome.TAKEN]
        assert store.release(KEY, A) is Outcome.OK
        assert store.connections[-1] is connection


@pytest.mark.parametrize("sent", [b"", b"$5", b"$5\r\n1 -1", b":"])
def test_a_reply_that_ends_early_is_asked_for_again(redis, settings, sent) -> None:
    """The server was killed while it sent its reply."""
    with private_store(settings, "redis", redis.url) as store:
        assert store.add(KEY, A, 60) is None
        parts = [sent]
        Interposed(store.connections[-1], recv=lambda size: parts.pop() if parts else b"")
        entry = store.read(KEY)
        assert entry is not None
        assert entry.value == A
        assert store.was_sent_twice


class Signal(BaseException):
    """An error that a signal handler raises."""


def interrupt_add(store: Any) -> None:
    """Let a signal strike after the request of an add() and before its reply."""
    signals = [Signal()]

    def strike() -> None:
        if signals:
            raise signals.pop()

    before_replies(store, strike)
    with pytest.raises(Signal):
        store.add(KEY, A, 60)


def test_an_unread_reply_is_not_mistaken_for_the_next(redis, settings) -> None:
    with private_store(settings, "redis", redis.url) as store:
        store.add(key_of("other"), B, 60)  # the server knows the script
        interrupt_add(store)
        blocker = store.add(KEY, B, 60)
        assert blocker is not None
        assert blocker.value == A


def test_control_on_the_same_connection_an_unread_reply_is_mistaken_for_the_next(
    redis, settings, monkeypatch
) -> None:
    with private_store(settings, "redis", redis.url) as store:
        store.add(key_of("other"), B, 60)  # the server knows the script
        connection = store.connections[-1]
        monkeypatch.setattr(connection, "disconnect", lambda *args: None)
        interrupt_add(store)
        # Nor is it looked for what there is to read before a request, and after its reply.
        monkeypatch.setattr(connection, "waiting", lambda seconds: [])
        monkeypatch.setattr(connection, "has_more", lambda seconds: False)
        Interposed(connection, recv=lambda size: connection._sock.sock.recv(len(b"+OK\r\n")))
        store.connections.append(connection)
        # The lock is A's, but this is the reply to the request before: "taken".
        assert store.add(KEY, B, 60) is None


def test_a_server_that_knows_no_info_holds_locks(settings) -> None:
    with Redis(**{"rename-command": "INFO ''"}) as server:
        with private_store(settings, "redis", server.url) as store:
            assert store.add(KEY, A, 60) is None
            assert store.release(KEY, A) is Outcome.OK


def test_a_connection_to_a_server_that_is_no_primary_any_more_is_closed(
    redis, client, settings
) -> None:
    """A failover leaves the connections of clients open."""
    with Redis() as primary, private_store(settings, "redis", redis.url) as store:
        assert store.add(KEY, A, 60) is None
        client.replicaof("127.0.0.1", primary.port)
        before = client.info("stats")["total_connections_received"]
        for _ in range(2):
            with pytest.raises(LockUnavailable, match="ReadOnlyError"):
                store.add(key_of("other"), B, 60)
        assert client.info("stats")["total_connections_received"] > before


def test_a_take_that_finds_its_own_entry_gets_the_whole_lease(redis, settings) -> None:
    """The reply to the first request was lost; the trust counts from the second one."""
    with private_store(settings, "redis", redis.url) as store:
        store.add(KEY, A, 5)
        assert inside.take(store, A, KEY) == KEY
        entry = store.read(KEY)
        assert entry is not None
        assert entry.remaining > 50


def test_a_lock_is_on_the_primary_and_read_there(redis, client, settings) -> None:
    # This replica follows nobody, as if it lagged far behind.
    with Redis() as replica:
        with private_store(settings, "redis", [redis.url, replica.url]) as store:
            assert store.add(KEY, A, 60) is None
            assert client.get(store.make_key(KEY)) == A
            for _ in range(20):
                entry = store.read(KEY)
                assert entry is not None
                assert entry.value == A
                assert store.add(KEY, B, 60) is not None
            assert [key for key, _ in store.entries()] == [KEY]


def test_control_the_cache_reads_from_a_replica_that_lags(redis, settings) -> None:
    with Redis() as replica:
        with private_store(settings, "redis", [redis.url, replica.url]):
            caches["redis"].set("name", "value")
            assert caches["redis"].get("name") is None


def test_ignored_exceptions_do_not_turn_an_outage_into_held(redis, settings) -> None:
    with private_store(settings, "django_redis_ignore", redis.url) as store:
        store.add(KEY, A, 60)
        redis.kill()
        with pytest.raises(LockUnavailable):
            store.add(KEY, B, 60)
        with pytest.raises(LockUnavailable):
            TaskLock("nightly", cache="django_redis_ignore").acquire()


@on_each_client
def test_values_are_plain_json(alias, redis, client, settings) -> None:
    with private_store(settings, alias, redis.url) as store:
        with TaskLock("nightly", cache=alias) as lock:
            raw = client.get(store.make_key(lock.key))
            assert json.loads(raw)["token"] == lock.token


@pytest.mark.parametrize(
    ("alias", "options"),
    [
        ("redis", {"decode_responses": True}),
        ("django_redis", {"CONNECTION_POOL_KWARGS": {"decode_responses": True}}),
        ("redis", {"protocol": 3}),
        ("django_redis", {"COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor"}),
        ("django_redis", {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"}),
    ],
)
def test_options_of_the_client_change_nothing(alias, options, redis, settings) -> None:
    with private_store(settings, alias, redis.url, options=options) as store:
        assert store.add(KEY, A, 60) is None
        blocker = store.add(KEY, B, 60)
        assert blocker is not None
        assert blocker.value == A
        assert store.read(KEY).value == A
        assert [(key, entry.value) for key, entry in store.entries()] == [(KEY, A)]
        assert store.renew(KEY, A, 60) is Outcome.OK
        assert store.clear(KEY, A, 60)
        assert store.renew(KEY, A, 60) is Outcome.GONE
        assert store.release(KEY, A) is Outcome.GONE


def test_the_connections_of_a_thread_end_with_the_thread(redis, client, settings) -> None:
    with private_store(settings, "redis", redis.url) as store:
        store.read(KEY)
        before = len(client.client_list())
        during = []

        def work() -> None:
            inside.store_of("redis").read(KEY)
            during.append(len(client.client_list()))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert during == [before + 1]
        assert eventually(lambda: len(client.client_list()) == before)


def test_what_is_no_lock_below_the_prefix_keeps_none_from_being_listed(on_redis) -> None:
    store = inside.store_of("redis")
    prefix = store.prefix().encode()
    store.client.set(prefix + b"\xff", b"binary key")
    store.client.hset(prefix + b"hash", "field", "value")
    store.add(KEY, A, 60)
    assert [entry.value for key, entry in store.entries() if key == KEY] == [A]
    store.client.delete(prefix + b"\xff", prefix + b"hash")


def interrupt_each_line(store: Any) -> int:
    """Let a signal strike before each line of a request, in turn; return how many there were."""
    code, struck = type(store).ask.__code__, 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal line
        if frame.f_code is not code:
            return None
        line += event == "line"
        if event == "line" and line > struck:
            raise Signal
        return trace

    while True:
        line = 0
        sys.settrace(trace)
        try:
            store.read(KEY)
            return struck
        except Signal:
            struck += 1
        finally:
            sys.settrace(None)


# If the signal strikes before a connection is closed, Python closes its socket, and warns.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("shared", [False, True])
def test_a_signal_in_a_request_loses_no_place_of_the_pool(
    redis, settings, shared, monkeypatch
) -> None:
    """After twenty lost ones, all would wait for ever."""
    monkeypatch.setattr(stores_redis, "are_greenlets", lambda: shared)
    with private_store(settings, "redis", redis.url) as store:
        monkeypatch.undo()
        store.add(KEY, A, 60)
        assert interrupt_each_line(store) > stores_redis.MOST
        gc.collect()
        assert not store.connections.users
        assert store.read(KEY).value == A
        store.close()
        store.pools.clear()


def test_greenlets_wait_for_a_place(monkeypatch) -> None:
    class Waits(Exception):
        pass

    def sleep(seconds: float) -> None:
        raise Waits

    monkeypatch.setattr(time, "sleep", sleep)
    pool = stores_redis.Pool()
    users = [pool.enter() for _ in range(stores_redis.MOST)]
    with pytest.raises(Waits):
        pool.enter()
    del users[0]
    assert pool.enter()
