"""Entries of the package that are no locks: no operator can clear them, or sees them as held."""

from __future__ import annotations

import re

import pytest
from django.core.management import CommandError

from django_singletask import TaskLock
from django_singletask.history.sweep import takes_turn
from django_singletask.locks.keys import LATEST, name_key
from django_singletask.operators import held
from django_singletask.stores import get_store
from django_singletask.stores.base import FENCE, Entry, marker_key
from django_singletask.task.latest import take_ticket
from tests.admin_pages import CLEAR, TASK, log_in
from tests.command_line import locks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

KINDS = ("epoch", "fence", "tickets", "marker", "marker of a slot", "turn to sweep")


@pytest.fixture
def entries() -> dict[str, str]:
    """Write an entry of each kind, beside a lock that is held; return their keys."""
    lock = TaskLock("nightly")
    assert lock.acquire()
    lock.fencing_token()
    take_ticket(lock._address, TASK)
    store = get_store("redis")
    assert takes_turn()
    [turn] = store.client.keys("*@sweep:*")
    first, second = name_key("weekly").slots(2)
    for key in (first, second):
        assert store.add(key, lock._lease.value, 60) is None
        assert store.clear(key, lock._lease.value, 60)
    return {
        "epoch": "singletask:@epoch",
        "fence": FENCE,
        "tickets": lock._lock_key.beside(LATEST, TASK).key,
        "marker": marker_key(first, lock._lease.value),
        "marker of a slot": marker_key(second, lock._lease.value),
        "turn to sweep": turn.decode().removeprefix(store.make_key("")),
    }


def entry(key: str) -> Entry | None:
    return get_store("redis").read(key)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [("clear", "--yes"), ("why",), ("list",)], ids=" ".join)
def test_the_command_does_not_know_it(
    entries: dict[str, str], kind: str, arguments: tuple[str, ...]
) -> None:
    key = entries[kind]
    before = entry(key)
    assert before is not None
    with pytest.raises(
        CommandError, match=re.escape(f"No lock or task is known as '{key}'")
    ) as caught:
        locks(*arguments, key)
    assert caught.value.returncode == 3
    assert entry(key).value == before.value  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_the_admin_does_not_clear_it(entries: dict[str, str], kind: str) -> None:
    key = entries[kind]
    before = entry(key)
    assert before is not None
    client = log_in("view_tasklockevent", "clear_lock")
    answer = client.post(CLEAR, {"lock": f"{key} ", "reason": ""}, follow=True)
    assert "Not freed: " in answer.content.decode()
    assert entry(key).value == before.value  # type: ignore[union-attr]


def test_it_is_not_listed(entries: dict[str, str]) -> None:
    assert [lock.name for lock in held.held()] == ["nightly"]


def test_control_the_key_of_a_lock_is_known(entries: dict[str, str]) -> None:
    assert "Freed 1 lock." in locks("clear", "--yes", name_key("nightly").key)


def test_a_lock_may_have_such_a_name() -> None:
    assert TaskLock(FENCE).acquire()
    assert "Freed 1 lock." in locks("clear", "--yes", FENCE)
