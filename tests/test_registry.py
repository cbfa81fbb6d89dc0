from __future__ import annotations

import json
import math
import time

import pytest
from celery import Celery
from django.core.cache import caches
from django.db import DatabaseError, connection

from django_singletask import SingletonTask, TaskLock, registry
from django_singletask.keys import name_key
from django_singletask.liveness import Holder
from django_singletask.models import TaskLockEvent
from django_singletask.registry import CannotList, clear, duration, held
from django_singletask.stores import get_store

pytestmark = pytest.mark.django_db(databases="__all__")

TABLE = TaskLockEvent._meta.db_table
FOREIGN = name_key("foreign").key


@pytest.fixture(autouse=True)
def empty_history(db):
    # Threads of other tests write outside of the transactions of those.
    TaskLockEvent.objects.all().delete()


@pytest.fixture
def redis(settings, empty_cache):
    settings.SINGLETASK_CACHE = "redis"
    empty_cache("redis")


@pytest.fixture
def memcached(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")


@pytest.fixture
def take():
    """Take locks that are given back after the test."""
    taken = []

    def take_one(name, **options):
        lock = TaskLock(name, **options)
        assert lock.acquire()
        taken.append(lock)
        return lock

    yield take_one
    for lock in taken:
        if lock.token is not None:
            lock.release()


def names(*args, **kwargs):
    return [lock.name for lock in held(*args, **kwargs)]


def drop_table():
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO {TABLE}_gone")


# On every store


def test_held_locks_are_listed(cache_alias, take):
    first, second = take("first", timeout=30), take("second")
    found = {lock.name: lock for lock in held()}
    assert set(found) == {"first", "second"}
    assert found["first"].key == first.key
    assert found["first"].holder.token == first.token
    assert found["second"].holder.token == second.token
    assert 0 <= found["first"].held_for < 20


def test_given_back_locks_are_not_listed(cache_alias, take):
    take("nightly").release()
    assert held() == []


def test_remaining_lease_is_known_but_on_memcached(cache_alias, take):
    take("nightly", timeout=30)
    [lock] = held()
    if cache_alias.startswith("py"):
        assert lock.remaining is None
    else:
        assert 10 < lock.remaining <= 30


def test_locks_of_any_name_are_listed(cache_alias, take):
    odd = {"ключ *[x]?% \\ _!", "cleared", "x:cleared", "cleared:cleared:y", "x" * 255}
    for name in odd:
        take(name)
    assert set(names()) == odd


def test_shown_lock_is_freed(cache_alias, take):
    lock = take("nightly")
    [shown] = held()
    assert clear(shown, actor="ada")
    assert not lock.locked()


def test_cleared_lock_leaves_nothing_in_the_list(cache_alias, take):
    take("nightly")
    clear(held()[0], actor="ada")
    assert held() == []


def test_lock_that_changed_hands_since_it_was_shown_stays(cache_alias, take):
    lock = take("nightly")
    [shown] = held()
    lock.release()
    other = take("nightly")
    assert not clear(shown, actor="ada")
    assert other.owned()
    assert not TaskLockEvent.objects.filter(kind="cleared").exists()


def test_lock_that_is_gone_since_it_was_shown_is_not_freed(cache_alias, take):
    lock = take("nightly")
    [shown] = held()
    lock.release()
    assert not clear(shown, actor="ada")


# What is asked for


def test_longest_held_is_first(redis, take, monkeypatch):
    now = time.time()
    for name, ago in (("young", 1), ("old", 100), ("middle", 50)):
        monkeypatch.setattr("django_singletask.locks.time.time", lambda ago=ago: now - ago)
        take(name)
    monkeypatch.undo()
    assert names() == ["old", "middle", "young"]


def test_names_and_keys_narrow_the_list(redis, take):
    take("one")
    key = take("two").key
    take("three")
    assert sorted(names(["one", key])) == ["one", "two"]
    assert names(["four"]) == []


def test_task_narrows_the_list(redis, take):
    take("by hand")
    with Celery("listed", set_as_current=False, broker="memory://") as app:

        @app.task(base=SingletonTask, name="listed", shared=False)
        def listed():
            return [lock.holder.task for lock in held(task="listed")]

        assert listed.apply().get() == ["listed"]
        assert held(task="other") == []


def test_skipped_runs_are_counted_by_holder(redis, take):
    take("nightly")
    take("other")
    for _ in range(3):
        TaskLock("nightly").acquire()
    assert {lock.name: lock.skipped for lock in held()} == {"nightly": 3, "other": 0}


def test_skips_of_an_earlier_holder_do_not_count(redis, take):
    first = take("nightly")
    TaskLock("nightly").acquire()
    first.release()
    take("nightly")
    assert held()[0].skipped == 0


def test_skipped_runs_of_many_locks_take_few_queries(redis, take, django_assert_num_queries):
    for number in range(20):
        take(f"lock {number}")
    with django_assert_num_queries(1):
        assert len(held()) == 20


# Without a history


def test_history_off_lists_without_counts(settings, redis, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    [lock] = held()
    assert lock.skipped is None


def test_missing_history_lists_without_counts(redis, take, caplog):
    take("nightly")
    drop_table()
    # A failed statement spoils the transaction of the test, so its savepoint is the test's own.
    [lock] = held()
    assert lock.skipped is None
    assert "skipped runs cannot be counted" in caplog.text


def test_history_off_on_memcached_says_so(settings, memcached, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    message = r"cache 'pymemcache' cannot list its entries, and with SINGLETASK_HISTORY = 'off'"
    with pytest.raises(CannotList, match=message):
        held()


def test_history_off_on_memcached_finds_what_is_named(settings, memcached, take):
    settings.SINGLETASK_HISTORY = "off"
    key = take("nightly").key
    assert names(["nightly"]) == names([key]) == ["nightly"]


def test_missing_history_on_memcached_says_so(memcached, take):
    take("nightly")
    drop_table()
    with pytest.raises(CannotList, match=r"history.* cannot be read.*Has 'manage.py migrate' run"):
        held()


def test_quiet_lock_on_memcached_is_found_by_its_key(memcached, take):
    lock = TaskLock("quiet")
    lock._quiet = True
    lock.acquire()
    assert names() == []
    assert names([lock.key]) == ["quiet"]
    lock.release()


def test_open_row_without_a_lock_is_not_listed(memcached, take):
    lock = take("nightly")
    lock._store().release(lock.key, lock._value)
    assert TaskLockEvent.objects.filter(outcome="").exists()
    assert held() == []


def test_lock_with_two_open_rows_is_listed_once(memcached, take):
    lock = take("nightly")
    lock._store().release(lock.key, lock._value)
    take("nightly")
    assert names() == ["nightly"]


def test_keys_that_are_hidden_by_a_key_function_are_found_in_the_history(settings, redis, take):
    settings.CACHES = {
        **settings.CACHES,
        "redis": {**settings.CACHES["redis"], "KEY_FUNCTION": "tests.test_registry.hide"},
    }
    take("nightly")
    assert names() == ["nightly"]


def hide(key, prefix, version):
    return f"{prefix}:{version}:{hash(key)}"


# What something else wrote


@pytest.mark.parametrize(
    "value", [b"", b"text", b"[]", b"\xff", b'{"token": 7, "since": "x"}', b"[" * 100_000]
)
def test_foreign_entry_is_listed_under_its_key(redis, value):
    get_store("redis").add(FOREIGN, value, 30)
    [lock] = held()
    assert (lock.name, lock.held_for) == (FOREIGN, 0)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "-5", "1e300"])
def test_numbers_of_a_foreign_entry_are_finite(redis, number):
    value = f'{{"token": "t", "since": {number}, "timeout": {number}}}'
    get_store("redis").add(FOREIGN, value.encode(), 30)
    [lock] = held()
    assert math.isfinite(lock.held_for)
    assert json.dumps([lock.holder.since, lock.holder.timeout], allow_nan=False)


def test_foreign_entry_can_be_cleared(redis):
    get_store("redis").add(FOREIGN, b"text", 30)
    assert clear(held()[0], actor="ada")
    assert held() == []


def test_other_entries_of_the_cache_are_not_listed(redis, take):
    caches["redis"].set("singletask", 1)
    caches["redis"].set("page:singletask:x", 1)
    take("nightly")
    assert names() == ["nightly"]


def test_store_that_is_down_is_an_error(settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    with pytest.raises(Exception, match="refused") as caught:
        held()
    assert not isinstance(caught.value, (CannotList, DatabaseError))


def test_lock_of_a_clock_that_is_ahead_is_held_for_no_time(redis):
    blank = Holder.from_dict({"name": "nightly", "since": time.time() + 1000})
    get_store("redis").add("singletask:nightly:1", blank.encode(), 30)
    assert registry.held()[0].held_for == 0


# Durations


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m 00s"),
        (134, "2m 14s"),
        (3600, "1h 00m"),
        (3720, "1h 02m"),
        (86_399, "23h 59m"),
        (86_400, "1d 00h"),
        (100 * 86_400, "100d 00h"),
    ],
)
def test_duration_is_written_in_its_two_largest_units(seconds, text):
    assert duration(seconds) == text
