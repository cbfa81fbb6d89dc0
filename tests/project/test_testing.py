"""The helpers for tests, as the tests of an application use them."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery
from django.conf import settings as django_settings
from django.core.management import call_command
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings

from django_singletask import (
    DuplicateTask,
    LockConflict,
    LockError,
    LockLost,
    SingletonTask,
    TaskLock,
    current_lock,
    only_one,
)
from django_singletask.models import TaskLockEvent
from django_singletask.signals import LockEvent, lock_event
from django_singletask.testing import advance_time, hold, no_locks, queued
from tests import inside
from tests.deliveries import collect_sent, receive

app = Celery("users", set_as_current=False, broker="memory://")
app.conf.task_always_eager = True


@app.task(base=SingletonTask, shared=False, name="users.add", skip_result="skipped")
def add(a, b=2):
    return a + b


@app.task(base=SingletonTask, shared=False, name="users.task", on_conflict="raise")
def takes_a_task(task, lock=None):
    return task


@app.task(base=SingletonTask, shared=False, name="users.bill", lock_name="customer:{customer}")
def bill(customer):
    return "billed"


@app.task(base=SingletonTask, shared=False, name="users.rebuild", lock_on=[], skip_result="held")
def rebuild(index):
    return "rebuilt"


@only_one(key="nightly", skip_result="skipped")
def nightly():
    return "ran"


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def in_effect():
    """Return what a block changes for the process: the way of the history, and the store."""
    return inside.setting("history"), inside.family("redis")


@pytest.fixture(autouse=True)
def check_that_nothing_stays():
    before = in_effect()
    yield
    assert in_effect() == before


@pytest.fixture
def dead(settings, dead_redis):
    settings.SINGLETASK_CACHE = dead_redis


@pytest.fixture
def locmem(settings, empty_cache):
    settings.SINGLETASK_CACHE = "locmem"
    settings.SINGLETASK_HISTORY = "off"
    empty_cache("locmem")


@pytest.fixture
def events():
    """Give the list to which the events of locks are added."""
    seen = []

    def receive(*, event, **kwargs):
        seen.append(event)

    lock_event.connect(receive, sender=LockEvent)
    yield seen
    lock_event.disconnect(receive, sender=LockEvent)


# In the classes of unittest, with a cache that does not answer

BACKEND = "django.core.cache.backends.redis.RedisCache"
DUMMY = "django.core.cache.backends.dummy.DummyCache"
ON_A_DEAD_SERVER = {
    "CACHES": {
        **django_settings.CACHES,
        "dead": {"BACKEND": BACKEND, "LOCATION": "redis://127.0.0.1:1/0"},
    },
    "SINGLETASK_CACHE": "dead",
}


@override_settings(**ON_A_DEAD_SERVER)
class InSimpleTestCase(SimpleTestCase):
    def test_control_without_hold_the_task_fails(self):
        with self.settings(SINGLETASK_HISTORY="off"):
            assert add.apply((1,)).state == "FAILURE"

    def test_a_held_task_is_skipped(self):
        with hold(add, 1):
            assert add.delay(1).get() == "skipped"
            assert add(1, b=2) == "skipped"

    def test_control_another_call_runs(self):
        with hold(add, 7):
            assert add.delay(1).get() == 3

    @hold(add, 1)
    def test_hold_as_a_decorator(self):
        assert add.delay(1).get() == "skipped"

    @hold(add, 1)
    async def test_hold_on_a_coroutine_function(self):
        await asyncio.sleep(0)
        assert add(1) == "skipped"

    @hold("nightly")
    @hold(bill, 7)
    def test_decorators_in_a_row(self):
        assert nightly() == "skipped"
        assert bill(7) is None
        assert bill(8) == "billed"

    def test_no_locks(self):
        with no_locks():
            assert add.delay(1).get() == 3
            assert nightly() == "ran"


@override_settings(**ON_A_DEAD_SERVER)
class InTestCase(TestCase):
    def test_no_query_is_made(self):
        rows = TaskLockEvent.objects.count()
        with self.assertNumQueries(0):
            with hold(add, 1):
                add(1)
                add(2)
            with no_locks():
                add(1)
        assert TaskLockEvent.objects.count() == rows


class Decorated:
    def setUp(self):
        self.in_set_up = add(1)

    def tearDown(self):
        assert add(1) == self.in_set_up

    @no_locks()
    def test_the_decorator_of_the_method_decides(self):
        assert add(1) == 3

    async def test_a_coroutine_function(self):
        assert add(1) == self.in_set_up


@hold(add, 1)
@override_settings(**ON_A_DEAD_SERVER)
class HeldInTestCase(Decorated, TestCase):
    @hold(add, 1)
    def test_held_twice(self):
        assert self.in_set_up == add(1) == "skipped"


@no_locks()
@override_settings(**ON_A_DEAD_SERVER)
class NoLocksInTransactionTestCase(Decorated, TransactionTestCase):
    def test_runs(self):
        assert self.in_set_up == add(1) == 3


# hold()


def test_hold_gives_the_holder(dead):
    with hold(add, 1) as holder:
        lock = add.lock(1)
        assert lock.locked()
        assert lock.holder() == holder
        assert 86_000 < lock.remaining() <= 86_400
    assert holder.task == "users.add"
    assert holder.name == "users.add(a=1)"
    assert str(holder) == f"task {holder.task_id} on elsewhere"


def test_each_hold_is_another_task(dead):
    with hold("a") as one, hold("b") as other:
        assert one.task_id != other.task_id
        assert one.token != other.token
        assert one.task is None


def test_a_call_with_equal_arguments_finds_the_lock_held(dead):
    with hold(takes_a_task, task=1, lock=2) as holder:
        with pytest.raises(LockConflict) as caught:
            takes_a_task(1, 2)
        assert caught.value.holder == holder
        assert takes_a_task(1, 3) == 1


def test_hold_takes_a_task_lock_or_a_name(dead):
    with hold("by name"), hold(TaskLock("by lock")):
        for name in ("by name", "by lock"):
            with pytest.raises(LockConflict), TaskLock(name):
                pass


def test_a_task_lock_is_held_in_its_own_cache(dead):
    with hold(TaskLock("a", cache="elsewhere")):
        assert TaskLock("a", cache="elsewhere").locked()
        assert not TaskLock("a").locked()


def test_to_ask_needs_no_argument_that_does_not_make_the_lock(dead):
    with hold(rebuild):
        assert rebuild.delay("a").get() == "held"
        assert rebuild.lock().locked()
        assert rebuild.queued() is None
        for ask in (rebuild.lock, rebuild.queued, lambda **wrong: hold(rebuild, **wrong).enable()):
            with pytest.raises(TypeError, match="unexpected keyword argument 'indx'"):
                ask(indx="a")


def test_another_lock_is_taken_and_given_back(dead):
    with hold("a"):
        with TaskLock("b") as lock:
            assert lock.owned()
            assert not TaskLock("b").acquire()
        assert not lock.locked()


@pytest.fixture
def wait_for_renewal(wait_for):
    """Give the function that waits until a lock of 3 seconds is renewed."""

    def wait(lock):
        wait_for(lambda: lock.remaining() < 2.5, "it has a while behind it")
        wait_for(lambda: lock.remaining() > 2.5, "it is renewed")

    return wait


def test_another_lock_is_renewed(dead, wait_for_renewal):
    with hold("a"), TaskLock("b", timeout=3) as lock:
        wait_for_renewal(lock)
        assert lock.owned()
        lock.extend()
        assert not lock.lost


def test_a_held_lock_can_be_cleared(dead):
    with hold(add, 1):
        assert add.lock(1).clear()
        assert add(1) == 3
        lock = add.lock(1)
        lock.acquire()
    assert not lock.lost


def test_the_command_lists_it(dead):
    out = io.StringIO()
    with hold(add, 1):
        call_command("locks", stdout=out)
    assert re.search(r"^handed over  users\.add\(a=1\) .* elsewhere$", out.getvalue(), re.MULTILINE)
    assert "dead" not in out.getvalue()


def test_hold_takes_a_lock_whose_name_looks_like_a_template(dead):
    with hold(TaskLock("sync-{user_id}")), hold("shop.tasks.add({'a': 1})"):
        assert TaskLock("sync-{user_id}").locked()


@app.task(base=SingletonTask, shared=False, name="users.without", lock_name=lambda a: None)
def without(a):
    pass


@app.task(base=SingletonTask, shared=False, name="users.once", unique_until="start", unique_for=600)
def once(a, b=2):
    return a + b


@pytest.mark.parametrize(
    ("helper", "arguments", "error", "text"),
    [
        *((hold, [what], TypeError, "takes a SingletonTask") for what in (None, 7, nightly, len)),
        (hold, [add, 1, 2, 3], TypeError, r"users\.add"),
        (hold, ["sync-{user_id}"], ValueError, r"^hold\('sync-{user_id}'\) has an unfilled field"),
        (hold, ["a", 1], TypeError, "takes no arguments"),
        (hold, [TaskLock("a"), 1], TypeError, "takes no arguments"),
        *(
            (queued, [what], TypeError, r"queued\(\) takes a SingletonTask")
            for what in (None, "name", TaskLock("a"), nightly)
        ),
        (queued, [once, 1, 2, 3], TypeError, r"users\.once"),
        (queued, [without, 1], ValueError, "has no lock"),
    ],
)
def test_what_is_no_lock_or_no_call_is_refused(dead, helper, arguments, error, text):
    with pytest.raises(error, match=text), helper(*arguments):
        pass


# no_locks()


def test_a_nested_lock_conflicts(dead):
    with no_locks(), TaskLock("a") as lock:
        assert lock.locked()
        assert lock.owned()
        assert lock.holder().token == lock.token
        assert lock.remaining() > 0
        with pytest.raises(LockConflict), TaskLock("a"):
            pass
        assert not in_a_thread(TaskLock("a").acquire)


def test_a_task_that_calls_itself_is_skipped_there(dead):
    @app.task(base=SingletonTask, shared=False, name="users.nested", skip_result="skipped")
    def nested(deeper=True):
        return nested(deeper), nested.apply((False,)).result if deeper else "no deeper"

    with no_locks():
        assert nested() == ("skipped", ("skipped", "no deeper"))


def test_a_lock_works_as_in_production_and_nothing_is_logged(dead, caplog):
    with no_locks(), TaskLock("a") as lock:
        lock.extend()
        lock.check()
        assert current_lock() is lock
        assert lock.fencing_token() > 0
        assert lock.release()
        assert not lock.locked()
    with hold(add, 1):
        add(1)
    # What other tests owe to a dead server is logged by another thread.
    assert threading.get_ident() not in [record.thread for record in caplog.records]


def test_a_lost_lock_is_noticed(dead):
    with no_locks(), TaskLock("a") as lock:
        assert TaskLock("a").clear()
        with pytest.raises(LockLost):
            lock.extend()


def test_slots_are_counted(dead):
    with no_locks(), TaskLock("a", slots=2):
        assert in_a_thread(TaskLock("a", slots=2).acquire)
        assert not in_a_thread(TaskLock("a", slots=2).acquire)


def test_a_lock_from_before_is_not_renewed_inside(locmem, wait_for_renewal):
    with TaskLock("before", timeout=3) as before:
        with no_locks(), TaskLock("inside", timeout=3) as lock:
            wait_for_renewal(lock)
            assert not TaskLock("before").locked()
        wait_for_renewal(before)
        assert before.owned()


# queued()


@pytest.fixture
def sends(dead):
    """Let calls be sent, to a broker in memory."""
    app.conf.task_always_eager = False
    yield
    app.conf.task_always_eager = True


@pytest.mark.usefixtures("sends")
def test_an_identical_call_is_a_duplicate(events):
    with queued(once, 1) as holder:
        assert once.delay(1, b=2).id == once.queued(1).id == holder.task_id
        assert once.delay(2).id != holder.task_id
        assert not once.lock(1).locked()
        with pytest.raises(DuplicateTask) as caught:
            once.apply_async((1,), lock_options={"on_duplicate": "raise"})
        assert caught.value.task_id == holder.task_id
    assert [event.kind for event in events] == ["duplicate", "duplicate"]
    assert (holder.host, holder.task, holder.name) == ("elsewhere", "users.once", "users.once(a=1)")
    with no_locks():
        assert once.queued(1) is None


@pytest.mark.usefixtures("sends")
def test_duplicates_of_the_own_calls_are_found_too(dead):
    with no_locks():
        first = once.delay(1)
        assert once.delay(1).id == once.queued(1).id == first.id
    with no_locks():
        assert once.queued(1) is None
        assert once.delay(1).id != first.id


@pytest.mark.usefixtures("sends")
def test_a_queued_call_may_be_replaced(dead):
    with queued(once, 1) as holder:
        newer = once.apply_async((1,), lock_options={"on_duplicate": "replace"})
        assert once.queued(1).id == newer.id != holder.task_id


@pytest.mark.usefixtures("sends")
def test_a_queued_call_blocks_its_duplicates_for_unique_for(dead):
    with queued(once, 1) as holder:
        advance_time(590)
        assert once.delay(1).id == holder.task_id
        advance_time(10)
        assert once.delay(1).id != holder.task_id


@queued(once, 1)
def test_queued_as_a_decorator(dead):
    assert once.queued(1)


@pytest.mark.usefixtures("sends")
def test_queued_refuses_a_call_that_the_test_has_queued_itself(dead):
    with no_locks():
        first = once.delay(1)
        with pytest.raises(DuplicateTask) as caught, queued(once, 1):
            pass
        assert caught.value.task_id == first.id
        assert once.queued(1).id == first.id


# advance_time()


@app.task(
    base=SingletonTask,
    shared=False,
    name="users.kept",
    skip_result="skipped",
    lock_at_least=300,
    lock_on=[],
)
def kept(seconds):
    advance_time(seconds)
    return "ran"


def test_a_lock_is_kept_from_the_start_of_its_run(dead):
    with no_locks():
        assert kept(301) == "ran"
        assert kept(299) == "ran"
        assert kept(0) == "skipped"
        advance_time(1)
        assert kept(0) == "ran"


def test_the_lease_of_a_live_run_is_renewed_meanwhile(dead):
    with no_locks(), TaskLock("a", timeout=30) as lock:
        advance_time(3600)
        lock.check()
        assert lock.owned()
        assert not in_a_thread(TaskLock("a").acquire)


def test_a_lease_that_is_not_renewed_ends(dead):
    with no_locks(), TaskLock("a", timeout=30, renew=False) as lock:
        advance_time(29)
        lock.check()
        advance_time(2)
        with pytest.raises(LockLost):
            lock.check()
        assert in_a_thread(TaskLock("a").acquire)


def test_a_lock_that_was_handed_over_ends(dead):
    with no_locks():
        with TaskLock("a") as lock:
            lock.hand_over(for_=60)
        advance_time(61)
        assert not TaskLock("a").locked()


def test_hold_ends_after_a_day(dead):
    with hold(add, 1):
        advance_time(3600)
        assert add(1) == "skipped"
        advance_time(23 * 3600)
        assert add(1) == 3


def test_only_the_innermost_memory_gets_older(dead):
    with hold("a"):
        with no_locks():
            advance_time(100_000)
        assert TaskLock("a").locked()


@app.task(base=SingletonTask, shared=False, name="users.daily", unique_until="expiry")
def daily():
    return "ran"


@pytest.mark.usefixtures("sends")
@pytest.mark.parametrize(("seconds", "sent"), [(3590, 1), (3600, 2)])
def test_a_call_blocks_its_duplicates_for_a_period_however_late_it_begins(
    dead, monkeypatch, seconds, sent
):
    messages = collect_sent(app, monkeypatch)
    with no_locks():
        daily.delay()
        advance_time(seconds)
        [message] = messages
        receive(daily, task_id=message["task_id"], header=message["headers"]["singletask"])
        daily.delay()
    assert len(messages) == sent


@pytest.mark.parametrize("seconds", [-1, "60"])
def test_time_that_cannot_pass_is_refused(dead, seconds):
    with no_locks(), pytest.raises((TypeError, ValueError), match=r"advance_time\(\)"):
        advance_time(seconds)


def test_time_passes_only_inside_a_block():
    with pytest.raises(LockError, match=r"inside no_locks\(\)"):
        advance_time(60)


# Both


@pytest.fixture(
    params=[hold("other"), no_locks(), queued(add, 7)], ids=["hold", "no_locks", "queued"]
)
def either(request):
    return request.param


def test_both_apply_to_every_thread(dead):
    with ThreadPoolExecutor(1) as pool:  # one that had its stores before
        assert isinstance(pool.submit(add.apply, (1,)).result().result, Exception)
        with hold(add, 1):
            assert in_a_thread(add, 1) == "skipped"
            assert pool.submit(add, 1).result() == "skipped"
        with no_locks():
            assert in_a_thread(add, 1) == 3
            assert pool.submit(add, 1).result() == 3
        assert isinstance(pool.submit(add.apply, (1,)).result().result, Exception)


def test_the_configured_store_is_back(locmem, either):
    lock = TaskLock("mine")
    lock.acquire()
    with either:
        assert inside.family("redis") == "locmem"
        assert not lock.locked()
        assert TaskLock("mine").acquire()
    assert inside.family("redis") == "redis"
    assert lock.owned()
    assert lock.release()


def test_the_server_is_asked_again_afterwards(dead, either):
    with either:
        TaskLock("a").locked()
    with pytest.raises(Exception, match="Connection refused"):
        TaskLock("a").locked()


@pytest.mark.parametrize(
    "caches", [{}, {"none": {"BACKEND": "no.such.Cache"}}, {"none": {"BACKEND": DUMMY}}]
)
def test_a_cache_that_cannot_hold_locks_does_no_harm(settings, either, caches):
    settings.CACHES = {**settings.CACHES, **caches}
    settings.SINGLETASK_CACHE = "none"
    with either:
        assert add(1) == 3


def test_an_exception_inside_ends_it(locmem, either):
    with pytest.raises(ZeroDivisionError), either:
        raise ZeroDivisionError
    assert inside.family("redis") == "redis"


def test_an_error_on_entry_leaves_the_outer_hold(dead):
    with hold("a"):
        with pytest.raises(TypeError), hold(7):
            pass
        assert TaskLock("a").locked()


def test_the_history_is_off_whatever_is_set_inside(locmem, settings, either):
    settings.SINGLETASK_HISTORY = "inline"
    with either:
        assert inside.setting("history") == "off"
        with override_settings(SINGLETASK_HISTORY="inline"):
            assert inside.setting("history") == "off"
    assert inside.setting("history") == "inline"


def test_a_setting_may_be_overridden_inside_and_restored_outside(locmem, settings, either):
    settings.SINGLETASK_HISTORY = "inline"
    later = override_settings(SINGLETASK_LOCK_TIMEOUT=9)
    with either:
        later.enable()
    try:
        assert inside.setting("lock_timeout") == 9
    finally:
        later.disable()
    assert inside.setting("history") == settings.SINGLETASK_HISTORY == "inline"


@pytest.mark.django_db
def test_control_otherwise_the_history_is_written(locmem, settings):
    settings.SINGLETASK_HISTORY = "inline"
    before = TaskLockEvent.objects.count()
    add(1)
    assert TaskLockEvent.objects.count() == before + 1


def test_the_signal_is_sent(dead, events):
    with hold(add, 1) as holder:
        add(1)
    with no_locks():
        add(2)
    assert [event.kind for event in events] == ["conflict", "acquired", "released"]
    assert events[0].blocked_by == holder.token
    assert events[0].blocked_by_task_id == holder.task_id


@pytest.mark.parametrize("context", [hold("a"), no_locks()], ids=["hold", "no_locks"])
def test_generator_functions_and_plain_classes_are_refused(context):
    def generator():
        yield

    async def coroutine_generator():
        yield

    for function in (generator, coroutine_generator):
        with pytest.raises(TypeError, match=r"Write 'with (hold|no_locks)\(…\):'"):
            context(function)
    with pytest.raises(TypeError, match=r"unittest\.TestCase"):
        context(type("Plain", (), {}))


# Nested


def test_hold_inside_no_locks(dead):
    with no_locks():
        with hold(add, 1):
            assert add(1) == "skipped"
            assert add(2) == 4
        assert add(1) == 3


def test_no_locks_inside_hold(dead):
    with hold(add, 1):
        with no_locks():
            assert add(1) == 3
            assert not add.lock(1).locked()
        assert add(1) == "skipped"


def test_the_same_lock_may_be_held_twice(dead):
    with hold(add, 1) as outer:
        with hold(add, 1) as inner:
            assert inner == outer
        assert add.lock(1).holder() == outer


def test_hold_refuses_a_lock_that_the_test_has_taken_itself(dead):
    with hold("a"), TaskLock("b") as lock:
        with pytest.raises(LockConflict) as caught, hold("b"):
            pass
        assert caught.value.holder.token == lock.token
        assert lock.owned()


def test_a_lock_is_back_after_no_locks(dead):
    with hold("a"), TaskLock("b") as lock:
        with no_locks():
            assert TaskLock("b").acquire()
        assert lock.owned()
        assert TaskLock("a").locked()


def test_hold_adds_its_lock_to_those_that_are_there(dead):
    with no_locks(), TaskLock("a"):
        with hold("b"):
            assert TaskLock("a").locked()
        assert TaskLock("a").locked()
        assert not TaskLock("b").locked()


def test_a_lock_that_was_not_given_back_is_forgotten(dead, either):
    with hold("a"):
        assert TaskLock("b").acquire()
    with hold("a"):
        assert not TaskLock("b").locked()


def test_a_lock_that_was_not_given_back_is_not_renewed_in_the_configured_cache(locmem, either):
    before, lock = TaskLock("before"), TaskLock("inside")
    before.acquire()
    with either:
        lock.acquire()
        assert lock.key in inside.renewed_keys()
    assert lock.key not in inside.renewed_keys()
    assert before.key in inside.renewed_keys()
    before.release()
