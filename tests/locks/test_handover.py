"""A lock that outlives its process: handed over by one, received by another."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_singletask import LockError, LockLost, TaskLock, current_lock
from django_singletask.models import TaskLockEvent
from django_singletask.testing import no_locks
from tests import inside
from tests.command_line import alarm, hold, locks, locks_as_json
from tests.deadline import wait_for
from tests.entries import in_child
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]


def handed_over(name: str = "nightly", *, for_: float = 60, **options: Any) -> str:
    with TaskLock(name, **options) as lock:
        return lock.hand_over(for_=for_)


class TestHandingOver:
    def test_the_lock_stays_held_after_the_block(self, cache_alias):
        with TaskLock("nightly") as lock:
            handle = lock.hand_over(for_=60)
            assert json.loads(json.dumps(handle)) == handle
            assert not lock
            assert lock.token is None
        assert lock.locked()
        assert not TaskLock("nightly").acquire()

    def test_the_entry_has_no_process_and_a_token_of_its_own(self):
        with TaskLock("nightly") as lock:
            before = lock.token
            lock.hand_over(for_=60)
        holder = lock.holder()
        assert (holder.pid, holder.start, holder.timeout) == (0, "", 60)
        assert holder.token != before

    def test_it_ends_after_its_seconds(self):
        handed_over(for_=0.2)
        wait_for(lambda: not TaskLock("nightly").locked(), "it ends, since nobody renews it")

    def test_a_lock_that_is_not_held_cannot_be_handed_over(self):
        with pytest.raises(LockError, match="acquire"):
            TaskLock("nightly").hand_over(for_=60)

    @pytest.mark.parametrize("seconds", [0, -1, float("inf"), 30 * 86400 + 1])
    def test_seconds_that_cannot_work(self, seconds):
        with TaskLock("nightly") as lock:
            with pytest.raises(ValueError, match="for_"):
                lock.hand_over(for_=seconds)
            assert lock.owned()

    def test_a_lost_lock_cannot_be_handed_over(self, cache_alias, take):
        with TaskLock("nightly") as lock:
            lock.clear()
            newer = take()
            with pytest.raises(LockLost):
                lock.hand_over(for_=60)
            assert lock.lost
        assert newer.owned()

    def test_a_task_can_hand_over_its_own_lock(self, monkeypatch):
        monkeypatch.setattr(tasks, "body", lambda *args: current_lock().hand_over(for_=60))
        handle = tasks.hold("a")
        assert tasks.hold.lock("a").locked()
        TaskLock.receive(handle).release()
        assert not tasks.hold.lock("a").locked()

    def test_a_fork_does_not_hand_over_the_lock_of_its_parent(self):
        def hand_over():
            with pytest.raises(LockLost):
                lock.hand_over(for_=60)
            return True

        with TaskLock("nightly") as lock:
            assert in_child(hand_over)
            assert lock.owned()

    def test_the_object_can_be_used_again(self):
        lock = TaskLock("nightly")
        assert lock.acquire()
        TaskLock.receive(lock.hand_over(for_=60)).release()
        assert lock.acquire()
        assert lock.release()

    @pytest.mark.parametrize("sent", [True, False])
    def test_a_lost_reply_raises_and_frees_the_lock(self, sent):
        """Nobody has the handle, so nobody could receive the lock."""
        with TaskLock("nightly") as lock, inside.failing("change", ConnectionError(), sent=sent):
            with pytest.raises(ConnectionError):
                lock.hand_over(for_=60)
        wait_for(lambda: not lock.locked(), "both values are released")


class TestReceiving:
    def test_the_receiver_holds_the_lock_and_frees_it(self, cache_alias):
        with TaskLock.receive(handed_over()) as lock:
            assert lock.owned()
            assert current_lock() is lock
            assert not TaskLock("nightly").acquire()
        assert not lock.locked()

    def test_it_is_renewed_from_then_on(self):
        first_lease = handed_over("not received", for_=2)
        with TaskLock.receive(handed_over(for_=2), timeout=1.5) as lock:
            wait_for(lambda: not TaskLock("not received").locked(), "the first lease is over")
            assert lock.owned()
        with pytest.raises(LockLost):
            TaskLock.receive(first_lease)

    def test_it_cannot_be_acquired_again(self):
        lock = TaskLock.receive(handed_over())
        with pytest.raises(LockError, match="in use"):
            lock.acquire()
        lock.release()

    def test_it_can_be_entered_once(self):
        with TaskLock.receive(handed_over()) as lock, pytest.raises(LockError, match="in use"):
            with lock:
                pass
        with lock:  # as with any other object after its use
            assert lock.owned()

    def test_a_signal_handler_frees_it_for_good_while_a_block_begins(self):
        """Taken again, it would have the token and the fencing token of its first acquisition."""
        lock = TaskLock.receive(handed_over())
        with inside.signal_while_entering(lock.release), lock:
            assert not lock
            assert not lock.locked()

    def test_it_can_be_handed_over_again(self, cache_alias):
        first = handed_over()
        with TaskLock.receive(first) as lock:
            second = lock.hand_over(for_=60)
        with pytest.raises(LockLost):
            TaskLock.receive(first)
        with TaskLock.receive(second) as lock:
            assert lock.owned()

    def test_a_second_receiver_has_lost_it(self, cache_alias):
        handle = handed_over()
        with TaskLock.receive(handle) as lock:
            with pytest.raises(LockLost, match="was already received"):
                TaskLock.receive(handle)
            assert lock.owned()
        with pytest.raises(LockLost, match="can no longer be received"):
            TaskLock.receive(handle)

    def test_of_two_receivers_at_once_one_holds_it(self):
        handle, others = handed_over(), [TaskLock.receive]
        received = []

        def let_another_receive(read: Any, key: str) -> Any:
            entry = read(key)
            while others:
                received.append(others.pop()(handle))
            return entry

        with inside.handled("read", let_another_receive), pytest.raises(LockLost):
            TaskLock.receive(handle)
        assert received[0].owned()
        received[0].release()

    def test_a_cleared_lock_cannot_be_received(self):
        handle = handed_over()
        assert TaskLock("nightly").clear()
        with pytest.raises(LockLost, match="cleared"):
            TaskLock.receive(handle)

    def test_the_lock_of_another_is_left_alone(self, take):
        handle = handed_over()
        TaskLock("nightly").clear()
        newer = take()
        with pytest.raises(LockLost):
            TaskLock.receive(handle)
        assert newer.owned()

    def test_a_lost_reply_raises_and_frees_the_lock(self):
        handle = handed_over()
        with inside.failing("change", ConnectionError(), sent=True):
            with pytest.raises(ConnectionError):
                TaskLock.receive(handle)
        wait_for(lambda: not TaskLock("nightly").locked(), "it is released")

    def test_the_cache_travels(self, empty_cache):
        empty_cache("db_sqlite")
        handle = handed_over(cache="db_sqlite")
        assert not TaskLock("nightly").locked()
        with TaskLock.receive(handle) as lock:
            assert lock.cache == "db_sqlite"
            assert lock.owned()


@no_locks()
def test_a_lock_is_handed_over_in_the_tests_of_an_application():
    with TaskLock.receive(handed_over()) as lock:
        assert lock


TOKEN = "0" * 32
KEY = f"singletask:x:{'0' * 32}"


@pytest.mark.parametrize(
    "handle",
    [
        "",
        "nightly",
        "1" * 100_000,
        None,
        7,
        f"1 t redis {KEY} x",
        f"1 {TOKEN} redis singletask:@fence x",
        f"1 {TOKEN} redis {KEY} ",
        f"1 {TOKEN} redis {KEY} {'x' * 256}",
        f"1 {TOKEN} {KEY} x",
        f"0 {TOKEN} redis {KEY} x",
        f"1 {TOKEN} redis {KEY} x\n",
    ],
    ids=lambda handle: repr(handle)[:40],
)
def test_a_string_that_is_no_handle_is_refused(handle):
    with pytest.raises(ValueError, match="handle must be what hand_over"):
        TaskLock.receive(handle)


@pytest.mark.parametrize("name", ["x", f"x {KEY} y"])
def test_control_the_fields_of_a_handle_are_accepted(name):
    with pytest.raises(LockLost):
        TaskLock.receive(f"1 {TOKEN} redis {KEY} {name}")


class TestHistory:
    def rows(self) -> list[tuple[str, str, str, str]]:
        rows = TaskLockEvent.objects.order_by("pk")
        return [
            (row.kind, row.outcome, row.result, row.reason.partition(" on ")[0]) for row in rows
        ]

    def test_each_hand_has_a_row(self):
        handle = handed_over()
        assert self.rows() == [
            ("run", "released", "returned", "handed over for 60 s"),
            ("run", "", "", ""),
        ]
        with TaskLock.receive(handle):
            assert self.rows()[1:] == [
                ("run", "released", "", "received by code outside a task"),
                ("run", "", "", ""),
            ]
        assert self.rows()[2] == ("run", "released", "returned", "")

    def test_the_end_of_a_body_that_handed_its_lock_over_is_told(self):
        """Otherwise a task that pauses its key after each run would never complete."""

        def body() -> None:
            with TaskLock("nightly") as lock:
                lock.hand_over(for_=60)
                raise LookupError

        with pytest.raises(LookupError):
            body()
        assert self.rows()[0] == ("run", "released", "raised", "handed over for 60 s")
        assert TaskLockEvent.objects.earliest("pk").is_completed

    def test_history_says_that_it_is_handed_over(self):
        handed_over()
        (_, line) = locks("history").splitlines()[1:]
        assert line.split()[1:] == ["-", "nightly", "handed", "over", "-", socket.gethostname()]

    def test_a_row_is_closed_although_the_cache_did_not_answer(self):
        with TaskLock("nightly") as lock, inside.failing("change", ConnectionError("down")):
            with pytest.raises(ConnectionError):
                lock.hand_over(for_=60)
        why = "not released at once: ConnectionError: down"
        assert self.rows() == [("run", "released", "", why)]


class TestOperators:
    def test_list_says_that_it_is_handed_over(self):
        handed_over()
        assert "handed over" in locks("list")
        (lock,) = locks_as_json("list")["locks"]
        assert (lock["state"], lock["pid"]) == ("handed_over", 0)

    def test_why_says_who_handed_it_over_and_for_how_long_it_waits(self):
        handed_over(for_=600)
        text = " ".join(locks("why", "nightly").split())
        assert re.search(r"held handed over \d+s ago by code outside a task on ", text)
        assert re.search(r"; free in 9m \d+s unless received before", text)

    def test_why_knows_it_where_the_cache_cannot_list(self, settings, empty_cache):
        settings.SINGLETASK_CACHE = "pymemcache"
        empty_cache("pymemcache")
        handed_over(for_=600)
        assert "handed over" in locks("why", "nightly")
        assert "handed over" in locks("list")

    def test_clear_frees_it(self):
        handle = handed_over()
        locks("clear", "nightly", "--yes")
        with pytest.raises(LockLost):
            TaskLock.receive(handle)

    def test_an_alarm_counts_it(self):
        hold(pid=0, since=time.time() - 3700)
        assert "nightly" in alarm("--fail-if-held-over", "1h")[1]


def test_a_conflict_names_who_handed_it_over(take: Callable[..., TaskLock]):
    handed_over()
    lock = TaskLock("nightly")
    assert not lock.acquire()
    assert "process" not in str(lock.blocker)


def test_the_last_of_all_slots_can_be_handed_over():
    lock = TaskLock("many", slots=1000)
    slots = inside.slot_keys(lock)
    for key in slots[:-1]:
        inside.put_entry(key, b"another")
    assert lock.acquire()
    with TaskLock.receive(lock.hand_over(for_=60)) as received:
        assert received.key == slots[-1]
