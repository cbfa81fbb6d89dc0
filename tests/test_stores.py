"""The contract of a store, against every cache that can hold locks, each on its real server."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_singletask import TaskLock
from django_singletask.locks.keys import name_key
from django_singletask.stores import CannotList, Entry, Outcome, Store, close_stores, get_store
from django_singletask.stores.base import LONGEST_KEY, marker_key
from tests.conftest import LOCK_CACHES
from tests.entries import eventually, holder, key_of, private_store
from tests.racers import connection_id

SHARED = [alias for alias in LOCK_CACHES if alias != "locmem"]
MEMCACHED = ("pylibmc", "pylibmc_binary", "pymemcache")
A, B, C = holder("a"), holder("b"), holder("c")
KEY = key_of("feeds.tasks.import_feed(feed_id=7)")
on_listing_caches = pytest.mark.parametrize(
    "cache_alias",
    ["redis", "django_redis", "db_postgres", "db_mariadb", "db_sqlite", "locmem"],
    indirect=True,
)


@pytest.fixture
def store(cache_alias: str) -> Iterator[Store]:
    yield get_store(cache_alias)
    close_stores()
    # Django's own connection to the table, where a test used it.
    caches[cache_alias].close()


def value_of(store: Store, key: str = KEY) -> bytes | None:
    entry = store.read(key)
    return None if entry is None else entry.value


# Taking


def test_add_takes_a_free_lock(store: Store) -> None:
    assert store.add(KEY, A, 60) is None
    assert value_of(store) == A


def test_add_leaves_a_held_lock_and_tells_its_holder(store: Store) -> None:
    store.add(KEY, A, 60)
    blocker = store.add(KEY, B, 60)
    assert blocker is not None
    assert blocker.value == A
    assert value_of(store) == A


def test_another_key_is_another_lock(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.add(key_of("feeds.tasks.import_feed(feed_id=8)"), B, 60) is None


def test_add_sent_twice_is_one_acquisition(store: Store) -> None:
    store.add(KEY, A, 60)
    again = store.add(KEY, A, 60)
    assert again is None or again.value == A


def test_task_lock_whose_request_was_sent_twice_is_acquired(
    store: Store, cache_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = type(store).add

    def add_twice(self: Store, key: str, value: bytes, lease: float) -> Entry | None:
        add(self, key, value, lease)
        return add(self, key, value, lease)

    monkeypatch.setattr(type(store), "add", add_twice)
    with TaskLock("sent twice", cache=cache_alias, on_conflict="skip") as lock:
        assert lock
        assert lock.owned()
        assert not TaskLock("sent twice", cache=cache_alias).acquire()


# The lease


def test_lock_is_free_when_its_lease_has_ended(store: Store) -> None:
    store.add(KEY, A, 0.2)
    assert value_of(store) == A
    assert eventually(lambda: store.add(KEY, B, 60) is None)
    assert store.release(KEY, A) is Outcome.TAKEN
    assert store.renew(KEY, A, 60) is Outcome.TAKEN
    assert not store.clear(KEY, A, 60)
    assert value_of(store) == B


def test_renewed_lock_outlives_its_first_lease(store: Store) -> None:
    other = key_of("not renewed")
    store.add(KEY, A, 0.2)
    store.add(other, A, 0.2)
    assert store.renew(KEY, A, 60) in {Outcome.OK, Outcome.RETAKEN}
    eventually(lambda: value_of(store, other) is None)
    assert value_of(store) == A


def test_renewal_may_shorten_the_lease(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.renew(KEY, A, 0.1) is Outcome.OK
    assert eventually(lambda: value_of(store) is None)


def test_read_tells_what_is_left_of_the_lease(store: Store, cache_alias: str) -> None:
    store.add(KEY, A, 60)
    entry, blocker = store.read(KEY), store.add(KEY, B, 60)
    assert entry is not None
    assert blocker is not None
    for found in (entry, blocker):
        if cache_alias in MEMCACHED:
            assert found.remaining is None
        else:
            assert found.remaining is not None
            assert 50 < found.remaining < 60.01


def test_a_lease_of_30_days_is_not_read_as_a_date(store: Store) -> None:
    store.add(KEY, A, 30 * 24 * 60 * 60)
    assert value_of(store) == A
    assert store.renew(KEY, A, 30 * 24 * 60 * 60) is Outcome.OK
    assert value_of(store) == A


# Giving back


def test_release_frees_the_lock_at_once(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.release(KEY, A) is Outcome.OK
    assert store.read(KEY) is None
    assert store.add(KEY, B, 60) is None


def test_release_leaves_the_lock_of_another(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.release(KEY, B) is Outcome.TAKEN
    assert value_of(store) == A


def test_control_delete_of_the_cache_frees_the_lock_of_another(
    store: Store, cache_alias: str
) -> None:
    store.add(KEY, A, 60)
    caches[cache_alias].delete(KEY)
    assert store.read(KEY) is None


def test_release_of_what_is_gone_says_so(store: Store) -> None:
    assert store.release(KEY, A) is Outcome.GONE
    store.add(KEY, A, 60)
    store.release(KEY, A)
    assert store.release(KEY, A) is Outcome.GONE


# Replacing


def test_replacing_what_is_there(store: Store) -> None:
    store.add(KEY, A, 0.5)
    assert store.replace(KEY, A, B, 60)
    assert value_of(store) == B
    assert store.release(KEY, A) is Outcome.TAKEN


def test_replacing_what_is_not_there_changes_nothing(store: Store) -> None:
    assert not store.replace(KEY, A, B, 60)
    assert store.read(KEY) is None
    store.add(KEY, C, 60)
    assert not store.replace(KEY, A, B, 60)
    assert value_of(store) == C


def test_replacing_twice_is_one_change(store: Store) -> None:
    """The client may have sent the request again, because the reply was lost."""
    store.add(KEY, A, 60)
    assert store.replace(KEY, A, B, 60)
    assert store.replace(KEY, A, B, 60)
    assert value_of(store) == B


def test_the_replaced_entry_has_the_new_lease(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.replace(KEY, A, B, 0.2)
    assert eventually(lambda: value_of(store) is None)


# Renewing


def test_renewal_of_the_lock_of_another_is_refused(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.renew(KEY, B, 0.1) is Outcome.TAKEN
    assert value_of(store) == A


def test_renewal_takes_a_vanished_lock_again(store: Store) -> None:
    assert store.renew(KEY, A, 60) is Outcome.RETAKEN
    assert value_of(store) == A
    assert store.add(KEY, B, 60) is not None


def test_renewals_at_the_same_moment_take_a_vanished_lock_again(
    cache_alias: str, store: Store
) -> None:
    barrier = threading.Barrier(4)
    outcomes = []

    def renew() -> None:
        mine = get_store(cache_alias)
        for number in range(20):
            barrier.wait(60)
            outcomes.append(mine.renew(key_of(f"lock {number}"), A, 60))

    threads = [threading.Thread(target=renew) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 80
    assert set(outcomes) <= {Outcome.OK, Outcome.RETAKEN}


def test_renewal_after_clear_does_not_take_the_lock_again(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.clear(KEY, A, 60)
    assert store.renew(KEY, A, 60) is Outcome.GONE
    assert store.read(KEY) is None


def test_renewal_after_clear_and_takeover_is_refused(store: Store) -> None:
    store.add(KEY, A, 60)
    store.clear(KEY, A, 60)
    store.add(KEY, B, 60)
    assert store.renew(KEY, A, 60) is Outcome.TAKEN
    assert value_of(store) == B


# Clearing


def test_clear_frees_exactly_the_value_shown(store: Store) -> None:
    store.add(KEY, A, 60)
    assert not store.clear(KEY, B, 60)
    assert value_of(store) == A
    assert store.clear(KEY, A, 60)
    assert store.add(KEY, C, 60) is None


def test_clear_of_what_is_gone_frees_nothing(store: Store) -> None:
    assert not store.clear(KEY, A, 60)


def test_marker_speaks_to_the_cleared_holder_alone(store: Store) -> None:
    store.add(KEY, A, 60)
    store.clear(KEY, A, 60)
    assert store.renew(KEY, B, 60) is Outcome.RETAKEN


def test_marker_lives_for_the_lease_it_was_given(store: Store) -> None:
    store.add(KEY, A, 60)
    store.clear(KEY, A, 0.1)
    assert eventually(lambda: store.renew(KEY, A, 60) is Outcome.RETAKEN)


def test_what_something_else_wrote_can_be_cleared(store: Store) -> None:
    store.add(KEY, b"not a holder", 60)
    assert store.clear(KEY, b"not a holder", 60)
    assert store.read(KEY) is None


# Listing


def test_entries_lists_what_is_held(store: Store, cache_alias: str) -> None:
    keys = [key_of("one"), key_of("order:cleared"), key_of("ein Schlüssel")]
    for key in keys:
        store.add(key, A, 60)
    store.add(KEY, B, 60)
    store.release(KEY, B)
    store.add(key_of("cleared"), B, 60)
    store.clear(key_of("cleared"), B, 60)
    store.add(key_of("expired"), B, 0.01)
    caches[cache_alias].set("something_else", "of the same cache")
    if cache_alias in MEMCACHED:
        with pytest.raises(CannotList):
            list(store.entries())
        return
    eventually(lambda: store.read(key_of("expired")) is None)
    found = dict(store.entries())
    assert sorted(found) == sorted(keys)
    assert {entry.value for entry in found.values()} == {A}
    assert all(50 < (entry.remaining or 0) < 60.01 for entry in found.values())


@on_listing_caches
def test_entries_lists_only_the_locks_under_its_own_prefix(cache_alias: str, settings) -> None:
    for prefix in ("a%b_c!d\\e[f]*?ü", "aXbXc!d\\ef*?ü"):
        with private_store(settings, cache_alias, KEY_PREFIX=prefix) as store:
            store.release(KEY, A)
            assert store.add(KEY, A, 60) is None
            assert [key for key, _ in store.entries()] == [KEY]


def hidden(key: str, prefix: str, version: int) -> str:
    return f"{prefix}-{abs(hash(key))}"


@on_listing_caches
def test_keys_that_a_key_function_hides_cannot_be_listed(cache_alias: str, settings) -> None:
    with private_store(settings, cache_alias, KEY_FUNCTION=hidden) as store:
        assert store.add(KEY, A, 60) is None
        with pytest.raises(CannotList, match="KEY_FUNCTION"):
            list(store.entries())
        assert store.release(KEY, A) is Outcome.OK


# Keys and values


@pytest.mark.parametrize(
    "name",
    ["x", "ein Schlüssel", "鍵", "with spaces", "per%cent_*?[a]\\", "a" * 255, "'; DROP TABLE--"],
)
def test_every_name_makes_a_lock(store: Store, cache_alias: str, name: str) -> None:
    with TaskLock(name, cache=cache_alias) as lock:
        assert lock.owned()
        assert not TaskLock(name, cache=cache_alias).acquire()
    assert not lock.locked()


def test_names_that_differ_in_case_are_two_locks(store: Store) -> None:
    store.add(key_of("Nightly"), A, 60)
    assert store.add(key_of("nightly"), B, 60) is None


def longest_prefix(cache_alias: str) -> str:
    return "p" * (250 - len(caches[cache_alias].key_func(LONGEST_KEY, "", 1)))


def test_longest_name_works_under_the_longest_prefix(cache_alias: str, settings) -> None:
    prefix = longest_prefix(cache_alias)
    assert len(prefix) > 60
    key = name_key("n" * 255).key
    with private_store(settings, cache_alias, KEY_PREFIX=prefix) as store:
        assert len(store.make_key(marker_key(key, A))) == 250
        store.release(key, A)
        store.add(key, A, 60)
        assert store.clear(key, A, 60)
        assert store.renew(key, A, 60) is Outcome.GONE
    with private_store(settings, cache_alias, KEY_PREFIX=prefix) as store:
        caches[cache_alias].delete(marker_key(key, A))


def test_longer_prefix_is_refused_at_first_use(cache_alias: str, settings) -> None:
    prefix = longest_prefix(cache_alias) + "pp"
    with pytest.raises(ImproperlyConfigured, match="2 bytes too long"):
        with private_store(settings, cache_alias, KEY_PREFIX=prefix):
            pass


unpickled: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return explode, ()


def explode() -> None:
    unpickled.append("a value of the cache")


def test_planted_pickle_is_not_loaded(store: Store, cache_alias: str) -> None:
    caches[cache_alias].set(KEY, Bomb(), 60)
    unpickled.clear()
    assert value_of(store)
    blocker = store.add(KEY, A, 60)
    assert blocker is not None
    lock = TaskLock("feeds.tasks.import_feed(feed_id=7)", cache=cache_alias)
    assert not lock.acquire()
    assert lock.clear()
    assert store.read(KEY) is None
    assert not unpickled


def test_control_the_cache_itself_loads_the_planted_pickle(store: Store, cache_alias: str) -> None:
    caches[cache_alias].set(KEY, Bomb(), 60)
    unpickled.clear()
    caches[cache_alias].get(KEY)
    assert unpickled


# One store per thread


def test_a_thread_keeps_its_store(store: Store, cache_alias: str) -> None:
    assert get_store(cache_alias) is store


def test_each_thread_has_a_store_of_its_own(store: Store, cache_alias: str) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(get_store(cache_alias)))
    thread.start()
    thread.join()
    assert found[0] is not store
    assert found[0].cache is not store.cache
    assert store.cache is not caches[cache_alias]


def test_store_is_closed_when_its_thread_ends(
    store: Store, cache_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Store] = []
    close = type(store).close

    def record(self: Store) -> None:
        close(self)
        closed.append(self)

    monkeypatch.setattr(type(store), "close", record)
    # pylibmc 1.6 has errors ignored on Python 3.13, and pytest would keep them with their frames,
    # the store among what they refer to.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    thread = threading.Thread(target=get_store, args=(cache_alias,))
    thread.start()
    thread.join()
    eventually(lambda: closed)
    assert store not in closed


def test_closed_store_is_opened_anew(store: Store, cache_alias: str) -> None:
    store.add(KEY, A, 60)
    close_stores()
    assert get_store(cache_alias) is not store
    assert value_of(get_store(cache_alias)) == A


@pytest.mark.parametrize("cache_alias", SHARED, indirect=True)
def test_lease_does_not_depend_on_the_clock_of_this_host(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    store.add(KEY, A, 60)
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    assert value_of(store) == A
    blocker = store.add(KEY, B, 60)
    assert blocker is not None
    assert blocker.remaining is None or 50 < blocker.remaining < 60.01


@pytest.mark.parametrize("cache_alias", ["redis", "db_postgres"], indirect=True)
def test_changed_settings_close_no_store_that_another_thread_uses(
    cache_alias: str, settings
) -> None:
    used, go_on = threading.Event(), threading.Event()
    found: list[bool] = []

    def work() -> None:
        store = get_store(cache_alias)
        before = connection_id(store)
        used.set()
        go_on.wait(60)
        found.append(connection_id(store) == before)
        found.append(get_store(cache_alias) is store)

    thread = threading.Thread(target=work)
    thread.start()
    used.wait(60)
    mine = get_store(cache_alias)
    settings.CACHES = dict(settings.CACHES)
    go_on.set()
    thread.join()
    assert found == [True, False]
    assert get_store(cache_alias) is not mine
    close_stores()
