"""Free the entry of a lock for another holder, and only if it still is the entry of that holder."""

from __future__ import annotations

import pytest
from django.core.cache import caches

from django_singletask import TaskLock
from django_singletask.models import TaskLockEvent
from tests import inside

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "no_renewal_thread"),
]


def test_of_a_killed_process_the_lock_with_its_token_is_freed(take):
    lock = take()
    assert not inside.free_killed(lock, "another")
    assert lock.owned()
    assert inside.free_killed(lock, lock.token)
    assert not lock.locked()
    assert not inside.free_killed(lock, lock.token)
    row = TaskLockEvent.objects.get(outcome="dead")
    assert (row.token, row.reason) == (lock.token, "its process was killed")


@pytest.mark.parametrize(
    "free",
    [lambda lock: inside.free_killed(lock, lock.token), TaskLock.clear],
    ids=["killed", "cleared"],
)
def test_a_lock_that_somebody_takes_meanwhile_stays(take, free):
    lock, others = take(), []

    def take_over(read, key):
        entry = read(key)
        if key == lock.key and not others:
            caches["redis"].delete(key)
            others.append(take())
        return entry

    with inside.handled("read", take_over):
        assert not free(lock)
    assert others[0].owned()
    assert not TaskLockEvent.objects.filter(outcome__in=["dead", "cleared"]).exists()
