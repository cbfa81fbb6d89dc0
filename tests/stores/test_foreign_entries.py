"""An entry of a type that no lock has is taken by something else, and concerns no other lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.core.management import CommandError
from valkey import Valkey

from django_singletask import LockUnavailable, TaskLock
from django_singletask.stores.base import Outcome, Store
from tests import inside
from tests.command_line import locks, locks_as_json
from tests.deadline import wait_for
from tests.entries import holder, key_of, private_store
from tests.servers import Redis

A, B = holder("a"), holder("b")
EPOCH = "singletask:@epoch"
KEYS = [key_of(name) for name in "abc"]
pytestmark = [pytest.mark.django_db(databases="__all__"), pytest.mark.usefixtures("cache_alias")]
on_each_family = pytest.mark.parametrize("cache_alias", ["redis", "cluster"], indirect=True)
on_redis = pytest.mark.parametrize("cache_alias", ["redis"], indirect=True)


def command(alias: str, verb: str, key: str, *words: str) -> None:
    """Send a command about the entry with this key."""
    store = inside.store_of(alias)
    if alias == "cluster":
        store = store.group(key)
    store.ask((bool, verb, store.make_key(key), *words))


@pytest.fixture
def put_list(cache_alias: str) -> Iterator[Callable[[str], None]]:
    """Give the function that puts a list in the place of an entry."""

    def put(key: str) -> None:
        command(cache_alias, "DEL", key)
        command(cache_alias, "RPUSH", key, "text")

    yield put
    for key in KEYS:
        command(cache_alias, "DEL", key)


@on_each_family
def test_it_is_taken_by_something_else(cache_alias: str, put_list: Callable[[str], None]) -> None:
    store, key = inside.store_of(cache_alias), KEYS[1]
    put_list(key)
    assert not TaskLock("b").acquire()
    assert TaskLock("b").locked()
    assert not store.insert(key, A, 60)
    assert store.add(key, A, 60) is not None
    assert store.renew(key, A, 60) is Outcome.TAKEN
    assert store.release(key, A) is Outcome.TAKEN
    assert not store.replace(key, A, B, 60)
    assert store.fence(key, A) is None
    entry = store.read(key)
    assert entry is not None
    assert store.release(key, entry.value) is Outcome.TAKEN


@on_each_family
def test_other_locks_are_renewed(cache_alias: str, put_list: Callable[[str], None]) -> None:
    store = inside.store_of(cache_alias)
    for key in KEYS:
        assert store.add(key, A, 60) is None
    put_list(KEYS[1])
    outcomes = store.renew_many([(key, A, 600) for key in KEYS])
    assert outcomes == [Outcome.OK, Outcome.TAKEN, Outcome.OK]
    assert store.read(KEYS[2]).remaining > 500  # type: ignore[union-attr, operator]


@on_redis
def test_its_holder_loses_it_and_other_holders_nothing(put_list: Callable[[str], None]) -> None:
    options: Any = {"timeout": 0.6}
    with (
        TaskLock("a", **options) as a,
        TaskLock("b", **options) as b,
        TaskLock("c", **options) as c,
    ):
        put_list(b.key)
        wait_for(lambda: b.lost, "its holder knows it")
        assert a.owned()
        assert c.owned()
        assert not a.lost
        assert not c.lost


@on_redis
def test_a_slot_of_another_type_is_no_free_slot(put_list: Callable[[str], None]) -> None:
    store = inside.store_of("redis")
    put_list(KEYS[0])
    assert inside.take(store, A, *KEYS, allowed=2) == KEYS[1]
    assert [*inside.take(store, B, *KEYS, allowed=2)] == KEYS[:2]


@on_each_family
def test_it_is_listed_and_not_cleared(put_list: Callable[[str], None]) -> None:
    put_list(KEYS[1])
    [lock] = locks_as_json("list")["locks"]
    assert (lock["name"], lock["state"]) == (KEYS[1], "held")
    assert not TaskLock("b").clear(actor="ada")
    with pytest.raises(CommandError):
        locks("clear", KEYS[1], "--yes")
    assert [lock["key"] for lock in locks_as_json("list")["locks"]] == [KEYS[1]]


@pytest.mark.parametrize("kind", ["empty", "list"])
@on_redis
def test_an_epoch_of_something_else_is_an_epoch(kind: str, put_list: Callable[[str], None]) -> None:
    store = inside.store_of("redis")
    put_list(EPOCH)
    if kind == "empty":
        command("redis", "DEL", EPOCH)
        command("redis", "SET", EPOCH, "")
    try:
        with TaskLock("a") as lock:
            assert lock.owned()
    finally:
        command("redis", "DEL", EPOCH)
        store.look()


def refuse(store: Store, key: str) -> None:
    """Let the server refuse each request about this entry."""
    client: Valkey = store.client  # type: ignore[attr-defined]
    others = [f"~{store.make_key(other)}*" for other in (*KEYS, EPOCH) if other != key]
    client.execute_command("ACL", "SETUSER", "default", "resetkeys", *others)


@on_redis
def test_a_refusal_is_the_reply_of_its_own_request(settings: Any) -> None:
    with Redis() as server, private_store(settings, "redis", server.url) as store:
        for key in KEYS:
            assert store.add(key, A, 60) is None
        store.look()
        refuse(store, KEYS[1])
        first, second, third = store.renew_many([(key, A, 600) for key in KEYS])
        assert (first, third) == (Outcome.OK, Outcome.OK)
        assert isinstance(second, LockUnavailable)
        assert "NOPERM" in str(second) or "NoPermission" in str(second)
        assert second.__cause__ is not None
        with pytest.raises(LockUnavailable) as caught:
            store.renew(KEYS[1], A, 600)
        assert isinstance(caught.value.__cause__, store.refusals)


@on_redis
def test_a_refused_renewal_ends_no_other_lease(settings: Any) -> None:
    with Redis() as server, private_store(settings, "redis", server.url) as store:
        with TaskLock("a", timeout=0.6) as a, TaskLock("b", timeout=0.6) as b:
            refuse(store, b.key)
            wait_for(lambda: b.lost, "its lease has passed")
            assert a.owned()
            assert not a.lost


@on_redis
def test_control_a_list_ends_a_script_that_does_not_expect_it(
    put_list: Callable[[str], None],
) -> None:
    put_list(KEYS[1])
    store = inside.store_of("redis")
    with pytest.raises(store.errors.ResponseError, match="wrong kind of value"):
        store.client.eval("return redis.call('GET', KEYS[1])", 1, store.make_key(KEYS[1]))
