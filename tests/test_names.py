from __future__ import annotations

import subprocess
import sys

import pytest

from django_singletask.locks.keys import name_key
from django_singletask.operators.held import held, must_be_known
from django_singletask.operators.names import (
    UnknownName,
    locks_of,
    nearest,
    select,
)
from tests.command_line import hold
from tests.past_rows import ran
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

UNIQUE = "tests.testapp.tasks.unique"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("nightly", 1),
        ("singletask:x:0", 1),
        # The lock of that name, the call as it is written and as the task binds it, each with the
        # entry of the call while it is queued.
        (f"{UNIQUE}(key='a')", 5),
        (f"{UNIQUE}('a')", 3),
        ("unknown.task(a=1)", 3),
        ("unknown.task(1)", 1),
        (f"{UNIQUE}(", 1),
        (f"{UNIQUE}(open('/etc/passwd'))", 1),
        ("(" * 250, 1),
        ("\x00", 0),
    ],
)
def test_number_of_keys_that_a_name_can_mean(name, count):
    assert len(locks_of(name)) == count


@pytest.mark.parametrize("name", [f"{UNIQUE}(key='a')", f"{UNIQUE}('a', 5)", f"{UNIQUE}( 'a' )"])
def test_call_is_found_by_its_arguments(name):
    assert tasks.unique.lock("a").key in select(name).keys


def test_name_of_a_lock_is_one_of_its_names():
    assert name_key("nightly").key in select("nightly").keys


def test_lock_name_that_raises_is_no_call(monkeypatch):
    def name(key):
        raise KeyError(key)

    task = tasks.unique.__class__  # of the task, not of the proxy that stands for it
    monkeypatch.setattr(task, "lock_on", None)
    monkeypatch.setattr(task, "lock_name", staticmethod(name), raising=False)
    assert not select(f"{UNIQUE}(key='a')").registered
    assert len(locks_of(f"{UNIQUE}(key='a')")) == 3


@pytest.mark.parametrize("name", [f"{UNIQUE}('a')", f"{UNIQUE}(key='a')"])
def test_call_of_a_task_of_the_project_is_known(name):
    assert select(name).registered


@pytest.mark.parametrize(
    "name",
    [
        "nightly",
        f"{UNIQUE}(wrong=1)",
        f"{UNIQUE}(1, 2, 3, 4)",
        "unknown.task(1)",
        "celery.backend_cleanup()",
    ],
)
def test_other_names_are_no_calls(name):
    assert not select(name).registered


def meant(typed):
    return select(typed).task


def test_last_parts_of_the_name_of_a_task_are_enough():
    ran(60, name="a()", task="other.project.sync")
    assert meant(UNIQUE) == meant("unique") == meant("tasks.unique") == UNIQUE
    assert meant("sync") == meant("project.sync") == "other.project.sync"
    assert meant("nique") == meant("") == ""
    assert tasks.unique.lock("a").key in select("unique('a')").keys


def test_task_that_only_holds_a_lock_is_found_by_its_name():
    hold(name="other.project.sync(1)", task="other.project.sync")
    assert [lock.task for lock in held([select("other.project.sync")])] == ["other.project.sync"]


def test_end_of_several_names_is_an_error_with_these_names():
    ran(60, name="a()", task="feeds.sync")
    ran(60, name="b()", task="shops.sync")
    with pytest.raises(UnknownName) as caught:
        select("sync")
    message = "No lock or task is known as 'sync'."
    assert str(caught.value) == f'{message} Did you mean "feeds.sync", or "shops.sync"?'


def test_error_does_not_repeat_a_huge_name():
    with pytest.raises(UnknownName) as caught:
        must_be_known([select("x" * 100_000)])
    assert len(str(caught.value)) < 400


def test_lock_that_has_the_name_is_meant_rather_than_a_task_whose_name_ends_so():
    assert meant("unique") == UNIQUE
    ran(60, name="unique")
    assert meant("unique") == ""


def test_tasks_are_imported_where_no_worker_has_done_so():
    program = "import django; django.setup()\nfrom django_singletask.operators import names\n"
    program += f"print(names.select('{UNIQUE}(1)').registered)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


KNOWN = ["reports.nightly()", "feeds.tasks.import_feed(feed_id=7)", "customer:12"]


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("import_fed", KNOWN[1]),
        ("IMPORT_FEED", KNOWN[1]),
        ("import_fed(feed_id=7)", KNOWN[1]),
        ("feed.tasks.import_feed(1)", KNOWN[1]),
        ("feed_id=7", KNOWN[1]),
        ("nightly", KNOWN[0]),
        ("costumer:12", KNOWN[2]),
    ],
)
def test_names_like_an_unknown_one_are_found(name, likely):
    assert nearest(name, KNOWN) == [likely]


@pytest.mark.parametrize("name", ["", " ", "something else"])
def test_no_name_is_suggested_for_a_strange_one(name):
    assert nearest(name, KNOWN) == []


def test_nearest_arguments_are_first_of_three():
    calls = [f"feeds.import_feed(feed_id={number})" for number in (12, 400, 7, 8)]
    assert nearest("feeds.import_fed(feed_id=400)", calls)[0] == calls[1]
    assert len(nearest("import_feed", calls)) == 3
