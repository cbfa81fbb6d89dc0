"""What the watcher of a worker's main process does with killed runs, and its sweeper.

See also tests/worker.
"""

from __future__ import annotations

import os
import time
from functools import partial
from types import SimpleNamespace

import pytest
from django.db import connections

from django_singletask.worker import sweeper, watcher
from tests import inside
from tests.deliveries import collect_sent, wait_for_debts
from tests.testapp.tasks import hold, unique

PROOF_THAT_GONE = watcher.proof_that_gone

pytestmark = pytest.mark.django_db(databases="__all__")


def accepted(task, *args, headers=None):
    """Return the delivery of a message, by default of one with a token for its run."""
    headers = headers or inside.headers_for(task, token="token")
    return inside.accepted(task, headers, *args)


def test_a_run_whose_arguments_give_no_lock_has_nothing_to_free(monkeypatch):
    pool = watcher.Watcher()
    pool.deliveries[1] = accepted(hold)
    monkeypatch.setattr(watcher, "proof_that_gone", lambda pid, start: "gone")
    pool.check_processes()
    assert (pool.deliveries, pool.to_free) == ({}, [])


def test_a_dead_process_is_replaced_although_its_lock_cannot_be_told(monkeypatch):
    pool = watcher.Watcher()
    pool.deliveries[1] = run = accepted(hold, "a")
    monkeypatch.setattr(watcher, "proof_that_gone", lambda pid, start: "gone")
    monkeypatch.setattr(run, "find_lock", lambda: {}["no such key"])
    with pytest.raises(KeyError):
        pool.check_processes()
    assert pool.someone_died


def test_the_main_process_looks_at_the_epoch_each_second(on_redis, monkeypatch):
    """Otherwise each process that it forks would wait for a second before its first lock."""
    pool, time, looks = watcher.Watcher(), inside.stop_clock(monkeypatch), []

    def note(look, *keys):
        looks.append(seconds)
        look(*keys)

    with inside.handled("look", note):
        for seconds in (10, 0.9, 0.2):
            time.now += seconds
            pool.learn_epoch()
    assert looks == [10, 0.2]


def test_a_cache_that_is_down_does_not_stop_the_watcher(settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis
    watcher.Watcher().learn_epoch()


def test_a_store_that_is_down_is_asked_again_until_the_lease_is_over(
    settings, dead_redis, monkeypatch, caplog
):
    settings.SINGLETASK_CACHE = dead_redis
    monkeypatch.setattr(connections, "close_all", lambda: None)
    pool = watcher.Watcher()
    now = time.monotonic()
    run = accepted(hold, "a")
    ref, options = run.find_lock()
    free = partial(run.free, ref, options.lock_slots, "process 1 is gone")
    pool.to_free = [(now + 100, free), (now - 1, free)]
    pool.free()
    assert pool.to_free == [(now + 100, free)]
    pool.free()
    assert caplog.text.count("not freed yet") == 1
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize("options", [{"lock_timeout": "60"}, {"lock_slots": "3"}])
def test_a_message_with_options_of_wrong_types_does_not_stop_the_check_of_others(
    monkeypatch, options
):
    pool = watcher.Watcher()
    monkeypatch.setattr(watcher, "proof_that_gone", lambda pid, start: "gone")
    headers = inside.headers_for(hold, token="token", options=options)
    pool.deliveries = {1: accepted(hold, "a", headers=headers), 2: accepted(hold, "b")}
    pool.check_processes()
    assert pool.deliveries == {}
    assert len(pool.to_free) == 1


class TestKilledRun:
    """A process is gone that held the lock of a run, whose token the main process has chosen."""

    @pytest.fixture(autouse=True)
    def is_gone(self, monkeypatch, on_redis):
        monkeypatch.setattr(watcher, "proof_that_gone", lambda pid, start: "process 1 is gone")
        # It would close the connection of the test's transaction.
        monkeypatch.setattr(connections, "close_all", lambda: None)

    @pytest.fixture
    def held(self):
        """Let the run with this token hold the lock of a task, whose holder is alive here."""

        def hold_lock(task, token="token"):
            lock = inside.lock_of_run(task.lock("a"), token=token)
            assert lock.acquire()
            return lock

        return hold_lock

    @pytest.mark.parametrize("fields", [("name", "key"), ()], ids=["apply_async", "send_task"])
    def test_its_lock_is_freed(self, held, fields):
        lock, pool = held(hold), watcher.Watcher()
        place = {field: getattr(lock, field) for field in fields}
        headers = inside.headers_for(hold, token="token", **place)
        pool.deliveries[1] = accepted(hold, "a", headers=headers)
        pool.check_processes()
        pool.free()
        assert not lock.locked()
        assert (pool.deliveries, pool.to_free) == ({}, [])
        assert pool.someone_died

    def test_the_lock_of_the_next_run_stays(self, held):
        lock, pool = held(hold, token="next"), watcher.Watcher()
        pool.deliveries[1] = accepted(hold, "a")
        pool.check_processes()
        pool.free()
        assert lock.owned()
        lock.release()

    def test_the_lock_of_a_living_process_stays(self, held, monkeypatch):
        """Negative control."""
        monkeypatch.setattr(watcher, "proof_that_gone", lambda pid, start: None)
        lock, pool = held(hold), watcher.Watcher()
        pool.deliveries[1] = accepted(hold, "a")
        pool.check_processes()
        pool.free()
        assert lock.owned()
        assert 1 in pool.deliveries
        lock.release()

    def test_the_lock_of_a_later_process_with_the_same_pid_stays(self, held, monkeypatch):
        """Its start is read at a look, so it may be that of the later process: no proof of death.

        Negative control: with the start of the first process that would be one.
        """
        monkeypatch.setattr(watcher, "proof_that_gone", PROOF_THAT_GONE)
        lock, pool = held(hold), watcher.Watcher()
        pool.deliveries[os.getpid()] = accepted(hold, "a")
        pool.check_processes()
        assert pool.deliveries[os.getpid()].start == lock.holder().start
        pool.check_processes()
        pool.free()
        assert lock.owned()
        pool.deliveries[os.getpid()].start = "1"
        pool.check_processes()
        assert len(pool.to_free) == 1
        lock.release()

    @pytest.mark.parametrize("ended", [False, True])
    def test_the_entry_of_its_queued_call(self, monkeypatch, ended):
        """A delivery that has ended may have queued its call again, with the same entry."""
        messages = collect_sent(unique.app, monkeypatch)
        unique.apply_async(("a",))
        headers = inside.header_of(messages[0]["headers"]) | {"token": "token"}
        pool = watcher.Watcher()
        pool.deliveries[1] = accepted(unique, "a", headers={"singletask": headers})
        pool.deliveries[1].ended = ended
        pool.check_processes()
        pool.free()
        wait_for_debts()
        assert (unique.queued("a") is not None) == ended


class TestSweep:
    def test_there_is_one_each_minute(self, monkeypatch):
        class Stop(BaseException):
            pass

        def sweep(*, failed_before):
            seen.append(failed_before)
            return len(seen) == 2

        def sleep(seconds):
            assert seconds == 60
            if len(seen) == 4:
                raise Stop

        seen = []
        monkeypatch.setattr(sweeper, "try_to_sweep", sweep)
        monkeypatch.setattr(sweeper, "time", SimpleNamespace(sleep=sleep))
        with pytest.raises(Stop):
            sweeper.Sweeper().run()
        assert seen == [False, False, True, False]
