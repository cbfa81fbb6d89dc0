from __future__ import annotations

import json
import math
import subprocess
import time
import tracemalloc

import pytest
from celery import Celery
from django.core.cache import caches
from django.db import InterfaceError, connection

from django_singletask import LockUnavailable, SingletonTask, TaskLock
from django_singletask.conf import conf
from django_singletask.holder import Holder, this_process
from django_singletask.locks.address import Run
from django_singletask.locks.keys import QUEUED, name_key
from django_singletask.locks.lock import lock_of
from django_singletask.management.output import lock_table
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held as registry
from django_singletask.operators.held import clear, held, with_history
from django_singletask.operators.names import select
from django_singletask.stores import get_store
from django_singletask.stores.base import CannotList
from tests.entries import private_store
from tests.past_rows import row
from tests.servers import Redis

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

TABLE = TaskLockEvent._meta.db_table
FOREIGN = name_key("foreign").key
FAMILIES = ["redis", "pymemcache", "db_postgres", "locmem"]

on_each_family = pytest.mark.parametrize("cache_alias", FAMILIES, indirect=True)


@pytest.fixture
def memcached(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")


def names(typed=()):
    return [lock.name for lock in held([*map(select, typed)])]


def lose(lock):
    """Let the cache forget the lock, as by an eviction."""
    store = get_store(conf.cache)
    store.release(lock.key, store.read(lock.key).value)


def drop_table():
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {TABLE} RENAME TO {TABLE}_gone")


# In every store


@on_each_family
def test_held_locks_are_listed(cache_alias, take):
    first, second = take("first", timeout=30), take("second")
    locks = {lock.name: lock for lock in held()}
    assert set(locks) == {"first", "second"}
    assert locks["first"].key == first.key
    assert locks["first"].token == first.token
    assert locks["second"].token == second.token
    assert 0 <= locks["first"].held_for < 20


@on_each_family
def test_released_locks_are_not_listed(cache_alias, take):
    take("nightly").release()
    assert held() == []


@on_each_family
def test_remaining_lease_is_known_except_on_memcached(cache_alias, take):
    take("nightly", timeout=30)
    [lock] = held()
    if cache_alias == "pymemcache":
        assert lock.remaining is None
    else:
        assert 10 < lock.remaining <= 30


def test_locks_of_any_name_are_listed(cache_alias, take):
    odd = {"ключ *[x]?% \\ _!", "cleared", "x:cleared", "cleared:cleared:y", "x" * 255}
    for name in odd:
        take(name)
    assert set(names()) == odd


@on_each_family
def test_shown_lock_is_freed(cache_alias, take):
    lock = take("nightly")
    [shown] = held()
    assert clear(shown, actor="ada")
    assert not lock.locked()


@on_each_family
def test_cleared_lock_leaves_nothing_in_the_list(cache_alias, take):
    take("nightly")
    clear(held()[0], actor="ada")
    assert held() == []


def test_clear_of_a_direct_call_leaves_the_entry_of_an_unknown_holder(on_redis):
    """A later version may have written it: then its task id is not known."""
    key, store = name_key("nightly"), get_store("redis")
    store.add(key.key, Run(task="t").holder("nightly", 30).encode(), 30)
    beside = key.beside(QUEUED, "t").key
    store.add(beside, b'{"version": 99, "task_id": "x"}', 30)
    [lock] = [lock for lock in held() if not lock.queued]
    assert (lock.task, lock.task_id) == ("t", None)
    assert clear(lock, actor="ada")
    assert store.read(beside) is not None


@on_each_family
def test_lock_that_changed_hands_since_it_was_shown_stays(cache_alias, take):
    lock = take("nightly")
    [shown] = held()
    lock.release()
    other = take("nightly")
    assert not clear(shown, actor="ada")
    assert other.owned()
    assert not TaskLockEvent.objects.filter(outcome="cleared").exists()


@on_each_family
def test_lock_that_is_gone_since_it_was_shown_is_not_freed(cache_alias, take):
    lock = take("nightly")
    [shown] = held()
    lock.release()
    assert not clear(shown, actor="ada")


def test_lock_is_freed_although_the_entry_of_its_call_cannot_be(settings, caplog):
    settings.SINGLETASK_CACHE = "redis"
    holder = Holder.from_dict({"token": "t", "name": "nightly", "task": "t", "task_id": "x"})
    key = name_key("nightly").key
    with Redis() as server, private_store(settings, "redis", server.url) as store:
        store.add(key, holder.encode(), 30)
        [shown] = held([select(key)])
        # The server refuses requests about other entries.
        allowed = f"~{store.make_key(key)}*"
        store.client.execute_command("ACL", "SETUSER", "default", "resetkeys", allowed)
        assert clear(shown, actor="ada")
        assert store.read(key) is None
    assert "was freed, but not the entry of its call: The cache" in caplog.text


def put(key, **facts):
    """Put an entry into Redis as a task would."""
    holder = Holder.from_dict({"token": "t", "name": "nightly", "task": "t", **facts})
    get_store("redis").add(key, holder.encode(), 30)


@pytest.mark.parametrize(("pid", "state"), [(0, ["queued"]), (7, [])])
def test_entry_of_a_call_that_runs_is_not_listed(on_redis, pid, state):
    put(name_key("nightly").beside(QUEUED, "t").key, pid=pid)
    assert [lock.state for lock in held()] == state
    assert [lock.state for lock in held([select("nightly")])] == state


@pytest.mark.parametrize(("task_id", "stays"), [("x", False), ("y", True)])
def test_entry_of_its_call_is_freed_with_a_lock_but_not_that_of_another(on_redis, task_id, stays):
    key, beside = name_key("nightly"), name_key("nightly").beside(QUEUED, "t").key
    put(key.key, task_id="x")
    put(beside, task_id=task_id)
    assert clear(held([select(key.key)])[0], actor="ada")
    assert (get_store("redis").read(beside) is not None) == stays


# What is asked for


def test_lock_that_is_held_for_longest_is_first(on_redis, take, monkeypatch):
    now = time.time()
    for name, ago in (("young", 1), ("old", 100), ("middle", 50)):
        monkeypatch.setattr("time.time", lambda ago=ago: now - ago)
        take(name)
    monkeypatch.undo()
    assert names() == ["old", "middle", "young"]


def test_names_and_keys_narrow_the_list(on_redis, take):
    take("one")
    key = take("two").key
    take("three")
    assert sorted(names(["one", key])) == ["one", "two"]
    assert names(["four"]) == []


def test_task_narrows_the_list(on_redis, take):
    take("by hand")
    with Celery("listed", set_as_current=False, broker="memory://") as app:

        @app.task(base=SingletonTask, name="listed", shared=False)
        def listed():
            return [lock.task for lock in held([select("listed")])]

        assert listed.apply().get() == ["listed"]
        assert held([select("other")]) == []


def test_conflicts_are_counted_by_holder(on_redis, take):
    take("nightly")
    take("other")
    for _ in range(3):
        TaskLock("nightly").acquire()
    locks = with_history(held())
    assert {lock.name: lock.conflicts for lock in locks} == {"nightly": 3, "other": 0}


def test_conflicts_with_an_earlier_holder_do_not_count(on_redis, take):
    first = take("nightly")
    TaskLock("nightly").acquire()
    first.release()
    take("nightly")
    assert with_history(held())[0].conflicts == 0


def test_usual_holds_of_many_names_are_bounded(
    on_redis, take, monkeypatch, django_assert_num_queries
):
    monkeypatch.setattr(registry, "USUAL", 2)
    for name in "abcd":
        take(name)
    locks = held()
    with django_assert_num_queries(3 * 3):  # two of them and the conflicts, each in a savepoint
        with_history(locks)


# Many


@pytest.fixture
def many(on_redis):
    """Put 3,000 locks into Redis, and return its client."""
    store = get_store("redis")
    with store.client.pipeline(transaction=False) as pipeline:
        for number in range(3000):
            facts = {**vars(this_process()), "name": f"feeds.tasks.import_feed(feed_id={number})"}
            facts |= {"token": f"{number:032}", "task": "feeds.tasks.import_feed", "since": 1e9}
            key = store.make_key(name_key(facts["name"]).key)
            pipeline.set(key, Holder.from_dict(facts).encode(), px=60_000)
        pipeline.execute()
    return store.client


def test_trips_and_statements_of_a_long_list_are_few(many, django_assert_num_queries):
    def trips():
        return many.info("commandstats")["cmdstat_evalsha"]["calls"]

    held([select("feeds")])  # the script is loaded
    before = trips()
    # A savepoint around each question: what is expired, what is usual, six batches of conflicts.
    with django_assert_num_queries(3 + 3 + (2 + 6)):
        assert len(with_history(held())) == 3000
    assert trips() - before <= 5


@pytest.mark.only_all("it takes many locks")
def test_memory_of_a_long_list_is_what_it_shows(many):
    list(lock_table(with_history(held())))  # what is kept for good is kept by now
    tracemalloc.start()
    try:
        lines = sum(1 for _line in lock_table(with_history(held())))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines == 3001
    assert peak / 3000 < 1500


# Without a history


def test_locks_are_listed_without_counts_if_the_history_is_off(settings, on_redis, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    [lock] = with_history(held())
    assert lock.conflicts is None


def test_locks_are_listed_without_counts_if_the_table_is_missing(on_redis, take, caplog):
    take("nightly")
    drop_table()
    [lock] = with_history(held())
    assert lock.conflicts is None
    assert "conflicts cannot be counted" in caplog.text


def away(*args):
    raise InterfaceError("connection already closed")


def test_locks_are_listed_without_counts_if_the_history_is_away(on_redis, take, caplog):
    take("nightly")
    with connection.execute_wrapper(away):
        [lock] = with_history(held())
    assert lock.conflicts is None
    assert "conflicts cannot be counted" in caplog.text
    assert "cannot be read: InterfaceError: connection already closed" in caplog.text


def test_memcached_with_a_history_that_is_away_says_so(memcached, take):
    take("nightly")
    with connection.execute_wrapper(away):
        with pytest.raises(CannotList, match="read: InterfaceError: connection already closed"):
            held()


def test_memcached_with_the_history_off_says_so(settings, memcached, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    message = r"cache 'pymemcache' cannot list its entries: .* SINGLETASK_HISTORY = 'off'"
    with pytest.raises(CannotList, match=message):
        held()


def test_history_off_on_memcached_finds_locks_by_name_and_key(settings, memcached, take):
    settings.SINGLETASK_HISTORY = "off"
    key = take("nightly").key
    assert names(["nightly"]) == names([key]) == ["nightly"]


def test_memcached_without_the_table_of_the_history_says_so(memcached, take):
    take("nightly")
    drop_table()
    with pytest.raises(CannotList, match=r"history.* cannot be read.*Run 'manage.py migrate'"):
        held()


def test_quiet_lock_on_memcached_is_found_by_its_key(memcached, take):
    lock = lock_of(TaskLock, "quiet", Run(quiet=True))
    lock.acquire()
    assert names() == []
    assert names([lock.key]) == ["quiet"]
    lock.release()


@pytest.mark.usefixtures("no_renewal_thread")
def test_open_row_without_a_lock_is_not_listed(memcached, take):
    lock = take("nightly")
    lose(lock)
    assert TaskLockEvent.objects.filter(outcome="").exists()
    assert held() == []


@pytest.mark.usefixtures("no_renewal_thread")
def test_lock_with_two_open_rows_is_listed_once(memcached, take):
    lock = take("nightly")
    lose(lock)
    take("nightly")
    assert names() == ["nightly"]


def test_keys_that_are_hidden_by_a_key_function_are_found_in_the_history(settings, on_redis, take):
    settings.CACHES = {
        **settings.CACHES,
        "redis": {**settings.CACHES["redis"], "KEY_FUNCTION": "tests.test_held.hide"},
    }
    take("nightly")
    assert names() == ["nightly"]


def hide(key, prefix, version):
    return f"{prefix}:{version}:{hash(key)}"


# Entries that something else wrote


@pytest.mark.parametrize(
    "value", [b"", b"text", b"[]", b"\xff", b'{"token": 7, "since": "x"}', b"[" * 100_000]
)
def test_foreign_entry_is_listed_under_its_key(on_redis, value):
    get_store("redis").add(FOREIGN, value, 30)
    [lock] = held()
    assert (lock.name, lock.held_for) == (FOREIGN, 0)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "-5", "1e300"])
def test_numbers_of_a_foreign_entry_are_finite(on_redis, number):
    value = f'{{"token": "t", "since": {number}, "timeout": {number}}}'
    get_store("redis").add(FOREIGN, value.encode(), 30)
    [lock] = held()
    assert math.isfinite(lock.held_for)
    assert json.dumps([lock.since, lock.timeout], allow_nan=False)


def test_foreign_entry_can_be_cleared(on_redis):
    get_store("redis").add(FOREIGN, b"text", 30)
    assert clear(held()[0], actor="ada")
    assert held() == []


@pytest.mark.parametrize("bad", ["\ud800", "\0"])
def test_characters_of_a_foreign_entry_that_no_database_takes_are_escaped(on_redis, bad):
    texts = ("name", "task", "task_id", "host", "boot_id", "pid_ns", "start")
    value = json.dumps({text: f"{text}{bad}" for text in texts})
    get_store("redis").add(FOREIGN, value.encode(), 30)
    [lock] = held()
    escaped = bad.encode("unicode_escape").decode()
    assert lock.name == f"name{escaped}"
    for text in texts:
        assert getattr(lock, text) == f"{text}{escaped}"
    assert with_history([lock])[0].conflicts == 0


def test_other_entries_of_the_cache_are_not_listed(on_redis, take):
    caches["redis"].set("singletask", 1)
    caches["redis"].set("page:singletask:x", 1)
    take("nightly")
    assert names() == ["nightly"]


def test_store_that_is_down_is_an_error(settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    with pytest.raises(LockUnavailable, match="refused"):
        held()


def test_lock_of_a_clock_that_is_ahead_is_held_for_no_time(on_redis):
    blank = Holder.from_dict({"name": "nightly", "since": time.time() + 1000})
    get_store("redis").add("singletask:nightly:1", blank.encode(), 30)
    assert held()[0].held_for == 0


# States


def states(*args, **kwargs):
    return {lock.name: lock.state for lock in held(*args, **kwargs)}


@pytest.fixture
def ended_process():
    """Describe a process of this host that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return {**vars(this_process()), "pid": child.pid, "start": "1"}


def test_lock_of_a_dead_process_is_marked(on_redis, take, ended_process):
    take("alive")
    holder = Holder.from_dict({"token": "t", "name": "gone", **ended_process})
    get_store("redis").add(name_key("gone").key, holder.encode(), 30)
    assert states() == {"alive": "held", "gone": "dead"}


def test_process_of_another_host_is_not_taken_for_dead(on_redis, ended_process):
    facts = {**ended_process, "boot_id": "another"}
    holder = Holder.from_dict({"token": "t", "name": "far", **facts})
    get_store("redis").add(name_key("far").key, holder.encode(), 30)
    assert states() == {"far": "held"}


@on_each_family
def test_open_row_beyond_its_lease_is_listed_as_expired(cache_alias, take):
    take("held")
    row("run", 100, name="nightly", token="t", task="a", host="web-1", pid=7, timeout=60)
    [lock] = held([select("a")])
    assert (lock.name, lock.state, lock.queued) == ("nightly", "expired", False)
    assert lock.remaining is None
    assert 100 <= lock.held_for < 120
    assert (lock.host, lock.pid, lock.token) == ("web-1", 7, "t")
    assert states()["held"] == "held"


@on_each_family
def test_clear_of_an_expired_lock_frees_and_closes_nothing(cache_alias, take):
    open_row = row("run", 100, name="nightly", token="t", timeout=60)
    [lock] = held([select("nightly")])
    take("nightly")
    assert not clear(lock, actor="ada")
    assert sorted(lock.state for lock in held()) == ["expired", "held"]
    open_row.refresh_from_db()
    assert open_row.outcome == ""
    assert not TaskLockEvent.objects.filter(outcome="cleared").exists()


def test_open_row_within_its_lease_is_not_listed(on_redis):
    row("run", 30, timeout=60)
    assert held() == []


def test_renewed_lock_is_not_expired(on_redis, take):
    lock = take("nightly")
    TaskLockEvent.objects.update(at="2026-01-01T00:00Z")
    assert states() == {"nightly": "held"}
    assert lock.owned()


def test_open_row_of_another_cache_is_not_listed(on_redis):
    row("run", 100, timeout=60, cache="pymemcache")
    assert held() == []


def test_without_history_nothing_is_expired(on_redis, settings):
    row("run", 100, timeout=60)
    settings.SINGLETASK_HISTORY = "off"
    assert held() == []


# By name


def test_look_needs_no_list_for_what_is_named(memcached, settings, take):
    settings.SINGLETASK_HISTORY = "off"
    key = take("nightly").key
    for name in ("nightly", key):
        assert [lock.name for lock in held([select(name)])] == ["nightly"]
    with pytest.raises(CannotList):
        held([select("other")])


def test_look_finds_a_name_that_hides_its_arguments(on_redis):
    holder = Holder.from_dict({"token": "t", "name": "feeds.import_feed(#1a2b3c4d)"})
    get_store("redis").add(name_key("x").key, holder.encode(), 30)
    [lock] = held([select("feeds.import_feed(#1a2b3c4d)")])
    assert lock.token == "t"


def test_listing_finds_the_expired_hold_beside_the_held_lock(on_redis, take):
    take("nightly")
    row("run", 100, timeout=60, token="t")
    assert {lock.state for lock in held([select("nightly")])} == {"held", "expired"}
