"""Records that something else wrote: whatever they hold, they are read, shown and cleared."""

from __future__ import annotations

import json

import pytest

from django_singletask import TaskLock
from django_singletask.holder import Holder
from tests import inside
from tests.admin_pages import BASE, CLEAR, log_in
from tests.command_line import locks, locks_as_json
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history", "eighty_columns"),
]

# What could steer a terminal, or turn the direction of a page's text.
HARMFUL = "\x1b[2J\x07\u202e\ud800\0\n"
FOREIGN = {
    "no JSON": b"locked",
    "no record": b'["locked"]',
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "huge numbers": b'{"token": "t", "timeout": 1e300, "since": -1e300, "pid": 1e300}',
    "endless": b'{"token": "t", "timeout": Infinity, "since": NaN}',
    "negative numbers": b'{"token": "t", "timeout": -1e300, "since": 1e300, "pid": -1}',
    "overlong": json.dumps(dict.fromkeys(("token", "name", "host", "task_id"), "x" * 200_000)),
    "harmful token": json.dumps({"token": HARMFUL}),
    "spaces in the token": b'{"token": "a b:c"}',
    "text as a number": b'{"token": "t", "pid": "7"}',
    "number as a text": b'{"token": "t", "host": 7}',
}
FOREIGN = {kind: text.encode() if isinstance(text, str) else text for kind, text in FOREIGN.items()}
TEXTS = {"token": "t"} | dict.fromkeys(("name", "host", "task", "task_id"), HARMFUL)
SHOWN = [FOREIGN["no text"], json.dumps(TEXTS).encode()]
NAME = "nightly"
KEY = TaskLock(NAME).key
UNKNOWN = Holder.from_dict({})


@pytest.mark.parametrize("kind", FOREIGN)
def test_its_holder_is_unknown(kind):
    assert Holder.decode(FOREIGN[kind]) == UNKNOWN


def test_a_lock_clears_what_something_else_wrote(cache_alias):
    inside.put_entry(KEY, FOREIGN["no JSON"], alias=cache_alias)
    assert TaskLock(NAME).locked()
    assert TaskLock(NAME).clear()
    assert TaskLock(NAME).acquire()


@pytest.mark.parametrize("value", SHOWN, ids=["foreign", "harmful"])
def test_the_command_clears_what_something_else_wrote(on_redis, value):
    inside.put_entry(KEY, value)
    listed = locks()
    assert max(map(len, listed.splitlines())) <= 80
    assert "Freed 1 lock." in locks("clear", NAME, "--yes")
    assert not TaskLock(NAME).locked()
    assert max(map(len, locks("history").splitlines())) <= 80


@pytest.mark.parametrize("value", SHOWN, ids=["foreign", "harmful"])
def test_the_admin_clears_what_something_else_wrote(on_redis, value):
    inside.put_entry(KEY, value)
    client = log_in("view_tasklockevent", "clear_lock")
    page = client.get(BASE).content.decode()
    assert len(page) < 20_000
    assert not set(page).intersection("\x1b\x07\u202e\ud800\0")
    [lock] = locks_as_json("list")["locks"]
    form = {"lock": f"{lock['key']} {lock['token']}", "reason": ""}
    answer = client.post(CLEAR, form, follow=True)
    assert "Cleared: " in answer.content.decode()
    assert not TaskLock(NAME).locked()


def test_what_is_harmful_is_shown_escaped():
    holder = Holder.decode(
        json.dumps({"host": "web\x1b[2J\u202e", "name": "日本\u3000語"}).encode()
    )
    assert holder.host == "web\\x1b[2J\\u202e"
    assert holder.name == "日本\u3000語"


def test_a_record_of_this_package_is_read_as_it_was_written():
    holder = inside.holder_of(TaskLock(NAME), tasks.hold, "3f0c", retries=2)
    assert Holder.decode(holder.encode()) == holder


def test_of_a_record_in_which_fields_mean_something_else_nothing_is_read():
    holder = inside.holder_of(TaskLock(NAME), tasks.hold, "3f0c")
    assert Holder.from_dict(vars(holder)) == holder
    assert Holder.from_dict({**vars(holder), "version": holder.version + 1}) == UNKNOWN


def test_records_of_other_versions_are_read():
    older = {"token": "t", "name": NAME, "since": 7}
    holder = Holder.decode(json.dumps({**older, "of a newer version": [1]}).encode())
    assert holder == Holder.from_dict(older)
    assert (holder.name, holder.since, holder.task_id, holder.slots) == (NAME, 7, None, 1)
