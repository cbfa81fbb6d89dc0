"""A lock that several may hold at once, each in a slot."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import threading

import pytest
from django.core.cache import caches
from django.db import connections
from django.urls import reverse

from django_singletask import LockConflict, LockLost, TaskLock, only_one
from django_singletask.models import TaskLockEvent
from django_singletask.testing import hold
from tests import inside
from tests.command_line import hold as put
from tests.command_line import locks, locks_as_json
from tests.deliveries import collect_sent, deliver, receive, receive_sent, wait_for_debts
from tests.entries import listening
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]
on_each_family = pytest.mark.parametrize(
    "cache_alias", ["redis", "pymemcache", "db_postgres", "locmem"], indirect=True
)


@pytest.fixture
def three(settings):
    """Give the locks of a name with three slots, of which two are taken."""
    locks = [TaskLock("api", slots=3) for _ in range(3)]
    assert locks[0].acquire()
    assert locks[1].acquire()
    yield locks
    for lock in locks:
        if lock:
            lock.release()


def hold_slot(number, task_id="other"):
    """Let a run have a slot of the lock of ``tasks.hold("a")``; return the key of the slot."""
    lock = tasks.hold.lock("a")
    key = inside.slot_keys(lock)[number - 1]
    holder = dataclasses.replace(inside.holder_of(lock, tasks.hold, task_id), slots=3)
    # A conflict is one with the slot that ends first.
    inside.put_entry(key, holder.encode(), 60 + number)
    return key


@on_each_family
def test_as_many_hold_the_lock_as_it_has_slots(cache_alias):
    locks = [TaskLock("api", slots=3, cache=cache_alias) for _ in range(4)]
    assert [lock.acquire() for lock in locks] == [True, True, True, False]
    assert {lock.key for lock in locks[:3]} == {*inside.slot_keys(locks[3])[:3]}
    assert locks[3].blocker.token in [lock.token for lock in locks[:3]]
    assert locks[1].release()
    assert locks[3].acquire()
    assert all(locks[n].owned() and locks[n].release() for n in (0, 2, 3))


def test_the_lock_is_locked_when_all_slots_are_taken(three):
    assert not three[2].locked()
    assert three[2].acquire()
    assert TaskLock("api", slots=3).locked()


def test_the_holder_is_the_one_whose_lease_ends_first(three):
    three[1].extend(20)
    view = TaskLock("api", slots=3)
    assert view.holder().token == three[1].token
    assert 15 < view.remaining() <= 20


def test_a_conflict_is_with_the_holder_whose_lease_ends_first(three):
    assert three[2].acquire()
    three[1].extend(20)
    with pytest.raises(LockConflict) as caught, TaskLock("api", slots=3):
        pass
    assert caught.value.holder.token == three[1].token


def test_a_call_that_waits_is_counted_behind_one_holder(three, wait_for):
    """Renewals change which lease ends first, and so the holder that the call would meet."""
    assert three[2].acquire()
    three[1].extend(20)
    with listening() as events:
        thread = threading.Thread(target=wait_in_vain, args=(2.5,))
        thread.start()
        wait_for(lambda: events, "it is reported")
        three[2].extend(10)
        thread.join()
    conflicts = [(event.result, event.blocked_by, event.was_waiting) for event in events]
    token = three[1].token
    assert conflicts == [("waiting", token, False), ("skipped", token, True)]


def wait_in_vain(seconds):
    assert not TaskLock("api", slots=3).acquire(wait=seconds)
    connections.close_all()


def test_clear_wants_a_token(three):
    with pytest.raises(TypeError, match=r"api has 3 slots: choose a holder with clear\(token="):
        three[2].clear()
    assert three[2].clear(token=three[1].token)
    assert (three[0].owned(), three[1].owned()) == (True, False)


def test_a_cleared_slot_is_not_taken_again_by_its_renewal(three):
    three[2].clear(token=three[1].token)
    with pytest.raises(LockLost):
        three[1].extend()


def test_several_slots_have_no_fencing_token(three):
    with pytest.raises(TypeError, match="has 3 slots"):
        three[0].fencing_token()


def test_a_slot_is_handed_over_and_received(three):
    handle = three[1].hand_over(for_=30)
    key = three[1].key
    with TaskLock.receive(handle) as lock:
        assert (lock.key, lock.slots, lock.owned()) == (key, 3, True)
        with pytest.raises(TypeError):
            lock.fencing_token()


def test_a_block_inside_a_block_conflicts_though_a_slot_is_free():
    with TaskLock("api", slots=3), pytest.raises(LockConflict), TaskLock("api", slots=3):
        pass


def test_an_object_that_received_a_slot_takes_no_second_one_inside_a_block(three):
    received = TaskLock.receive(three[1].hand_over(for_=30))
    three[0].release()
    received.release()
    with TaskLock(received.name, slots=3):
        assert not received.acquire()


def test_a_block_does_not_wait_for_itself():
    with TaskLock("api", slots=3), pytest.raises(LockConflict):
        TaskLock("api", slots=3).acquire(wait=math.inf)


def test_a_slot_of_a_dead_holder_is_taken_over_when_no_other_is_free(three, monkeypatch):
    assert three[2].acquire()
    dead = three[1].token
    inside.call_dead(monkeypatch, lambda holder: holder.token == dead)
    with TaskLock("api", slots=3) as lock:
        assert lock.key == three[1].key
        assert not three[1].owned()


def test_an_error_gives_back_what_the_request_may_have_taken(take):
    first = take("api", slots=2)
    with inside.failing("take", ConnectionError(), sent=True), pytest.raises(ConnectionError):
        TaskLock("api", slots=2).acquire()
    wait_for_debts()
    assert first.owned()
    assert take("api", slots=2)


def test_hold_holds_all_slots():
    lock = TaskLock("api", slots=3)
    with hold(lock):
        assert lock.locked()
        assert not lock.acquire()
        with hold(lock):
            pass
        assert lock.locked()
        assert TaskLock("api", slots=4).acquire()
    assert lock.holder() is None


def test_hold_refuses_a_lock_of_which_the_test_has_a_slot():
    with hold("another"):
        lock = TaskLock("api", slots=3)
        assert lock.acquire()
        with pytest.raises(LockConflict), hold(TaskLock("api", slots=3)):
            pass
        assert all(TaskLock("api", slots=3).acquire() for _ in range(2))


@pytest.mark.parametrize("slots", [0, 1001, True, "3", 2.0])
def test_a_wrong_number_of_slots_is_refused(slots):
    with pytest.raises(
        (TypeError, ValueError), match="slots must be a whole number from 1 to 1000"
    ):
        TaskLock("api", slots=slots)


def test_only_one_lets_so_many_calls_in():
    @only_one(key="calls", slots=2, skip_result="skipped")
    def call(inner):
        return inner() if inner else "ran"

    other = TaskLock("calls", slots=2)
    assert other.acquire()
    assert call(None) == "ran"
    assert TaskLock("calls", slots=2).acquire()
    assert call(None) == "skipped"


class TestTasks:
    """Messages of a task with ``lock_slots``."""

    @pytest.fixture
    def hold(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))
        monkeypatch.setattr(tasks.hold, "lock_slots", 3)
        return tasks.hold

    @pytest.fixture
    def sent(self, monkeypatch):
        return collect_sent(tasks.hold.app, monkeypatch)

    def test_a_run_takes_a_free_slot_and_is_skipped_without_one(self, hold):
        for number in (1, 2):
            hold_slot(number)
        assert receive(hold, "a") == "ran"
        hold_slot(3)
        assert receive(hold, "a") == "skipped"
        event = TaskLockEvent.objects.get(kind="conflict")
        assert (event.name, event.key) == (hold.lock("a").name, hold.lock("a").key)

    @pytest.mark.parametrize(
        ("number", "message"),
        [
            (2, {}),
            # A deploy has lowered lock_slots from 1,000 to 3 since the first run began.
            (1000, {"delivery_info": {"redelivered": True}}),
            (1000, {"header": inside.WAITS}),
        ],
        ids=["a slot is free", "marked by the broker", "postponed before"],
    )
    def test_a_redelivery_waits_for_its_first_run(self, hold, sent, number, message):
        hold_slot(number, task_id="mine")
        with inside.postponed():
            receive(hold, "a", **message)
        assert inside.WAITS.items() <= inside.header_of(sent[0]["headers"]).items()

    def test_a_redelivery_finds_its_first_run_though_one_slot_is_left(
        self, hold, sent, monkeypatch
    ):
        monkeypatch.setattr(hold, "lock_slots", 1)
        key = hold_slot(3, task_id="mine")
        with inside.postponed():
            receive(hold, "a", delivery_info={"redelivered": True})
        assert inside.WAITS.items() <= inside.header_of(sent[0]["headers"]).items()
        caches["redis"].delete(key)
        assert receive(hold, "a", header=inside.READS) == "ran"

    def test_a_retry_waits_for_the_try_before_it_beyond_its_own_number(self, hold, sent):
        """That try has sent it, and is about to give back a slot of a time with 1,000 slots."""
        hold_slot(1000, task_id="mine")
        with inside.postponed():
            receive(hold, "a", retries=1)
        assert len(sent) == 1

    def test_tasks_of_a_loop_in_a_body_have_a_slot_each(self, monkeypatch):
        """They have the task id of the body, but only a delivery is one run of it."""

        async def take_one(inside):
            async with TaskLock("api", slots=3):
                inside.append(1)
                while len(inside) < 3:
                    await asyncio.sleep(0.01)

        async def take_three():
            inside = []
            await asyncio.wait_for(asyncio.gather(*(take_one(inside) for _ in range(3))), 20)
            return len(inside)

        monkeypatch.setattr(tasks, "body", lambda *args, **facts: asyncio.run(take_three()))
        assert deliver(tasks.unique, "a").retval == 3

    def test_a_redelivery_takes_a_dead_run_of_another_call_for_no_proof(
        self, hold, sent, monkeypatch
    ):
        """Its own first run has given its slot back; the result of that may be on its way."""
        for number in (1, 2, 3):
            hold_slot(number)
        inside.call_dead(monkeypatch, lambda holder: holder.is_run_of("other"))
        with inside.postponed():
            receive(hold, "a", header=inside.WAITS)
        assert inside.READS.items() <= inside.header_of(sent[0]["headers"]).items()

    def test_a_link_waits_for_the_task_that_it_replaces(self, hold, sent):
        for number, task_id in enumerate(["one", "parent", "two"], 1):
            hold_slot(number, task_id=task_id)
        with inside.postponed():
            receive(hold, "a", parent_id="parent", replaced_task_nesting=1)

    def test_what_was_postponed_runs_when_a_slot_is_free(self, hold, sent, monkeypatch):
        monkeypatch.setattr(hold, "on_conflict", "requeue")
        keys = [hold_slot(number) for number in (1, 2, 3)]
        with inside.postponed():
            receive(hold, "a")
        header = inside.header_of(sent[0]["headers"])
        assert header["key"] == keys[0]
        caches["redis"].delete(keys[1])
        assert receive(hold, "a", header=header) == "ran"

    def test_of_the_calls_that_replace_each_other_the_last_runs(self, hold, sent):
        keys = [hold_slot(number) for number in (1, 2, 3)]
        first, _last = [hold.apply_async(("a",), lock_options=tasks.LATEST) for _ in range(2)]
        with inside.postponed():
            receive_sent(hold, sent[1])
        caches["redis"].delete(keys[2])
        assert sent[0]["task_id"] == first.id
        assert receive_sent(hold, sent[0]) == "skipped"
        assert receive_sent(hold, sent[2]) == "ran"

    def test_raise_and_wait_meet_the_holders(self, hold, monkeypatch):
        for number in (1, 2, 3):
            hold_slot(number)
        for policy in ("raise", "wait"):
            monkeypatch.setattr(hold, "on_conflict", policy)
            monkeypatch.setattr(hold, "lock_wait", 0.1 if policy == "wait" else None)
            with pytest.raises(LockConflict):
                receive(hold, "a")


class TestOperators:
    """What an operator sees of a lock with slots."""

    def test_each_holder_is_listed_with_its_share(self, three):
        lines = [line for line in locks("list", "api").splitlines() if "  api  " in line]
        assert len(lines) == 2
        assert all(line.startswith("held (2 of 3)  ") for line in lines)
        facts = locks_as_json("list")["locks"]
        assert [(each["slots"], each["slots_held"]) for each in facts] == [(3, 2), (3, 2)]
        assert {each["key"] for each in facts} == {lock.key for lock in three[:2]}

    def test_a_cache_that_lists_nothing_is_asked_for_all_slots(self, settings, empty_cache):
        settings.SINGLETASK_CACHE = "pymemcache"
        empty_cache("pymemcache")
        taken = [TaskLock("api", slots=3) for _ in range(2)]
        assert all(lock.acquire() for lock in taken)
        taken[0].release()
        settings.SINGLETASK_HISTORY = "off"
        (lock,) = locks_as_json("list", "api")["locks"]
        assert lock["key"] == taken[1].key

    @pytest.mark.parametrize("alias", ["redis", "pymemcache"])
    @pytest.mark.parametrize("typed", ["name", "key"])
    def test_a_name_reads_the_slots_that_its_holders_count(
        self, settings, empty_cache, alias, typed
    ):
        """The first holder counts two slots, and later ones, after a deploy, count four."""
        settings.SINGLETASK_CACHE = alias
        settings.SINGLETASK_HISTORY = "off"
        empty_cache(alias)
        lock, counted = TaskLock("api"), []
        keys = inside.slot_keys(lock)
        for number, slots in ((0, 2), (1, 4), (3, 4)):
            holder = dataclasses.replace(inside.holder_of(lock), slots=slots, token=f"t{number}")
            inside.put_entry(keys[number], holder.encode(), alias=alias)

        def count_keys(read_many, wanted):
            counted.extend(wanted := [*wanted])
            return read_many(wanted)

        with inside.handled("read_many", count_keys, cache=alias):
            found = locks_as_json("list", getattr(lock, typed))["locks"]
        shares = {each["key"]: (each["slots_held"], each["slots"]) for each in found}
        assert shares == {keys[0]: (3, 2), keys[1]: (3, 4), keys[3]: (3, 4)}
        assert 3 <= len(counted) == len({*counted}) <= 6

    def test_a_record_that_counts_too_many_slots_reads_no_more_than_there_can_be(self):
        put(name="api", key=TaskLock("api").key, slots=2**31 - 1)
        assert [lock["name"] for lock in locks_as_json("list", "api")["locks"]] == ["api"]

    def test_why_tells_of_each_holder(self, three):
        text = locks("why", "api")
        assert text.startswith("api: held (2 of 3 slots)\n")
        assert all(f"manage.py locks clear {lock.token}" in text for lock in three[:2])

    def test_why_tells_the_slots_of_the_lock_whose_key_is_given(self, three):
        text = locks("why", three[1].key)
        assert text.count("  slot       held, for ") == 2

    def test_why_says_of_a_kept_slot_that_its_run_has_ended(self, monkeypatch, tmp_path):
        monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "log"))
        for task_id in ("first", "second"):
            options = {"lock_slots": 2, "lock_at_least": 60}
            receive(tasks.hold, "a", task_id=task_id, header={"options": options})
        text = " ".join(locks("why", tasks.hold.lock("a").name).split())
        assert re.search(
            r" slot kept, for \d+s more by lock_at_least; the body of task second on \S+ has ended",
            text,
        )

    def test_why_of_a_lock_whose_first_slot_is_free(self, three):
        three[0].release()
        assert locks("why", "api").startswith("api: held (1 of 3 slots)\n")

    def test_clear_frees_the_slot_that_was_named(self, three):
        locks("clear", "--yes", three[1].key)
        assert (three[0].owned(), three[1].owned()) == (True, False)

    def test_clear_frees_all_that_it_showed(self, three):
        assert "Freed 2 locks." in locks("clear", "--yes", "api")
        assert TaskLock("api", slots=3).holder() is None

    def test_the_history_has_the_name_of_the_lock_and_the_key_of_the_slot(self, three):
        rows = TaskLockEvent.objects.named("api")
        assert {row.key for row in rows} == {lock.key for lock in three[:2]}

    def test_the_admin_shows_each_holder_with_its_share(self, three, admin_client):
        page = admin_client.get(reverse("admin:django_singletask_tasklockevent_changelist"))
        assert page.content.decode().count("2 of 3 slots") == 2
