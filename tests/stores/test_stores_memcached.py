"""What can go wrong only with locks in memcached. The contract is in test_stores.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from django.core.cache import caches
from django.core.cache.backends.base import InvalidCacheKey
from pymemcache.client.base import Client

from django_singletask import LockUnavailable, TaskLock
from django_singletask.stores import memcached
from django_singletask.stores.base import Entry, Outcome, Store
from tests import inside
from tests.entries import holder, key_of, private_store
from tests.proxy import Proxy
from tests.servers import Memcached
from tests.settings import MEMCACHED

A, B = holder("a"), holder("b")
KEY = key_of("nightly")
ALIASES = ["pylibmc", "pylibmc_binary", "pymemcache"]
PYLIBMC = ["pylibmc", "pylibmc_binary"]
on_all_clients = pytest.mark.parametrize("cache_alias", ALIASES, indirect=True)
on_pymemcache = pytest.mark.parametrize("cache_alias", ["pymemcache"], indirect=True)
on_pylibmc = pytest.mark.parametrize("cache_alias", PYLIBMC, indirect=True)


@pytest.fixture
def store(cache_alias: str) -> Iterator[Store]:
    yield inside.store_of(cache_alias)
    caches[cache_alias].close()


@on_pylibmc
def test_a_store_opens_its_client_without_a_word(
    cache_alias: str, monkeypatch: pytest.MonkeyPatch, settings
) -> None:
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    with private_store(settings, cache_alias):
        pass
    assert said == []


@pytest.fixture
def server() -> Iterator[Client]:
    host, port = MEMCACHED.split(":")
    client = Client((host, int(port)))
    yield client
    client.close()


def requests(server: Client, work: Callable[[], object]) -> dict[str, int]:
    """Return how many looks (get, gets) and changes (add, cas) the server counted meanwhile."""
    before = server.stats()
    work()
    after = server.stats()
    for other in (b"cmd_touch", b"delete_hits", b"delete_misses"):
        assert after[other] == before[other]
    names = {"looks": b"cmd_get", "changes": b"cmd_set"}
    return {name: after[stat] - before[stat] for name, stat in names.items()}


@on_all_clients
def test_take_and_give_back_are_four_requests(store: Store, server: Client) -> None:
    """The look at the epoch, and for pymemcache in the same request the number of the entry."""

    def take_and_give_back() -> None:
        take(store)
        assert store.release(KEY, A) is Outcome.OK

    store.look()
    assert requests(server, take_and_give_back) == {"looks": 2, "changes": 2}


@on_all_clients
def test_a_conflict_is_two_requests(store: Store, server: Client, cache_alias: str) -> None:
    store.look()
    store.add(KEY, A, 60)
    # pylibmc reads the epoch in the same request, which shows that the server answers.
    keys = 2 if cache_alias in PYLIBMC else 1
    assert requests(server, lambda: store.add(KEY, B, 60)) == {"looks": keys, "changes": 1}


@on_all_clients
def test_release_leaves_nothing_on_the_server(store: Store, server: Client) -> None:
    store.add(KEY, A, 60)
    store.release(KEY, A)
    assert server.get(store.make_key(KEY)) is None
    assert server.add(store.make_key(KEY), b"free", noreply=False)


@on_pylibmc
def test_pylibmc_compares_before_it_sets(store: Store) -> None:
    raw_key = store.make_key(KEY).encode()
    assert store.client.behaviors["cas"]
    store.add(KEY, A, 60)
    _, cas = store.client.gets(raw_key)
    store.release(KEY, A)
    store.add(KEY, B, 60)
    assert not store.client.cas(raw_key, A, cas, time=60)
    assert store.read(KEY) == Entry(B, None)


@on_pylibmc
def test_options_that_report_success_for_what_was_not_done_are_off(
    cache_alias: str, settings
) -> None:
    unsafe = {"cas": False, "no_block": True, "buffer_requests": True}
    with private_store(settings, cache_alias, options={"behaviors": unsafe}) as store:
        assert store.add(KEY, A, 60) is None
        assert store.add(KEY, B, 60) == Entry(A, None)
        assert store.release(KEY, B) is Outcome.TAKEN
        assert store.release(KEY, A) is Outcome.OK
        assert store.read(KEY) is None


@on_all_clients
def test_an_entry_that_is_deleted_between_look_and_change_is_gone_and_no_error(
    store: Store, server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(KEY, A, 60)
    gets = store.client.gets

    def gets_before_another_deletes(key: str | bytes) -> object:
        seen = gets(key)
        server.delete(store.make_key(KEY), noreply=False)
        return seen

    monkeypatch.setattr(store.client, "gets", gets_before_another_deletes)
    # pylibmc raises where pymemcache returns None, in gets and in cas.
    assert store.release(KEY, A) is Outcome.GONE


@on_pymemcache
def test_a_take_that_is_spoiled_each_time_is_a_conflict(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(KEY, A, 60)
    # As if the lock were released before each look, and taken before each add.
    monkeypatch.setattr(store.client, "get_multi", lambda *args: {})
    assert store.add(KEY, B, 60) == Entry(b"", None)


@on_pymemcache
def test_a_change_that_is_spoiled_each_time_leaves_the_entry(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(KEY, A, 60)
    monkeypatch.setattr(store.client, "cas", lambda *args: False)
    assert store.release(KEY, A) is Outcome.TAKEN
    assert store.read(KEY) == Entry(A, None)


@on_all_clients
def test_values_are_plain_json(store: Store, cache_alias: str, server: Client) -> None:
    with TaskLock("nightly", cache=cache_alias) as lock:
        raw = server.get(store.make_key(lock.key))
        assert json.loads(raw)["token"] == lock.token


@on_all_clients
def test_a_key_that_memcached_would_refuse_is_not_sent(store: Store) -> None:
    with pytest.raises(InvalidCacheKey):
        store.add("singletask:" + "x" * 250, A, 60)


@pytest.mark.parametrize("alias", ALIASES)
def test_during_an_outage_no_other_server_is_asked(alias: str, settings) -> None:
    # Another process may still reach the server of the key.
    with Memcached() as one, Memcached() as two:
        addresses = [one.address, two.address]
        with private_store(settings, alias, addresses) as store:
            keys = [key_of(f"lock {number}") for number in range(20)]
            for key in keys:
                store.add(key, A, 60)
            client = Client(("127.0.0.1", one.port))
            on_first = {key for key in keys if client.get(store.make_key(key))}
            client.close()
            assert 0 < len(on_first) < len(keys)
            one.kill()
            for _ in range(4):
                for key in keys:
                    if key in on_first:
                        with pytest.raises(LockUnavailable):
                            store.add(key, B, 60)
                    else:
                        assert store.add(key, B, 60) == Entry(A, None)


@pytest.mark.parametrize("alias", ["pymemcache"])
def test_options_that_turn_an_outage_into_an_answer_are_off(alias: str, settings) -> None:
    options = {"ignore_exc": True, "default_noreply": True}
    with Memcached() as memcached:
        with private_store(settings, alias, memcached.address, options=options) as store:
            store.add(KEY, A, 60)
            assert store.release(KEY, B) is Outcome.TAKEN
            memcached.kill()
            for _ in range(3):
                with pytest.raises(LockUnavailable):
                    store.add(KEY, B, 60)


# The number that pymemcache reads with the epoch


def take(store: Store) -> None:
    assert inside.take(store, A, KEY, waits=True) == KEY


@contextmanager
def store_behind_proxy(settings) -> Iterator[tuple[Store, Proxy]]:
    with Proxy(int(MEMCACHED.split(":")[1])) as proxy:
        with private_store(settings, "pymemcache", f"127.0.0.1:{proxy.port}") as store:
            store.client.flush_all()
            yield store, proxy


def test_pymemcache_takes_and_gives_back_in_three_trips(settings, monkeypatch) -> None:
    monkeypatch.setattr(memcached, "FRESH", 60)
    with store_behind_proxy(settings) as (store, proxy):
        store.look()
        for work, trips in (
            (lambda: take(store), 2),
            (lambda: store.release(KEY, A), 1),
            (lambda: take(store), 2),
            (lambda: store.add(KEY, B, 60), 2),
            (lambda: store.renew(KEY, A, 60), 1),
            (lambda: store.release(KEY, A), 2),  # the renewal has changed the number
        ):
            before = proxy.requests
            work()
            assert proxy.requests - before == trips
        assert store.read(KEY) is None


@on_pymemcache
def test_an_error_of_the_server_is_raised_and_shifts_no_replies(store: Store) -> None:
    with pytest.raises(LockUnavailable, match="MemcacheServerError: b'object too large"):
        store.add(KEY, b"x" * 2_000_000, 60)
    assert store.add(KEY, A, 60) is None
    assert store.add(KEY, B, 60) == Entry(A, None)


@on_pymemcache
def test_an_entry_that_has_changed_since_the_take_is_not_given_back(
    store: Store, server: Client
) -> None:
    take(store)
    server.set(store.make_key(KEY), B, noreply=False)
    assert store.release(KEY, A) is Outcome.TAKEN
    assert store.read(KEY) == Entry(B, None)


@on_pymemcache
def test_the_number_of_a_take_gives_back_no_other_bytes(store: Store) -> None:
    take(store)
    assert store.release(KEY, B) is Outcome.TAKEN
    assert store.read(KEY) == Entry(A, None)


@pytest.mark.parametrize("options", [{"use_pooling": True}, {"key_prefix": "prefix:"}])
def test_pymemcache_takes_and_gives_back_with_options(settings, options) -> None:
    with private_store(settings, "pymemcache", options=options) as store:
        store.client.flush_all()
        assert store.read(KEY) is None
        assert store.add(KEY, A, 60) is None
        assert store.add(KEY, B, 60) == Entry(A, None)
        assert store.release(KEY, A) is Outcome.OK


def test_the_number_of_a_server_that_was_restarted_is_not_used(settings, monkeypatch) -> None:
    monkeypatch.setattr(memcached, "FRESH", 60)
    with (
        Memcached() as server,
        private_store(settings, "pymemcache", server.address) as store,
    ):
        for number in range(10):  # the thread that renews locks may add the epoch at any time
            store.add(key_of(f"other {number}"), A, 60)
        take(store)
        _, cas = store.client.gets(store.make_key(KEY))
        server.restart_empty()
        store.read(KEY)  # connects again
        other = Client(("127.0.0.1", server.port))
        while other.gets(store.make_key(KEY)) != (B, cas):
            other.set(store.make_key(KEY), B, noreply=False)
        other.close()
        assert store.release(KEY, A) is Outcome.TAKEN
        assert store.read(KEY) == Entry(B, None)


def test_a_connection_that_was_closed_while_idle_hinders_no_release(settings, monkeypatch) -> None:
    monkeypatch.setattr(memcached, "FRESH", 0)
    with store_behind_proxy(settings) as (store, proxy):
        store.add(KEY, A, 60)
        proxy.hang_up()
        assert store.release(KEY, A) is Outcome.OK
