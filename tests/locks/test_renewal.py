"""The thread that renews leases and makes owed releases."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from django.core.cache import caches

from django_singletask import LockLost, LockUnavailable, TaskLock, threads
from django_singletask.locks import renewal
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.entries import in_child, listening

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def on_redis(settings, empty_cache):
    settings.SINGLETASK_CACHE = "redis"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("redis")


@pytest.fixture
def renewer(monkeypatch):
    """Let a new renewer keep the leases in Redis."""
    renewer = renewal.Renewer("redis")
    monkeypatch.setitem(renewal.renewers, "redis", renewer)
    return renewer


@pytest.fixture
def no_thread(renewer, monkeypatch):
    """Let the test make the ticks."""
    monkeypatch.setattr(renewer, "begin", lambda: None)
    return renewer


@pytest.fixture
def trips(settings):
    """Give the function that counts what the server has read; each call is one of that."""
    with redis.Redis.from_url(settings.CACHES["redis"]["LOCATION"]) as client:
        yield lambda: client.info("stats")["total_reads_processed"]


def test_locks_that_are_due_together_are_renewed_in_one_go(monkeypatch, no_thread, trips):
    locks = [TaskLock(f"lock {number}", timeout=60) for number in range(200)]
    for lock in locks:
        lock.acquire()
    before = trips()
    with monkeypatch.context() as patch:
        time = inside.stop_clock(patch)
        time.now += 21
        no_thread.tick()
    assert {inside.renewed_at(lock) for lock in locks} == {time.now}
    # One pipeline, which the server reads in pieces of 16 KiB; one by one it would be 200 trips.
    assert trips() - before < 50
    for lock in locks:
        lock.release()


def test_locks_held_for_a_moment_let_the_thread_sleep(no_thread, monkeypatch):
    """Each waking costs the task a switch of threads; one a lock doubled the time of a lock."""
    woken = []
    monkeypatch.setattr(no_thread, "wake", lambda: woken.append(1))
    for _ in range(200):
        with TaskLock("nightly"):
            pass
    assert len(woken) == 1


class TestEpoch:
    """When a process that holds locks asks for the epoch; clock and thread are simulated."""

    @pytest.fixture
    def looks(self, no_thread, monkeypatch):
        """Give the function that lets seconds pass; it returns the times of the looks."""

        def pass_by(seconds, *, is_down=False):
            began = min(lease.taken_at for lease in no_thread.held())
            times = []

            def note(look, keys):
                times.append(round(time.now - began, 2))
                if is_down:
                    raise LockUnavailable
                look(keys)

            with monkeypatch.context() as patch, inside.handled("look", note):
                time = inside.stop_clock(patch)
                time.now = began + no_thread.interval
                while time.now <= began + seconds:
                    no_thread.error = None
                    no_thread.tick()
                    no_thread.failed = no_thread.error is not None
                    time.now += no_thread.interval
            return times

        return pass_by

    def test_it_looks_each_0_4_seconds_whatever_the_number_of_locks(self, looks, take):
        for number in range(20):
            take(f"lock {number}")
        assert looks(2.1) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], abs=0.05)

    def test_a_look_is_one_small_request(self, take, looks, trips):
        take()
        looks(0.5)
        before = trips()
        assert len(looks(0.9)) == 1
        assert trips() - before == 2  # with that of trips() itself

    def test_a_run_of_less_than_0_4_seconds_costs_no_look(self, looks):
        with TaskLock("nightly"):
            assert looks(0.3) == []

    def test_while_the_cache_is_down_it_looks_each_0_4_seconds(self, looks, take):
        take()
        assert looks(1.3, is_down=True) == pytest.approx([0.4, 0.8, 1.2], abs=0.05)

    def test_after_an_outage_all_leases_are_renewed(self, looks, take):
        """The server may have come back with an old snapshot, in which the epoch is the same."""
        lock = take()
        looks(0.5, is_down=True)
        caches["redis"].delete(lock.key)
        with listening() as events:
            looks(0.9)
            assert [event.kind for event in events] == ["retaken"]
        renewed_at = inside.renewed_at(lock)
        looks(2)
        assert inside.renewed_at(lock) == renewed_at

    def test_another_epoch_renews_all_leases_at_once(self, take, looks):
        for number in range(3):
            take(f"lock {number}")
        caches["redis"].clear()
        with listening() as events:
            looks(0.5)
            assert [event.kind for event in events] == ["retaken"] * 3
            looks(1)
        assert len(events) == 3

    def test_another_epoch_finds_a_fixed_lease_lost(self, take, looks):
        lock = take(timeout=60, renew=False)
        caches["redis"].clear()
        looks(0.5)
        assert lock.lost
        assert not lock.locked()

    def test_if_the_cache_fails_again_before_the_renewal_all_are_renewed_later(self, take, looks):
        take()
        caches["redis"].clear()
        with listening() as events:
            with inside.failing("renew_many"):
                looks(0.5)
            assert not events
            looks(0.9)
        assert [event.kind for event in events] == ["retaken"]


@pytest.mark.parametrize("method", ["extend", "fencing_token"])
@pytest.mark.parametrize("kind", ["retaken", "lost"])
def test_a_receiver_of_an_event_may_use_the_lock(kind, method, take, no_thread):
    """The events are sent within a renewal, and both methods wait for the end of renewals."""
    lock, outcomes = take(), []
    leases = no_thread.held()

    def use(event):
        if event.kind == kind:
            try:
                getattr(lock, method)()
                outcomes.append("done")
            except LockLost:
                outcomes.append("LockLost")

    caches["redis"].delete(lock.key)
    if kind == "lost":
        take()
    renew = threading.Thread(target=lambda: no_thread.renew(no_thread.store(), leases), daemon=True)
    with listening(use):
        renew.start()
        renew.join(30)
    assert outcomes == ["done" if (kind, method) == ("retaken", "extend") else "LockLost"]


def test_a_lock_that_is_extended_inside_another_request_is_not_trusted_too_long(monkeypatch):
    """A signal handler shortens the lease while the interrupted code makes it longer."""
    handlers = []

    def renew_and_strike(renew, *arguments):
        outcome = renew(*arguments)
        while handlers:
            handlers.pop()()
        return outcome

    with inside.handled("renew", renew_and_strike), TaskLock("nightly", timeout=60) as lock:
        for _ in range(2):
            handlers.append(lambda: lock.extend(5))
            lock.extend(600)
            assert lock.remaining() <= 5
            lock.extend()
            assert lock.remaining() <= 5
        inside.stop_clock(monkeypatch).now += 5
        assert lock.lost


def test_a_thread_that_could_not_be_started_is_started_by_the_next_lock(renewer, monkeypatch):
    def refuse(function, arguments):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        with pytest.raises(RuntimeError):
            TaskLock("first", timeout=1.5).acquire()
    with TaskLock("second", timeout=1.5) as lock:
        inside.wait_for_renewals(lock, 0.6)


def test_a_thread_that_has_ended_is_started_by_the_next_lock(renewer, monkeypatch, wait_for):
    def end():
        raise SystemExit  # ends a thread without a message

    with monkeypatch.context() as patch:
        patch.setattr(renewer, "tick", end)
        TaskLock("first", timeout=1.5).acquire()
        wait_for(lambda: renewer.thread is None, "the thread has ended")
    with TaskLock("second", timeout=1.5) as lock:
        inside.wait_for_renewals(lock, 0.6)


def test_many_locks_at_once_have_one_thread(renewer, monkeypatch, wait_for):
    ran = []
    pause = renewer.pause
    monkeypatch.setattr(renewer, "pause", lambda: (ran.append(threading.get_ident()), pause()))
    with ThreadPoolExecutor(20) as pool:
        for _ in pool.map(lambda number: TaskLock(f"lock {number}").acquire(), range(200)):
            pass
    wait_for(lambda: ran, "the thread runs")
    assert len(set(ran)) == 1


def test_a_thread_that_hangs_is_reported_once(renewer, monkeypatch, wait_for, caplog):
    hangs, go_on = threading.Event(), threading.Event()

    def hang():
        hangs.set()
        go_on.wait(30)

    monkeypatch.setattr(renewer, "tick", hang)
    with TaskLock("first"):
        assert hangs.wait(30)
    with monkeypatch.context() as patch:
        time = inside.stop_clock(patch)
        time.now += 3
        TaskLock("second").acquire()
        assert "has not answered" not in caplog.text
        time.now += 2
        for name in ("third", "fourth"):
            TaskLock(name).acquire()
    go_on.set()
    assert caplog.text.count("renews the locks in the cache 'redis' has not answered for 4 s") == 1
    assert "OPTIONS" in caplog.text


@pytest.mark.parametrize("reply", ["comes", "is lost"])
def test_a_lease_that_may_have_been_made_shorter_is_renewed_in_time(renewer, wait_for, reply):
    with TaskLock("nightly", timeout=600) as lock:
        wait_for(lambda: renewer.shortest == 600, "the thread knows the lease")
        if reply == "comes":
            lock.extend(1.5)
        else:
            with inside.failing("renew", sent=True), pytest.raises(LockUnavailable):
                lock.extend(1.5)
        inside.wait_for_renewals(lock, 0.6)
        assert lock.owned()


def test_a_short_lease_limits_the_requests_of_long_ones_only_while_it_is_held(
    renewer, take, no_thread
):
    take("long", timeout=60)
    with TaskLock("short", timeout=1.5):
        no_thread.tick()
        assert no_thread.store().limited == pytest.approx(0.25)
    no_thread.read_at = 0
    no_thread.tick()
    assert no_thread.store().limited == 2


def test_an_extension_that_hangs_does_not_end_other_leases(renewer):
    hangs, go_on = threading.Event(), threading.Event()

    def hang(renew, *args):
        hangs.set()
        go_on.wait(30)
        return renew(*args)

    with (
        inside.handled("renew", hang, of_all_threads=True),
        TaskLock("other", timeout=1.5) as other,
        TaskLock("nightly", timeout=60) as lock,
    ):
        thread = threading.Thread(target=lock.extend)
        thread.start()
        assert hangs.wait(30)
        inside.wait_for_renewals(other, 0.9)
        go_on.set()
        thread.join()


def test_a_look_that_fails_keeps_no_lease_from_its_renewal(no_thread, take, monkeypatch):
    """Of two servers of memcached, only one has the epoch; the other may have the lock."""
    lock = take(timeout=60)
    with monkeypatch.context() as patch, inside.failing("look"):
        time = inside.stop_clock(patch)
        time.now += 21
        no_thread.tick()
    assert isinstance(no_thread.error, LockUnavailable)
    assert inside.renewed_at(lock) == time.now


def test_a_short_lease_is_renewed_beside_long_ones_of_which_many_come_and_go(renewer):
    """The thread reads all leases while locks are taken; it must miss none."""
    ended = threading.Event()

    def take_long_ones():
        while not ended.is_set():
            with TaskLock(f"long {threading.get_ident()}", timeout=600):
                pass

    others = [threading.Thread(target=take_long_ones) for _ in range(3)]
    for other in others:
        other.start()
    try:
        for number in range(5):
            with TaskLock(f"short {number}", timeout=1.5) as lock:
                inside.wait_for_renewals(lock, 0)
    finally:
        ended.set()
        for other in others:
            other.join()


def test_a_lock_that_nobody_holds_any_more_is_not_renewed():
    lock = TaskLock("nightly", timeout=30)
    lock.acquire()
    kept = lock.token, lock.key
    assert kept in inside.kept_leases()
    del lock
    assert kept not in inside.kept_leases()
    assert TaskLock("nightly").locked()  # until its lease ends


def test_two_locks_of_one_token_are_both_renewed():
    """A run has one token for its lock and for the entry of its queued call."""
    locks = [inside.lock_of_run(TaskLock(name), timeout=1.5) for name in ("nightly", "beside")]
    for lock in locks:
        assert lock.acquire()
    assert locks[0].token == locks[1].token
    for lock in locks:
        inside.wait_for_renewals(lock, 0)
    locks[1].release()
    assert inside.kept_leases() == [(locks[0].token, locks[0].key)]
    locks[0].release()


def test_a_renewal_that_failed_is_tried_again(caplog):
    failures = []

    def fail_once(renew_many, requests):
        if not failures:
            failures.append(requests)
            raise LockUnavailable("down")
        return renew_many(requests)

    with inside.handled("renew_many", fail_once, of_all_threads=True):
        with TaskLock("nightly", timeout=1.5) as lock:
            inside.wait_for_renewals(lock, 0)
            assert lock.owned()
    assert caplog.text.count("Locks cannot be renewed or released now; trying again. down") == 1


def test_many_owed_releases_keep_no_lock_from_its_renewal(renewer, wait_for, monkeypatch):
    """A worker that discards a backlog of expired calls gives back the entry of each."""
    left, tick = [], renewer.tick

    def note_and_tick():
        left.append(len(renewer.owed))
        tick()

    monkeypatch.setattr(renewer, "tick", note_and_tick)
    with TaskLock("nightly", timeout=0.6):
        for number in range(5000):
            renewer.owe([f"singletask:{number}"], b"x", 60)
        wait_for(lambda: not renewer.owed, "all releases are made")
    assert any(0 < count < 5000 for count in left), left


def test_too_many_owed_releases_are_dropped_and_logged(no_thread, monkeypatch, caplog):
    monkeypatch.setattr(renewal, "MAX_OWED", 2)
    for key in ("a", "b", "c"):
        no_thread.owe([key], b"x", 60)
    assert [keys for keys, *_ in no_thread.owed] == [["a"], ["b"]]
    assert "c is not released; it is free when its lease ends." in caplog.text


def test_releases_of_a_server_that_is_down_do_not_delay_those_of_another(no_thread):
    freed = []

    def release(_release, key, *rest):
        if key == "down":
            raise LockUnavailable("down")
        freed.append((key, *rest))

    no_thread.tick_at = math.inf
    for key in (*["down"] * 50, "good"):
        no_thread.owe([key], b"x", 60)
    with inside.handled("release", release):
        no_thread.release_some()
    assert freed == [("good", b"x", b"", 0.0)]
    assert len(no_thread.owed) == 50
    assert "down" in str(no_thread.error)


def test_releases_of_a_server_that_hangs_take_little_time(no_thread, monkeypatch):
    time, releases = inside.stop_clock(monkeypatch), []

    def release(_release, *arguments):
        releases.append(arguments)
        time.now += renewal.LOOK / 10
        raise LockUnavailable("hangs")

    no_thread.tick_at = math.inf
    for _ in range(9):
        no_thread.owe(["hangs"], b"x", 60)
    with inside.handled("release", release):
        no_thread.release_some()
    assert len(releases) == 1


def test_a_take_of_many_slots_owes_one_release(no_thread):
    """The take of a lock with 1,000 slots may have put its entry in each of them."""
    lock = TaskLock("nightly", slots=1000)
    slots, sent = inside.slot_keys(lock), []
    with inside.failing("take"), pytest.raises(LockUnavailable):
        lock.acquire()
    [(_keys, value, *_rest)] = no_thread.owed
    inside.put_entry(slots[0], b"another")
    inside.put_entry(slots[700], value)
    no_thread.tick_at = math.inf
    with inside.handled("release", lambda _release, key, *_rest: sent.append(key)):
        no_thread.release_some()
    assert sent == [slots[700]]
    assert not no_thread.owed


def test_an_owed_release_is_tried_once_although_its_lease_has_ended(no_thread):
    """Memcached keeps an entry for up to two seconds longer than its lease."""
    freed = []
    no_thread.owe(["late"], b"x", -1, b"new", 7.0)
    with inside.handled("release", lambda _release, *arguments: freed.append(arguments)):
        no_thread.release_some()
    assert freed == [("late", b"x", b"new", 7.0)]


def test_a_process_that_ends_waits_for_owed_releases(renewer, monkeypatch):
    # Other tests owe releases to caches that are down: they would be waited for.
    monkeypatch.setattr(renewal, "renewers", {"redis": renewer})
    lock = TaskLock("owed")
    inside.put_entry(lock.key, b"x")
    renewer.owe([lock.key], b"x", 60)
    renewal.release_owed(60)
    assert not lock.locked()


def test_a_process_that_ends_does_not_wait_for_a_cache_that_is_down(dead_redis):
    renewal.renewers[dead_redis].owe(["singletask:owed"], b"x", 60)
    renewal.release_owed(0.3)
    renewal.renewers[dead_redis].owed.clear()


def test_a_forked_child_has_a_thread_of_its_own():
    def is_renewed():
        with TaskLock("child", timeout=1.5) as lock:
            inside.wait_for_renewals(lock, 0.6)
            return lock.owned()

    with TaskLock("parent", timeout=30):
        assert in_child(is_renewed)


STOPPED = """
import django, signal, time
django.setup()
from django_singletask import TaskLock
with TaskLock("nightly", timeout=1) as lock:
    woken = []
    signal.signal(signal.SIGCONT, lambda *_: woken.append(lock.lost))
    print("held", flush=True)
    while not woken:  # the signal may reach another thread, so no call may wait for it
        time.sleep(0.01)
    print(woken[0], flush=True)
"""


def test_a_stopped_process_knows_when_it_wakes(wait_for):
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SINGLETASK_TEST_CACHE": "redis"},
    )
    try:
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGSTOP)
        with TaskLock("nightly", wait=30) as second:
            assert second.owned()
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "True\n"
            assert second.owned()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize(("option", "has_threads"), [("master", False), ("enable-threads", True)])
def test_a_server_without_threads_is_warned_once(monkeypatch, caplog, option, has_threads):
    monkeypatch.setitem(sys.modules, "uwsgi", types.SimpleNamespace(opt={option: True}))
    threads.has_threads.cache_clear()
    try:
        for _ in range(2):
            assert threads.has_threads() == has_threads
    finally:
        threads.has_threads.cache_clear()
    assert caplog.text.count("--enable-threads") == (0 if has_threads else 1)


def test_the_longest_gap_between_renewals_is_recorded(settings, renewer):
    settings.SINGLETASK_HISTORY = "inline"
    TaskLockEvent.objects.all().delete()
    with TaskLock("nightly", timeout=1.5) as lock:
        inside.wait_for_renewals(lock, 0)
    assert TaskLockEvent.objects.get().longest_renewal_gap >= 0.2


GEVENT = """
from gevent import monkey
monkey.patch_all()
import django, gevent, json, time
django.setup()
from django_singletask import TaskLock
def body(number):
    with TaskLock(f"green {number}", timeout=1.5) as lock:
        time.sleep(2)
        return lock.owned() and not lock.lost
jobs = [gevent.spawn(body, number) for number in range(5)]
gevent.joinall(jobs)
print(json.dumps([job.value for job in jobs]))
"""


def test_leases_are_renewed_with_gevent():
    done = subprocess.run(
        [sys.executable, "-c", GEVENT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "SINGLETASK_TEST_CACHE": "redis"},
    )
    assert json.loads(done.stdout or "null") == [True] * 5, done.stderr
