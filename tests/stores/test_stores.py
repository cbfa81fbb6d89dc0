"""Stores, on every cache that can hold locks, each with its real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_singletask import TaskLock
from django_singletask.stores.base import Outcome, Store
from django_singletask.testing.stores import StoreContract
from tests import inside
from tests.conftest import CLUSTERS, remove_all
from tests.entries import eventually, holder, key_of, private_store

MEMCACHED = ["pylibmc", "pylibmc_binary", "pymemcache"]
# Their locks have the store and the connection of redis or of pylibmc: what takes long, and does
# not depend on the settings of the cache, is shown there.
ALIKE = ["redis_replica", "django_redis", "django_redis_sentinel", "valkey", "django_valkey"]
ALIKE += ["pylibmc_binary", "redis_cluster", "django_redis_cluster"]
LONG = ("of_several_that", "several_take", "several_share", "child", "_lease", "agree_on_the_epoch")
on_memcached = pytest.mark.parametrize("cache_alias", MEMCACHED, indirect=True)
A, B, C = holder("a"), holder("b"), holder("c")
KEY = key_of("feeds.tasks.import_feed(feed_id=7)")
on_each_family = pytest.mark.parametrize(
    "cache_alias", ["redis", "pylibmc", "pymemcache", "db_postgres", "locmem"], indirect=True
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
    yield inside.store_of(cache_alias)
    # A test may have used Django's own connection to the table.
    caches[cache_alias].close()


def value_of(store: Store, key: str = KEY) -> bytes | None:
    entry = store.read(key)
    return None if entry is None else entry.value


@pytest.mark.only_all(
    "shown on another cache",
    "redis_replica",
    "django_redis",
    "django_redis_sentinel",
    "valkey",
    "django_valkey",
    "redis_cluster",
    "django_redis_cluster",
    "pylibmc",
    "pylibmc_binary",
    "db_sqlite",
)
class TestStores(StoreContract):
    """The contract, which the documentation has for stores of third parties, on each cache."""

    @pytest.fixture(autouse=True)
    def prepare(self, cache_alias: str, request: pytest.FixtureRequest) -> Iterator[None]:
        if cache_alias in ALIKE and any(each in request.node.name for each in LONG):
            pytest.skip("shown with redis or pylibmc")
        if cache_alias in CLUSTERS and "forgotten" in request.node.name:
            pytest.skip("each group of locks has an epoch: see test_cluster.py")
        if cache_alias in CLUSTERS[1:] and "entries_lists" in request.node.name:
            pytest.skip("the calls of the cache itself meet redirects")
        self.alias = cache_alias
        is_memcached = cache_alias in MEMCACHED
        self.lists = self.fences = self.tells_remaining = not is_memcached
        self.forgets = is_memcached or any(
            name in cache_alias for name in ("redis", "valkey", "cluster")
        )
        self.between_processes = cache_alias != "locmem"
        with self.prepared():
            yield

    def empty(self) -> None:
        remove_all(self.alias)


# Slots

SLOTS = inside.slot_keys(TaskLock("feeds.tasks.import_feed(feed_id=7)"))[:3]
MARK = b"file"


def take_slot(store: Store, value: bytes) -> object:
    """Take one of three slots for a message; return its key, or what is in the way by key."""
    return inside.take(store, value, *SLOTS, allowed=3, mark=MARK)


@pytest.mark.parametrize("cache_alias", ["pymemcache", "db_postgres"], indirect=True)
def test_two_deliveries_take_no_slot_each_if_one_is_given_back_between_their_looks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (value.replace(b"tests", b"a file") for value in (A, B))
    preferred = take_slot(store, first)
    assert isinstance(preferred, str)
    store.replace(preferred, first, C, 60)
    read, taken = store.read_many, []

    def read_then_be_overtaken(keys: tuple[str, ...]) -> object:
        entries = read(keys)
        monkeypatch.setattr(store, "read_many", read)
        store.release(preferred, C)
        taken.append(take_slot(store, second))
        return entries

    monkeypatch.setattr(store, "read_many", read_then_be_overtaken)
    assert take_slot(store, first) == {preferred: second}
    assert taken == [preferred]
    assert [*store.read_many(SLOTS)] == [preferred]


@pytest.mark.parametrize("cache_alias", ["redis"], indirect=True)
def test_a_slot_that_was_taken_by_a_lost_request_is_not_taken_twice(store: Store) -> None:
    assert take_slot(store, A) == take_slot(store, A)


# Fencing tokens


@on_memcached
def test_memcached_says_why_it_gives_no_fencing_token(store: Store) -> None:
    store.add(KEY, A, 60)
    with pytest.raises(NotImplementedError, match=r"can lose a counter.*SINGLETASK_CACHE"):
        store.fence(KEY, A)


# Listing


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
        with pytest.raises(Exception, match=r"KEY_FUNCTION .* locks cannot be listed"):
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


def longest_prefix(cache_alias: str) -> str:
    longest_key = inside.marker_of(inside.slot_keys(TaskLock("n" * 255))[-1], A)
    return "p" * (250 - len(caches[cache_alias].key_func(longest_key, "", 1)))


def test_the_longest_name_works_under_the_longest_prefix(cache_alias: str, settings) -> None:
    prefix = longest_prefix(cache_alias)
    assert len(prefix) > 55
    key = inside.slot_keys(TaskLock("n" * 255))[-1]
    with private_store(settings, cache_alias, KEY_PREFIX=prefix) as store:
        store.release(key, A)
        store.add(key, A, 60)
        assert store.clear(key, A, 60)
        assert store.renew(key, A, 60) is Outcome.GONE
        store.release(inside.marker_of(key, A), b"1")


@on_each_family
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


@on_each_family
def test_a_planted_pickle_is_not_loaded(store: Store, cache_alias: str) -> None:
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
    caches[cache_alias].set(KEY, Bomb(), 60)
    caches[cache_alias].get(KEY)
    assert unpickled  # the cache itself loads it


# Caches that cannot hold locks


@pytest.mark.parametrize(
    ("alias", "reason"), [("dummy", "stores nothing"), ("filebased", "is not atomic")]
)
def test_a_cache_that_cannot_hold_locks_is_refused_at_first_use(alias: str, reason: str) -> None:
    """A web server runs no system checks."""
    with pytest.raises(ImproperlyConfigured, match=f"{alias!r} cannot hold locks: .* {reason}"):
        inside.store_of(alias)


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
        inside.store_of("nowhere")


@pytest.mark.parametrize("alias", ["dummy", "nowhere"])
@pytest.mark.parametrize("by_setting", [True, False])
def test_a_refusal_names_the_setting_or_the_argument(settings, alias, by_setting) -> None:
    settings.SINGLETASK_CACHE = alias if by_setting else "redis"
    cause = f"SINGLETASK_CACHE = {alias!r}" if by_setting else f"TaskLock's cache={alias!r}"
    with pytest.raises(ImproperlyConfigured, match=f"^{cause} "):
        TaskLock("nightly", cache=alias).acquire()


# One store per thread


@on_each_family
def test_each_thread_has_a_store_of_its_own(store: Store, cache_alias: str) -> None:
    stores = []
    thread = threading.Thread(target=lambda: stores.append(inside.store_of(cache_alias)))
    thread.start()
    thread.join()
    assert inside.store_of(cache_alias) is store
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
    thread = threading.Thread(target=inside.store_of, args=(cache_alias,))
    thread.start()
    thread.join()
    eventually(lambda: closed)
    assert store not in closed


def test_a_change_of_settings_closes_no_store_that_another_thread_uses(settings) -> None:
    used, go_on = threading.Event(), threading.Event()
    kept: list[bool] = []

    def work() -> None:
        store = inside.store_of("redis")
        store.read(KEY)
        [connection] = store.connections
        used.set()
        go_on.wait(60)
        store.read(KEY)
        kept.append(store.connections == [connection])
        kept.append(inside.store_of("redis") is store)

    thread = threading.Thread(target=work)
    thread.start()
    used.wait(60)
    store = inside.store_of("redis")
    settings.CACHES = dict(settings.CACHES)
    go_on.set()
    thread.join()
    assert kept == [True, False]  # its connection until it asks again, but not its store
    assert inside.store_of("redis") is not store
