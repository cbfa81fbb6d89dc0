"""The contract of a store, on every cache that can hold locks, each with its real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_singletask import TaskLock
from django_singletask.locks.keys import name_key
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.base import (
    FENCE,
    LONGEST_KEY,
    CannotList,
    Outcome,
    Slots,
    Store,
    marker_key,
)
from django_singletask.stores.cluster import TAGS, ClusterStore
from tests.conftest import LOCK_CACHES
from tests.entries import eventually, holder, key_of, private_store
from tests.racers import connection_id

SHARED = [alias for alias in LOCK_CACHES if alias != "locmem"]
A, B, C = holder("a"), holder("b"), holder("c")
KEY = key_of("feeds.tasks.import_feed(feed_id=7)")
on_each_family = pytest.mark.parametrize(
    "cache_alias", ["redis", "pymemcache", "db_postgres", "locmem"], indirect=True
)
on_listing_caches = pytest.mark.parametrize(
    "cache_alias",
    [
        *("redis", "django_redis", "valkey", "django_valkey", "cluster"),
        *("db_postgres", "db_mariadb", "db_sqlite", "locmem"),
    ],
    indirect=True,
)


@pytest.fixture
def store(cache_alias: str) -> Iterator[Store]:
    yield get_store(cache_alias)
    close_stores()
    # A test may have used Django's own connection to the table.
    caches[cache_alias].close()


def of_lock(store: Store, key: str) -> str:
    """Return where the cache has an entry of this lock, or of its group in a cluster."""
    return key + (f"{{{TAGS[store.group(KEY).number]}}}" if isinstance(store, ClusterStore) else "")


def value_of(store: Store, key: str = KEY) -> bytes | None:
    entry = store.read(key)
    return None if entry is None else entry.value


# Taking


def test_add_takes_a_free_lock(store: Store) -> None:
    assert store.add(KEY, A, 60) is None
    assert value_of(store) == A


def test_add_leaves_a_held_lock_and_returns_its_entry(store: Store) -> None:
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


# Slots

LOCK = name_key("feeds.tasks.import_feed(feed_id=7)")
MARK = b"file"


def take_slot(store: Store, value: bytes, mark: bytes = b"", looks_at: int = 3) -> object:
    """Take one of three slots; return its key, or the bytes of the entries in the way by key."""
    slots = Slots(LOCK.slots(looks_at), 3, mark)
    taken = store.take(slots, value, 60, heeds_epoch=False)
    return taken if isinstance(taken, str) else {key: taken[key].value for key in taken}


def test_each_take_of_a_slot_gets_another_until_all_are_held(store: Store) -> None:
    holders = {take_slot(store, value): value for value in (A, B, C)}
    assert set(holders) == set(LOCK.slots(3))
    assert take_slot(store, holder("d")) == holders
    assert {key: value_of(store, key) for key in holders} == holders


def test_a_slot_that_was_given_back_is_free(store: Store) -> None:
    keys = [take_slot(store, value) for value in (A, B, C)]
    assert store.release(str(keys[1]), B) is Outcome.OK
    assert take_slot(store, holder("d")) == keys[1]


@on_each_family
@pytest.mark.parametrize("number", [3, 5])  # the fifth is beyond those that may be taken
def test_no_slot_is_taken_beside_an_entry_with_the_mark(store: Store, number: int) -> None:
    key, own = LOCK.slots()[number - 1], A.replace(b"tests", b"a file")
    store.add(key, own, 60)
    assert take_slot(store, B, MARK, looks_at=5) == {key: own}
    assert take_slot(store, B, looks_at=5) in LOCK.slots(3)


@pytest.mark.parametrize("cache_alias", ["pymemcache", "db_postgres"], indirect=True)
def test_two_deliveries_take_no_slot_each_if_one_is_given_back_between_their_looks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (value.replace(b"tests", b"a file") for value in (A, B))
    preferred = take_slot(store, first, MARK)
    assert isinstance(preferred, str)
    store.replace(preferred, first, C, 60)
    read, taken = store.read_many, []

    def read_then_be_overtaken(keys: tuple[str, ...]) -> object:
        entries = read(keys)
        monkeypatch.setattr(store, "read_many", read)
        store.release(preferred, C)
        taken.append(take_slot(store, second, MARK))
        return entries

    monkeypatch.setattr(store, "read_many", read_then_be_overtaken)
    assert take_slot(store, first, MARK) == {preferred: second}
    assert taken == [preferred]
    assert [*store.read_many(LOCK.slots())] == [preferred]


@pytest.mark.parametrize("cache_alias", ["redis"], indirect=True)
def test_a_slot_that_was_taken_by_a_lost_request_is_not_taken_twice(store: Store) -> None:
    assert take_slot(store, A, MARK) == take_slot(store, A, MARK)


@on_each_family
def test_the_entries_of_several_keys_are_read_in_their_order(store: Store) -> None:
    store.add(LOCK.slots(3)[2], C, 60)
    store.add(LOCK.key, A, 60)
    entries = store.read_many(LOCK.slots(3))
    assert [(key, entry.value) for key, entry in entries.items()] == [
        (LOCK.slots(3)[0], A),
        (LOCK.slots(3)[2], C),
    ]


@on_listing_caches
def test_a_slot_is_listed_and_its_marker_is_not(store: Store) -> None:
    key = LOCK.slots(2)[1]
    store.add(key, A, 60)
    store.add(marker_key(key, B), b"1", 60)
    assert [key for key, _entry in store.entries()] == [key]


# The lease

# The binary protocol has the same leases, which Memcached ends up to two seconds late.
on_leases = pytest.mark.parametrize(
    "cache_alias", [alias for alias in LOCK_CACHES if alias != "pylibmc_binary"], indirect=True
)


@on_leases
def test_a_lock_is_free_when_its_lease_has_ended(store: Store) -> None:
    store.add(KEY, A, 0.2)
    assert value_of(store) == A
    assert eventually(lambda: store.add(KEY, B, 60) is None)
    assert store.release(KEY, A) is Outcome.TAKEN
    assert store.renew(KEY, A, 60) is Outcome.TAKEN
    assert not store.clear(KEY, A, 60)
    assert value_of(store) == B


@on_leases
def test_a_renewed_lock_outlives_its_first_lease(store: Store) -> None:
    other = key_of("not renewed")
    store.add(KEY, A, 0.2)
    store.add(other, A, 0.2)
    assert store.renew(KEY, A, 60) in {Outcome.OK, Outcome.RETAKEN}
    eventually(lambda: value_of(store, other) is None)
    assert value_of(store) == A


def test_an_entry_says_what_is_left_of_its_lease(store: Store) -> None:
    store.add(KEY, A, 60)
    for entry in (store.read(KEY), store.add(KEY, B, 60)):
        assert entry is not None
        if store.family == "memcached":
            assert entry.remaining is None
        else:
            assert entry.remaining is not None
            assert 50 < entry.remaining < 60.01


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


def test_control_the_cache_itself_deletes_the_lock_of_another(
    store: Store, cache_alias: str
) -> None:
    store.add(KEY, A, 60)
    caches[cache_alias].delete(of_lock(store, KEY))
    assert store.read(KEY) is None


def test_release_of_a_missing_entry_says_that_it_is_gone(store: Store) -> None:
    assert store.release(KEY, A) is Outcome.GONE
    store.add(KEY, A, 60)
    store.release(KEY, A)
    assert store.release(KEY, A) is Outcome.GONE


# Replacing


def test_replace_changes_the_entry_that_is_there(store: Store) -> None:
    store.add(KEY, A, 0.5)
    assert store.replace(KEY, A, B, 60)
    assert value_of(store) == B
    assert store.release(KEY, A) is Outcome.TAKEN


def test_replace_changes_no_other_entry(store: Store) -> None:
    assert not store.replace(KEY, A, B, 60)
    assert store.read(KEY) is None
    store.add(KEY, C, 60)
    assert not store.replace(KEY, A, B, 60)
    assert value_of(store) == C


def test_replace_sent_twice_is_one_change(store: Store) -> None:
    """A client that lost the reply sends the request again."""
    store.add(KEY, A, 60)
    assert store.replace(KEY, A, B, 60)
    assert store.replace(KEY, A, B, 60)
    assert value_of(store) == B


@on_leases
def test_a_changed_entry_has_the_new_lease(store: Store) -> None:
    replaced, renewed = key_of("replaced"), key_of("renewed")
    for key in (replaced, renewed):
        store.add(key, A, 60)
    assert store.replace(replaced, A, B, 0.2)
    assert store.renew(renewed, A, 0.2) is Outcome.OK
    assert eventually(lambda: value_of(store, replaced) is None)
    assert eventually(lambda: value_of(store, renewed) is None)


# Renewing


def test_renewal_of_the_lock_of_another_is_refused(store: Store) -> None:
    store.add(KEY, A, 60)
    assert store.renew(KEY, B, 0.1) is Outcome.TAKEN
    assert value_of(store) == A


def test_renewal_takes_a_missing_lock_again(store: Store) -> None:
    assert store.renew(KEY, A, 60) is Outcome.RETAKEN
    assert value_of(store) == A
    assert store.add(KEY, B, 60) is not None


def test_renewals_at_the_same_moment_take_a_missing_lock_again(
    cache_alias: str, store: Store
) -> None:
    barrier = threading.Barrier(4)
    outcomes = []

    def renew() -> None:
        thread_store = get_store(cache_alias)
        for number in range(20):
            barrier.wait(60)
            outcomes.append(thread_store.renew(key_of(f"lock {number}"), A, 60))

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


def test_clear_frees_the_lock_of_this_value_only(store: Store) -> None:
    store.add(KEY, A, 60)
    assert not store.clear(KEY, B, 60)
    assert value_of(store) == A
    assert store.clear(KEY, A, 60)
    assert store.add(KEY, C, 60) is None


def test_clear_of_a_missing_entry_frees_nothing(store: Store) -> None:
    assert not store.clear(KEY, A, 60)


def test_a_renewal_that_finds_the_entry_cleared_does_not_take_it_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: if clear() deleted first, this renewal would find no marker yet."""
    change, outcomes = store.change, []

    def renew_after_the_deletion(key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        outcome = change(key, old, new, lease)
        if lease is None:
            outcomes.append(store.renew(key, A, 60))
        return outcome

    store.add(KEY, A, 60)
    monkeypatch.setattr(store, "change", renew_after_the_deletion)
    assert store.clear(KEY, A, 60)
    assert outcomes == [Outcome.GONE]
    assert store.read(KEY) is None


def test_the_marker_stops_only_the_holder_that_was_cleared(store: Store) -> None:
    store.add(KEY, A, 60)
    store.clear(KEY, A, 60)
    assert store.renew(KEY, B, 60) is Outcome.RETAKEN


@on_leases
def test_the_marker_ends_with_its_lease(store: Store) -> None:
    store.add(KEY, A, 60)
    store.clear(KEY, A, 0.1)
    assert eventually(lambda: store.renew(KEY, A, 60) is Outcome.RETAKEN)


def test_an_entry_that_something_else_wrote_can_be_cleared(store: Store) -> None:
    store.add(KEY, b"not a holder", 60)
    assert store.clear(KEY, b"not a holder", 60)
    assert store.read(KEY) is None


# Fencing tokens

MEMCACHED = ["pylibmc", "pylibmc_binary", "pymemcache"]
on_memcached = pytest.mark.parametrize("cache_alias", MEMCACHED, indirect=True)
on_counting_caches = pytest.mark.parametrize(
    "cache_alias", [alias for alias in LOCK_CACHES if alias not in MEMCACHED], indirect=True
)


def fence(store: Store, value: bytes) -> int:
    number = store.fence(KEY, value)
    assert number is not None
    return number


def set_last(store: Store, number: int) -> None:
    """Make this the fencing token that was given last."""
    if isinstance(store, ClusterStore):
        store = store.group(KEY)
    store.add(FENCE, b"0", 60)
    entry = store.read(FENCE)
    assert entry is not None
    assert store.replace(FENCE, entry.value, str(number).encode(), 60)


@on_counting_caches
def test_each_fencing_token_is_greater_than_all_before(store: Store) -> None:
    numbers = []
    for value in (A, B, C):
        store.add(KEY, value, 60)
        numbers += [fence(store, value), fence(store, value)]
        store.release(KEY, value)
    assert sorted(set(numbers)) == numbers


@on_counting_caches
def test_a_fencing_token_is_the_time_of_the_server_in_microseconds(store: Store) -> None:
    store.add(KEY, A, 60)
    assert abs(fence(store, A) - time.time() * 1_000_000) < 5_000_000


@on_counting_caches
def test_only_the_holder_gets_a_fencing_token(store: Store) -> None:
    assert store.fence(KEY, A) is None
    store.add(KEY, A, 60)
    assert store.fence(KEY, B) is None
    store.replace(KEY, A, B, 0.1)
    assert store.fence(KEY, A) is None
    assert eventually(lambda: store.fence(KEY, B) is None)


@on_counting_caches
@pytest.mark.parametrize("last", [2**53 + 1, 2**62 + 1])
def test_no_digit_of_a_fencing_token_is_lost(store: Store, last: int) -> None:
    """A number of Lua is exact up to 2**53, and is printed with 14 digits."""
    store.add(KEY, A, 60)
    set_last(store, last)
    assert [fence(store, A), fence(store, A)] == [last + 1, last + 2]


@on_counting_caches
def test_fencing_tokens_grow_although_the_clock_was_set_back(store: Store) -> None:
    store.add(KEY, A, 60)
    an_hour_ahead = time.time_ns() // 1000 + 3_600_000_000
    set_last(store, an_hour_ahead)
    assert fence(store, A) == an_hour_ahead + 1


@on_counting_caches
def test_fencing_tokens_grow_although_the_cache_was_emptied(
    store: Store, cache_alias: str, empty_cache: Callable[[str], None]
) -> None:
    store.add(KEY, A, 60)
    before = fence(store, A)
    empty_cache(cache_alias)
    store.add(KEY, B, 60)
    assert fence(store, B) > before


@on_counting_caches
def test_the_last_fencing_token_is_no_lock(store: Store, cache_alias: str) -> None:
    store.add(KEY, A, 60)
    fence(store, A)
    assert [key for key, _ in store.entries()] == [KEY]


@on_counting_caches
def test_purge_leaves_the_last_fencing_token(store: Store) -> None:
    store.add(KEY, A, 60)
    fence(store, A)
    assert store.purge() == 0
    counting = store.group(KEY) if isinstance(store, ClusterStore) else store
    assert value_of(counting, FENCE) is not None


@on_memcached
def test_memcached_says_why_it_gives_no_fencing_token(store: Store) -> None:
    store.add(KEY, A, 60)
    with pytest.raises(NotImplementedError, match=r"can lose a counter.*SINGLETASK_CACHE"):
        store.fence(KEY, A)


# Listing


def test_entries_lists_the_locks_that_are_held(store: Store, cache_alias: str) -> None:
    keys = [key_of("one"), key_of("order:cleared"), key_of("ein Schlüssel")]
    for key in keys:
        store.add(key, A, 60)
    store.add(KEY, B, 60)
    store.release(KEY, B)
    store.add(key_of("cleared"), B, 60)
    store.clear(key_of("cleared"), B, 60)
    store.add(key_of("expired"), B, 0.01)
    caches[cache_alias].set("something_else", "of the same cache")
    if store.family == "memcached":
        with pytest.raises(CannotList):
            list(store.entries())
        return
    eventually(lambda: store.read(key_of("expired")) is None)
    # A worker that another test has started holds the lock of its sweep for a minute.
    sweep = "singletask:django_singletask.sweep"
    entries = {key: entry for key, entry in store.entries() if not key.startswith(sweep)}
    assert sorted(entries) == sorted(keys)
    assert {entry.value for entry in entries.values()} == {A}
    assert all(50 < (entry.remaining or 0) < 60.01 for entry in entries.values())


@on_listing_caches
def test_entries_lists_only_the_locks_of_this_prefix(cache_alias: str, settings) -> None:
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


NAMES = [
    "x",
    "ein Schlüssel",
    "鍵",
    "with spaces",
    "per%cent_*?[a]\\",
    "a" * 255,
    "'; DROP TABLE--",
]


def test_every_name_makes_a_lock(store: Store, cache_alias: str) -> None:
    for name in NAMES:
        with TaskLock(name, cache=cache_alias) as lock:
            assert lock.owned(), name
            assert not TaskLock(name, cache=cache_alias).acquire(), name
        assert not lock.locked(), name


def test_names_that_differ_in_case_are_two_locks(store: Store) -> None:
    store.add(key_of("Nightly"), A, 60)
    assert store.add(key_of("nightly"), B, 60) is None


def longest_prefix(cache_alias: str) -> str:
    return "p" * (250 - len(caches[cache_alias].key_func(LONGEST_KEY, "", 1)))


def test_the_longest_name_works_under_the_longest_prefix(cache_alias: str, settings) -> None:
    prefix = longest_prefix(cache_alias)
    assert len(prefix) > 55
    key = name_key("n" * 255).slots()[-1]
    with private_store(settings, cache_alias, KEY_PREFIX=prefix) as store:
        assert len(store.make_key(marker_key(key, A))) == 250
        store.release(key, A)
        store.add(key, A, 60)
        assert store.clear(key, A, 60)
        assert store.renew(key, A, 60) is Outcome.GONE
    with private_store(settings, cache_alias, KEY_PREFIX=prefix) as store:
        caches[cache_alias].delete(marker_key(key, A))


def test_a_longer_prefix_is_refused_at_first_use(cache_alias: str, settings) -> None:
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


def test_a_planted_pickle_is_not_loaded(store: Store, cache_alias: str) -> None:
    caches[cache_alias].set(of_lock(store, KEY), Bomb(), 60)
    unpickled.clear()
    assert value_of(store)
    blocker = store.add(KEY, A, 60)
    assert blocker is not None
    lock = TaskLock("feeds.tasks.import_feed(feed_id=7)", cache=cache_alias)
    assert not lock.acquire()
    assert lock.clear()
    assert store.read(KEY) is None
    assert not unpickled


@on_each_family
def test_control_the_cache_itself_loads_the_planted_pickle(store: Store, cache_alias: str) -> None:
    caches[cache_alias].set(KEY, Bomb(), 60)
    unpickled.clear()
    caches[cache_alias].get(KEY)
    assert unpickled


# Caches that cannot hold locks


@pytest.mark.parametrize(
    ("alias", "reason"), [("dummy", "stores nothing"), ("filebased", "is not atomic")]
)
def test_a_cache_that_cannot_hold_locks_is_refused_at_first_use(alias: str, reason: str) -> None:
    """A web server runs no system checks."""
    with pytest.raises(ImproperlyConfigured, match=f"{alias!r} cannot hold locks: .* {reason}"):
        get_store(alias)


@pytest.mark.parametrize(
    ("alias", "client", "reason"),
    [
        (
            "django_redis",
            f"{__name__}.UnknownClient",
            "UnknownClient is not one of the supported clients",
        ),
        (
            "django_valkey",
            "django_valkey.client.default.HashClient",
            "HashClient is not one of the supported clients",
        ),
    ],
)
def test_an_unfit_client_is_refused_at_first_use(settings, alias, client, reason) -> None:
    with pytest.raises(ImproperlyConfigured, match=reason):
        with private_store(settings, alias, options={"CLIENT_CLASS": client}):
            pass


class UnknownClient:
    def __init__(self, *args: object) -> None: ...

    def close(self) -> None: ...


def test_an_alias_that_does_not_exist_is_refused_at_first_use() -> None:
    with pytest.raises(ImproperlyConfigured, match="'nowhere' is not in CACHES"):
        get_store("nowhere")


@pytest.mark.parametrize("alias", ["dummy", "nowhere"])
@pytest.mark.parametrize("by_setting", [True, False])
def test_a_refusal_names_the_setting_or_the_argument(settings, alias, by_setting) -> None:
    settings.SINGLETASK_CACHE = alias if by_setting else "redis"
    cause = f"SINGLETASK_CACHE = {alias!r}" if by_setting else f"TaskLock's cache={alias!r}"
    with pytest.raises(ImproperlyConfigured, match=f"^{cause} "):
        TaskLock("nightly", cache=alias).acquire()


# One store per thread


@on_each_family
def test_a_thread_keeps_its_store(store: Store, cache_alias: str) -> None:
    assert get_store(cache_alias) is store


@on_each_family
def test_each_thread_has_a_store_of_its_own(store: Store, cache_alias: str) -> None:
    stores = []
    thread = threading.Thread(target=lambda: stores.append(get_store(cache_alias)))
    thread.start()
    thread.join()
    assert stores[0] is not store
    assert stores[0].cache is not store.cache
    assert store.cache is not caches[cache_alias]


@on_each_family
def test_a_store_is_closed_when_its_thread_ends(
    store: Store, cache_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Store] = []
    close = type(store).close

    def record(self: Store) -> None:
        close(self)
        closed.append(self)

    monkeypatch.setattr(type(store), "close", record)
    thread = threading.Thread(target=get_store, args=(cache_alias,))
    thread.start()
    thread.join()
    eventually(lambda: closed)
    assert store not in closed


@on_each_family
def test_a_closed_store_is_opened_anew(store: Store, cache_alias: str) -> None:
    store.add(KEY, A, 60)
    close_stores()
    assert get_store(cache_alias) is not store
    assert value_of(get_store(cache_alias)) == A


@pytest.mark.parametrize("cache_alias", SHARED, indirect=True)
def test_a_lease_does_not_depend_on_the_clock_of_this_host(
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
def test_a_change_of_settings_closes_no_store_that_another_thread_uses(
    cache_alias: str, settings
) -> None:
    used, go_on = threading.Event(), threading.Event()
    kept: list[bool] = []

    def work() -> None:
        store = get_store(cache_alias)
        before = connection_id(store)
        used.set()
        go_on.wait(60)
        kept.append(connection_id(store) == before)
        kept.append(get_store(cache_alias) is store)

    thread = threading.Thread(target=work)
    thread.start()
    used.wait(60)
    store = get_store(cache_alias)
    settings.CACHES = dict(settings.CACHES)
    go_on.set()
    thread.join()
    assert kept == [True, False]  # its connection until it asks again, but not its store
    assert get_store(cache_alias) is not store
    close_stores()
