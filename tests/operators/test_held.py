from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import threading
import time
import tracemalloc
from contextlib import contextmanager

import pytest
from django.core.cache import caches
from django.core.management import CommandError, call_command
from django.db import connection, connections

from django_singletask import LockConflict, LockUnavailable, TaskLock
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held
from tests import inside
from tests.admin_pages import drop_table, gone
from tests.command_line import ended_process, hold, locks
from tests.entries import key_of, private_store
from tests.inside import held_now
from tests.past_rows import ran, row, skipped
from tests.servers import Redis
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history"),
]

FOREIGN = key_of("foreign")
KEY = key_of("nightly")
BESIDE = inside.queued_key(KEY, "t")
FAMILIES = ["redis", "pymemcache", "db_postgres", "locmem"]

on_each_family = pytest.mark.parametrize("cache_alias", FAMILIES, indirect=True)


@pytest.fixture
def memcached(settings, empty_cache):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")


@pytest.fixture
def stopped_process():
    """Return what an entry says of a process of this host that stands still."""
    with subprocess.Popen(["sleep", "600"]) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        yield {**inside.this_process(), "pid": child.pid, "start": ""}
        child.kill()


def names(*typed):
    return [lock.name for lock in held_now(*typed)]


def states(*typed):
    return {lock.name: lock.state for lock in held_now(*typed)}


# In every store


@on_each_family
def test_held_locks_are_listed(cache_alias, take):
    first, second = take("first", timeout=30), take("second")
    locks = {lock.name: lock for lock in held_now()}
    assert set(locks) == {"first", "second"}
    assert locks["first"].key == first.key
    assert locks["first"].token == first.token
    assert locks["second"].token == second.token
    assert 0 <= locks["first"].held_for < 20
    if cache_alias == "pymemcache":
        assert locks["first"].remaining is None
    else:
        assert 10 < locks["first"].remaining <= 30
    first.release()
    assert names() == ["second"]


def test_locks_of_any_name_are_listed(cache_alias, take):
    odd = {"ключ *[x]?% \\ _!", "cleared", "x:cleared", "cleared:cleared:y", "x" * 255}
    for name in odd:
        take(name)
    assert set(names()) == odd


@on_each_family
def test_shown_lock_is_freed(cache_alias, take):
    lock = take("nightly")
    [shown] = held_now()
    assert held.clear(shown, actor="ada")
    assert not lock.locked()
    assert held_now() == []


def test_clear_of_a_direct_call_leaves_the_entry_of_an_unknown_holder(on_redis):
    """A later version may have written it: then its task id is not known."""
    hold(key=KEY, task="t")
    inside.put_entry(BESIDE, b'{"version": 99, "task_id": "x"}')
    [lock] = [lock for lock in held_now() if not lock.queued]
    assert (lock.task, lock.task_id) == ("t", None)
    assert held.clear(lock, actor="ada")
    assert inside.has_entry(BESIDE)


@on_each_family
def test_lock_that_changed_hands_since_it_was_shown_stays(cache_alias, take):
    lock = take("nightly")
    [shown] = held_now()
    lock.release()
    assert not held.clear(shown, actor="ada")
    other = take("nightly")
    assert not held.clear(shown, actor="ada")
    assert other.owned()
    assert not TaskLockEvent.objects.filter(outcome="cleared").exists()


def test_lock_is_freed_although_the_entry_of_its_call_cannot_be(settings, caplog):
    settings.SINGLETASK_CACHE = "redis"
    with Redis() as server, private_store(settings, "redis", server.url) as store:
        hold(key=KEY, task="t", task_id="x")
        [shown] = held_now(KEY)
        # The server refuses requests about other entries.
        allowed = f"~{store.make_key(KEY)}*"
        store.client.execute_command("ACL", "SETUSER", "default", "resetkeys", allowed)
        assert held.clear(shown, actor="ada")
        assert not inside.has_entry(KEY)
    assert "was freed, but not the entry of its call: The cache" in caplog.text


@pytest.mark.parametrize(("pid", "state"), [(0, ["queued"]), (7, [])])
def test_entry_of_a_call_that_runs_is_not_listed(on_redis, pid, state):
    hold(key=BESIDE, task="t", pid=pid)
    assert [lock.state for lock in held_now()] == state
    assert [lock.state for lock in held_now("nightly")] == state


@pytest.mark.parametrize(("task_id", "stays"), [("x", False), ("y", True)])
def test_entry_of_its_call_is_freed_with_a_lock_but_not_that_of_another(on_redis, task_id, stays):
    hold(key=KEY, task="t", task_id="x")
    hold(key=BESIDE, task="t", task_id=task_id)
    assert held.clear(held_now(KEY)[0], actor="ada")
    assert inside.has_entry(BESIDE) == stays


# What is asked for


def test_lock_that_is_held_for_longest_is_first(on_redis, take, monkeypatch):
    now = time.time()
    for name, ago in (("young", 1), ("old", 100), ("middle", 50)):
        monkeypatch.setattr("time.time", lambda ago=ago: now - ago)
        take(name)
    monkeypatch.undo()
    assert names() == ["old", "middle", "young"]


def test_conflicts_are_counted_by_holder(on_redis, take):
    take("nightly")
    take("other")
    for _ in range(3):
        TaskLock("nightly").acquire()
    locks = held.add_conflicts(held_now())
    assert {lock.name: lock.conflicts for lock in locks} == {"nightly": 3, "other": 0}


def test_conflicts_with_an_earlier_holder_do_not_count(on_redis, take):
    first = take("nightly")
    TaskLock("nightly").acquire()
    first.release()
    take("nightly")
    assert held.add_conflicts(held_now())[0].conflicts == 0


# The worst first


def seen(*typed):
    return [(lock.name, lock.state) for lock in held_now(*typed)]


def slow(name):
    """Hold a lock for long, of which five short runs are recorded."""
    for _ in range(5):
        ran(5000, 5, name=name)
    return hold(name=name, token=name, since=time.time() - 600)


def test_worst_lock_is_first(on_redis, stopped_process):
    now = time.time()
    hold(name="held", token="1", since=now - 9000)
    hold(name="hungry", token="2", since=now - 8500)
    skipped(8000, 60, 40, name="hungry", blocked_by="2")
    slow("slow")
    hold(name="stopped", **{**stopped_process, "token": "3", "since": now - 100})
    hold(name="dead", **{**ended_process(), "token": "4", "since": now - 10})
    row("run", 7200, name="over", timeout=60)
    hold(name="queued", key=BESIDE, pid=0, token="5", since=now - 9500)
    assert seen() == [
        ("dead", "dead"),
        ("over", "expired"),
        ("stopped", "stopped"),
        ("slow", "slow"),
        ("hungry", "starving"),
        ("queued", "queued"),
        ("held", "held"),
    ]


def test_slow_is_worse_than_starving(on_redis):
    slow("nightly")
    skipped(4000, 60, 40, blocked_by="nightly")
    assert seen() == [("nightly", "slow")]


def test_states_that_somebody_should_look_at_are_counted(on_redis):
    hold(name="held", token="1")
    slow("one")
    slow("two")
    hold(name="dead", **{**ended_process(), "token": "2"})
    locks = held_now()
    assert held.summary(locks) == "4 locks: 1 dead, 2 slow"
    counts = held.count_states(locks)
    assert list(counts) == inside.states_of_a_lock()
    assert {state: number for state, number in counts.items() if number} == {
        "dead": 1,
        "slow": 2,
        "held": 1,
    }


def test_summary_of_good_locks_is_their_number(on_redis, take):
    take("nightly")
    assert held.summary(held_now()) == "1 lock"


def test_young_hold_costs_no_query_for_what_is_usual(on_redis, take, django_assert_num_queries):
    take("nightly")
    locks = held.list_held()
    with django_assert_num_queries(0):
        held.add_states(locks, [])


def test_usual_holds_of_many_names_are_bounded(on_redis, monkeypatch, django_assert_num_queries):
    inside.bound(monkeypatch, "usual holds", 2)
    for name in "abcd":
        hold(name=name, token=name, since=time.time() - 100)
    locks = held.list_held()
    with django_assert_num_queries(2 * 3):  # each in a savepoint
        held.add_states(locks, [])


# Many


@pytest.fixture
def many(on_redis):
    """Put 3,000 locks into Redis, and return its client."""
    process = inside.this_process()
    for number in range(3000):
        task = "feeds.tasks.import_feed"
        name = f"{task}(feed_id={number})"
        facts = {"name": name, "token": f"{number:032}", "task": task, "since": 1e9}
        hold(key=key_of(name), left=60, **process, **facts)
    return caches["redis"]._cache.get_client()


def test_trips_and_statements_of_a_long_list_are_few(many, django_assert_num_queries):
    def trips():
        return many.info("commandstats")["cmdstat_evalsha"]["calls"]

    held_now("feeds")  # the script is loaded
    before = trips()
    # A savepoint around each question: what is expired, what starves, what is usual, and six
    # batches of conflicts.
    with django_assert_num_queries(3 + 5 + 3 + (2 + 6)):
        assert len(held.add_conflicts(held_now())) == 3000
    assert trips() - before <= 5


@pytest.mark.only_all("it takes many locks")
def test_memory_of_a_long_list_is_what_it_shows(many):
    assert locks().count("\n") == 3002  # what is kept for good is kept by now
    peaks = []
    for _ in range(2):  # what other threads and first uses add is not there twice
        with open(os.devnull, "w") as nowhere:
            tracemalloc.start()
            try:
                call_command("locks", stdout=nowhere, no_color=True)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    assert min(peaks) / 3000 < 1600


# Without a history


def test_locks_are_listed_without_counts_if_the_history_is_off(settings, on_redis, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    [lock] = held.add_conflicts(held_now())
    assert lock.conflicts is None


OUTAGES = {
    "no table": r"cannot be read.*Run 'manage.py migrate'",
    "no connection": "cannot be read: InterfaceError: connection already closed",
}


@contextmanager
def away(outage):
    """Let the history be away."""
    if outage == "no table":
        drop_table()
        yield
        return
    with connection.execute_wrapper(gone):
        yield


@pytest.mark.parametrize("outage", OUTAGES)
def test_locks_are_listed_without_counts_if_the_history_is_away(on_redis, take, outage, caplog):
    take("nightly")
    with away(outage):
        [lock] = held.add_conflicts(held_now())
    assert lock.conflicts is None
    assert "conflicts cannot be counted" in caplog.text
    assert re.search(OUTAGES[outage], caplog.text)


@pytest.mark.parametrize("outage", OUTAGES)
def test_memcached_with_a_history_that_is_away_says_so(memcached, take, outage):
    take("nightly")
    with away(outage), pytest.raises(CommandError, match=OUTAGES[outage]):
        locks()


def test_history_off_on_memcached_finds_locks_by_name_and_key(settings, memcached, take):
    settings.SINGLETASK_HISTORY = "off"
    key = take("nightly").key
    assert names("nightly") == names(key) == ["nightly"]


def test_quiet_lock_on_memcached_is_found_by_its_key(memcached, monkeypatch):
    monkeypatch.setattr(tasks.hold, "lock_history", False)
    with tasks.hold.lock("x") as lock:
        assert names() == []
        assert names(lock.key) == [lock.name]


@pytest.mark.usefixtures("no_renewal_thread")
def test_open_row_without_a_lock_is_not_listed(memcached, take):
    lock = take("nightly")
    inside.forget(lock)
    assert TaskLockEvent.objects.filter(outcome="").exists()
    assert held_now() == []


@pytest.mark.usefixtures("no_renewal_thread")
def test_lock_with_two_open_rows_is_listed_once(memcached, take):
    lock = take("nightly")
    inside.forget(lock)
    take("nightly")
    assert names() == ["nightly"]


def test_keys_that_are_hidden_by_a_key_function_are_found_in_the_history(settings, on_redis, take):
    settings.CACHES = {
        **settings.CACHES,
        "redis": {**settings.CACHES["redis"], "KEY_FUNCTION": "tests.operators.test_held.hide"},
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
    inside.put_entry(FOREIGN, value)
    [lock] = held_now()
    assert (lock.name, lock.held_for) == (FOREIGN, 0)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "-5", "1e300"])
def test_numbers_of_a_foreign_entry_are_finite(on_redis, number):
    value = f'{{"token": "t", "since": {number}, "timeout": {number}}}'
    inside.put_entry(FOREIGN, value.encode())
    [lock] = held_now()
    assert math.isfinite(lock.held_for)
    assert json.dumps([lock.since, lock.timeout], allow_nan=False)


def test_foreign_entry_can_be_cleared(on_redis):
    inside.put_entry(FOREIGN, b"text")
    assert held.clear(held_now()[0], actor="ada")
    assert held_now() == []


@pytest.mark.parametrize("bad", ["\ud800", "\0"])
def test_characters_of_a_foreign_entry_that_no_database_takes_are_escaped(on_redis, bad):
    texts = ("name", "task", "task_id", "host", "boot_id", "pid_ns", "start")
    value = json.dumps({text: f"{text}{bad}" for text in texts})
    inside.put_entry(FOREIGN, value.encode())
    [lock] = held_now()
    escaped = bad.encode("unicode_escape").decode()
    assert lock.name == f"name{escaped}"
    for text in texts:
        assert getattr(lock, text) == f"{text}{escaped}"
    assert held.add_conflicts([lock])[0].conflicts == 0


def test_other_entries_of_the_cache_are_not_listed(on_redis, take):
    caches["redis"].set("singletask", 1)
    caches["redis"].set("page:singletask:x", 1)
    take("nightly")
    assert names() == ["nightly"]


def test_store_that_is_down_is_an_error(settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    with pytest.raises(LockUnavailable, match="refused"):
        held_now()


def test_lock_of_a_clock_that_is_ahead_is_held_for_no_time(on_redis):
    hold(since=time.time() + 1000)
    assert held_now()[0].held_for == 0


# States


def test_lock_of_a_dead_process_is_marked_but_not_that_of_another_host(on_redis, take):
    take("alive")
    gone = {**ended_process(), "name": "gone", "token": "t1"}
    hold(**gone)
    hold(**{**gone, "name": "far", "token": "t2", "boot_id": "another"})
    assert states() == {"alive": "held", "gone": "dead", "far": "held"}


@on_each_family
def test_open_row_beyond_its_lease_is_listed_as_expired(cache_alias, take):
    take("held")
    row("run", 100, name="nightly", token="t", task="a", host="web-1", pid=7, timeout=60)
    [lock] = held_now("a")
    assert (lock.name, lock.state, lock.queued) == ("nightly", "expired", False)
    assert lock.remaining is None
    assert 100 <= lock.held_for < 120
    assert (lock.host, lock.pid, lock.token) == ("web-1", 7, "t")
    assert states()["held"] == "held"


@on_each_family
def test_clear_of_an_expired_lock_frees_and_closes_nothing(cache_alias, take):
    open_row = row("run", 100, name="nightly", token="t", timeout=60)
    [lock] = held_now("nightly")
    take("nightly")
    assert not held.clear(lock, actor="ada")
    assert sorted(lock.state for lock in held_now()) == ["expired", "held"]
    open_row.refresh_from_db()
    assert open_row.outcome == ""
    assert not TaskLockEvent.objects.filter(outcome="cleared").exists()


def test_open_row_within_its_lease_is_not_listed(on_redis):
    row("run", 30, timeout=60)
    assert held_now() == []


def test_renewed_lock_is_not_expired(on_redis, take):
    lock = take("nightly")
    TaskLockEvent.objects.update(at="2026-01-01T00:00Z")
    assert states() == {"nightly": "held"}
    assert lock.owned()


def test_open_row_of_another_cache_is_not_listed(on_redis):
    row("run", 100, timeout=60, cache="pymemcache")
    assert held_now() == []


def test_without_history_nothing_is_expired(on_redis, settings):
    row("run", 100, timeout=60)
    settings.SINGLETASK_HISTORY = "off"
    assert held_now() == []


# By name


def test_look_finds_a_name_that_hides_its_arguments(on_redis):
    name = "feeds.import_feed(#1a2b3c4d)"
    hold(name=name)
    assert names(name) == [name]


# Calls that wait


def test_a_call_that_waits_inside_its_process_is_counted_until_it_gives_up(on_redis, wait_for):
    """It has two conflicts in the history, and is one call."""
    seen = []

    def conflicts():
        [lock] = held.add_conflicts(held_now("nightly"))
        return lock.conflicts, lock.waiting

    def wait():
        seen.append(TaskLock("nightly").acquire(wait=2.5))
        with pytest.raises(LockConflict):
            TaskLock("nightly", wait=1.5).__enter__()
        connections.close_all()

    with TaskLock("nightly"):
        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(lambda: conflicts() == (1, 1), "it waits")
        assert seen == []
        thread.join()
        assert conflicts() == (2, 0)


def test_a_short_wait_that_fails_is_none_of_those_that_wait(on_redis, take, wait_for):
    def counts():
        [lock] = held.add_conflicts(held_now("nightly"))
        return lock.conflicts, lock.waiting

    def wait():
        with TaskLock("nightly", wait=60):
            pass
        connections.close_all()

    lock = take("nightly")
    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: counts() == (1, 1), "it waits")
    for _ in range(2):
        assert not TaskLock("nightly").acquire(wait=0.05)
    assert counts() == (3, 1)
    lock.release()
    thread.join()


def test_conflicts_are_counted_by_their_results(on_redis, take):
    token = take("nightly").token
    skipped(9, count=28, blocked_by=token)
    skipped(9, count=3, reason="requeue", blocked_by=token)
    skipped(9, count=2, kind="duplicate", blocked_by=token)
    [lock] = held.add_conflicts(held_now("nightly"))
    assert lock.met == {"skipped": 28, "waiting": 3, "duplicate": 2}
    assert (lock.conflicts, lock.waiting) == (33, 3)
