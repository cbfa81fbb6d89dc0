"""Entries of the package that are no locks: no operator can clear them, or sees them as held."""

from __future__ import annotations

import re

import pytest
from django.core.management import CommandError

from django_singletask import TaskLock
from tests import inside
from tests.admin_pages import CLEAR, log_in
from tests.command_line import locks, locks_as_json
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("no_renewal_thread", "on_redis", "empty_history"),
]

KINDS = [
    "singletask:@epoch",
    "singletask:@fence",
    "singletask:@latest:.+",
    "singletask:@sweep:.+",
    "singletask:weekly:[0-9a-f]{32}:cleared:[0-9a-f]+",
    "singletask:weekly:[0-9a-f]{32}#2:cleared:[0-9a-f]+",
]
"""The keys of the entries: a pattern for each kind, and for the marker of a second slot."""


@pytest.fixture
def entries() -> list[str]:
    """Write an entry of each kind, beside a lock that is held; return their keys."""
    lock = TaskLock("nightly")
    assert lock.acquire()
    lock.fencing_token()
    assert inside.take_number(lock, tasks.latest)
    assert inside.take_turn_to_sweep()
    weekly = [TaskLock("weekly", slots=2) for _slot in range(2)]
    assert all(slot.acquire() for slot in weekly)
    assert all(slot.clear(token=slot.token) for slot in weekly)
    store = inside.store_of("redis")
    prefix = store.make_key("")
    keys = [key.decode().removeprefix(prefix) for key in store.client.keys("*")]
    keys.remove(lock.key)
    for kind in KINDS:
        assert any(re.fullmatch(kind, key) for key in keys)
    return keys


def value_of(key: str) -> bytes:
    """Return what is in an entry, which must be there."""
    value: bytes = inside.store_of("redis").read(key).value
    return value


@pytest.mark.parametrize("arguments", [("clear", "--yes"), ("why",), ("list",)], ids=" ".join)
def test_the_command_does_not_know_it(entries: list[str], arguments: tuple[str, ...]) -> None:
    for key in entries:
        before = value_of(key)
        text = re.escape(f"No lock or task is known as '{key}'")
        with pytest.raises(CommandError, match=text) as caught:
            locks(*arguments, key)
        assert caught.value.returncode == 3
        assert value_of(key) == before


def test_the_admin_does_not_clear_it(entries: list[str]) -> None:
    client = log_in("view_tasklockevent", "clear_lock")
    for key in entries:
        before = value_of(key)
        answer = client.post(CLEAR, {"lock": f"{key} ", "reason": ""}, follow=True)
        assert "Not freed: " in answer.content.decode()
        assert value_of(key) == before


def test_it_is_not_listed(entries: list[str]) -> None:
    assert [lock["name"] for lock in locks_as_json("list")["locks"]] == ["nightly"]


def test_control_the_key_of_a_lock_is_known(entries: list[str]) -> None:
    assert "Freed 1 lock." in locks("clear", "--yes", TaskLock("nightly").key)


def test_a_lock_may_have_such_a_name() -> None:
    assert TaskLock("singletask:@fence").acquire()
    assert "Freed 1 lock." in locks("clear", "--yes", "singletask:@fence")
