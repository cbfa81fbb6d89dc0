from __future__ import annotations

import subprocess
import sys

import pytest
from django.core.management import CommandError

from django_singletask.models import TaskLockEvent
from django_singletask.operators import names
from tests import inside
from tests.command_line import hold, locks, locks_as_json
from tests.entries import key_of
from tests.past_rows import keep_history_in, ran
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
        # The lock of that name, the call, and its entry while it is queued.
        (f"{UNIQUE}(key='a')", 3),
        ("unknown.task(a=1)", 3),
        (f"{UNIQUE}('a')", 1),
        (f"{UNIQUE}(", 1),
        (f"{UNIQUE}(a=open('/etc/passwd'))", 1),
        ("(" * 250, 1),
        ("\x00", 0),
    ],
)
def test_number_of_keys_that_a_name_can_mean(name, count):
    assert len(names.locks_of(name)) == count


@pytest.mark.parametrize("name", [f"{UNIQUE}(key='a')", f"{UNIQUE}( key='a' )"])
def test_call_is_found_by_its_arguments(name):
    assert tasks.unique.lock("a").key in names.select(name).locks


def test_name_of_a_lock_is_one_of_its_names():
    assert key_of("nightly") in names.select("nightly").locks


@pytest.mark.parametrize("name", [UNIQUE, "unique", f"{UNIQUE}(key='a')", "tests.*", "*.unique(*"])
def test_task_of_the_project_is_known_and_so_are_its_calls(name):
    assert names.select(name).is_known()


@pytest.mark.parametrize("name", ["nightly", "nique", "unknown.task(a=1)", "unknown.*", ""])
def test_other_names_are_unknown(name):
    assert not names.select(name).is_known()


def meant(typed):
    return list(names.select(typed).tasks)


def test_last_parts_of_the_name_of_a_task_are_enough():
    ran(60, name="a()", task="other.project.sync")
    ran(60, name="b()", task="project.sync")
    assert meant(UNIQUE) == meant("unique") == meant("tasks.unique") == [UNIQUE]
    assert meant("other.project.sync") == ["other.project.sync"]
    assert meant("project.sync") == ["project.sync"]
    assert meant("sync") == ["other.project.sync", "project.sync"]
    assert meant("nique") == meant("") == []


@pytest.mark.parametrize(
    "text", ["other.project.sync", "sync", "sync(feed=1)", "*sync*", "web-9", "5d1c", "t9"]
)
def test_lock_is_selected_by_what_is_listed(text):
    hold(name="nightly")
    facts = {"host": "web-9", "task_id": "5d1c", "token": "t9"}
    hold(name="other.project.sync(feed=1)", task="other.project.sync", **facts)
    assert [lock.task for lock in inside.held_now(text)] == ["other.project.sync"]


@pytest.mark.parametrize(
    "shown",
    ["…import_fee…(feed_id=32)", "…ks.import_feeds(feed_id=32)", "…tasks.import_feeds(feed_id=32)"],
)
def test_name_that_a_table_has_cut_selects_its_lock(shown):
    for number in (32, 33):
        name = f"proj.feeds.tasks.import_feeds(feed_id={number})"
        hold(name=name, task="proj.feeds.tasks.import_feeds", token=f"t{number}")
    assert [lock.token for lock in inside.held_now(shown)] == ["t32"]
    assert [lock["token"] for lock in locks_as_json("why", shown)["held"]] == ["t32"]


def test_cut_name_whose_lock_is_free_is_unknown():
    ran(60, name="feeds.import_feed(feed_id=32)")
    with pytest.raises(CommandError, match="No lock or task is known as"):
        locks("why", "….import_fe…(feed_id=32)")


def test_lock_that_has_the_name_is_selected_rather_than_those_of_a_task_or_a_host():
    hold(name="sync")
    hold(name="a(1)", task="project.sync", host="sync", token="t2")
    assert [lock.name for lock in inside.held_now("sync")] == ["sync"]


def test_key_or_name_whose_lock_is_free_selects_nothing_else():
    hold(name="pool", key="singletask:pool:0#2", slots=3)
    hold(name="alike", key="singletask:alike:1", token="t2")
    hold(name="project.nightly()", task="project.nightly", token="t3", host="nightly")
    ran(60, name="pool", key="singletask:pool:0")
    ran(60, name="alike", key="singletask:alike:0")
    ran(60, name="nightly")
    for text in ("singletask:pool:0#3", "singletask:alike:0", "nightly"):
        assert inside.held_now(text) == []
    assert [lock.name for lock in inside.held_now("singletask:pool:0")] == ["pool"]


def test_id_is_meant_rather_than_a_task_and_a_task_rather_than_a_host():
    hold(name="one", token="t1", task_id="x", host="web")
    hold(name="a.x()", task="a.x", token="t2", host="x")
    hold(name="a.y()", task="a.y", token="t3", host="x")
    hold(name="three", token="t4", host="y")
    for text, name in (("x", "one"), ("y", "a.y()"), ("web", "one")):
        assert [lock.name for lock in inside.held_now(text)] == [name]


@pytest.fixture
def of_nobody():
    """Let three locks be held without a task, and one by something that is unknown."""
    hold(name="nightly", token="t1")
    hold(name="report of None", token="t2", task="")
    hold(name="weekly", token="t3", host="", pid=0)
    inside.put_entry(key_of("foreign"), b"None")


@pytest.mark.parametrize(
    "text", ["None", "none", "null", "False", "", " ", ".", "-", "unknown", "…", "0", "web-3:None"]
)
def test_text_that_stands_for_nothing_selects_nothing(of_nobody, text):
    assert inside.held_now(text) == []


def test_control_selects_a_lock_without_a_task(of_nobody, monkeypatch):
    """The test above would notice if the text of a missing task were compared."""

    def compare_texts(self, name, task):
        return f".{task}".endswith(f".{self.text}")

    monkeypatch.setattr(names.Selector, "covers", compare_texts)
    assert [lock.name for lock in inside.held_now("None")] != []


@pytest.mark.needs("mariadb")
def test_lock_is_not_selected_by_a_name_that_only_a_database_takes_for_its_own(settings):
    """MariaDB compares texts without their case, and without spaces at their ends."""
    keep_history_in(settings, "mariadb")
    for name in ("Nightly", "nightly ", "nightlý"):
        hold(name=name, key=key_of(name))
        ran(60, name=name)
    assert TaskLockEvent.objects.filter(name="nightly").count() == 3
    assert inside.held_now("nightly") == []
    assert [lock.name for lock in inside.held_now("Nightly")] == ["Nightly"]


def test_error_does_not_repeat_a_huge_name():
    with pytest.raises(CommandError) as caught:
        locks("why", "x" * 100_000)
    assert len(str(caught.value)) < 600


def test_lock_that_has_the_name_is_meant_rather_than_a_task_whose_name_ends_so():
    assert meant("unique") == [UNIQUE]
    ran(60, name="unique")
    assert meant("unique") == []


@pytest.mark.only_all("it starts processes")
def test_tasks_are_imported_where_no_worker_has_done_so():
    program = "import django; django.setup()\nfrom django_singletask.operators import names\n"
    program += "print(names.tasks_of('unique'))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"['{UNIQUE}']\n"
