"""The thread that renews leases and pays debts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from django.core.cache import caches

from django_singletask import LockLost, TaskLock, clock
from django_singletask.locks import renewal
from django_singletask.locks.debts import Debt, Debts
from django_singletask.locks.run import Run
from django_singletask.signals import lock_event
from django_singletask.stores import get_store
from tests.entries import holder

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def on_redis(settings, empty_cache):
    settings.SINGLETASK_CACHE = "redis"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("redis")


def new_keeper(monkeypatch):
    """Let a new keeper keep the leases of this process."""
    keeper = renewal.Keeper()
    monkeypatch.setattr(renewal, "keeper", lambda: keeper)
    return keeper


def test_locks_that_are_due_together_are_renewed_in_one_go(monkeypatch):
    locks = [TaskLock(f"lock {number}", timeout=60) for number in range(200)]
    for lock in locks:
        lock.acquire()
    before = trips()
    began = [lock.lease.renewed_at for lock in locks]
    keeper = renewal.Keeper()
    for lock in locks:
        keeper.keep(lock.lease)
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now + 21)
    keeper.tick()
    assert all(lock.lease.renewed_at > start for lock, start in zip(locks, began, strict=True))
    # One pipeline, which the server reads in pieces of 16 KiB; one by one it would be 200 trips.
    assert trips() - before < 50
    monkeypatch.undo()
    for lock in locks:
        lock.release()


def trips():
    client = get_store("redis").client
    return client.info("stats")["total_reads_processed"]


def test_locks_held_for_a_moment_let_the_thread_sleep(monkeypatch, wait_for):
    """Each waking costs the task a switch of threads; one a lock doubled the time of a lock."""
    keeper, woken = new_keeper(monkeypatch), []
    wake = keeper.wake
    monkeypatch.setattr(keeper, "wake", lambda at: (woken.append(at), wake(at)))
    with TaskLock("nightly"):
        pass
    assert woken
    wait_for(lambda: keeper.sleeps, "the thread has come to its sleep")
    woken.clear()
    for _ in range(200):
        with TaskLock("nightly"):
            pass
    # It wakes by itself each 0.4 s; until it sleeps again, some may wake it.
    assert len(woken) <= 5


class TestEpoch:
    """When a process that holds locks asks for the epoch; clock and thread are simulated."""

    @pytest.fixture
    def keeper(self, monkeypatch):
        keeper = new_keeper(monkeypatch)
        monkeypatch.setattr(keeper, "wake", lambda at: None)
        return keeper

    @pytest.fixture
    def looks(self, keeper, monkeypatch):
        """Give the function that lets seconds pass; it returns the times of the looks."""

        def pass_by(seconds, look=None):
            began = now = min(lease.taken_at for lease in keeper.held())
            store, times = get_store("redis"), []
            real_look = look or store.look

            def note():
                times.append(round(now - began, 2))
                real_look()

            with monkeypatch.context() as patch:
                patch.setattr(store, "look", note)
                patch.setattr(clock, "now", lambda: now)
                while (due := keeper.next_due()) <= began + seconds:
                    now = max(due, now)
                    keeper.tick()
            return times

        return pass_by

    def test_it_looks_each_0_4_seconds_whatever_the_number_of_locks(self, looks, take):
        for number in range(20):
            take(f"lock {number}")
        assert looks(2.1) == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], abs=0.05)

    def test_a_look_is_one_small_request(self, keeper, take):
        take()
        store = get_store("redis")
        store.look()
        before = trips()
        store.look()
        assert trips() - before == 2  # with that of trips() itself

    def test_a_run_of_less_than_0_4_seconds_costs_no_look(self, looks, monkeypatch):
        with TaskLock("nightly"):
            assert looks(0.3) == []

    def test_while_the_cache_is_down_it_looks_each_0_2_seconds(self, looks, take):
        def fail():
            raise ConnectionError

        take()
        assert looks(1.1, fail) == pytest.approx([0.4, 0.6, 0.8, 1.0], abs=0.05)

    def test_a_fixed_lease_that_has_ended_causes_no_look(self, looks, take):
        take(timeout=1, renew=False)
        assert looks(3) == pytest.approx([0.4, 0.8], abs=0.05)

    def test_after_an_outage_all_leases_are_renewed(self, looks, take):
        """The server may have come back with an old snapshot, in which the epoch is the same."""

        def fail():
            raise ConnectionError

        lock = take()
        looks(0.5, fail)
        store = get_store("redis")
        store.release(lock.key, lock.lease.value)
        looks(0.7)
        assert lock.lease.retaken == 1
        renewed_at = lock.lease.renewed_at
        looks(2)
        assert lock.lease.renewed_at == renewed_at

    def test_another_epoch_renews_all_leases_at_once(self, keeper, take, empty_cache, looks):
        locks = [take(f"lock {number}") for number in range(3)]
        caches["redis"].clear()
        looks(0.5)
        assert [lock.lease.retaken for lock in locks] == [1, 1, 1]
        looks(1)
        assert [lock.lease.retaken for lock in locks] == [1, 1, 1]

    def test_another_epoch_finds_a_fixed_lease_lost(self, take, keeper, looks):
        lock = take(timeout=60, renew=False)
        caches["redis"].clear()
        looks(0.5)
        assert lock.lost
        assert not lock.locked()

    def test_if_the_cache_fails_again_before_the_renewal_all_are_renewed_later(
        self, keeper, take, looks, monkeypatch
    ):
        lock = take()
        caches["redis"].clear()
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "renew_all", lambda alias, leases: False)
            looks(0.5)
        assert not lock.lease.retaken
        looks(0.9)
        assert lock.lease.retaken == 1


def test_many_locks_that_are_taken_while_the_thread_sleeps_leave_few_due_times(monkeypatch):
    keeper = new_keeper(monkeypatch)
    monkeypatch.setattr(keeper, "wake", lambda at: None)
    for number in range(300):
        with TaskLock("nightly", timeout=60 if number % 2 else 30):
            pass
    assert len(keeper.new_dues) <= 2


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
    store.release(lock.key, lock.lease.value)
    if kind == "lost":
        store.add(lock.key, holder("another"), 60)
    listen(use)
    keeper = renewal.keeper()
    thread = threading.Thread(target=keeper.renew_all, args=("redis", [lock.lease]), daemon=True)
    thread.start()
    thread.join(10)
    assert outcomes == ["done" if (kind, method) == ("retaken", "extend") else "LockLost"]


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


def test_a_thread_that_could_not_be_started_is_started_by_the_next_lock(monkeypatch, wait_for):
    """If wakes_at were set before the thread is started, no later lock would be renewed."""
    new_keeper(monkeypatch)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            TaskLock("first", timeout=0.6).acquire()
    with TaskLock("second", timeout=0.6) as lock:
        began = lock.lease.renewed_at
        wait_for(lambda: lock.lease.renewed_at > began + 0.6, "renewals")
        assert lock.owned()


def test_a_lease_that_was_made_shorter_is_renewed_in_time(monkeypatch, wait_for):
    keeper = new_keeper(monkeypatch)
    with TaskLock("nightly", timeout=600) as lock:
        wait_for(lambda: keeper.sleeps, "the thread sleeps, for 200 s")
        lock.extend(0.6)
        began = lock.lease.renewed_at
        wait_for(lambda: lock.lost or lock.lease.renewed_at > began + 0.6, "renewals")
        assert not lock.lost


def test_a_lease_that_may_have_been_made_shorter_is_renewed_in_time(monkeypatch, wait_for):
    """The reply to extend() is lost, so the entry may end soon."""
    keeper = new_keeper(monkeypatch)
    with TaskLock("nightly", timeout=600) as lock:
        wait_for(lambda: keeper.sleeps, "the thread sleeps, for 200 s")
        store = get_store("redis")
        renew = store.renew

        def lose_the_reply(*args):
            renew(*args)
            raise ConnectionError

        with monkeypatch.context() as patch:
            patch.setattr(store, "renew", lose_the_reply)
            with pytest.raises(ConnectionError):
                lock.extend(0.6)
        began = lock.lease.renewed_at
        wait_for(lambda: lock.lost or lock.lease.renewed_at > began + 0.6, "renewals")
        assert not lock.lost
        assert lock.owned()


def test_the_thread_can_list_leases_while_another_one_takes_locks():
    """It would fail, and sleep for a second, if it iterated over a dict that changes."""
    keeper, locks, ended = renewal.Keeper(), [], threading.Event()

    class Fixed:
        renews = False

    def take():
        while not ended.is_set():
            lock = Fixed()
            keeper.leases[str(len(locks)), "key"] = lock
            locks.append(lock)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            keeper.held()
    finally:
        ended.set()
        thread.join()


def test_a_lock_that_nobody_holds_any_more_is_not_renewed():
    lock = TaskLock("nightly", timeout=30)
    lock.acquire()
    kept = (lock.token, lock.key)
    assert kept in renewal.keeper().kept()
    del lock
    assert kept not in renewal.keeper().kept()


def test_two_locks_of_one_token_are_both_renewed(wait_for):
    """A run has one token for its lock and for the entry of its queued call."""
    run = Run(token="5a3e")
    locks = [TaskLock(name, timeout=0.6, run=run) for name in ("nightly", "beside")]
    for lock in locks:
        assert lock.acquire()
    began = [lock.lease.renewed_at for lock in locks]
    wait_for(
        lambda: all(lock.lease.renewed_at > b for lock, b in zip(locks, began, strict=True)),
        "both are renewed",
    )
    locks[1].release()
    assert renewal.keeper().kept() == {(locks[0].token, locks[0].key)}
    locks[0].release()


def test_a_renewal_that_failed_is_tried_again(monkeypatch, wait_for, caplog):
    # Each thread has a store object of its own, so patch the class.
    store = type(get_store("redis"))
    renew_many, failures = store.renew_many, []

    def fail_once(store, requests):
        if not failures:
            failures.append(requests)
            raise ConnectionError("down")
        return renew_many(store, requests)

    monkeypatch.setattr(store, "renew_many", fail_once)
    with TaskLock("nightly", timeout=0.9) as lock:
        began = lock.lease.renewed_at
        wait_for(lambda: lock.lease.renewed_at > began, "a renewal")
        assert lock.owned()
        assert not lock.lost
    assert caplog.text.count("1 locks could not be renewed: down") == 1


def test_many_debts_keep_no_lock_from_its_renewal(wait_for, dead_redis):
    """A worker that discards a backlog of expired calls gives back the entry of each."""
    with TaskLock("nightly", timeout=0.6) as lock:
        renewal.keeper().owe(dead_redis, "singletask:elsewhere", b"x", 60)
        for number in range(5000):
            renewal.keeper().owe("redis", f"singletask:{number}", b"x", 60)
        debts = renewal.keeper().debts["redis"]
        wait_for(lambda: not debts.waiting, "all debts to Redis are paid", deadline=10)
        assert not lock.lost
        assert lock.lease.longest_gap < 0.5
    renewal.keeper().debts.clear()


def test_of_too_many_debts_the_oldest_is_dropped_and_logged(monkeypatch, caplog):
    monkeypatch.setattr("django_singletask.locks.debts.MAX_DEBTS", 2)
    debts = Debts("redis")
    for key in ("a", "b", "c"):
        debts.add(Debt(key, b"x", 60))
    assert [debt.key for debt in debts.waiting] == ["b", "c"]
    assert "a is not released; it is free when its lease ends." in caplog.text


def test_a_release_that_always_fails_does_not_block_the_others(monkeypatch):
    store, freed = get_store("redis"), []

    def release(key, value):
        if key == "poison":
            raise ValueError("this entry is no lock")
        freed.append(key)

    monkeypatch.setattr(store, "release", release)
    debts = Debts("redis")
    for key in ("poison", "good"):
        debts.add(Debt(key, b"x", clock.now() + 60))
    debts.pay()
    debts.pay()
    assert freed == ["good"]


def test_a_debt_is_tried_once_although_its_lease_has_ended(monkeypatch):
    """Memcached keeps an entry for up to two seconds longer than its lease."""
    store, freed = get_store("redis"), []
    monkeypatch.setattr(store, "release", lambda key, value: freed.append(key))
    debts = Debts("redis")
    debts.add(Debt("late", b"x", clock.now() - 1))
    debts.pay()
    assert freed == ["late"]


def test_a_forked_child_has_a_thread_of_its_own(wait_for):
    with TaskLock("parent", timeout=30):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with TaskLock("child", timeout=0.6) as lock:
                    began = lock.lease.renewed_at
                    wait_for(lambda: lock.lease.renewed_at > began + 0.6, "renewals in the child")
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
    renewal.has_threads.cache_clear()
    yield
    renewal.has_threads.cache_clear()


@pytest.mark.usefixtures("forget_answer")
def test_a_server_without_threads_is_warned(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "uwsgi", types.SimpleNamespace(opt={"master": True}))
    assert not renewal.has_threads()
    assert not renewal.has_threads()
    assert caplog.text.count("--enable-threads") == 1


@pytest.mark.usefixtures("forget_answer")
def test_a_server_with_threads_is_not_warned(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "uwsgi", types.SimpleNamespace(opt={"enable-threads": True}))
    assert renewal.has_threads()
    assert not caplog.text


def test_the_longest_gap_between_renewals_is_recorded(settings, wait_for):
    from django_singletask.models import TaskLockEvent

    settings.SINGLETASK_HISTORY = "inline"
    TaskLockEvent.objects.all().delete()
    with TaskLock("nightly", timeout=0.9) as lock:
        began = lock.lease.renewed_at
        wait_for(lambda: lock.lease.renewed_at > began, "a renewal")
        token = lock.token
    gap = TaskLockEvent.objects.get(token=token).longest_renewal_gap
    assert 0.2 <= gap < 0.9


GEVENT = """
from gevent import monkey
monkey.patch_all()
import django, gevent, json, time
django.setup()
from django_singletask import TaskLock
def body(number):
    with TaskLock(f"green {number}", timeout=0.9) as lock:
        began = lock.lease.renewed_at
        until = time.monotonic() + 10
        while lock.lease.renewed_at < began + 0.9 and time.monotonic() < until:
            time.sleep(0.01)
        return lock.owned() and not lock.lost
jobs = [gevent.spawn(body, number) for number in range(5)]
gevent.joinall(jobs)
print(json.dumps([job.value for job in jobs]))
"""


def test_leases_are_renewed_with_gevent():
    pytest.importorskip("gevent")
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
