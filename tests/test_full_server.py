"""A server whose memory is full: its locks stay held, and nobody takes a refusal for a loss."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pymemcache
import pytest
from redis import Redis as Client
from redis.exceptions import OutOfMemoryError, ResponseError

from django_singletask import LockUnavailable, TaskLock, clock
from django_singletask.holder import Holder, this_process
from django_singletask.operators import held
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores import get_store
from django_singletask.stores.base import Outcome
from tests.deadline import wait_for
from tests.entries import holder, key_of, private_store
from tests.servers import Memcached, Redis

pytestmark = pytest.mark.django_db

A, B = holder("a"), holder("b")
KEY = key_of("nightly")
KEYS = [key_of(name) for name in "abc"]


def open_redis(settings: Any, policy: str) -> Iterator[Client]:
    settings.SINGLETASK_CACHE = "redis"
    settings.SINGLETASK_HISTORY = "off"
    with Redis(maxmemory="8mb", maxmemory_policy=policy) as server:
        with private_store(settings, "redis", server.url), Client.from_url(server.url) as client:
            yield client


@pytest.fixture
def client(settings: Any) -> Iterator[Client]:
    """Give a client of the Redis that holds the locks of this test."""
    yield from open_redis(settings, "noeviction")


def fill(client: Client) -> None:
    with suppress(OutOfMemoryError):
        while True:
            client.append("filler", b"x" * 100_000)


def test_locks_outlive_their_leases_on_a_full_server(client: Client) -> None:
    locks = [TaskLock(name, timeout=0.6) for name in "abcde"]
    assert all(lock.acquire() for lock in locks)
    fill(client)
    client.script_flush()  # the scripts can be loaded again
    end = clock.now() + 2
    wait_for(lambda: clock.now() > end, "three leases have passed")
    for lock in locks:
        lock.check()
        assert lock.owned()
        lock.extend(60)
        assert lock.release()
    assert not any(lock.locked() for lock in locks)


def test_control_a_renewal_that_writes_is_refused(client: Client) -> None:
    client.set("lock", "a", px=60_000)
    fill(client)
    with pytest.raises(OutOfMemoryError):
        client.eval("redis.call('SET', KEYS[1], ARGV[1], 'PX', 60000)", 1, "lock", "a")


def test_a_take_on_a_full_server_is_an_outage_and_a_conflict_is_a_conflict(client: Client) -> None:
    with TaskLock("held"):
        fill(client)
        assert not TaskLock("held").acquire()
        with pytest.raises(LockUnavailable, match="OOM"):
            TaskLock("free").acquire()
    assert not TaskLock("free").locked()


def test_a_lock_that_cannot_be_taken_again_is_told_of_alone(client: Client) -> None:
    store = get_store("redis")
    store.look()
    for key in KEYS:
        assert store.add(key, A, 60) is None
    client.delete(store.make_key(KEYS[1]))
    fill(client)
    first, second, third = store.renew_many([(key, A, 60) for key in KEYS])
    assert (first, third) == (Outcome.OK, Outcome.OK)
    assert isinstance(second, LockUnavailable)
    with pytest.raises(LockUnavailable, match="OOM"):
        store.renew(KEYS[1], A, 60)
    client.delete("filler")
    assert store.renew(KEYS[1], A, 60) is Outcome.RETAKEN


def test_a_lock_that_a_full_server_evicts_is_not_taken_for_lost(settings: Any) -> None:
    """It evicts all entries with a lease before it refuses one without."""
    for client in open_redis(settings, "volatile-lru"):
        store = get_store("redis")
        store.look()
        for key in KEYS:
            assert store.add(key, A, 60) is None
        fill(client)
        outcomes = store.renew_many([(key, A, 60) for key in KEYS])
        assert [type(outcome) for outcome in outcomes] == [LockUnavailable] * 3
        client.delete("filler")
        assert store.renew_many([(key, A, 60) for key in KEYS]) == [Outcome.RETAKEN] * 3


class Events(list[LockEvent]):
    def __call__(self, *, event: LockEvent, **kwargs: Any) -> None:
        self.append(event)


@pytest.fixture
def events() -> Iterator[Events]:
    events = Events()
    lock_event.connect(events)
    yield events
    lock_event.disconnect(events)


def test_a_lock_is_kept_for_a_time_by_the_bytes_of_its_run(
    client: Client, events: Events, caplog: Any
) -> None:
    with TaskLock("nightly", at_least=300) as lock:
        value = get_store("redis").read(lock.key).value
        fill(client)
    entry = get_store("redis").read(lock.key)
    assert entry.value == value
    assert 60 < entry.remaining <= 300
    [event] = [event for event in events if event.kind == "released"]
    assert event.reason.startswith("kept for 300 s from its start, if its process lives so long: ")
    assert "OOM" in event.reason
    assert event.result == "returned"
    assert [record.levelname for record in caplog.records if "kept" in record.message] == [
        "WARNING"
    ]
    assert not TaskLock("nightly").acquire()


def test_a_lock_that_cannot_be_handed_over_is_freed(client: Client) -> None:
    lock = TaskLock("nightly")
    assert lock.acquire()
    fill(client)
    with pytest.raises(LockUnavailable, match="OOM"):
        lock.hand_over(for_=60)
    assert not lock
    wait_for(lambda: not lock.locked(), "the lock is free")


def test_only_the_lock_of_a_dead_holder_can_be_cleared(client: Client) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    facts = {"token": "t", "name": "dead", "timeout": 60.0, "pid": ended.pid, "start": "1"}
    dead = Holder.from_dict({**vars(this_process()), **facts})
    store = get_store("redis")
    assert store.add(key_of("dead"), dead.encode(), 60) is None
    assert store.add(key_of("live"), A, 60) is None
    fill(client)
    shown = {lock.state: lock for lock in held.held()}
    with pytest.raises(LockUnavailable) as caught:
        held.clear(shown["held"], actor="ada")
    assert held.cannot_ask(caught.value).startswith("Nothing was freed, because the marker ")
    assert isinstance(caught.value.__cause__, ResponseError)
    assert store.read(key_of("live")).value == A
    assert held.clear(shown["dead"], actor="ada")
    assert store.read(key_of("dead")) is None


def test_without_an_epoch_a_full_server_takes_no_lock(client: Client) -> None:
    fill(client)
    with pytest.raises(LockUnavailable, match="OOM"):
        TaskLock("nightly").acquire()


@pytest.mark.parametrize("alias", ["pylibmc", "pylibmc_binary", "pymemcache"])
def test_memcached_that_is_full_loses_no_lock(alias: str, settings: Any) -> None:
    """It evicts nothing with -M, and then it refuses to renew."""

    with Memcached("-M", "-m", "8") as server:
        with private_store(settings, alias, server.address) as store:
            assert store.add(KEY, A, 60) is None
            client = pymemcache.Client(("127.0.0.1", server.port), default_noreply=False)
            for size in (100_000, *range(1000, 40, -20)):
                with suppress(pymemcache.MemcacheServerError):
                    for number in range(100_000):
                        client.set(f"{size}-{number}", b"x" * size)
            client.close()
            for _ in range(3):
                with pytest.raises(LockUnavailable):
                    store.renew(KEY, A, 60)
                with pytest.raises(LockUnavailable):
                    store.replace(KEY, A, B, 60)
            assert store.read(KEY).value == A
