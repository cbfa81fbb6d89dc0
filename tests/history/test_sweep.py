from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta

import pytest
from django.core.cache import caches
from django.db import OperationalError, connection, connections
from django.db.migrations.recorder import MigrationRecorder
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_singletask import TaskLock
from django_singletask.history import sweep as history
from django_singletask.models import TaskLockEvent
from django_singletask.worker import sweeper
from tests import inside
from tests.command_line import locks_as_json
from tests.deadline import wait_for
from tests.past_rows import before_now, keep_history_in, new, ran, row, save, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]


def advance(seconds):
    """Let time pass since the rows were written."""
    for run in TaskLockEvent.objects.filter(kind="run"):
        run.at -= timedelta(seconds=seconds)
        run.noticed_at = run.noticed_at and run.noticed_at - timedelta(seconds=seconds)
        run.save()


def lose_host(lock):
    """Let the entry end as if the holder's host was lost; return its token and its bytes."""
    value = lock.holder().encode()
    inside.stop_renewal(lock)  # it would take the lock again
    caches["redis"].delete(lock.key)
    return lock.token, value


def row_of(token):
    return TaskLockEvent.objects.get(ref=token)


def outcome(token):
    return row_of(token).outcome


# Open rows


def test_row_whose_token_is_gone_at_two_looks_is_expired(take):
    token, _value = lose_host(take("nightly", timeout=10))
    advance(11)
    history.sweep()
    noticed = row_of(token)
    assert (noticed.outcome, noticed.noticed_at is not None) == ("", True)
    advance(11)
    history.sweep()
    expired = row_of(token)
    assert (expired.outcome, expired.result, expired.ended_at) == ("expired", "", None)
    assert expired.reason == "its lease ended without a release"
    assert expired.noticed_at > noticed.noticed_at
    assert expired.actor == f"{socket.gethostname()}:{os.getpid()}"


def test_a_lock_that_was_handed_over_and_not_received_is_no_trouble(take, caplog):
    """``hand_over()`` is also how a body pauses its key, or frees it early."""
    lock = take("nightly", timeout=10)
    lock.hand_over(for_=10)
    caches["redis"].delete(lock.key)
    advance(11)
    pause = TaskLockEvent.objects.filter(kind="run").latest("at")
    assert [*TaskLockEvent.objects.open()] == [pause]
    assert locks_as_json()["locks"] == []
    history.sweep()
    pause.refresh_from_db()
    assert (pause.outcome, pause.reason) == ("released", "nobody received it")
    assert (pause.hold_ended_at - pause.at).total_seconds() == 10
    assert caplog.messages == []


def test_a_lock_that_was_handed_over_may_be_there_when_its_time_is_over(take):
    """memcached counts whole seconds, and clocks differ."""
    lock = take("nightly", timeout=10)
    lock.hand_over(for_=10)
    advance(11)
    history.sweep()  # finds the entry
    caches["redis"].delete(lock.key)
    history.sweep()
    pause = TaskLockEvent.objects.filter(kind="run").latest("at")
    assert (pause.outcome, pause.reason) == ("released", "nobody received it")


def test_fixed_lease_that_expired_ended_when_its_time_was_over(take):
    token, _value = lose_host(take("nightly", timeout=10, renew=False))
    for _ in range(2):
        advance(11)
        history.sweep()
    expired = row_of(token)
    assert expired.outcome == "expired"
    assert (expired.hold_ended_at - expired.at).total_seconds() == 10


def test_fixed_lease_that_was_extended_ended_at_an_unknown_time(take):
    lock = take("nightly", timeout=10, renew=False)
    advance(11)
    history.sweep()  # finds the entry
    token, _value = lose_host(lock)
    for _ in range(2):
        advance(11)
        history.sweep()
    expired = row_of(token)
    assert (expired.outcome, expired.fixed) == ("expired", False)


def test_looks_that_are_less_than_a_lease_apart_are_not_enough(take):
    token, _value = lose_host(take("nightly", timeout=10))
    advance(11)
    history.sweep()
    advance(9)
    history.sweep()
    assert outcome(token) == ""


def test_row_within_its_lease_is_not_looked_at(take):
    token, _value = lose_host(take("nightly", timeout=1000))
    advance(900)
    history.sweep()
    advance(150)
    history.sweep()  # the first look
    advance(900)
    history.sweep()
    assert outcome(token) == ""


def test_row_whose_token_is_found_again_must_be_missed_twice_anew(take):
    lock = take("nightly", timeout=10)
    token, value = lose_host(lock)
    advance(11)
    history.sweep()
    inside.put_entry(lock.key, value)
    advance(11)
    history.sweep()
    lose_host(lock)
    advance(11)
    history.sweep()
    assert outcome(token) == ""


@pytest.mark.parametrize(("error", "result"), [(None, "returned"), (ZeroDivisionError(), "")])
def test_row_of_a_run_that_was_killed_after_it_had_kept_its_lock_is_closed(error, result):
    with suppress(ZeroDivisionError), TaskLock("nightly", at_least=60) as lock:
        if error is not None:
            raise error
    TaskLockEvent.objects.update(outcome="", result="", ended_at=None)
    advance(3600)
    history.sweep()
    row = TaskLockEvent.objects.get()
    assert (row.outcome, row.result) == ("released", result)
    assert lock.holder().kept


@pytest.mark.parametrize("alias", ["redis", "pymemcache"])
def test_held_lock_is_left_alone_however_old(take, empty_cache, alias):
    empty_cache(alias)
    lock = take("nightly", timeout=10, cache=alias)
    for _ in range(3):
        advance(100)
        history.sweep()
    assert outcome(lock.token) == ""


def test_run_has_the_last_word_about_its_row(take):
    lock = take("nightly", timeout=10)
    token, value = lose_host(lock)
    for _ in range(2):
        advance(11)
        history.sweep()
    inside.put_entry(lock.key, value)
    lock.release()
    assert outcome(token) == "released"
    assert row_of(token).reason == ""


def test_lock_of_a_dead_process_is_freed(take, monkeypatch):
    lock = take("nightly", timeout=10)
    monkeypatch.setattr(history, "proof_of_death", lambda holder: "the test killed it")
    advance(11)
    history.sweep()
    assert not lock.locked()
    dead = row_of(lock.token)
    assert (dead.outcome, dead.reason) == ("dead", "the test killed it")


def test_cache_that_is_down_does_not_keep_the_rows_of_others_from_being_swept(
    take, dead_redis, caplog
):
    for number in range(2):
        row("run", 100, key=f"a{number}", cache=dead_redis, timeout=10, token=f"d{number}")
    token, _value = lose_host(take("nightly", timeout=10))
    for _ in range(2):
        advance(11)
        history.sweep()
    assert outcome(token) == "expired"
    assert outcome("d0") == outcome("d1") == ""
    assert caplog.text.count("Open history rows of the cache 'dead' cannot be checked") == 2


def test_cache_that_is_no_longer_in_the_settings_is_not_asked(caplog):
    row("run", 100, cache="removed", timeout=10, token="t")
    for _ in range(2):
        advance(11)
        history.sweep()
    assert (outcome("t"), caplog.text) == ("", "")


def test_entries_are_read_in_batches():
    batches = []

    def note(read_many, keys):
        batches.append(len(keys))
        return read_many(keys)

    facts = {"kind": "run", "at": before_now(100), "cache": "redis", "timeout": 10}
    runs = [new(ref=f"t{n}", name="n", key=f"k{n}", **facts) for n in range(1000)]
    TaskLockEvent.objects.bulk_create(runs)
    one_by_one = inside.failing("read", AssertionError())
    with (
        inside.handled("read_many", note),
        one_by_one,
        CaptureQueriesContext(connection) as queries,
    ):
        history.sweep()
    assert batches == [500, 500]
    assert len(queries) < 10
    assert TaskLockEvent.objects.filter(noticed_at=None).count() == 0


# Old rows


@pytest.mark.parametrize("days", [7, 30])
def test_sweep_prunes(settings, days):
    settings.SINGLETASK_HISTORY_DAYS = days
    ran((days + 1) * 86_400)
    ran((days - 1) * 86_400)
    history.sweep()
    assert TaskLockEvent.objects.count() == 1


def test_prune_deletes_what_is_too_old_in_batches():
    old = timezone.now() - timedelta(days=8)
    event = {"name": "n", "key": "k", "at": old}
    rows = [new(kind="conflict", ref=f"c{n}", **event) for n in range(25)]
    TaskLockEvent.objects.bulk_create(rows)
    save(kind="conflict", ref="new", **{**event, "at": timezone.now()})
    save(kind="run", ref="t", **event)
    assert [*history.prune(batch=10, older_than=7 * 86_400)] == [10, 10, 5]
    assert TaskLockEvent.objects.count() == 2


def test_prune_keeps_what_went_on_until_lately():
    ran(60, lasted=1000)
    skipped(1000, last=60)
    assert sum(history.prune(older_than=500)) == 0


def test_prune_deletes_conflicts_before_the_runs_that_they_met():
    ran(9000, lasted=60, token="t")
    skipped(9050, 9040, 3, blocked_by="t")
    assert sum(history.prune(older_than=600, limit=1)) == 1
    assert [row.kind for row in TaskLockEvent.objects.all()] == ["run"]


# The worker


@pytest.mark.parametrize("cache_alias", ["db_sqlite", "redis"], indirect=True)
def test_of_two_workers_one_takes_each_turn(cache_alias, monkeypatch):
    assert history.TURN < sweeper.SWEEP
    monkeypatch.setattr(history, "TURN", 1)
    assert history.take_turn()
    assert not history.take_turn()
    wait_for(history.take_turn, "the turn is over")


@pytest.fixture
def sweeps(monkeypatch):
    """Give the list of the sweeps, which do nothing else."""
    sweeps = []
    monkeypatch.setattr(history, "sweep", lambda: sweeps.append(1))
    monkeypatch.setattr(connections, "close_all", lambda: None)
    return sweeps


def test_one_worker_sweeps(sweeps):
    for _ in range(3):
        assert not sweeper.try_to_sweep()
    assert len(sweeps) == 1
    assert locks_as_json("list")["locks"] == []
    assert not TaskLockEvent.objects.exists()


@pytest.mark.parametrize("difference", ["alias", "migration", "history"])
def test_two_projects_on_one_cache_both_sweep(settings, difference):
    """They have histories of their own; the second one may be at the same address elsewhere."""
    assert history.take_turn()
    if difference == "alias":
        keep_history_in(settings, "sqlite")
    elif difference == "migration":
        MigrationRecorder.Migration.objects.update(applied=timezone.now())
    else:
        settings.SINGLETASK_HISTORY = "off"
    assert history.take_turn()


def test_without_a_history_only_the_lock_table_is_cleaned(settings, sweeps):
    settings.SINGLETASK_HISTORY = "off"
    sweeper.try_to_sweep()
    assert sweeps == []


def test_a_history_that_cannot_be_swept_is_logged_once(monkeypatch, sweeps, caplog):

    def fail():
        if next(failures):
            raise OperationalError("the server is away.\nmore")

    failures = iter([True, True, False, True])
    monkeypatch.setattr(history, "sweep", fail)
    monkeypatch.setattr(history, "take_turn", lambda: True)
    failed = False
    for _ in range(4):
        failed = sweeper.try_to_sweep(failed_before=failed)
    assert caplog.text.count("cannot be cleaned up (OperationalError: the server is away);") == 2
    assert "Traceback" not in caplog.text
