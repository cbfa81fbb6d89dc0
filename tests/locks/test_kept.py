"""A lock that a run which began keeps for a while (``lock_at_least``)."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from django.core.cache import caches
from django.db.models import F

from django_singletask import LockConflict, SingletonTask, TaskLock, current_lock, only_one
from django_singletask.holder import Holder
from django_singletask.models import TaskLockEvent
from tests import inside
from tests.admin_pages import BASE, CLEAR, log_in, rows_of, text_of
from tests.command_line import alarm, locks
from tests.deliveries import (
    at_the_first_pause,
    collect_sent,
    deliver,
    held_by,
    receive,
    receive_sent,
    wait_for_debts,
)
from tests.entries import eventually
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

KEEP = {"lock_at_least": 60}


@pytest.fixture(autouse=True)
def runs_log(monkeypatch, tmp_path):
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))


@pytest.fixture
def sent(monkeypatch):
    return collect_sent(tasks.hold.app, monkeypatch)


@pytest.fixture
def result(monkeypatch):
    """Let the result backend return this result for every task."""
    stored = SimpleNamespace(state="PENDING", date_done=None)
    monkeypatch.setattr(SingletonTask, "AsyncResult", lambda self, task_id: stored)
    return stored


def run(task_id="first", task=tasks.hold, options=KEEP, **request):
    return receive(task, "a", task_id=task_id, header={"options": options}, **request)


def kept_holder():
    holder = tasks.hold.lock("a").holder()
    return holder if holder and holder.kept else None


def test_a_run_that_returned_keeps_its_lock_from_its_start(cache_alias):
    assert run() == "ran"
    holder, lock = kept_holder(), tasks.hold.lock("a")
    assert lock.locked()
    assert (holder.pid, holder.task_id, holder.timeout) == (0, "first", 60)
    assert lock.remaining() is None or 50 < lock.remaining() < 62
    assert run("second") == "skipped"


def test_a_kept_lock_ends_by_itself():
    run(options={"lock_at_least": 0.2})
    eventually(lambda: run("second", options={}) == "ran")


def test_a_run_that_took_longer_frees_its_lock():
    assert run(options={"lock_at_least": 0.000001}) == "ran"
    assert not tasks.hold.lock("a").locked()


def raising(error):
    """Return a body that ends with this error."""

    def body(*args, **facts):
        raise error

    return body


def fail(error, *args, **facts):
    """Run a call whose body ends with this error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "body", raising(error))
        with pytest.raises(type(error)):
            run(*args, **facts)


BEGAN = [ValueError(), Retry(), Ignore(), Reject(), SoftTimeLimitExceeded()]


@pytest.mark.parametrize("error", BEGAN, ids=repr)
def test_a_run_that_began_keeps_its_lock_however_its_body_ends(error):
    fail(error)
    assert not kept_holder().returned
    assert run("second") == "skipped"


def test_the_record_says_that_the_body_has_returned():
    run()
    assert kept_holder().returned


def test_a_body_that_releases_its_lock_has_not_returned(monkeypatch):
    monkeypatch.setattr(tasks, "body", lambda *args, **facts: current_lock().release())
    run()
    assert not kept_holder().returned


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt()], ids=repr)
def test_a_process_that_ends_frees_its_lock(error):
    fail(error)
    assert not tasks.hold.lock("a").locked()


def test_a_body_frees_its_lock_earlier_by_handing_it_over(monkeypatch):
    monkeypatch.setattr(tasks, "body", lambda *args, **facts: current_lock().hand_over(for_=0.2))
    run()
    eventually(lambda: not tasks.hold.lock("a").locked())


class TestABodyThatNeverBegan:
    """It keeps nothing, although its delivery had the lock."""

    def test_because_an_error_kept_it_away(self, monkeypatch):
        monkeypatch.setattr(tasks.hold, "stores_started", True)
        store = Mock(side_effect=SoftTimeLimitExceeded())
        monkeypatch.setattr(tasks.hold.backend, "store_result", store)
        with pytest.raises(SoftTimeLimitExceeded):
            run()
        assert not tasks.hold.lock("a").locked()

    def test_because_it_was_postponed(self, sent, result):
        """It has the lock, and hops once to see the result of its first run."""
        header = {"options": KEEP, **inside.WAITS}
        with inside.postponed():
            receive(tasks.hold, "a", task_id="first", header=header)
        assert not tasks.hold.lock("a").locked()

    def test_because_a_later_call_replaced_it_while_it_waited(self, sent, monkeypatch):
        task = tasks.latest
        task.apply_async(("a",), lock_options=KEEP)
        older = sent[0]

        def replace_it():
            task.apply_async(("a",), lock_options=KEEP)
            task.lock("a").clear()

        at_the_first_pause(monkeypatch, replace_it)
        inside.write(task.lock("a"), b"another")
        assert receive_sent(task, older) == "superseded"
        assert not task.lock("a").locked()

    def test_because_a_signal_came_during_the_take(self):
        lock = TaskLock("nightly", at_least=60)
        with inside.signal_after_take(SoftTimeLimitExceeded()):
            with pytest.raises(SoftTimeLimitExceeded), lock:
                raise AssertionError("the block began")
        wait_for_debts()
        assert not lock.locked()


def test_the_time_is_counted_from_the_begin_of_the_body(monkeypatch):
    """The reply to the take may come late."""
    with pytest.MonkeyPatch.context() as patch:
        clock = inside.stop_clock(patch)

        def answer_late(take, *args, **options):
            reply = take(*args, **options)
            clock.now += 5
            return reply

        with inside.handled("take", answer_late):
            run()
    assert tasks.hold.lock("a").remaining() > 59


def test_a_lock_that_was_lost_is_not_kept(monkeypatch):
    monkeypatch.setattr(tasks, "body", lambda *args, **facts: current_lock().clear())
    assert run()
    assert not tasks.hold.lock("a").locked()
    assert TaskLockEvent.objects.get().outcome == "cleared"


def test_each_of_several_slots_is_kept(sent, result):
    options = {**KEEP, "lock_slots": 2}
    ends = [run(task_id, options=options) for task_id in ("1", "2", "3")]
    assert ends == ["ran", "ran", "skipped"]
    result.state = "SUCCESS"
    with inside.dropped():
        run("2", options=options)


def test_to_keep_costs_no_further_trip():
    trips = []
    with inside.handled("change", lambda change, *args: trips.append(args) or change(*args)):
        run()
    assert len(trips) == 1


def test_a_signal_before_the_release_begins_keeps_it_all_the_same():
    lock = TaskLock("nightly", at_least=60)
    with pytest.raises(SoftTimeLimitExceeded):
        with inside.signal_before_release(SoftTimeLimitExceeded()), lock:
            pass
    assert lock.holder().kept


def test_a_lost_reply_to_the_keeping_keeps_it_all_the_same():
    outcomes = ["handled", "not sent"]

    def lose(change, *args):
        if not outcomes:
            return change(*args)
        if outcomes.pop(0) == "handled":
            change(*args)
        raise ConnectionError

    with inside.handled("change", lose, of_all_threads=True):
        assert run() == "ran"
        assert kept_holder()
        eventually(lambda: not outcomes)
        wait_for_debts()
    assert 50 < tasks.hold.lock("a").remaining() < 61


def test_a_lock_that_could_not_be_kept_at_once_is_kept_when_the_cache_answers():
    with inside.failing("change", ConnectionError(), of_all_threads=True):
        run()
        assert kept_holder() is None
    eventually(kept_holder)


def test_the_row_of_the_run_is_closed_and_conflicts_count_against_it():
    run()
    run("second")
    first, conflict = TaskLockEvent.objects.order_by("id")
    assert (first.outcome, first.result) == ("released", "returned")
    assert first.reason == "kept for 60 s from its start"
    assert conflict.blocked_by == first.token


def test_the_row_says_too_that_the_cache_had_forgotten_the_lock(monkeypatch):
    def forget(*args, **facts):
        lock = current_lock()
        caches["redis"].delete(lock.key)
        lock.extend()

    monkeypatch.setattr(tasks, "body", forget)
    run()
    row = TaskLockEvent.objects.get()
    assert (row.retaken, row.reason) == (1, "kept for 60 s from its start")


def test_the_conflict_says_that_the_lock_is_kept():
    run(task=tasks.insist)
    with pytest.raises(LockConflict, match=r"kept for \d+ s more") as caught:
        run("second", tasks.insist)
    assert Holder.from_dict(caught.value.args[1]).kept
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class TestItsOwnMessageAgain:
    """first run:  takes ... returns: kept      result SUCCESS
    message:                             again               again
    """

    def test_is_dropped_if_its_result_is_there(self, sent, result):
        run("mine")
        result.state = "SUCCESS"
        with inside.dropped():
            run("mine")
        assert not sent

    def test_waits_for_one_hop_if_its_result_may_be_on_its_way(self, sent, result):
        run("mine")
        with inside.postponed():
            run("mine")
        assert inside.READS.items() <= inside.header_of(sent[0]["headers"]).items()

    def test_leaves_it_to_the_policy_if_no_result_comes(self, sent, result):
        """The body has returned, so it does not run again; the links after it go on."""
        run("mine")
        header = {"options": KEEP, **inside.READS}
        assert receive(tasks.hold, "a", task_id="mine", header=header) == "skipped"

    @pytest.mark.parametrize("policy", ["raise", "wait", "requeue"])
    def test_is_dropped_with_another_policy_if_no_result_comes(self, sent, result, policy):
        """The kept lock proves that the body has returned.

        first run:  takes ... returns: kept    killed before its result is stored
        message:                                        again: must neither fail nor run
        """
        options = {**KEEP, "on_conflict": policy, "lock_wait": 5}
        due = time.time()
        run("mine", options=options)
        header = {"options": options, **inside.READS, "due": due}
        with inside.dropped():
            receive(tasks.hold, "a", task_id="mine", header=header)
        assert not sent

    def test_raises_if_it_is_another_call_with_the_same_id(self, sent, result):
        run("mine")
        options = {**KEEP, "on_conflict": "raise"}
        header = {"options": options, **inside.READS, "due": time.time() + 2}
        with pytest.raises(LockConflict):
            receive(tasks.hold, "a", task_id="mine", header=header)

    def test_is_skipped_if_the_id_is_used_again_and_the_result_is_older(self, sent, result):
        run("mine")
        result.state = "SUCCESS"
        result.date_done = datetime.fromtimestamp(1000, UTC)
        header = {"options": KEEP, "due": 2000.0}
        with inside.postponed():
            receive(tasks.hold, "a", task_id="mine", header=header)
        header |= inside.READS
        assert receive(tasks.hold, "a", task_id="mine", header=header) == "skipped"

    @pytest.mark.parametrize("policy", ["skip", "raise", "wait", "requeue"])
    @pytest.mark.parametrize("error", [Reject(requeue=True), ValueError()], ids=repr)
    def test_waits_and_runs_if_its_body_did_not_return(self, sent, result, policy, error):
        """Its work is not done, so it is neither dropped nor skipped.

        first run:  begins   Reject(requeue=True): kept ............... ends
        message:                                    again: waits               runs
        """
        options = {"lock_at_least": 60, "on_conflict": policy, "lock_wait": 5}
        fail(error, "mine", options=options)
        with inside.postponed():
            run("mine", options=options)
        for _ in range(3):
            with inside.postponed():
                receive_sent(tasks.hold, sent[-1])
        assert inside.WAITS.items() <= inside.header_of(sent[-1]["headers"]).items()
        tasks.hold.lock("a").clear()
        with inside.postponed():
            receive_sent(tasks.hold, sent[-1])
        assert receive_sent(tasks.hold, sent[-1]) == "ran"

    @pytest.mark.parametrize("policy", ["skip", "raise", "wait", "requeue"])
    def test_waits_if_it_is_the_next_try_of_a_body_that_raised(self, sent, result, policy):
        options = {"lock_at_least": 60, "on_conflict": policy, "lock_wait": 5}
        fail(Retry(), "mine", options=options)
        with inside.postponed():
            run("mine", options=options, retries=1, expires="2130-01-01")
        for _ in range(3):
            with inside.postponed():
                receive_sent(tasks.hold, sent[-1], retries=1, expires="2130-01-01")
        assert sent[-1]["expires"] == "2130-01-01"
        tasks.hold.lock("a").clear()
        assert receive_sent(tasks.hold, sent[-1], retries=1) == "ran"

    def test_waits_for_the_slot_of_its_earlier_try(self, sent, result):
        """Another slot is free."""
        options = {**KEEP, "lock_slots": 3}
        fail(Retry(), "mine", options=options)
        with inside.postponed():
            run("mine", options=options, retries=1)
        assert run("another", options=options) == "ran"

    def test_waits_if_it_is_the_next_try(self, sent, result):
        """``self.retry(throw=False)`` lets the body return."""
        run("mine")
        result.state = "SUCCESS"
        with inside.postponed():
            run("mine", retries=1)
        assert sent[0]["countdown"] <= 0.05


def test_only_one():
    calls = []

    @only_one(key="guarded", at_least=60)
    def guarded():
        calls.append(1)

    guarded()
    guarded()
    assert len(calls) == 1
    assert TaskLock("guarded").holder().kept


class TestABlockInATaskThatIsTriedAgain:
    """A block cannot be postponed, and to skip it would lose the work of the task."""

    @pytest.fixture
    def tries(self):
        return []

    @pytest.fixture
    def task(self, tries):
        @tasks.hold.app.task(bind=True, shared=False, name="tests.guarded")
        def guarded(self, returns=False):
            @only_one(key="guarded", at_least=60)
            def body():
                tries.append(self.request.retries)
                if len(tries) == 1 and not returns:
                    raise self.retry(countdown=0)

            body()
            if returns:
                raise self.retry(countdown=0)

        yield guarded
        tasks.hold.app.tasks.pop("tests.guarded")

    def test_the_next_try_fails(self, task, tries, sent):
        assert deliver(task).info.state == "RETRY"
        error = deliver(task, retries=1).info.retval
        assert str(error).endswith("; an earlier try of this task keeps it (at_least)")
        assert (type(error), tries) == (LockConflict, [0])

    def test_another_call_is_skipped(self, task, tries, sent):
        deliver(task)
        assert deliver(task, task_id="other").info is None
        assert tries == [0]

    def test_the_next_try_is_skipped_if_the_block_returned(self, task, tries, sent):
        """Its work is done."""
        deliver(task, True)
        deliver(task, True, retries=1)
        assert tries == [0]

    def test_an_eager_try_finds_it_free(self, task, tries):
        task.apply()
        assert tries == [0, 1]


@pytest.mark.parametrize("error", [ValueError(), GeneratorExit()], ids=repr)
def test_a_block_that_raises_keeps_its_lock(error):
    lock = TaskLock("nightly", at_least=60)
    with pytest.raises(type(error)), lock:
        raise error
    assert not lock.holder().returned


def test_a_lock_that_was_acquired_is_kept_at_its_release():
    lock = TaskLock("nightly", at_least=60)
    lock.acquire()
    lock.release()
    assert lock.holder().kept


def test_a_block_of_asyncio_code_that_is_cancelled_keeps_its_lock():
    lock = TaskLock("nightly", at_least=60)

    async def body():
        async with lock:
            await asyncio.Event().wait()

    async def cancel():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(body(), 0.5)

    asyncio.run(cancel())
    assert lock.holder().kept


class TestEager:
    """The next try runs in this process, inside ``apply()``: nobody could wait for the rest."""

    @pytest.fixture
    def tries(self):
        return []

    @pytest.fixture(params=["raised", "returned", "autoretry", "replace"])
    def task(self, request, tries):
        options = {"base": SingletonTask, "shared": False, "bind": True, **KEEP}
        if request.param == "autoretry":
            options |= {"autoretry_for": (ZeroDivisionError,), "retry_backoff": False}
        options |= {"lock_on": [], "default_retry_delay": 0, "name": "tests.eager"}

        @tasks.hold.app.task(**options)
        def work(self, number):
            tries.append(number)
            if len(tries) > 1:
                return "ran"
            if request.param == "autoretry":
                return 1 / 0
            if request.param == "replace":
                return self.replace(work.si(number))
            return self.retry(throw=request.param == "raised")

        yield work
        tasks.hold.app.tasks.pop("tests.eager")

    def test_it_is_freed_for_the_next_try_which_keeps_it(self, task, tries):
        assert task.apply((7,)).get() == "ran"
        assert tries == [7, 7]
        assert task.lock(7).holder().returned


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=repr)
def test_the_entry_of_the_queued_call_is_kept_as_long(sent, monkeypatch, error):
    task = tasks.unique_to_the_end
    task.apply_async(("a",), lock_options=KEEP)
    message = sent[0]
    outcome = nullcontext()
    if error is not None:
        monkeypatch.setattr(tasks, "body", raising(error))
        outcome = pytest.raises(ZeroDivisionError)
    with outcome:
        receive_sent(task, message)
    assert task.lock("a").holder().kept
    left = inside.read(inside.queued_entry(task, "a")).remaining
    assert left == pytest.approx(task.lock("a").remaining(), abs=0.5)
    assert task.queued("a") is None
    assert task.apply_async(("a",)).id == message["task_id"]
    assert len(sent) == 1
    assert TaskLockEvent.objects.get(kind="duplicate").reason == "kept"


def test_the_entry_of_the_queued_call_is_freed_if_the_lock_was_lost(sent, monkeypatch):
    task = tasks.unique_to_the_end
    task.apply_async(("a",), lock_options=KEEP)
    monkeypatch.setattr(tasks, "body", lambda *args, **facts: current_lock().clear())
    message = sent[0]
    receive(task, "a", task_id=message["task_id"], header=inside.header_of(message["headers"]))
    task.apply_async(("a",))
    assert len(sent) == 2


def test_the_entry_of_the_queued_call_is_freed_if_its_process_ends(sent, monkeypatch):
    task = tasks.unique_to_the_end
    task.apply_async(("a",), lock_options=KEEP)
    monkeypatch.setattr(tasks, "body", raising(SystemExit()))
    with pytest.raises(SystemExit):
        receive_sent(task, sent[0])
    task.apply_async(("a",))
    assert len(sent) == 2


def test_control_without_the_option_nothing_is_kept(cache_alias):
    assert run(options={}) == "ran"
    assert run("second", options={}) == "ran"


def test_the_watch_over_killed_processes_leaves_what_their_runs_have_kept():
    run()
    assert not inside.free_killed(tasks.hold.lock("a"), kept_holder().token)
    assert kept_holder()


class TestOperators:
    pytestmark = pytest.mark.usefixtures("eighty_columns")

    @pytest.mark.parametrize("cache_alias", ["redis", "pymemcache"], indirect=True)
    def test_list(self, cache_alias):
        """Also where the cache cannot list its entries."""
        run()
        assert re.search(r"\nkept .* \d+s ", locks())

    def test_why(self):
        run()
        text = " ".join(locks("why", tasks.hold.lock("a").name).split())
        kept = r" held for 5\ds more by lock_at_least; the body of task first on \S+ has ended "
        assert re.search(kept, text)
        assert f"manage.py locks clear {kept_holder().token}" in text

    def test_a_kept_lock_is_not_held_for_too_long(self):
        run(options={"lock_at_least": 86_400})
        lock = tasks.hold.lock("a")
        inside.write(lock, replace(lock.holder(), since=time.time() - 7200).encode())
        assert "\nkept " in locks("list", "--fail-if-held-over", "1h")

    def test_its_conflicts_starve_nobody(self):
        run()
        for _ in range(3):
            run("second")
        TaskLockEvent.objects.exclude(kind="run").update(at=F("at") - timedelta(hours=2))
        assert "\nkept " in locks("list", "--fail-if-starving", "1h")

    def test_control_the_conflicts_of_a_lock_that_is_held_do(self):
        with held_by("first"):
            for _ in range(3):
                run("second")
            rows = TaskLockEvent.objects.filter(kind="conflict")
            rows.update(at=F("at") - timedelta(hours=2))
            assert "(3 conflicts in 2h)" in alarm("--fail-if-starving", "1h")[1]

    def test_clear_frees_the_lock_and_the_entry_of_its_call(self, sent):
        task = tasks.unique_to_the_end
        task.apply_async(("a",), lock_options=KEEP)
        message = sent[0]
        receive(task, "a", task_id=message["task_id"], header=inside.header_of(message["headers"]))
        locks("clear", task.lock("a").name, "--yes")
        assert not task.lock("a").locked()
        task.delay("a")
        assert len(sent) == 2

    def test_the_admin(self):
        run()
        client = log_in("view_tasklockevent", "clear_lock")
        (row,) = rows_of(client.get(BASE), "singletask-held")
        assert " kept " in row
        query = {"lock": f"{tasks.hold.lock('a').key} {kept_holder().token}"}
        assert "kept" in text_of(client.get(CLEAR, query).content.decode())
