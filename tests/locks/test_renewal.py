"""The thread that renews leases and makes owed releases."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from django.core.cache import caches

from django_singletask import LockLost, LockUnavailable, TaskLock, clock, threads
from django_singletask.locks import renewal
from django_singletask.locks.address import Run
from django_singletask.locks.keys import name_key
from django_singletask.locks.lock import lock_of
from django_singletask.signals import lock_event
from django_singletask.stores import get_store
from tests.entries import holder

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


def test_locks_that_are_due_together_are_renewed_in_one_go(monkeypatch, no_thread):
    locks = [TaskLock(f"lock {number}", timeout=60) for number in range(200)]
    for lock in locks:
        lock.acquire()
    before = trips()
    began = [lock._lease.renewed_at for lock in locks]
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now + 21)
    no_thread.tick()
    assert all(lock._lease.renewed_at > start for lock, start in zip(locks, began, strict=True))
    # One pipeline, which the server reads in pieces of 16 KiB; one by one it would be 200 trips.
    assert trips() - before < 50
    monkeypatch.undo()
    for lock in locks:
        lock.release()


def trips():
    client = get_store("redis").client
    return client.info("stats")["total_reads_processed"]


def test_locks_held_for_a_moment_let_the_thread_sleep(renewer, monkeypatch):
    """Each waking costs the task a switch of threads; one a lock doubled the time of a lock."""
    woken = []
    wake = renewer.wake
    monkeypatch.setattr(renewer, "wake", lambda: (woken.append(clock.now()), wake()))
    began = clock.now()
    for _ in range(200):
        with TaskLock("nightly"):
            pass
    # The first wakes it; then it ticks each 0.4 s, and sleeps again if nothing is held.
    assert 1 <= len(woken) <= 2 + (clock.now() - began) / 0.4


class TestEpoch:
    """When a process that holds locks asks for the epoch; clock and thread are simulated."""

    @pytest.fixture
    def looks(self, no_thread, monkeypatch):
        """Give the function that lets seconds pass; it returns the times of the looks."""

        def pass_by(seconds, look=None):
            began = now = min(lease.taken_at for lease in no_thread.held())
            store, times = get_store("redis"), []
            real_look = look or store.look

            def note(keys):
                times.append(round(now - began, 2))
                real_look(keys)

            with monkeypatch.context() as patch:
                patch.setattr(store, "look", note)
                patch.setattr(clock, "now", lambda: now)
                while (now := now + no_thread.interval) <= began + seconds:
                    no_thread.error = None
                    no_thread.tick()
                    no_thread.failed = no_thread.error is not None
            return times

        return pass_by

    def test_it_looks_each_0_4_seconds_whatever_the_number_of_locks(self, looks, take):
        for number in range(20):
            take(f"lock {number}")
        assert looks(2.1) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], abs=0.05)

    def test_a_look_is_one_small_request(self, take):
        take()
        store = get_store("redis")
        store.look()
        before = trips()
        store.look()
        assert trips() - before == 2  # with that of trips() itself

    def test_a_run_of_less_than_0_4_seconds_costs_no_look(self, looks):
        with TaskLock("nightly"):
            assert looks(0.3) == []

    def test_while_the_cache_is_down_it_looks_each_0_4_seconds(self, looks, take):
        def fail(_):
            raise LockUnavailable

        take()
        assert looks(1.3, fail) == pytest.approx([0.4, 0.8, 1.2], abs=0.05)

    def test_after_an_outage_all_leases_are_renewed(self, looks, take):
        """The server may have come back with an old snapshot, in which the epoch is the same."""

        def fail(_):
            raise LockUnavailable

        lock = take()
        looks(0.5, fail)
        store = get_store("redis")
        store.release(lock.key, lock._lease.value)
        looks(0.9)
        assert lock._lease.retaken == 1
        renewed_at = lock._lease.renewed_at
        looks(2)
        assert lock._lease.renewed_at == renewed_at

    def test_another_epoch_renews_all_leases_at_once(self, take, looks):
        locks = [take(f"lock {number}") for number in range(3)]
        caches["redis"].clear()
        looks(0.5)
        assert [lock._lease.retaken for lock in locks] == [1, 1, 1]
        looks(1)
        assert [lock._lease.retaken for lock in locks] == [1, 1, 1]

    def test_another_epoch_finds_a_fixed_lease_lost(self, take, looks):
        lock = take(timeout=60, renew=False)
        caches["redis"].clear()
        looks(0.5)
        assert lock.lost
        assert not lock.locked()

    def test_if_the_cache_fails_again_before_the_renewal_all_are_renewed_later(
        self, no_thread, take, looks, monkeypatch
    ):
        def fail(*args):
            raise LockUnavailable

        lock = take()
        caches["redis"].clear()
        with monkeypatch.context() as patch:
            patch.setattr(no_thread, "renew", fail)
            looks(0.5)
        assert not lock._lease.retaken
        looks(0.9)
        assert lock._lease.retaken == 1


@pytest.mark.usefixtures("no_renewal_thread")
@pytest.mark.parametrize("method", ["extend", "fencing_token"])
@pytest.mark.parametrize("kind", ["retaken", "lost"])
def test_a_receiver_of_an_event_may_use_the_lock(kind, method, take, listen):
    """The events are sent within a renewal, and both methods wait for the end of renewals."""
    lock, outcomes = take(), []

    def use(event, **kwargs):
        if event.kind == kind:
            try:
                getattr(lock, method)()
                outcomes.append("done")
            except LockLost:
                outcomes.append("LockLost")

    store = get_store("redis")
    store.release(lock.key, lock._lease.value)
    if kind == "lost":
        store.add(lock.key, holder("another"), 60)
    listen(use)
    renew = renewal.renewers["redis"].renew
    thread = threading.Thread(target=lambda: renew(get_store("redis"), [lock._lease]), daemon=True)
    thread.start()
    thread.join(10)
    assert outcomes == ["done" if (kind, method) == ("retaken", "extend") else "LockLost"]


def test_a_lock_that_is_extended_inside_another_request_is_not_trusted_too_long(monkeypatch):
    """A signal handler shortens the lease while the interrupted code makes it longer."""
    store = get_store("redis")
    renew = store.renew

    def renew_and_strike(*arguments):
        outcome = renew(*arguments)
        monkeypatch.setattr(store, "renew", renew)
        lock.extend(5)
        return outcome

    with TaskLock("nightly", timeout=60) as lock:
        monkeypatch.setattr(store, "renew", renew_and_strike)
        lock.extend(600)
        assert lock.remaining() <= 5
        assert lock._lease.deadline <= clock.now() + 5
        assert lock._lease.length == 5


@pytest.fixture
def listen():
    """Give the function that connects a receiver of events for the time of the test."""
    receivers = []

    def connect(receiver):
        lock_event.connect(receiver, weak=False)
        receivers.append(receiver)

    yield connect
    for receiver in receivers:
        lock_event.disconnect(receiver)


def test_a_thread_that_could_not_be_started_is_started_by_the_next_lock(
    renewer, monkeypatch, wait_for
):
    def refuse(function, arguments):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", refuse)
        with pytest.raises(RuntimeError):
            TaskLock("first", timeout=0.6).acquire()
    with TaskLock("second", timeout=0.6) as lock:
        began = lock._lease.renewed_at
        wait_for(lambda: lock._lease.renewed_at > began + 0.6, "renewals")
        assert lock.owned()


def test_a_thread_that_has_ended_is_started_by_the_next_lock(renewer, monkeypatch, wait_for):
    def end():
        raise SystemExit  # ends a thread without a message

    with monkeypatch.context() as patch:
        patch.setattr(renewer, "tick", end)
        TaskLock("first", timeout=0.6).acquire()
        wait_for(lambda: renewer.thread is None, "the thread has ended")
    with TaskLock("second", timeout=0.6) as lock:
        began = lock._lease.renewed_at
        wait_for(lambda: lock._lease.renewed_at > began + 0.6, "renewals")


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
        go_on.wait(20)

    monkeypatch.setattr(renewer, "tick", hang)
    with TaskLock("first"):
        assert hangs.wait(10)
    now = clock.now()
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now", lambda: now + 3)
        TaskLock("second").acquire()
        assert "has not answered" not in caplog.text
        patch.setattr(clock, "now", lambda: now + 5)
        for name in ("third", "fourth"):
            TaskLock(name).acquire()
    go_on.set()
    assert caplog.text.count("renews the locks in the cache 'redis' has not answered for 4 s") == 1
    assert "OPTIONS" in caplog.text


def test_a_lease_that_was_made_shorter_is_renewed_in_time(renewer, wait_for):
    with TaskLock("nightly", timeout=600) as lock:
        wait_for(lambda: renewer.shortest == 600, "the thread knows the lease")
        lock.extend(0.6)
        began = lock._lease.renewed_at
        wait_for(lambda: lock.lost or lock._lease.renewed_at > began + 0.6, "renewals")
        assert not lock.lost


def test_a_lease_that_may_have_been_made_shorter_is_renewed_in_time(renewer, monkeypatch, wait_for):
    """The reply to extend() is lost, so the entry may end soon."""
    with TaskLock("nightly", timeout=600) as lock:
        wait_for(lambda: renewer.shortest == 600, "the thread knows the lease")
        store = get_store("redis")
        renew = store.renew

        def lose_the_reply(*args):
            renew(*args)
            raise LockUnavailable

        with monkeypatch.context() as patch:
            patch.setattr(store, "renew", lose_the_reply)
            with pytest.raises(LockUnavailable):
                lock.extend(0.6)
        began = lock._lease.renewed_at
        wait_for(lambda: lock.lost or lock._lease.renewed_at > began + 0.6, "renewals")
        assert not lock.lost
        assert lock.owned()


def test_a_short_lease_limits_the_requests_of_long_ones_only_while_it_is_held(
    renewer, take, no_thread
):
    take("long", timeout=60)
    with TaskLock("short", timeout=0.6):
        no_thread.tick()
        assert no_thread.store().limited == pytest.approx(0.1)
    no_thread.read_at = 0
    no_thread.tick()
    assert no_thread.store().limited == 2


def test_an_extension_that_hangs_does_not_end_other_leases(renewer, wait_for, monkeypatch):
    hangs, go_on = threading.Event(), threading.Event()
    store_class, renew = type(get_store("redis")), type(get_store("redis")).renew

    def hang(store, *args):
        hangs.set()
        go_on.wait(20)
        return renew(store, *args)

    monkeypatch.setattr(store_class, "renew", hang)
    with TaskLock("other", timeout=0.9) as other, TaskLock("nightly", timeout=60) as lock:
        thread = threading.Thread(target=lock.extend)
        thread.start()
        assert hangs.wait(10)
        began = other._lease.renewed_at
        wait_for(lambda: other.lost or other._lease.renewed_at > began + 0.9, "renewals")
        go_on.set()
        thread.join()
        assert not other.lost


def test_a_look_that_fails_keeps_no_lease_from_its_renewal(no_thread, take, monkeypatch):
    """Of two servers of memcached, only one has the epoch; the other may have the lock."""

    def fail(_):
        raise LockUnavailable("away")

    lock = take(timeout=60)
    now = clock.now()
    monkeypatch.setattr(get_store("redis"), "look", fail)
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now", lambda: now + 21)
        no_thread.tick()
    assert isinstance(no_thread.error, LockUnavailable)
    assert lock._lease.renewed_at > now + 20


def test_a_short_lease_is_renewed_beside_long_ones_of_which_many_come_and_go(renewer, wait_for):
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
            with TaskLock(f"short {number}", timeout=0.9) as lock:
                lease = lock._lease
                wait_for(lambda lease=lease: lease.renewed_at > lease.taken_at + 0.3, "renewals")
                assert not lock.lost
    finally:
        ended.set()
        for other in others:
            other.join()


def test_a_lock_that_nobody_holds_any_more_is_not_renewed():
    lock = TaskLock("nightly", timeout=30)
    lock.acquire()
    kept = lock.token, lock.key
    assert kept in renewal.renewers["redis"].leases
    del lock
    assert kept not in renewal.renewers["redis"].leases
    assert TaskLock("nightly").locked()  # until its lease ends


def test_two_locks_of_one_token_are_both_renewed(wait_for):
    """A run has one token for its lock and for the entry of its queued call."""
    run = Run(token="5a3e")
    locks = [lock_of(TaskLock, name, run, timeout=0.6) for name in ("nightly", "beside")]
    for lock in locks:
        assert lock.acquire()
    began = [lock._lease.renewed_at for lock in locks]
    wait_for(
        lambda: all(lock._lease.renewed_at > b for lock, b in zip(locks, began, strict=True)),
        "both are renewed",
    )
    locks[1].release()
    assert [*renewal.renewers["redis"].leases] == [(locks[0].token, locks[0].key)]
    locks[0].release()


def test_a_renewal_that_failed_is_tried_again(monkeypatch, wait_for, caplog):
    # Each thread has a store object of its own, so patch the class.
    store = type(get_store("redis"))
    renew_many, failures = store.renew_many, []

    def fail_once(store, requests):
        if not failures:
            failures.append(requests)
            raise LockUnavailable("down")
        return renew_many(store, requests)

    monkeypatch.setattr(store, "renew_many", fail_once)
    with TaskLock("nightly", timeout=0.9) as lock:
        began = lock._lease.renewed_at
        wait_for(lambda: lock._lease.renewed_at > began, "a renewal")
        assert lock.owned()
        assert not lock.lost
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


def test_releases_of_a_server_that_is_down_do_not_delay_those_of_another(no_thread, monkeypatch):
    store, freed = get_store("redis"), []

    def release(key, value, new, until):
        assert (value, new, until) == (b"x", b"", 0.0)
        if key == "down":
            raise LockUnavailable("down")
        freed.append(key)

    monkeypatch.setattr(store, "release", release)
    no_thread.tick_at = math.inf
    for key in (*["down"] * 50, "good"):
        no_thread.owe([key], b"x", 60)
    no_thread.release_some()
    assert freed == ["good"]
    assert len(no_thread.owed) == 50
    assert "down" in str(no_thread.error)


def test_releases_of_a_server_that_hangs_take_little_time(no_thread, monkeypatch):
    def release(*arguments):
        now.append(now[-1] + renewal.LOOK / 10)
        raise LockUnavailable("hangs")

    now = [100.0]
    monkeypatch.setattr(clock, "now", lambda: now[-1])
    monkeypatch.setattr(get_store("redis"), "release", release)
    no_thread.tick_at = math.inf
    for _ in range(9):
        no_thread.owe(["hangs"], b"x", 60)
    no_thread.release_some()
    assert len(now) == 2  # no more than one request


def test_a_take_of_many_slots_owes_one_release(no_thread, monkeypatch):
    """The take of a lock with 1,000 slots may have put its entry in each of them."""
    lock, slots = TaskLock("nightly", slots=1000), name_key("nightly").slots()
    store, sent = get_store("redis"), []
    monkeypatch.setattr(store, "take", mock.Mock(side_effect=LockUnavailable("no reply")))
    with pytest.raises(LockUnavailable):
        lock.acquire()
    assert len(no_thread.owed) == 1
    store.add(slots[0], b"another", 60)
    store.add(slots[700], no_thread.owed[0][1], 60)
    monkeypatch.setattr(store, "release", lambda *entry: sent.append(entry))
    no_thread.tick_at = math.inf
    no_thread.release_some()
    assert [key for key, *_ in sent] == [slots[700]]
    assert not no_thread.owed


def test_an_owed_release_is_tried_once_although_its_lease_has_ended(no_thread, monkeypatch):
    """Memcached keeps an entry for up to two seconds longer than its lease."""
    store, freed = get_store("redis"), []
    monkeypatch.setattr(store, "release", lambda key, *rest: freed.append((key, *rest)))
    no_thread.owe(["late"], b"x", -1, b"new", 7.0)
    no_thread.release_some()
    assert freed == [("late", b"x", b"new", 7.0)]


def test_a_process_that_ends_waits_for_owed_releases(renewer, monkeypatch):
    # Other tests owe releases to caches that are down: they would be waited for.
    monkeypatch.setattr(renewal, "renewers", {"redis": renewer})
    store = get_store("redis")
    store.add("singletask:owed", b"x", 60)
    renewer.owe(["singletask:owed"], b"x", 60)
    began = clock.now()
    renewal.release_owed(60)
    assert store.read("singletask:owed") is None
    assert clock.now() - began < 30


def test_a_process_that_ends_does_not_wait_for_a_cache_that_is_down(dead_redis):
    renewal.renewers[dead_redis].owe(["singletask:owed"], b"x", 60)
    began = clock.now()
    renewal.release_owed(0.3)
    assert 0.3 <= clock.now() - began < 30
    renewal.renewers[dead_redis].owed.clear()


def test_a_forked_child_has_a_thread_of_its_own(wait_for):
    with TaskLock("parent", timeout=30):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with TaskLock("child", timeout=0.6) as lock:
                    began = lock._lease.renewed_at
                    wait_for(lambda: lock._lease.renewed_at > began + 0.6, "renewals in the child")
                    code = 0 if lock.owned() else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


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
        with TaskLock("nightly", wait=10) as second:
            assert second.owned()
            process.send_signal(signal.SIGCONT)
            assert process.stdout.readline() == "True\n"
            assert second.owned()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


@pytest.fixture
def forget_answer():
    threads.has_threads.cache_clear()
    yield
    threads.has_threads.cache_clear()


@pytest.mark.usefixtures("forget_answer")
def test_a_server_without_threads_is_warned(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "uwsgi", types.SimpleNamespace(opt={"master": True}))
    assert not threads.has_threads()
    assert not threads.has_threads()
    assert caplog.text.count("--enable-threads") == 1


@pytest.mark.usefixtures("forget_answer")
def test_a_server_with_threads_is_not_warned(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "uwsgi", types.SimpleNamespace(opt={"enable-threads": True}))
    assert threads.has_threads()
    assert not caplog.text


def test_the_longest_gap_between_renewals_is_recorded(settings, monkeypatch, wait_for):
    # One that has seen no other epoch, which would renew the lease at once.
    monkeypatch.delitem(renewal.renewers, "redis", raising=False)
    from django_singletask.models import TaskLockEvent

    settings.SINGLETASK_HISTORY = "inline"
    TaskLockEvent.objects.all().delete()
    with TaskLock("nightly", timeout=0.9) as lock:
        began = lock._lease.renewed_at
        wait_for(lambda: lock._lease.renewed_at > began, "a renewal")
        token = lock.token
    gap = TaskLockEvent.objects.get(ref=token).longest_renewal_gap
    assert gap >= 0.2


GEVENT = """
from gevent import monkey
monkey.patch_all()
import django, gevent, json, time
django.setup()
from django_singletask import TaskLock
def body(number):
    with TaskLock(f"green {number}", timeout=0.9) as lock:
        began = lock._lease.renewed_at
        until = time.monotonic() + 10
        while lock._lease.renewed_at < began + 0.9 and time.monotonic() < until:
            time.sleep(0.01)
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


def test_the_clock_goes_on():
    first = clock.now()
    time.sleep(0.001)
    assert clock.now() > first
