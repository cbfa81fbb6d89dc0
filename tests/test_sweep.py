from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.db import OperationalError, connections
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from django_singletask.conf import conf
from django_singletask.history import sweep
from django_singletask.history.sweep import Sweeper, prune
from django_singletask.models import TaskLockEvent
from django_singletask.operators.held import held
from django_singletask.stores import get_store
from django_singletask.worker import watcher
from tests.past_rows import keep_history_in, ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]


class Clock:
    """The clock of a sweeper, on which the time since the rows were written passes as well."""

    def __init__(self):
        self.now = time.monotonic()

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds
        for run in TaskLockEvent.objects.filter(kind="acquired"):
            TaskLockEvent.objects.filter(pk=run.pk).update(at=run.at - timedelta(seconds=seconds))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sweeper(clock):
    return Sweeper(clock)


def lose_host(lock):
    """Let the entry end as if the holder's host was lost; return its token and its bytes."""
    store = get_store("redis")
    value = store.read(lock.key).value
    store.release(lock.key, value)
    return lock.token, value


def outcome(token):
    return TaskLockEvent.objects.get(kind="acquired", token=token).outcome


# Open rows


def test_row_whose_token_is_gone_at_two_looks_is_expired(take, clock, sweeper):
    token, _value = lose_host(take("nightly", timeout=10))
    clock.advance(11)
    sweeper.sweep()
    assert outcome(token) == ""
    clock.advance(11)
    sweeper.sweep()
    assert outcome(token) == "expired"
    expired = TaskLockEvent.objects.get(kind="expired")
    assert (expired.token, expired.reason) == (token, "its lease ended without a release")


def test_looks_that_are_less_than_a_lease_apart_are_not_enough(take, clock, sweeper):
    token, _value = lose_host(take("nightly", timeout=10))
    clock.advance(11)
    sweeper.sweep()
    clock.advance(9)
    sweeper.sweep()
    assert outcome(token) == ""


def test_row_within_its_lease_is_not_looked_at(take, clock, sweeper):
    token, _value = lose_host(take("nightly", timeout=1000))
    clock.advance(900)
    sweeper.sweep()
    clock.advance(150)
    sweeper.sweep()  # the first look
    clock.advance(900)
    sweeper.sweep()
    assert outcome(token) == ""


def test_row_whose_token_is_found_again_must_be_missed_twice_anew(take, clock, sweeper):
    lock = take("nightly", timeout=10)
    token, value = lose_host(lock)
    clock.advance(11)
    sweeper.sweep()
    get_store("redis").add(lock.key, value, 60)
    clock.advance(11)
    sweeper.sweep()
    lose_host(lock)
    clock.advance(11)
    sweeper.sweep()
    assert outcome(token) == ""


def test_row_that_its_run_has_closed_is_no_longer_missed(take, clock, sweeper):
    lock = take("nightly", timeout=10)
    lose_host(lock)
    clock.advance(11)
    sweeper.sweep()
    assert len(sweeper.missed) == 1
    lock.release()
    sweeper.sweep()
    assert sweeper.missed == {}


@pytest.mark.parametrize("alias", ["redis", "pymemcache"])
def test_held_lock_is_left_alone_however_old(take, clock, sweeper, empty_cache, alias):
    empty_cache(alias)
    lock = take("nightly", timeout=10, cache=alias)
    for _ in range(3):
        clock.advance(100)
        sweeper.sweep()
    assert outcome(lock.token) == ""


def test_run_has_the_last_word_about_its_row(take, clock, sweeper):
    lock = take("nightly", timeout=10)
    token, value = lose_host(lock)
    for _ in range(2):
        clock.advance(11)
        sweeper.sweep()
    get_store("redis").add(lock.key, value, 10)
    lock.release()
    assert outcome(token) == "released"
    assert not TaskLockEvent.objects.filter(kind="expired").exists()


def test_lock_of_a_dead_process_is_freed(take, clock, sweeper, monkeypatch):
    lock = take("nightly", timeout=10)
    monkeypatch.setattr(sweep, "proof_of_death", lambda holder: "the test killed it")
    clock.advance(11)
    sweeper.sweep()
    assert not lock.locked()
    assert outcome(lock.token) == "dead"
    assert TaskLockEvent.objects.get(kind="expired").reason == "the test killed it"


def test_cache_that_is_down_does_not_keep_the_rows_of_others_from_being_swept(
    take, clock, sweeper, dead_redis, caplog
):
    for number in range(2):
        row("acquired", 100, key=f"a{number}", cache=dead_redis, timeout=10, token=f"d{number}")
    token, _value = lose_host(take("nightly", timeout=10))
    for _ in range(2):
        clock.advance(11)
        sweeper.sweep()
    assert outcome(token) == "expired"
    assert outcome("d0") == outcome("d1") == ""
    assert caplog.text.count("Open history rows of the cache 'dead' cannot be checked") == 2


def test_cache_that_is_no_longer_in_the_settings_is_not_asked(clock, sweeper, caplog):
    row("acquired", 100, cache="removed", timeout=10, token="t")
    for _ in range(2):
        clock.advance(11)
        sweeper.sweep()
    assert (outcome("t"), caplog.text) == ("", "")


# Old rows


def test_sweep_prunes(sweeper):
    ran(31 * 86_400)
    sweeper.sweep()
    assert not TaskLockEvent.objects.exists()


def test_prune_deletes_what_is_too_old_in_batches(settings):
    settings.SINGLETASK_HISTORY_DAYS = 7
    old = timezone.now() - timedelta(days=8)
    event = {"name": "n", "key": "k", "at": old}
    rows = [TaskLockEvent(kind="skipped", **event) for _ in range(25)]
    TaskLockEvent.objects.bulk_create(rows)
    TaskLockEvent.objects.create(kind="skipped", **{**event, "at": timezone.now()})
    TaskLockEvent.objects.create(kind="acquired", **event)
    assert [*prune(batch=10)] == [10, 10, 5]
    assert TaskLockEvent.objects.count() == 2


def test_prune_keeps_what_went_on_until_lately():
    ran(60, lasted=1000)
    skipped(1000, last=60)
    assert sum(prune(older_than=500)) == 0


def test_prune_deletes_skips_before_the_runs_that_they_met():
    ran(9000, lasted=60, token="t")
    skipped(9050, 9040, 3, blocked_by="t")
    assert sum(prune(older_than=600, limit=1)) == 1
    assert [row.kind for row in TaskLockEvent.objects.all()] == ["acquired"]


# The worker


def test_one_worker_sweeps(monkeypatch):
    sweeps = []
    monkeypatch.setattr(Sweeper, "sweep", lambda self: sweeps.append(1))
    monkeypatch.setattr(connections, "close_all", lambda: None)
    one, two = watcher.Watcher(), watcher.Watcher()
    watcher.sweep(one)
    watcher.sweep(two)
    watcher.sweep(one)
    assert len(sweeps) == 2
    assert [lock.name for lock in held()] == []
    assert not TaskLockEvent.objects.exists()
    one.leader.release()
    watcher.sweep(two)
    assert len(sweeps) == 3
    two.leader.release()


@pytest.mark.parametrize("difference", ["alias", "migration", "history"])
def test_two_projects_on_one_cache_both_sweep(settings, monkeypatch, difference):
    """They have histories of their own; the second one may be at the same address elsewhere."""
    sweeps = []
    monkeypatch.setattr(Sweeper, "sweep", lambda self: sweeps.append(conf.history))
    monkeypatch.setattr(connections, "close_all", lambda: None)
    one, two = watcher.Watcher(), watcher.Watcher()
    watcher.sweep(one)
    if difference == "alias":
        keep_history_in(settings, "sqlite")
    elif difference == "migration":
        MigrationRecorder.Migration.objects.update(applied=timezone.now())
    else:
        settings.SINGLETASK_HISTORY = "off"
    watcher.sweep(two)
    assert one.leader
    assert two.leader
    assert one.leader.name == two.leader.name
    assert len(sweeps) == (1 if difference == "history" else 2)
    one.leader.release()
    two.leader.release()


def test_a_history_that_cannot_be_swept_is_logged_once(monkeypatch, caplog):

    def fail(sweeper):
        if next(failures):
            raise OperationalError("the server is away.\nmore")

    failures = iter([True, True, False, True])
    monkeypatch.setattr(Sweeper, "sweep", fail)
    monkeypatch.setattr(connections, "close_all", lambda: None)
    pool = watcher.Watcher()
    for _ in range(4):
        watcher.sweep(pool)
    assert caplog.text.count("cannot be cleaned up (OperationalError: the server is away);") == 2
    assert "Traceback" not in caplog.text
    pool.leader.release()
