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


def selected(*typed):
    return sorted(lock.name for lock in inside.held_now(*typed))


def meant(typed):
    return list(names.Selector(typed).tasks)


# What is listed


@pytest.fixture
def feed():
    """Let one lock be held about which a list has something to show, and another one."""
    facts = {"host": "web-9", "pid": 40, "task_id": "5d1c", "token": "t9"}
    hold(name="shop.tasks.sync(feed=1)", task="shop.tasks.sync", key=key_of("feed"), **facts)
    hold(name="nightly", token="t1")


@pytest.mark.parametrize(
    "text",
    [
        "shop.tasks.sync(feed=1)",
        "sync(feed=1)",
        "shop.tasks.sync",
        "sync",
        "5d1c",
        "t9",
        "web-9",
        "web-9:40",
        key_of("feed"),
    ],
)
def test_lock_is_selected_by_what_is_listed(feed, text):
    assert selected(text) == ["shop.tasks.sync(feed=1)"]


@pytest.mark.parametrize(
    "text",
    [
        *("*sync*", "sync*", "*(feed=1)", "web-*:40", "5d*", "shop.*", "…ync(fe…1)", "s…c"),
        f"{key_of('feed')[:-1]}*",
    ],
)
def test_pattern_fits_one_of_the_things_that_are_listed(feed, text):
    assert selected(text) == ["shop.tasks.sync(feed=1)"]


@pytest.mark.parametrize("text", ["sync(1)", "sync(feed=2)", "sync( feed=1 )", "ync", "web", "*yn"])
def test_nothing_that_is_typed_is_parsed_or_completed(feed, text):
    assert selected(text) == []


def test_only_the_star_is_special_in_a_pattern():
    hold(name="list([1])")
    hold(name="list(1)", token="t2")
    assert selected("list([1]*") == ["list([1])"]
    assert selected("list(?*") == []


def test_pattern_of_many_stars_is_soon_compared():
    """A comparison that tries each part of the name for each star would take days."""
    hold(name="a" * 200)
    assert selected("*" * 12 + "a*" * 12 + "Z") == []


def test_last_part_is_what_follows_the_modules():
    hold(name="report v1.2")
    hold(name="report v1.2(a.b)", token="t2")
    assert selected("2") == selected("b)") == []


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


def test_key_of_a_lock_means_all_its_slots_and_that_of_a_slot_only_itself():
    hold(name="pool", key=f"{key_of('pool')}#2", slots=3, token="t2")
    hold(name="pool", key=f"{key_of('pool')}#3", slots=3, token="t3")
    for slot in ("", "#2", "#3"):
        ran(60, name="pool", key=f"{key_of('pool')}{slot}")
    assert selected(key_of("pool")) == ["pool", "pool"]
    assert [lock.token for lock in inside.held_now(f"{key_of('pool')}#3")] == ["t3"]


# One lock, and no other


def test_name_of_a_lock_means_only_this_lock_whether_or_not_it_is_held():
    hold(name="project.nightly()", task="project.nightly", token="t3", host="nightly")
    ran(60, name="nightly")
    assert selected("nightly") == []
    hold(name="nightly", key=key_of("nightly"))
    assert selected("nightly") == ["nightly"]


def test_name_that_is_not_recorded_is_also_what_else_is_listed():
    hold(name="project.nightly()", task="project.nightly")
    assert selected("nightly") == ["project.nightly()"]


def test_lock_with_the_name_of_a_task_leaves_the_other_locks_of_the_task():
    hold(name="project.sync", key=key_of("project.sync"), task="project.sync")
    hold(name="customer:7", task="project.sync", token="t2")
    ran(60, name="project.sync", task="project.sync")
    assert selected("project.sync") == ["customer:7", "project.sync"]


def test_key_whose_lock_is_free_selects_nothing_else():
    hold(name="alike", key="singletask:alike:1")
    ran(60, name="alike", key="singletask:alike:0")
    assert selected("singletask:alike:0") == []


@pytest.mark.needs("mariadb")
def test_lock_is_not_selected_by_a_name_that_only_a_database_takes_for_its_own(settings):
    """MariaDB compares texts without their case, and without spaces at their ends."""
    keep_history_in(settings, "mariadb")
    for name in ("Nightly", "nightly ", "nightlý"):
        hold(name=name, key=key_of(name))
        ran(60, name=name)
    assert TaskLockEvent.objects.filter(name="nightly").count() == 3
    assert selected("nightly") == []
    assert selected("Nightly") == ["Nightly"]


# Nothing


@pytest.fixture
def of_nobody():
    """Let three locks be held without a task, and one by something that is unknown."""
    hold(name="nightly", token="t1")
    hold(name="report of None", token="t2", task="")
    hold(name="weekly", token="t3", host="", pid=0)
    inside.put_entry(key_of("foreign"), b"None")


@pytest.mark.parametrize(
    "text", ["None", "none", "null", "False", "", " ", ".", "-", "unknown", "0", "web-3:None"]
)
def test_text_that_stands_for_nothing_selects_nothing(of_nobody, text):
    assert selected(text) == []


def test_control_selects_a_lock_without_a_task(of_nobody, monkeypatch):
    """The test above would notice if the text of a missing task were compared."""

    def compare_texts(self, name, task, *others):
        return f".{task}".endswith(f".{self.text}")

    monkeypatch.setattr(names.Selector, "fits", compare_texts)
    assert selected("None") != []


def test_error_names_the_next_step_and_does_not_repeat_a_huge_name():
    with pytest.raises(CommandError) as caught:
        locks("why", "x" * 100_000)
    assert "'manage.py locks' lists what is held" in str(caught.value)
    assert len(str(caught.value)) < 600


# What is read


def test_locks_that_are_named_are_read_without_those_of_others():
    for number in range(3):
        hold(name=f"lock {number}", key=key_of(f"lock {number}"), token=f"t{number}", slots=2)
    wanted = [key_of("lock 0"), key_of("lock 1")]
    asked = []
    with inside.handled("read_many", lambda send, keys: asked.append({*keys}) or send(keys)):
        assert selected(*wanted) == ["lock 0", "lock 1"]
    assert asked == [{*wanted}, {f"{key}#2" for key in wanted}]


# Tasks


def test_last_parts_of_the_name_of_a_task_are_enough():
    ran(60, name="a()", task="other.project.sync")
    ran(60, name="b()", task="project.sync")
    assert meant(UNIQUE) == meant("unique") == meant("tasks.unique") == [UNIQUE]
    assert meant("other.project.sync") == ["other.project.sync"]
    assert meant("project.sync") == ["project.sync"]
    assert meant("sync") == ["other.project.sync", "project.sync"]
    assert meant("nique") == meant("") == []


def test_locks_of_a_task_are_selected_by_a_part_of_its_name():
    hold(name="customer:7", task=tasks.unique.name)
    assert selected("tasks.unique") == ["customer:7"]


@pytest.mark.only_all("it starts processes")
def test_tasks_are_imported_where_no_worker_has_done_so():
    program = "import django; django.setup()\nfrom django_singletask.operators import names\n"
    program += "print([name for name in names.task_names() if name.endswith('.unique')])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"['{UNIQUE}']\n"


def test_text_in_which_all_is_cut_out_selects_nothing(feed):
    assert selected("…") == selected("……") == []
