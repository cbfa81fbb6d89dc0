"""A server whose memory is full: its locks stay held, and nobody takes a refusal for a loss."""

from __future__ import annotations

import io
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pymemcache
import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse
from redis import Redis as Client
from redis.exceptions import OutOfMemoryError, ResponseError

from django_singletask import Holder, LockUnavailable, TaskLock
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores.base import Outcome
from tests import inside
from tests.admin_pages import log_in
from tests.command_line import locks_as_json
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
    end = time.monotonic() + 2
    wait_for(lambda: time.monotonic() > end, "three leases have passed")
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
        with pytest.raises(LockUnavailable, match="OutOfMemoryError"):
            TaskLock("free").acquire()
    assert not TaskLock("free").locked()


def test_a_lock_that_cannot_be_taken_again_is_told_of_alone(client: Client) -> None:
    store = inside.store_of("redis")
    store.look()
    for key in KEYS:
        assert store.add(key, A, 60) is None
    client.delete(store.make_key(KEYS[1]))
    fill(client)
    first, second, third = store.renew_many([(key, A, 60) for key in KEYS])
    assert (first, third) == (Outcome.OK, Outcome.OK)
    assert isinstance(second, LockUnavailable)
    with pytest.raises(LockUnavailable, match="OutOfMemoryError"):
        store.renew(KEYS[1], A, 60)
    client.delete("filler")
    assert store.renew(KEYS[1], A, 60) is Outcome.RETAKEN


def test_a_refusal_hides_no_loss_of_other_locks(client: Client) -> None:
    store = inside.store_of("redis")
    store.look()
    taken, _gone, cleared = KEYS
    assert store.add(taken, B, 60) is None
    assert store.add(inside.marker_of(cleared, A), b"1", 60) is None
    fill(client)
    lost, refused, told = store.renew_many([(key, A, 60) for key in KEYS])
    assert (lost, told) == (Outcome.TAKEN, Outcome.GONE)
    assert isinstance(refused, LockUnavailable)


def test_a_lock_that_a_full_server_evicts_is_not_taken_for_lost(settings: Any) -> None:
    """It evicts all entries with a lease before it refuses one without."""
    for client in open_redis(settings, "volatile-lru"):
        store = inside.store_of("redis")
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
        value = inside.store_of("redis").read(lock.key).value
        fill(client)
    entry = inside.store_of("redis").read(lock.key)
    assert entry.value == value
    assert 60 < entry.remaining <= 300
    [event] = [event for event in events if event.kind == "released"]
    assert event.reason.startswith("kept for 300 s from its start, if its process lives so long: ")
    assert "OutOfMemoryError" in event.reason
    assert event.result == "returned"
    assert [record.levelname for record in caplog.records if "kept" in record.message] == [
        "WARNING"
    ]
    assert not TaskLock("nightly").acquire()


def test_a_lock_that_cannot_be_handed_over_is_freed(client: Client) -> None:
    lock = TaskLock("nightly")
    assert lock.acquire()
    fill(client)
    with pytest.raises(LockUnavailable, match="OutOfMemoryError"):
        lock.hand_over(for_=60)
    assert not lock
    wait_for(lambda: not lock.locked(), "the lock is free")


@pytest.fixture
def several(client: Client) -> list[dict[str, Any]]:
    """List the locks of living and of dead holders in turn; then the server is full."""
    with TaskLock("living") as lock:
        living = vars(lock.holder())
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = {**living, "pid": ended.pid, "start": "1"}
    since = time.time() - 9  # "a" has been held for longest, "d" for the shortest time
    for number, process in enumerate([living, dead, living, dead]):
        name = "abcd"[number]
        facts = {"token": name, "name": name, "timeout": 60.0, "since": since + number}
        record = Holder.from_dict({**process, **facts})
        assert inside.store_of("redis").add(key_of(name), record.encode(), 60) is None
    fill(client)
    shown = held()
    assert [lock["state"] for lock in shown] == ["dead", "dead", "held", "held"]
    return shown


NOT_MARKED = "The lock was not freed, because the cache refused what tells its holder of it: "


def held() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = locks_as_json("list")["locks"]
    return found


def names_of_held() -> list[str]:
    return sorted(lock["name"] for lock in held())


def test_only_the_lock_of_a_dead_holder_can_be_cleared(several: list[dict[str, Any]]) -> None:
    with pytest.raises(LockUnavailable, match=NOT_MARKED) as caught:
        TaskLock("a").clear()
    assert isinstance(caught.value.__cause__, ResponseError)
    assert names_of_held() == ["a", "b", "c", "d"]
    assert TaskLock("b").clear()
    assert names_of_held() == ["a", "c", "d"]


def test_of_several_the_locks_of_the_dead_are_cleared(several: list[dict[str, Any]]) -> None:
    output = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command("locks", "clear", "--all", "--yes", "--json", stdout=output)
    assert caught.value.returncode == 3
    assert str(caught.value).startswith(f"Not freed: a, c. {NOT_MARKED}")
    rows = json.loads(output.getvalue())["locks"]
    assert [row["name"] for row in rows if row["freed"]] == ["b", "d"]
    assert names_of_held() == ["a", "c"]


def test_the_page_clears_the_locks_of_the_dead_among_several(several: list[dict[str, Any]]) -> None:
    operator = log_in("view_tasklockevent", "clear_lock")
    locks = [f"{lock['key']} {lock['token']}" for lock in several]
    url = reverse("admin:django_singletask_tasklockevent_clear")
    response = operator.post(url, {"lock": locks, "reason": ""}, follow=True)
    freed, refused = map(str, response.context["messages"])
    assert freed.startswith("Cleared: b, d.")
    assert refused.startswith(f"a, c: {NOT_MARKED}")
    assert names_of_held() == ["a", "c"]


def test_without_an_epoch_a_full_server_takes_no_lock(client: Client) -> None:
    fill(client)
    with pytest.raises(LockUnavailable, match="OutOfMemoryError"):
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
