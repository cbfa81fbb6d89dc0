"""Free the entry of a lock for another holder, and only if it still is the entry of that holder."""

from __future__ import annotations

import pytest

from django_singletask import TaskLock
from django_singletask.locks.address import Address
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "no_renewal_thread"),
]


@pytest.fixture
def taken_over(monkeypatch):
    """Let another holder take the lock as soon as its entry was read."""
    locks = []

    def take_over(lock):
        read = Address.read

        def read_and_lose(address):
            monkeypatch.setattr(Address, "read", read)
            entry = address.read()
            get_store("redis").release(address.key, entry.value)
            locks.append(TaskLock(lock.name))
            assert locks[0].acquire()
            return entry

        monkeypatch.setattr(Address, "read", read_and_lose)
        return locks

    yield take_over
    for lock in locks:
        lock.release()


class TestBury:
    def test_the_lock_of_that_token_is_freed(self, take):
        lock = take()
        assert lock._address.free_killed(lock.token, "its process was killed")
        assert not lock.locked()
        row = TaskLockEvent.objects.get(outcome="dead")
        assert (row.token, row.reason) == (lock.token, "its process was killed")

    def test_the_lock_of_another_token_stays(self, take):
        lock = take()
        assert not lock._address.free_killed("another", "its process was killed")
        assert lock.owned()

    def test_a_free_lock_stays_free(self):
        assert not TaskLock("nightly")._address.free_killed("a token", "its process was killed")
        assert not TaskLockEvent.objects.exists()

    def test_a_lock_that_somebody_takes_meanwhile_stays(self, take, taken_over):
        lock = take()
        locks = taken_over(lock)
        assert not lock._address.free_killed(lock.token, "its process was killed")
        assert locks[0].owned()
        assert not TaskLockEvent.objects.filter(outcome="dead").exists()


class TestClear:
    def test_a_lock_that_somebody_takes_meanwhile_stays(self, take, taken_over):
        lock = take()
        locks = taken_over(lock)
        assert not TaskLock("nightly").clear()
        assert locks[0].owned()
        assert not TaskLockEvent.objects.filter(outcome="cleared").exists()
