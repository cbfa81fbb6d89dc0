from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_singletask import TaskLock
from django_singletask.history import writing as history
from django_singletask.locks import clock
from django_singletask.models import TaskLockEvent
from django_singletask.operators.held import held
from django_singletask.stores import get_store
from django_singletask.worker.watcher import Watcher, sweep

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture(autouse=True)
def on_redis(settings, empty_cache, monkeypatch):
    settings.SINGLETASK_CACHE = "redis"
    empty_cache("redis")
    TaskLockEvent.objects.all().delete()
    monkeypatch.setattr(history, "_missed", {})


@pytest.fixture
def later(monkeypatch):
    """Let the sweep believe that so many seconds have passed since the rows were written."""

    def pass_time(seconds):
        now = clock.now()
        monkeypatch.setattr(clock, "now", lambda: now + seconds)
        age = timedelta(seconds=seconds)
        for row in TaskLockEvent.objects.filter(kind="acquired"):
            TaskLockEvent.objects.filter(pk=row.pk).update(at=row.at - age)

    return pass_time


def lose_without_a_word(lock):
    """Let the entry end as if the holder's host was lost."""
    get_store("redis").release(lock.key, lock.lease.value)


def row_of(lock):
    return TaskLockEvent.objects.get(kind="acquired", token=lock.lease.token)


def test_a_row_whose_token_is_gone_twice_is_expired(later):
    lock = TaskLock("nightly", timeout=10)
    lock.acquire()
    lose_without_a_word(lock)
    later(11)
    history.sweep()
    assert row_of(lock).outcome == ""
    later(11)
    history.sweep()
    assert row_of(lock).outcome == "expired"
    expired = TaskLockEvent.objects.get(kind="expired")
    assert (expired.token, expired.reason) == (lock.lease.token, "its lease ended unreleased")


def test_once_is_not_enough(later):
    lock = TaskLock("nightly", timeout=10)
    lock.acquire()
    lose_without_a_word(lock)
    later(11)
    history.sweep()
    history.sweep()
    assert row_of(lock).outcome == ""


def test_a_row_within_its_lease_is_left_alone():
    lock = TaskLock("nightly", timeout=1000)
    lock.acquire()
    lose_without_a_word(lock)
    history.sweep()
    assert not history._missed


def test_a_held_lock_is_left_alone_however_old(later):
    with TaskLock("nightly", timeout=10) as lock:
        for _ in range(3):
            later(100)
            history.sweep()
        assert row_of(lock).outcome == ""


def test_a_lock_of_another_cache_is_looked_for_there(later, empty_cache):
    empty_cache("pymemcache")
    with TaskLock("nightly", timeout=10, cache="pymemcache") as lock:
        for _ in range(3):
            later(100)
            history.sweep()
        assert row_of(lock).outcome == ""


def test_the_owners_own_word_stands_above(later):
    lock = TaskLock("nightly", timeout=10)
    lock.acquire()
    lose_without_a_word(lock)
    for _ in range(2):
        later(11)
        history.sweep()
    get_store("redis").add(lock.key, lock.lease.value, 10)
    lock.release()
    assert row_of(lock).outcome == "released"
    assert not TaskLockEvent.objects.filter(kind="expired").exists()


def test_the_lock_of_a_dead_process_is_freed(later, monkeypatch):
    lock = TaskLock("nightly", timeout=10)
    lock.acquire()
    monkeypatch.setattr(history, "proof_of_death", lambda holder: "the test killed it")
    later(11)
    history.sweep()
    assert not lock.locked()
    assert row_of(lock).outcome == "dead"
    assert TaskLockEvent.objects.get(kind="expired").reason == "the test killed it"


def test_prune_deletes_what_is_too_old_in_batches(settings):
    settings.SINGLETASK_HISTORY_DAYS = 7
    old = timezone.now() - timedelta(days=8)
    event = {"name": "n", "key": "k", "at": old}
    rows = [TaskLockEvent(kind="skipped", **event) for _ in range(25)]
    TaskLockEvent.objects.bulk_create(rows)
    TaskLockEvent.objects.create(kind="skipped", **{**event, "at": timezone.now()})
    TaskLockEvent.objects.create(kind="acquired", **event)
    assert history.prune(batch=10) == 25
    assert TaskLockEvent.objects.count() == 2


def test_one_worker_sweeps(monkeypatch):
    swept = []
    monkeypatch.setattr(history, "sweep", lambda: swept.append(1))
    monkeypatch.setattr("django_singletask.worker.watcher.connections.close_all", lambda: None)
    one, two = Watcher().leader, Watcher().leader
    sweep(one)
    sweep(two)
    sweep(one)
    assert len(swept) == 2
    assert [lock.name for lock in held()] == []
    assert not TaskLockEvent.objects.exists()
    one.release()
    sweep(two)
    assert len(swept) == 3
    two.release()


def test_a_watcher_gives_up_on_what_has_no_lock(monkeypatch):
    from types import SimpleNamespace

    from django_singletask.worker import watcher as worker
    from tests.testapp.tasks import hold

    request = SimpleNamespace(task=hold, request_dict={}, id="i", _payload=((), {"x": 1}, {}))
    watcher = Watcher()
    watcher.runs[1] = worker.Accepted("token", "", request)
    monkeypatch.setattr(worker, "is_gone", lambda pid, start: "gone")
    watcher.look()
    assert watcher.runs == {}
    assert watcher.corpses == []


def test_a_store_that_is_down_is_asked_again_until_the_lease_is_over(
    settings, dead_redis, monkeypatch, caplog
):
    from django_singletask.worker import watcher as worker

    settings.SINGLETASK_CACHE = dead_redis
    monkeypatch.setattr("django_singletask.worker.watcher.connections.close_all", lambda: None)
    watcher = Watcher()
    now = worker.time.monotonic()
    corpse = worker.Corpse(TaskLock("nightly"), "token", "gone", now + 100, run=None)
    over = corpse._replace(until=now - 1)
    watcher.corpses = [corpse, over]
    watcher.bury()
    assert watcher.corpses == [corpse]
    watcher.bury()
    assert caplog.text.count("not freed yet") == 1
