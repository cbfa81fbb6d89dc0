"""The page "Per task", and the sums of the history behind it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections

from django_singletask.models import TaskLockEvent
from django_singletask.operators import per_task, windows
from tests.admin_pages import BASE, log_in, rows_of
from tests.past_rows import keep_history_in, ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history", "whole_second"),
]

PAGE = f"{BASE}per-task/"
HOUR = 3600


def figures(since=24 * HOUR, until=None):
    """Return the figures of each task in a window, from and to so many seconds before now."""
    now = datetime.fromtimestamp(time.time(), UTC)
    end = now - timedelta(seconds=until or 0)
    window = windows.Window(now - timedelta(seconds=since), end)
    tasks = per_task.per_task(TaskLockEvent.objects.all(), window, now)
    return {each.now["task"]: each for each in tasks}


@pytest.fixture
def viewer():
    return log_in("view_tasklockevent")


def shown(client, **query):
    return rows_of(client.get(PAGE, query), "singletask-numbers")


# The sums


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_every_database_gives_the_same_sums(settings, alias):
    keep_history_in(settings, alias)
    for lasted in (1, 2, 6):
        ran(HOUR, lasted, task="a", waited=0.5)
    ran(HOUR, 1, task="a", result="raised")
    ran(HOUR, 1, task="a", retaken=1)
    ran(HOUR, 500, task="a", outcome="expired", result="")
    for outcome in ("dead", "lost", "cleared", "unguarded"):
        ran(HOUR, 500, task="a", outcome=outcome, result="")
    skipped(HOUR, count=7, task="a")
    skipped(HOUR, reason="wait", task="a", waited=3)
    skipped(HOUR, kind="duplicate", count=2, task="a")
    ran(30 * HOUR, 8, task="a")
    ran(30 * HOUR, 8, task="old")
    ran(60, name="nightly")
    found = figures()
    TaskLockEvent.objects.all().delete()
    now = found["a"].now
    assert (now["run"], now["raised"], now["trouble"]) == (10, 1, 3)
    assert (now["conflict"], now["duplicate"], now["waited"]) == (8, 2, 4.5)
    assert now["mean"] == pytest.approx(11 / 5, abs=0.001)
    assert now["longest"] == pytest.approx(6, abs=0.001)
    assert found["a"].before["run"] == found["old"].before["run"] == 1
    assert found["a"].before["longest"] == pytest.approx(8, abs=0.001)
    assert (found["old"].now["run"], found[""].now["run"]) == (0, 1)


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_all_tasks_are_summed_up_by_one_query(settings, alias, django_assert_max_num_queries):
    keep_history_in(settings, alias)
    for number in range(5):
        ran(60, task=f"t{number}")
    row("run", 60, task="t5")
    with django_assert_max_num_queries(2, connection=connections[alias]):
        assert len(figures()) == 6
    TaskLockEvent.objects.all().delete()


def test_run_counts_in_the_window_in_which_it_ended():
    ran(5, lasted=3 * HOUR, task="a")
    assert figures(HOUR)["a"].now["run"] == 1
    assert "a" not in figures(4 * HOUR, until=2 * HOUR)


def test_window_in_the_past_is_beside_the_one_before_it():
    for hours in (1.5, 2.5, 2.6, 3.5):
        ran(hours * HOUR, task="a")
    both = figures(3 * HOUR, until=2 * HOUR)["a"]
    assert (both.now["run"], both.before["run"]) == (2, 1)


def test_run_that_seems_to_end_before_it_began_took_no_time():
    """The clocks of two hosts differ."""
    ran(60, -30, task="a")
    assert figures()["a"].now["mean"] == 0


def test_cleared_unguarded_or_retaken_run_that_returned_is_not_dead_or_lost():
    for facts in ({"outcome": "cleared"}, {"outcome": "unguarded"}, {"retaken": 1}):
        ran(60, task="a", **facts)
    now = figures()["a"].now
    assert (now["run"], now["trouble"]) == (3, 0)


def test_queued_call_that_was_cleared_is_no_run():
    row("run", 60, task="a", outcome="cleared", key="singletask:@queued:a:1")
    assert figures() == {}


def test_open_hold_is_only_held_now():
    row("run", 60, task="a", timeout=1e9)
    now = figures()["a"].now
    assert (now["held"], now["run"], now["trouble"]) == (1, 0, 0)


def test_open_hold_that_has_expired_is_trouble_of_the_window_until_now():
    row("run", 9 * HOUR, task="a", timeout=5)
    now = figures(HOUR)["a"].now
    assert (now["held"], now["run"], now["trouble"]) == (0, 1, 1)
    assert figures(3 * HOUR, until=2 * HOUR)["a"].now["trouble"] == 0


def test_task_last_completed_when_a_body_last_returned_or_raised():
    def completed():
        return time.time() - figures()["a"].now["completed"]

    ran(30 * HOUR, task="a")
    assert completed() == 30 * HOUR
    ran(9, task="a", result="raised")
    ran(5, task="a", result="retried")
    ran(2, task="a", outcome="lost")
    assert completed() == 9


# The page


def test_page_shows_each_task_beside_the_window_before(viewer):
    for lasted in (2, 2, 89):
        ran(60, lasted, task="feeds.tasks.fetch", waited=1.5)
    ran(60, 1, task="feeds.tasks.fetch", outcome="dead", result="")
    ran(30 * HOUR, 4, task="feeds.tasks.fetch")
    skipped(60, count=4, task="feeds.tasks.fetch")
    row("run", 30, task="feeds.tasks.fetch", timeout=1e9)
    [text] = shown(viewer)
    numbers = ["4 before: 1", "0 before: 0", "1 before: 0", "4 before: 0", "0 before: 0"]
    numbers += ["4.50s before: -", "31s before: 4.00s", "1m 29s before: 4.00s"]
    assert text.startswith(f"feeds.tasks.fetch History {' '.join(numbers)} 20")
    assert text.endswith(" 1")
    content = viewer.get(PAGE).content.decode()
    assert f'{BASE}history/?task=feeds.tasks.fetch&amp;range=24h"' in content
    assert f'{BASE}timeline/?task=feeds.tasks.fetch&amp;range=24h"' in content
    assert '<span class="singletask-warning">1</span>' in content


def test_page_shows_a_window_and_leads_to_the_one_before_it(viewer, settings):
    settings.TIME_ZONE = "UTC"
    start = datetime.fromtimestamp(time.time() - 2 * HOUR, UTC)
    ran(2.5 * HOUR, task="a")
    form = "%Y-%m-%dT%H:%M:%S"
    window = {"from": f"{start:{form}}", "to": f"{start + timedelta(hours=1):{form}}"}
    content = viewer.get(PAGE, window).content.decode()
    assert f'name="from" value="{start:{form}}"' in content
    assert f'<a href="?from={start - timedelta(hours=1):%Y-%m-%dT%H%%3A%M}' in content


def test_locks_without_a_task_are_one_row_without_links(viewer):
    ran(60, name="nightly")
    row("run", 30, name="weekly")
    [text] = shown(viewer)
    assert text.startswith("Locks without a task ")
    assert "History" not in text


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("", "cab"),
        ("task", "abc"),
        ("-task", "cba"),
        ("run", "cab"),
        ("-longest", "abc"),
        ("-completed", "abc"),
        ("-held", "abc"),
    ],
)
def test_rows_are_sorted_by_a_column(viewer, sort, order):
    for task, runs, lasted in (("a", 3, 9), ("b", 4, 5), ("c", 1, 1)):
        for _ in range(runs):
            ran(60 + ord(task), lasted, task=task)
    ran(60, task="c", outcome="dead", result="")
    assert "".join(text[0] for text in shown(viewer, sort=sort)) == order


def test_heading_of_the_sorted_column_turns_the_order_round(viewer):
    ran(60, task="a")
    for sort, order, link in (
        ("-mean", "descending", "mean"),
        ("mean", "ascending", "-mean"),
        ("task", "ascending", "-task"),
        ("-task", "descending", "task"),
    ):
        content = viewer.get(PAGE, {"sort": sort, "range": "7d"}).content.decode()
        heading = f'<th scope="col" aria-sort="{order}"><a href="?range=7d&amp;sort={link}">'
        assert content.count(heading) == content.count("aria-sort") == 1


@pytest.mark.parametrize("query", [{"range": "2h"}, {"sort": "pk"}, {"sort": "--run"}])
def test_odd_address_shows_the_day_with_trouble_first(viewer, query):
    ran(60, task="a")
    content = viewer.get(PAGE, query).content.decode()
    assert '?range=24h&amp;sort=-trouble" aria-current="true"' in content


def test_empty_history_has_no_table(viewer):
    content = viewer.get(PAGE).content.decode()
    assert "Nothing is recorded in this time span." in content
    assert '<table class="singletask' not in content
