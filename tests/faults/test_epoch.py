"""A cache that was restarted empty, or flushed, is noticed before its locks are taken by others."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from django.core.cache import caches

from django_singletask import LockUnavailable, TaskLock
from django_singletask.stores import base, epoch, get_store
from django_singletask.stores.base import TRIES, Forgotten
from tests import inside
from tests.entries import eventually, holder, key_of, private_store
from tests.servers import Memcached, Redis, Valkey, ask

ROOT = Path(__file__).parents[2]
EPOCH = "singletask:@epoch"


def beside(alias, way, fault=""):
    """Let a cache forget a lock that is held, and return what tests/beside.py saw."""
    kind, variable = Memcached, "SINGLETASK_TEST_MEMCACHED"
    if "redis" in alias:
        kind, variable = Redis, "SINGLETASK_TEST_REDIS_URL"
    elif "valkey" in alias:
        kind, variable = Valkey, "SINGLETASK_TEST_VALKEY_URL"
    with kind() as server:
        address = server.address if kind is Memcached else server.url
        environment = {
            **os.environ,
            variable: address,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }
        command = [sys.executable, "-m", "tests.beside", alias]
        if way == "restart with an old snapshot":
            key = caches[alias].make_key(EPOCH)
            ask(server.port, f"SET {key} old\r\n".encode())
            ask(server.port, b"SAVE\r\n")
        process = subprocess.Popen(
            [*command, *([fault] if fault else [])],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout.readline() == "held\n"
            if way == "restart":
                server.restart_empty()
            elif way == "restart with an old snapshot":
                server.kill()
                server.start()
            else:
                ask(server.port, b"flush_all\r\n" if kind is Memcached else b"FLUSHALL\r\n")
            return json.loads(process.stdout.read())


@pytest.mark.only_all("another case shows it", "flush")
@pytest.mark.parametrize("way", ["restart", "flush"])
@pytest.mark.parametrize("alias", ["redis", "pymemcache"])
def test_a_live_holder_has_its_lock_back_before_others_take_it(alias, way):
    result = beside(alias, way)
    assert result == {"beside": 0, "retaken": 1, "lost": False}


def test_a_server_that_comes_back_with_an_old_snapshot_is_noticed():
    """It has the epoch of before, but not the locks that were taken since."""
    result = beside("valkey", "restart with an old snapshot")
    assert result == {"beside": 0, "retaken": 1, "lost": False}


@pytest.mark.only_all("it repeats until it goes wrong")
@pytest.mark.parametrize("fault", ["nobody is held back", "nobody looks"])
def test_control_without_it_others_run_beside_the_holder(fault):
    # It goes wrong by chance, on a busy machine not each time.
    assert any(beside("redis", "restart", fault)["beside"] for _attempt in range(4))


@pytest.mark.only_all("it repeats until it goes wrong")
def test_control_if_nobody_asks_which_server_answers_others_run_beside_the_holder():
    fault = "nobody asks which server answers"
    assert beside("redis", "restart with an old snapshot", fault)["beside"] > 0


@pytest.fixture
def outside_of_tests(settings, cache_alias):
    store = get_store(cache_alias)
    store.look()  # an earlier test has left another epoch
    store.epoch.changed_at = store.epoch.told_at = -math.inf
    settings.SINGLETASK_TESTING = False
    settings.SINGLETASK_HISTORY = "inline"


on_each_client = pytest.mark.parametrize(
    "cache_alias",
    ["redis", "django_redis", "valkey", "django_valkey", "pylibmc", "pymemcache"],
    indirect=True,
)


def forget(alias):
    """Empty a cache, when the last look of this process was long ago."""
    caches[alias].clear()
    get_store(alias).epoch.seen_at = -math.inf


def take(name):
    with TaskLock(name, wait=30) as lock:
        assert lock.owned()


@pytest.mark.parametrize("cache_alias", ["redis", "pylibmc", "pymemcache"], indirect=True)
@pytest.mark.usefixtures("outside_of_tests", "db")
def test_a_process_that_knew_another_epoch_takes_nothing_for_a_second(cache_alias, caplog, pauses):
    take("first")
    assert not pauses
    forget(cache_alias)
    began = time.monotonic()
    take("second")
    assert time.monotonic() - began > 0.9
    assert len(pauses) == 1
    assert caplog.text.count("may have forgotten its locks") == 1
    take("third")
    assert len(pauses) == 1


def refusal(store):
    try:
        store.read("nightly")
    except LockUnavailable as error:
        return str(error)
    return ""


def test_the_second_begins_when_a_server_has_loaded_its_snapshot(settings):
    """It says who it is from its start. So the pause could be over before a holder can come."""
    with (
        ThreadPoolExecutor(1) as thread,  # the server ends with the thread that starts it
        Redis() as server,
        private_store(settings, "redis", server.url) as store,
    ):
        store.look()
        for number in range(1000):
            ask(server.port, f"SET other:{number} {'x' * 1000}\r\n".encode())
        assert ask(server.port, b"SAVE\r\n") == b"+OK\r\n"
        server.kill()
        # Loading takes 50 s, unless it is told to go on.
        server.config |= {"key_load_delay": 50_000, "loading_process_events_interval_bytes": 1024}
        started = thread.submit(server.start)
        assert eventually(lambda: "loading" in refusal(store))
        settings.SINGLETASK_TESTING = False
        with pytest.raises(LockUnavailable, match="loading"):  # the pause has not begun
            inside.take(store, holder("a"), key_of("nightly"), waits=True)
        ask(server.port, b"CONFIG SET key-load-delay 0\r\n")
        started.result()
        with pytest.raises(Forgotten):
            inside.take(store, holder("a"), key_of("nightly"), waits=True)


@pytest.mark.parametrize("cache_alias", ["pylibmc", "pymemcache"], indirect=True)
@pytest.mark.usefixtures("outside_of_tests", "db")
def test_a_holder_that_meets_takers_one_after_another_has_its_lock_back(cache_alias, monkeypatch):
    """In memcached a taker adds its entry, sees the change, and gives the entry back."""
    monkeypatch.setattr(epoch, "HOLD_BACK", 60)
    assert not meets_takers(cache_alias, monkeypatch)


@pytest.mark.parametrize("cache_alias", ["pymemcache"], indirect=True)
@pytest.mark.usefixtures("outside_of_tests", "db")
def test_control_a_holder_that_looks_once_loses_its_lock(cache_alias, monkeypatch):
    monkeypatch.setattr(epoch, "HOLD_BACK", 0)
    assert meets_takers(cache_alias, monkeypatch)


@pytest.mark.parametrize("cache_alias", ["pymemcache"], indirect=True)
@pytest.mark.usefixtures("outside_of_tests", "no_renewal_thread", "db")
def test_extend_waits_until_a_taker_has_given_its_entry_back(cache_alias, monkeypatch):
    store, key, taker = get_store(cache_alias), key_of("nightly"), holder("a")
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        store.release(key, taker)

    with TaskLock("nightly", timeout=60) as lock:
        caches[cache_alias].clear()
        assert store.add(key, taker, 60) is None
        monkeypatch.setattr(base, "time", SimpleNamespace(sleep=sleep, time_ns=time.time_ns))
        lock.extend()
        assert lock.owned()
    assert sleeps == [epoch.LOOK_AGAIN]


def meets_takers(cache_alias, monkeypatch):
    """Return whether a holder loses its lock that meets the entries of three takers."""
    store = get_store(cache_alias)
    looks, renew_many = [], type(store).renew_many

    def count(store, requests):
        outcomes = renew_many(store, requests)
        looks.append(outcomes)
        return outcomes

    key, takers = key_of("nightly"), [holder("a"), holder("b"), holder("c")]
    with TaskLock("nightly", timeout=60) as lock:
        monkeypatch.setattr(type(store), "renew_many", count)
        caches[cache_alias].clear()
        assert store.add(key, takers[0], 60) is None
        for taker, next_taker in itertools.pairwise(takers):
            before = len(looks)
            eventually(lambda before=before: len(looks) > before)
            assert store.replace(key, taker, next_taker, 60)
            if lock.lost:
                return True
        store.release(key, takers[-1])
        eventually(lambda: lock.owned() or lock.lost)
        return lock.lost


@on_each_client
@pytest.mark.usefixtures("outside_of_tests")
def test_the_entry_of_a_queued_call_is_not_held_back(cache_alias, pauses):
    forget(cache_alias)
    assert get_store(cache_alias).add(key_of("queued"), holder("a"), 60) is None
    assert not pauses


@on_each_client
@pytest.mark.django_db
def test_tests_that_empty_their_cache_are_not_held_back(cache_alias, caplog, pauses):
    for name in ("first", "second"):
        take(name)
        forget(cache_alias)
    assert not pauses
    assert "have forgotten" not in caplog.text


@pytest.mark.django_db
def test_a_cache_that_is_emptied_all_the_time_lets_a_take_wait_three_times(on_redis, monkeypatch):
    store, waits = get_store("redis"), []
    take = store.take

    def forget(*arguments, heeds_epoch):
        if not heeds_epoch:
            return take(*arguments, heeds_epoch=False)
        waits.append(arguments)
        raise Forgotten(0)

    monkeypatch.setattr(store, "take", forget)
    with TaskLock("nightly") as lock:
        assert lock.owned()
    assert len(waits) == 3


@pytest.mark.parametrize("waits", ["plain", "asyncio"])
def test_a_long_wait_is_held_back_each_time_that_the_cache_forgets(on_redis, settings, waits):
    """A wait that heeds only the first of many restarts would take a lock under its holder."""
    settings.SINGLETASK_HISTORY = "off"
    heeded = []

    def forget_between_two_looks(take, *arguments, heeds_epoch):
        heeded.append(heeds_epoch)
        if heeds_epoch and len(heeded) % 2:
            raise Forgotten(0)
        return take(*arguments, heeds_epoch=heeds_epoch)

    holder, waiter = TaskLock("nightly"), TaskLock("nightly", wait=2)
    with holder, inside.handled("take", forget_between_two_looks, of_all_threads=True):
        if waits == "asyncio":
            assert not asyncio.run(waiter.aacquire())
        else:
            with ThreadPoolExecutor() as pool:
                assert not pool.submit(waiter.acquire).result()
    assert len(heeded) > 8
    assert all(heeded)


def test_a_cache_that_does_not_keep_the_epoch_is_an_error(on_redis, monkeypatch):
    """It is full and evicts nothing, for example: nobody asks it for ever."""
    store, added = get_store("redis"), []
    store.cache.clear()
    monkeypatch.setattr(store, "insert", lambda key, value, lease: added.append(key))
    with pytest.raises(
        LockUnavailable, match="'redis' does not keep new entries: it lost redis:1:singletask:@"
    ):
        store.look()
    assert added == [EPOCH] * TRIES


@on_each_client
def test_the_epoch_is_no_lock(cache_alias):
    store = get_store(cache_alias)
    store.look()
    assert store.epoch.value
    if store.family == "redis":
        assert EPOCH not in dict(store.entries())
