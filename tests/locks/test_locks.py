"""TaskLock and only_one: take, hold, wait, give back, and what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import logging
import math
import os
import pickle
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.core.cache import caches
from django.db import connections

from django_singletask import (
    DuplicateTask,
    LockConflict,
    LockError,
    LockLost,
    LockUnavailable,
    TaskLock,
    current_lock,
    only_one,
)
from django_singletask.holder import Holder
from django_singletask.testing import advance_time, no_locks
from tests import inside
from tests.entries import in_child, listening

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]


@pytest.fixture
def events():
    with listening() as seen:
        yield seen


def of_kind(events, kind):
    return [event for event in events if event.kind == kind]


class TestWith:
    def test_holds_the_lock_in_the_block(self, cache_alias):
        with TaskLock("nightly") as lock:
            assert lock
            assert lock.locked()
            assert lock.owned()
            assert TaskLock("nightly").locked()
        assert not lock
        assert not lock.locked()

    def test_a_held_lock_raises(self, cache_alias):
        with TaskLock("nightly") as lock:
            with pytest.raises(LockConflict) as caught, TaskLock("nightly"):
                pytest.fail("entered")
            assert caught.value.name == "nightly"
            assert caught.value.holder.token == lock.token
            assert caught.value.holder.pid == os.getpid()

    def test_skip_yields_a_false_lock(self, cache_alias):
        with TaskLock("nightly"), TaskLock("nightly", on_conflict="skip") as second:
            assert not second
            assert second.blocker.pid == os.getpid()

    def test_a_skipped_block_frees_nothing(self):
        with TaskLock("nightly") as lock:
            with TaskLock("nightly", on_conflict="skip"):
                pass
            assert lock.owned()

    def test_the_lock_is_free_after_an_error(self):
        with pytest.raises(ZeroDivisionError), TaskLock("nightly") as lock:
            raise ZeroDivisionError
        assert not lock.locked()

    def test_an_object_can_be_used_again(self):
        lock = TaskLock("nightly")
        with lock:
            first = lock.token
        with lock:
            assert lock.token != first

    def test_repr_says_whether_the_lock_is_held(self):
        lock = TaskLock("nightly")
        assert repr(lock) == "<TaskLock nightly (not held)>"
        with lock:
            assert repr(lock) == f"<TaskLock nightly (held, token {lock.token})>"

    def test_another_name_is_free(self):
        with TaskLock("nightly"), TaskLock("hourly") as lock:
            assert lock


@pytest.fixture
def no_history(settings):
    """It would be written on connections of other threads."""
    settings.SINGLETASK_HISTORY = "off"


@pytest.mark.usefixtures("no_history")
class TestAcquireAndRelease:
    def test_acquire_and_release_return_whether_they_did(self, cache_alias):
        lock, other = TaskLock("nightly"), TaskLock("nightly")
        assert lock.acquire()
        assert not other.acquire()
        assert other.blocker.token == lock.token
        assert lock.release()
        assert other.acquire()
        assert other.release()

    def test_check_of_what_is_not_held_is_an_error(self):
        lock = TaskLock("nightly")
        with pytest.raises(LockError, match="acquire"):
            lock.check()
        with lock:
            lock.check()
        with pytest.raises(LockError, match="acquire"):
            lock.check()

    def test_release_of_what_is_not_held_is_an_error(self):
        with pytest.raises(LockError, match="not held"):
            TaskLock("nightly").release()

    def test_release_never_frees_another_holder(self, cache_alias):
        slow, next_one = TaskLock("nightly"), TaskLock("nightly")
        slow.acquire()
        assert TaskLock("nightly").clear()
        next_one.acquire()
        assert not slow.release()
        assert next_one.owned()
        next_one.release()

    def test_acquire_waits_until_the_lock_is_free(self):
        first = TaskLock("nightly")
        taken = threading.Event()

        def hold():
            with TaskLock("nightly"):
                taken.set()
                time.sleep(0.2)
            connections.close_all()

        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(30)
        assert first.acquire(wait=30)
        first.release()
        thread.join()

    def test_acquire_gives_up_when_the_wait_is_over(self):
        with held_elsewhere("nightly"):
            began = time.monotonic()
            assert not TaskLock("nightly").acquire(wait=0.2)
            assert 0.2 <= time.monotonic() - began < 30

    def test_a_lock_that_would_wait_for_its_own_block_raises_at_once(self):
        began = time.monotonic()
        with TaskLock("nightly"), TaskLock("another"):
            with pytest.raises(LockConflict), TaskLock("nightly", wait=30):
                pytest.fail("entered")
        assert time.monotonic() - began < 15

    def test_a_thread_of_a_pool_waits_for_what_its_earlier_job_acquired(self):
        first, second = TaskLock("nightly"), TaskLock("nightly")
        release = threading.Timer(0.2, first.release)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(first.acquire).result()
            release.start()
            assert pool.submit(second.acquire, wait=30).result()
            assert pool.submit(second.release).result()
        release.join()

    def test_coroutines_that_share_threads_wait_for_each_other(self):
        """Five of twelve were refused at once when the number of the thread decided."""

        async def work():
            for _ in range(2):
                lock = TaskLock("nightly")
                assert await asyncio.to_thread(lock.acquire, wait=30)
                await asyncio.sleep(0.01)
                assert await asyncio.to_thread(lock.release)

        async def work_at_once():
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(13))
            await asyncio.gather(*(work() for _ in range(12)))

        asyncio.run(work_at_once())

    def test_a_job_in_another_thread_waits_for_the_block_around_it(self):
        """It has the context of the block, which another thread can end."""
        opened, ended = threading.Event(), []

        def wait():
            opened.set()
            ended.append(TaskLock("nightly").acquire(wait=30))

        with TaskLock("nightly"):
            context = contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(wait,))
            thread.start()
            assert opened.wait(30)
        thread.join()
        assert ended == [True]
        TaskLock("nightly").clear()

    def test_a_fixed_lease_of_its_own_block_is_waited_for_if_it_ends_in_time(self):
        with TaskLock("nightly", timeout=0.3, renew=False):
            with pytest.raises(LockConflict), TaskLock("nightly", wait=0.1):
                pytest.fail("entered")
            with TaskLock("nightly", wait=30) as second:
                assert second.owned()


class TestLateReply:
    """The lease is counted from before the request, so it can end before the reply comes."""

    @pytest.fixture
    def answer_late(self, monkeypatch, cache_alias):
        """Give the function that lets a store answer late: each take by 40 seconds at first."""
        time, trips = inside.stop_clock(monkeypatch), []

        @contextlib.contextmanager
        def answer(times):
            def late(take, *arguments, **options):
                taken = take(*arguments, **options)
                trips.append(arguments)
                if len(trips) <= times:
                    time.now += 40
                return taken

            with inside.handled("take", late, cache=cache_alias):
                yield trips

        return answer

    def test_a_lease_that_ended_before_the_reply_is_given_back_and_taken_anew(self, answer_late):
        with answer_late(1) as trips, TaskLock("nightly", timeout=30) as lock:
            assert not lock.lost
            assert lock.owned()
        assert len(trips) == 2
        assert not TaskLock("nightly").locked()

    def test_a_cache_that_always_answers_late_is_an_error(self, answer_late, wait_for):
        with answer_late(100) as trips:
            with pytest.raises(LockUnavailable, match="Give the lock a longer timeout"):
                TaskLock("nightly", timeout=30).acquire()
        assert len(trips) == 4
        wait_for(lambda: not TaskLock("nightly").locked(), "nothing is left behind")


@pytest.mark.usefixtures("no_renewal_thread")
class TestOneObjectServesOneAcquisition:
    def test_it_cannot_be_acquired_while_it_holds(self):
        lock = TaskLock("nightly")
        lock.acquire()
        token = lock.token
        with pytest.raises(LockError, match="Create one for each use"):
            lock.acquire()
        assert lock.token == token
        assert lock.release()
        assert lock.acquire()
        assert lock.release()

    def test_it_cannot_be_entered_inside_its_own_block(self):
        with TaskLock("nightly", on_conflict="skip") as lock:
            with pytest.raises(LockError, match="in use"), lock:
                pytest.fail("entered")
            assert lock.owned()

    def test_a_second_thread_does_not_enter(self):
        """It would find the object true, run the block, and free the lock of the first thread."""
        shared = TaskLock("nightly", on_conflict="skip")
        with shared, ThreadPoolExecutor(1) as pool:
            with pytest.raises(LockError, match="in use"):
                pool.submit(shared.__enter__).result()
            assert shared.owned()

    def test_a_skipped_block_keeps_the_object_until_its_end(self):
        """Otherwise it could become true before the skipping thread has looked at it."""
        shared = TaskLock("nightly", on_conflict="skip")
        with held_elsewhere("nightly"):
            shared.__enter__()
        with ThreadPoolExecutor(1) as pool, pytest.raises(LockError, match="in use"):
            pool.submit(shared.acquire).result()
        assert not shared
        shared.__exit__(None, None, None)
        with shared:
            assert shared.owned()

    def test_a_lock_that_a_skipped_block_does_not_hold_cannot_be_handed_over(self):
        """Nor does the attempt let another thread use the object during the block."""
        shared = TaskLock("nightly", on_conflict="skip")
        with held_elsewhere("nightly"), shared:
            for leave in (shared.release, lambda: shared.hand_over(for_=60)):
                with pytest.raises(LockError, match="is not held by this TaskLock"):
                    leave()
            with pytest.raises(LockError, match="in use"):
                shared.acquire()

    def test_another_thread_may_release(self):
        lock = TaskLock("nightly")
        lock.acquire()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lock.release).result()
            pool.submit(connections.close_all).result()
        assert lock.acquire()
        assert lock.release()

    def test_after_a_conflict_it_can_be_used_again(self):
        lock = TaskLock("nightly")
        with held_elsewhere("nightly"):
            with pytest.raises(LockConflict), lock:
                pytest.fail("entered")
            assert not lock.acquire()
        with lock:
            assert lock.owned()


class TestHolding:
    def test_extend(self, cache_alias):
        with TaskLock("nightly", timeout=5) as lock:
            lock.extend(50)
            remaining = lock.remaining()
            assert remaining is None or 45 < remaining < 50.1

    def test_extend_of_a_cleared_lock_is_lost(self, cache_alias):
        lock = TaskLock("nightly")
        lock.acquire()
        TaskLock("nightly").clear()
        with pytest.raises(LockLost):
            lock.extend()
        assert lock.lost
        with pytest.raises(LockLost):
            lock.check()
        assert not lock.release()

    @pytest.mark.parametrize("reply_takes", [0, 10])
    def test_a_lease_is_trusted_from_before_the_request_until_it_ends(
        self, monkeypatch, reply_takes
    ):
        """If it was trusted from the reply on, that would be ten seconds longer."""
        time = inside.stop_clock(monkeypatch)
        began = time.now

        def reply_late(take, *arguments, **options):
            time.now += reply_takes
            return take(*arguments, **options)

        with inside.handled("take", reply_late):
            with TaskLock("nightly", timeout=30, renew=False) as lock:
                time.now = began + 29
                assert not lock.lost
                time.now = began + 30
                assert lock.lost  # without a request

    def test_holder_and_remaining_of_a_free_lock(self, cache_alias):
        lock = TaskLock("nightly")
        assert lock.holder() is None
        assert lock.remaining() is None
        assert not lock.owned()

    def test_holder(self, cache_alias):
        with TaskLock("nightly", timeout=7) as lock:
            holder = TaskLock("nightly").holder()
            assert (holder.token, holder.name, holder.timeout) == (lock.token, "nightly", 7)
            assert time.time() - 60 < holder.since <= time.time()

    def test_a_lease_is_renewed_while_the_lock_is_held(self, cache_alias):
        with TaskLock("nightly", timeout=1.5) as lock:
            inside.wait_for_renewals(lock, 1.5)
            assert lock.owned()

    def test_without_renewal_the_lease_ends(self, wait_for):
        """Negative control of the test above."""
        with TaskLock("nightly", timeout=0.5, renew=False) as lock:
            wait_for(lambda: not lock.locked(), "the lease ends")
            assert lock.lost


class TestClear:
    def test_the_lock_is_freed_whoever_holds_it(self, cache_alias):
        with TaskLock("nightly"):
            assert TaskLock("nightly").clear()
            assert not TaskLock("nightly").locked()

    def test_a_free_lock_is_not_cleared(self, cache_alias):
        assert not TaskLock("nightly").clear()

    def test_a_lock_with_another_token_is_not_cleared(self, cache_alias):
        with TaskLock("nightly") as lock:
            assert not TaskLock("nightly").clear(token="another")
            assert lock.owned()


class TestFailures:
    def test_a_store_that_is_down_is_an_error_not_a_conflict(self, dead_redis):
        with pytest.raises(Exception, match=r"Connection|refused|connect"):
            TaskLock("nightly", cache=dead_redis).acquire()

    def test_a_failed_release_is_logged_and_does_not_raise(self, caplog):
        with inside.failing("release"), TaskLock("nightly", timeout=1) as lock:
            pass
        messages = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert [lock.key in record.getMessage() for record in messages] == [True]

    @pytest.mark.only_all("a with block shows it", "acquire", "hand_over")
    @pytest.mark.parametrize("use", ["acquire", "with", "hand_over"])
    def test_a_signal_at_any_line_leaves_no_lock_behind(self, use, wait_for):
        """The release or a debt frees the lock, or its lease ends since nobody renews it."""
        names = []
        for line in itertools.count(1):
            names.append(f"interrupted in {use} at line {line}")
            # Use a new context each time: an interrupted block leaves its lock in the context.
            context = contextvars.copy_context()
            if not context.run(take_and_give_back, names[-1], use, line):
                break
        for name in names:
            lock = TaskLock(name)
            wait_for(lambda lock=lock: not lock.locked(), f"{name}: the lock is free")
        assert len(names) > 60

    def test_a_lock_that_a_lost_request_took_is_acquired(self, cache_alias):
        def twice(take, *arguments, **options):
            take(*arguments, **options)
            return take(*arguments, **options)

        with inside.handled("take", twice, cache=cache_alias), TaskLock("nightly") as lock:
            assert lock.owned()

    def test_an_entry_that_something_else_wrote_is_a_holder_without_a_name(self):
        lock = TaskLock("nightly")
        caches["redis"].set(lock.key, "pickled", 30)
        assert not lock.acquire()
        assert lock.blocker == Holder.decode(b"")


class TestForkedChild:
    """The lock is the parent's, who renews it and gives it back."""

    def test_it_does_not_free_the_lock(self):
        with TaskLock("nightly") as lock:
            assert in_child(lambda: lock.release() is False)
            assert lock.owned()

    def test_it_does_not_extend_the_lock(self):
        def extend():
            with pytest.raises(LockError, match="parent process"):
                lock.extend()
            return True

        with TaskLock("nightly") as lock:
            assert in_child(extend)

    def test_it_does_not_renew_a_received_lock_that_it_enters(self):
        lock = TaskLock("nightly")
        lock.acquire()
        received = TaskLock.receive(lock.hand_over(for_=60))

        def enter():
            with received:
                return not inside.kept_leases()

        assert in_child(enter)
        assert received.owned()
        received.release()

    # Without the thread: else the parent may be the first to notice it, and its child would
    # inherit that.
    @pytest.mark.usefixtures("no_renewal_thread")
    def test_it_asks_the_store_whether_the_parent_still_has_it(self, cache_alias, monkeypatch):
        def is_lost():
            lock.check()  # the parent may be about to take again what the cache forgot
            inside.stop_clock(monkeypatch).now += 1
            return is_lost_at_once()

        def is_lost_at_once():
            with pytest.raises(LockLost):
                lock.check()
            return True

        with TaskLock("nightly", timeout=30) as lock:
            assert in_child(lambda: lock.check() is None)
            TaskLock("nightly").clear()
            assert in_child(is_lost)
            with TaskLock("nightly"):
                assert in_child(is_lost_at_once)

    def test_it_finds_a_retaken_lock_held(self, empty_cache, monkeypatch):
        empty, taken_again = os.pipe(), os.pipe()

        def is_held():
            lock.check()
            os.write(empty[1], b"x")
            assert os.read(taken_again[0], 1)
            inside.stop_clock(monkeypatch).now += 1
            lock.check()
            return True

        def take_again():
            assert os.read(empty[0], 1)
            lock.extend()
            os.write(taken_again[1], b"x")

        with TaskLock("nightly", timeout=30) as lock:
            empty_cache("redis")
            assert in_child(is_held, meanwhile=take_again)

    def test_it_asks_once_a_second(self, monkeypatch):
        def ask_often():
            reads, time = [], inside.stop_clock(monkeypatch)
            began = time.now
            with inside.handled("read", lambda read, key: reads.append(key) or read(key)):
                for seconds in (0, 0.5, 0.9, 1, 1.5, 2.1):
                    time.now = began + seconds
                    lock.check()
            return len(reads) == 3

        with TaskLock("nightly", timeout=1.5) as lock:
            assert in_child(ask_often)


@pytest.mark.usefixtures("no_renewal_thread")
class TestRenewalMeetsRelease:
    def test_a_renewal_overtaken_by_a_release_leaves_nothing_behind(self, wait_for):
        def release_first(renew, *arguments):
            lock.release()
            outcome = renew(*arguments)
            assert lock.locked()  # taken again
            return outcome

        lock = TaskLock("nightly")
        lock.acquire()
        with inside.handled("renew", release_first), pytest.raises(LockError, match="not held"):
            lock.extend()
        inside.make_owed_releases()
        assert not lock.locked()

    def test_a_release_overtaken_by_a_renewal_leaves_nothing_behind(self):
        def release_before_the_reply(renew, *arguments):
            outcome = renew(*arguments)
            lock.release()
            return outcome

        lock = TaskLock("nightly")
        lock.acquire()
        with inside.handled("renew", release_before_the_reply), pytest.raises(LockError):
            lock.extend()
        assert not lock.locked()
        assert not lock.lost

    def test_a_longer_lease_whose_renewal_fails_is_not_trusted(self, monkeypatch):
        with TaskLock("nightly", timeout=30) as lock:
            time = inside.stop_clock(monkeypatch)
            with inside.failing("renew"):
                with pytest.raises(LockUnavailable):
                    lock.extend(600)
            lock.extend()
            assert lock.remaining() <= 30
            with inside.failing("renew"):
                with pytest.raises(LockUnavailable):
                    lock.extend(600)
            time.now += 30
            assert lock.lost


@pytest.mark.usefixtures("no_renewal_thread")
class TestLoss:
    @pytest.fixture
    def reasons(self, events):
        return lambda: [event.reason for event in events if event.kind == "lost"]

    @pytest.fixture
    def let_pass(self, monkeypatch):
        """Give the function that lets seconds pass for the locks of this process alone."""

        def pass_by(seconds):
            inside.stop_clock(monkeypatch).now += seconds

        return pass_by

    def test_a_lock_that_the_store_forgot_is_retaken(self, events, empty_cache, caplog):
        with TaskLock("nightly") as lock:
            empty_cache("redis")
            lock.extend()
            assert lock.owned()
            lock.check()
            empty_cache("redis")
            lock.extend()
        assert "taken again" in caplog.text
        kinds = [(event.kind, event.retaken) for event in events[1:]]
        assert kinds == [("retaken", 1), ("retaken", 2), ("released", 2)]

    def test_a_lock_that_is_gone_after_its_deadline_is_lost(self, reasons, empty_cache, let_pass):
        """Another run may have held it, and ended, in between."""
        with TaskLock("nightly", timeout=30) as lock:
            empty_cache("redis")
            let_pass(31)
            with pytest.raises(LockLost):
                lock.extend()
            assert not lock.locked()
        assert reasons() == ["its lease of 30 s ended before it could be renewed"]

    def test_what_is_lost_stays_lost(self, reasons, let_pass):
        """The entry is still there, but a check has said that it is not to be trusted."""
        with TaskLock("nightly", timeout=30) as lock:
            let_pass(31)
            with pytest.raises(LockLost):
                lock.check()
            for ask in (lock.extend, lock.check, lock.fencing_token):
                with pytest.raises(LockLost):
                    ask()
        assert len(reasons()) == 1

    @no_locks()
    def test_a_lock_that_was_cleared_is_never_taken_again(self, reasons):
        """Also when the one who cleared it, and the next holder, have long ended."""
        with TaskLock("nightly", timeout=5) as lock:
            lock.extend(60)
            TaskLock("nightly").clear()
            with TaskLock("nightly"):
                pass
            advance_time(50)
            with pytest.raises(LockLost):
                lock.extend()
            assert not lock.locked()
        assert reasons() == ["cleared"]

    def test_a_fixed_lease_is_not_taken_again(self, reasons, empty_cache):
        with TaskLock("nightly", renew=False, timeout=30) as lock:
            empty_cache("redis")
            with pytest.raises(LockLost):
                lock.extend()
            assert not lock.locked()
        assert reasons() == ["gone from the cache (evicted, flushed or restarted empty)"]

    def test_a_fixed_lease_that_ends_first_is_no_error(self, events, let_pass, caplog):
        caplog.set_level("INFO", logger="django_singletask")
        with TaskLock("nightly", renew=False, timeout=30) as lock:
            caches["redis"].delete(lock.key)
            let_pass(31)
        assert {record.levelname for record in caplog.records} == {"INFO"}
        [released] = events[1:]
        assert (released.kind, released.outcome) == ("released", "lost")
        assert released.reason == "its fixed lease of 30 s ended first"

    def test_a_lock_that_another_has_names_the_other(self, reasons, empty_cache, take):
        with TaskLock("nightly") as lock:
            empty_cache("redis")
            blocker = take().holder()
            with pytest.raises(LockLost):
                lock.extend()
        assert reasons() == [f"taken by {blocker}"]

    @pytest.mark.parametrize("is_taken", [True, False])
    def test_a_loss_is_reported_while_the_store_is_down(self, reasons, is_taken, take, caplog):
        def fail(read, key):
            if key == lock.key:
                raise LockUnavailable
            return read(key)

        with TaskLock("nightly") as lock:
            lock.clear()
            if is_taken:
                take()
            with inside.handled("read", fail), pytest.raises(LockLost):
                lock.extend()
        assert len(reasons()) == 1
        assert "was lost while its run continued" in caplog.text


class TestOptions:
    @pytest.mark.parametrize(
        ("error", "option", "values"),
        [
            (ValueError, "timeout", [0, -1, math.nan, math.inf, 30 * 86400 + 1]),
            (TypeError, "timeout", ["60", True, type(None), [1]]),
            (ValueError, "on_conflict", ["wait"]),
            (ValueError, "wait", [-1]),
            (ValueError, "name", ["", " ", "a\nb"]),
            (TypeError, "name", [7]),
        ],
    )
    def test_a_value_that_cannot_work_is_refused(self, error, option, values):
        for value in values:
            with pytest.raises(error, match=option):
                TaskLock(**{"name": "nightly", option: value})

    def test_renew_false_needs_a_timeout(self):
        with pytest.raises(TypeError, match="timeout"):
            TaskLock("nightly", renew=False)

    def test_a_negative_wait(self):
        with pytest.raises(ValueError, match="wait"):
            TaskLock("nightly").acquire(wait=-1)

    def test_a_name_with_a_field_is_logged_once(self, caplog):
        for name in ("lost-f-{user_id}", "lost-f-{user_id}", "{'a': 1}", "{}"):
            TaskLock(name)
        [record] = caplog.records
        expected = "TaskLock('lost-f-{user_id}') has an unfilled field: all values share one lock."
        assert record.getMessage() == f"{expected} Use an f-string."

    def test_the_default_timeout_is_read_when_the_lock_is_taken(self, settings):
        lock = TaskLock("nightly")
        settings.SINGLETASK_LOCK_TIMEOUT = 7
        with lock:
            assert lock.holder().timeout == 7

    def test_a_bad_setting_is_named(self, settings):
        settings.SINGLETASK_LOCK_TIMEOUT = 0
        with pytest.raises(ValueError, match="SINGLETASK_LOCK_TIMEOUT"):
            TaskLock("nightly").acquire()


def test_a_receiver_cannot_change_an_event(events):
    with TaskLock("nightly"):
        pass
    for event in events:
        assert isinstance(hash(event), int)
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.name = "another"


class TestCurrentLock:
    def test_current_lock_is_the_innermost(self):
        assert current_lock() is None
        with TaskLock("outer") as outer:
            assert current_lock() is outer
            with TaskLock("inner") as inner:
                assert current_lock() is inner
            assert current_lock() is outer
        assert current_lock() is None

    def test_a_skipped_block_has_the_lock_around_it(self):
        with TaskLock("a") as outer, TaskLock("a", on_conflict="skip"):
            assert current_lock() is outer


@pytest.mark.usefixtures("no_history")
class TestCodeThatWaitsForItself:
    """A lock that is not in a block may be released by another thread, so a wait goes on."""

    ITSELF = "the same code already holds it, and a lock is not re-entrant"

    @pytest.mark.parametrize("enter", [TaskLock.acquire, TaskLock.__enter__])
    def test_a_wait_without_end_is_logged_once(self, caplog, enter):
        held, waiting = TaskLock("nightly"), TaskLock("nightly", wait=math.inf)
        held.acquire()
        timer = threading.Timer(0.3, held.release)
        timer.start()
        enter(waiting)
        timer.join()
        waiting.release()
        [warning] = [each for each in caplog.records if each.levelname == "WARNING"]
        assert warning.getMessage().startswith("Endless wait for nightly (")
        expected = f": {self.ITSELF}. Only another thread can release it."
        assert warning.getMessage().endswith(expected)

    def test_a_wait_for_another_thread_is_not_logged(self, caplog):
        held = TaskLock("nightly")
        thread = threading.Thread(target=held.acquire)
        thread.start()
        thread.join()
        timer = threading.Timer(0.2, held.release)
        timer.start()
        with TaskLock("nightly", wait=math.inf):
            timer.join()
        assert "Endless wait" not in caplog.text

    @pytest.mark.parametrize("wait", [0, 5, math.inf])
    def test_the_error_of_a_nested_block_says_so(self, caplog, wait):
        caplog.set_level("INFO")
        with TaskLock("nightly"), pytest.raises(LockConflict) as caught:
            TaskLock("nightly", wait=wait).__enter__()
        assert str(caught.value).endswith(f" unless renewed; {self.ITSELF}")
        assert f"; {self.ITSELF}." in caplog.text

    def test_the_error_of_a_wait_says_how_long_it_was(self, caplog):
        caplog.set_level("INFO")
        with pytest.raises(LockConflict) as caught, held_elsewhere("nightly"):
            TaskLock("nightly", wait=0.05).__enter__()
        assert str(caught.value).endswith("; gave up after 0.05 s (wait)")
        assert ": wait; gave up after 0.05 s (wait)." in caplog.text
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class TestOnlyOne:
    def test_keeps_the_return_value(self):
        @only_one
        def add(a, b):
            """Add."""
            return a + b

        assert add(1, b=2) == 3
        assert add.__name__ == "add"
        assert add.__doc__ == "Add."

    def test_a_call_is_skipped_while_the_lock_is_held(self):
        @only_one(key="import", timeout=30, skip_result="skipped")
        def work():
            return "ran"

        with held_elsewhere("import"):
            assert work() == "skipped"
        assert work() == "ran"

    def test_on_conflict_raise(self):
        @only_one(key="import", on_conflict="raise")
        def work():
            return "ran"

        with held_elsewhere("import"), pytest.raises(LockConflict):
            work()

    def test_on_skip_is_called_with_the_conflict_and_the_arguments(self, events):
        def report(conflict, a, *, b):
            assert conflict.lock.locked()
            return conflict.name, conflict.holder.token, conflict.lock.key, a, b

        @only_one(key="import", on_skip=report)
        def work(a, *, b):
            return "ran"

        with TaskLock("import") as held:
            assert work(1, b=2) == ("import", held.token, held.key, 1, 2)
        assert [event.reason for event in events if event.kind == "conflict"] == ["skip"]
        assert work(1, b=2) == "ran"

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"skip_result": dict}, TypeError, "use on_skip"),
            ({"on_skip": "report"}, TypeError, "must be a function"),
            ({"on_skip": print, "on_conflict": "raise"}, TypeError, 'needs on_conflict="skip"'),
            ({"timeout": -1}, ValueError, "timeout"),
            ({"at_least": -1}, ValueError, "at_least"),
        ],
    )
    def test_options_that_cannot_work_are_refused_at_decoration(self, options, error, text):
        with pytest.raises(error, match=text):
            only_one(**options)(print)

    def test_is_named_after_the_function(self):
        @only_one
        def work():
            return current_lock().name

        assert work() == f"{__name__}.{work.__qualname__}"

    def test_on_a_method(self):
        class Import:
            @only_one(key="import")
            def run(self, x):
                return self, x

        one = Import()
        assert one.run(3) == (one, 3)

    def test_a_key_is_filled_from_the_arguments(self):
        """Calls for other users were skipped when the key was taken literally."""
        ran = []

        @only_one(key="sync-{user_id}-{region}", skip_result="skipped")
        def sync(user_id, region="eu"):
            ran.append(user_id)
            return [sync(other) for other in range(user_id, 3)]

        assert sync(user_id=1) == ["skipped", ["skipped"]]
        assert ran == [1, 2]
        with held_elsewhere("sync-7-eu"):
            assert sync(7) == "skipped"

    def test_a_callable_key_takes_the_arguments(self):
        @only_one(key=lambda user, urgent=False: None if urgent else f"sync-{user}")
        def sync(user, urgent=False):
            return current_lock() and current_lock().name

        assert sync(7) == "sync-7"
        assert sync(7, urgent=True) is None

    def test_doubled_braces_in_a_key_are_literal(self):
        @only_one(key="{{sync}}")
        def sync():
            return current_lock().name

        assert sync() == "{sync}"

    def test_a_key_reads_an_attribute_of_self(self):
        class Import:
            pk = 5

            @only_one(key="import-{self.pk}")
            def run(self):
                return current_lock().name

            @only_one(key="import-{self}")
            def run_by_object(self):
                pass

        assert Import().run() == "import-5"
        with pytest.raises(TypeError, match="memory address"):
            Import().run_by_object()

    @pytest.mark.parametrize(
        ("key", "error", "text"),
        [
            ("sync-{user}", TypeError, "names 'user', which is not an argument"),
            ("sync-{}", TypeError, "names '', which is not an argument"),
            ("{user_id}", ValueError, "has no fixed text"),
            ("sync-{", ValueError, "is not a format string"),
            ("", ValueError, "has no fixed text"),
            (7, TypeError, "must be a format string or a callable"),
        ],
    )
    def test_a_key_that_cannot_work_is_refused_at_decoration(self, key, error, text):
        with pytest.raises(error, match=f"^key={re.escape(repr(key))} of .*sync {text}"):

            @only_one(key=key)
            def sync(user_id): ...

    @pytest.mark.parametrize(
        ("function", "text"),
        [
            ("sync-{user_id}", r"guards a function .*, not 'sync-\{user_id\}': use key=….$"),
            (Exception, "guards a function or a method, not <class 'Exception'>"),
            (7, "guards a function or a method, not 7"),
        ],
    )
    def test_what_is_no_function_is_refused(self, function, text):
        with pytest.raises(TypeError, match=f"^only_one {text}"):
            only_one(function)

    def test_arguments_in_a_key_can_be_hidden(self, settings):
        settings.SINGLETASK_RECORD_ARGUMENTS = False

        @only_one(key="sync-{user_id}")
        def sync(user_id):
            return current_lock().name

        assert sync("secret").startswith("sync-{user_id}#")

    def test_functions_whose_body_runs_later_are_refused(self):
        def generator():
            yield

        async def both():
            yield

        for function in (generator, both):
            with pytest.raises(TypeError, match=function.__name__):
                only_one(function)

    def test_a_task_object_is_refused(self):
        from tests.testapp.tasks import plain

        with pytest.raises(TypeError, match="below @shared_task"):
            only_one(plain)

    def test_on_a_django_task(self):
        tasks = pytest.importorskip("django.tasks", reason="django.tasks came with Django 6.0")

        task = tasks.task(module_level)
        assert task.enqueue(2).return_value == 4
        with pytest.raises(TypeError, match="below @shared_task or @task"):
            only_one(task)


@only_one
def module_level(x):
    return 2 * x


class TestEvents:
    def test_acquired_and_released(self, events):
        with TaskLock("nightly") as lock:
            token = lock.token
        assert [(e.kind, e.token, e.result) for e in events] == [
            ("acquired", token, ""),
            ("released", token, "returned"),
        ]

    def test_a_conflict_names_its_blocker(self, events):
        with TaskLock("nightly") as lock, TaskLock("nightly", on_conflict="skip"):
            token = lock.token
        conflict = next(event for event in events if event.kind == "conflict")
        facts = conflict.reason, conflict.result, conflict.blocked_by
        assert facts == ("skip", "skipped", token)

    @pytest.mark.usefixtures("no_history")
    @pytest.mark.parametrize("call", ["acquire", "aacquire"])
    def test_a_call_that_waits_is_reported_while_it_waits(self, events, wait_for, call):
        """Once, after a second, with the holder that it meets then; its run knows all its wait."""
        holder, waiting = TaskLock("nightly"), TaskLock("nightly")
        holder.acquire()
        ended = threading.Event()

        def wait():
            if call == "acquire":
                waiting.acquire(wait=math.inf)
            else:
                asyncio.run(waiting.aacquire(wait=math.inf))
            ended.set()
            connections.close_all()

        began = time.monotonic()
        thread = threading.Thread(target=wait)
        thread.start()
        conflict = wait_for(lambda: of_kind(events, "conflict"), "it is reported")[0]
        told_after = time.monotonic() - began
        assert not ended.is_set()
        facts = conflict.reason, conflict.result, conflict.blocked_by, conflict.waited
        assert facts == ("wait", "waiting", holder.token, 0)
        assert told_after >= 1
        wait_for(lambda: time.monotonic() - began > 2.2, "it would be reported again")
        holder.release()
        thread.join()
        assert of_kind(events, "conflict") == [conflict]
        acquired = of_kind(events, "acquired")
        assert acquired[0].waited == 0
        assert 2 < acquired[1].waited <= time.monotonic() - began
        waiting.release()

    @pytest.mark.usefixtures("no_history")
    @pytest.mark.parametrize("call", ["acquire", "aacquire"])
    def test_a_call_that_waits_is_reported_with_the_next_holder(self, events, wait_for, call):
        """Otherwise nobody would see behind which holder it waits; but at most once a second."""
        first, waiting = TaskLock("nightly"), TaskLock("nightly")
        first.acquire()

        def wait():
            if call == "acquire":
                waiting.acquire(wait=math.inf)
            else:
                asyncio.run(waiting.aacquire(wait=math.inf))
            connections.close_all()

        def reports():
            conflicts = of_kind(events, "conflict")
            return [(event.reason, event.result, event.blocked_by) for event in conflicts]

        expected = [("wait", "waiting", first.token)]
        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(lambda: reports() == expected, "it is reported")
        # Nobody else can take the lock in between; the handle is a holder for less than a second.
        second = TaskLock.receive(first.hand_over(for_=60))
        expected.append(("wait", "waiting", second.token))
        wait_for(lambda: reports() == expected, "it is reported again")
        second.release()
        thread.join()
        assert reports() == expected
        one, other = of_kind(events, "conflict")
        assert (other.at - one.at).total_seconds() > 0.9
        waiting.release()

    @pytest.mark.usefixtures("no_history")
    def test_a_short_wait_is_not_reported_but_its_run_knows_it(self, events):
        holder = TaskLock("nightly")
        holder.acquire()
        timer = threading.Timer(0.3, holder.release)
        timer.start()
        with TaskLock("nightly", wait=30):
            timer.join()
        assert of_kind(events, "conflict") == []
        assert 0.2 < of_kind(events, "acquired")[1].waited < 30

    @pytest.mark.parametrize(("wait", "results"), [(0, [0]), (0.2, [0.2]), (1.2, [0, 1.2])])
    def test_a_conflict_knows_how_long_the_call_waited_in_vain(self, events, wait, results):
        with held_elsewhere("nightly"), pytest.raises(LockConflict):
            TaskLock("nightly", wait=wait).__enter__()
        conflicts = of_kind(events, "conflict")
        expected = ["waiting", "failed"][-len(results) :]
        assert [event.result for event in conflicts] == expected
        for event, waited in zip(conflicts, results, strict=True):
            assert waited <= event.waited + 0.05
            assert event.waited == 0 or waited > 0

    def test_a_loss_is_reported_and_logged_once(self, events, caplog):
        with TaskLock("nightly") as lock:
            TaskLock("nightly").clear()
            with pytest.raises(LockLost):
                lock.extend()
        kinds = [event.kind for event in events]
        assert kinds == ["acquired", "cleared", "lost", "released"]
        assert events[-1].outcome == "lost"
        assert [r.levelname for r in caplog.records].count("ERROR") == 1
        assert events[2].reason == "cleared"

    def test_a_failing_receiver_does_not_reach_the_body(self):
        def fail(event):
            raise ZeroDivisionError

        with listening(fail), TaskLock("nightly"):
            pass


class TestErrors:
    @pytest.fixture
    def caught(self):
        with TaskLock("nightly"), pytest.raises(LockConflict) as caught, TaskLock("nightly"):
            pass
        return caught

    def test_errors_survive_pickle(self, caught):
        assert caught.value.lock is not None
        conflict = pickle.loads(pickle.dumps(caught.value))
        assert conflict.lock is None
        assert str(conflict) == str(caught.value)
        assert conflict.holder == caught.value.holder
        for error in (LockError("a"), LockLost("b"), LockUnavailable("c"), DuplicateTask("d", "e")):
            assert str(pickle.loads(pickle.dumps(error))) == str(error)

    def test_the_repr_of_a_conflict_is_its_text_alone(self, caught):
        """Celery logs it."""
        assert repr(caught.value) == f"LockConflict({str(caught.value)!r})"
        assert caught.value.holder.token not in repr(caught.value)


def take_and_give_back(name, use, line):
    """Use a lock, and return whether a signal struck at that line."""
    lock = TaskLock(name, timeout=3)
    try:
        with interrupt_at(line):
            if use == "acquire":
                lock.acquire()
                lock.release()
            elif use == "with":
                with lock:
                    pass
            else:
                with lock:
                    handle = lock.hand_over(for_=3)
                with TaskLock.receive(handle, timeout=3):
                    pass
    except KeyboardInterrupt:
        return True
    return False


FILES = {"acquisition.py", "held.py", "lock.py", "lease.py", "handover.py"}


@contextlib.contextmanager
def interrupt_at(number):
    """Raise KeyboardInterrupt where that line of a lock is about to run."""
    seen, before = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal seen
        if Path(frame.f_code.co_filename).name not in FILES:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                sys.settrace(before)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class held_elsewhere:
    """Hold a lock in another thread."""

    def __init__(self, name):
        self.lock = TaskLock(name)
        self.taken, self.done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold)

    def hold(self):
        with self.lock:
            self.taken.set()
            self.done.wait(30)
        connections.close_all()

    def __enter__(self):
        self.thread.start()
        assert self.taken.wait(30)

    def __exit__(self, *exc):
        self.done.set()
        self.thread.join()


class Empty(Exception):
    """An error that is false, as one that collects errors and has none."""

    def __len__(self):
        return 0


def test_an_error_that_is_false_is_no_return(on_redis):
    """The record of a kept lock says whether the body returned."""
    lock = TaskLock("nightly", at_least=60)
    with pytest.raises(Empty), lock:
        raise Empty
    assert not lock.holder().returned
