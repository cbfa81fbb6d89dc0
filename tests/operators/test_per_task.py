"""The page "Per task", and the sums of the history behind it."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from django.utils.timezone import override

from django_singletask.models import TaskLockEvent
from django_singletask.operators import charts, windows
from tests import inside
from tests.admin_pages import BASE, log_in, rows_of
from tests.history.test_queries import fill
from tests.past_rows import keep_history_in, ran, row, save, skipped
from tests.plans import plans

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history", "whole_second"),
]

PAGE = f"{BASE}per-task/"
HOUR = 3600


def facts(span="24h"):
    """Return the facts of each task by its name."""
    window = windows.Window.past(span, datetime.fromtimestamp(time.time(), UTC))
    tasks = charts.per_task(TaskLockEvent.objects.all(), window)["rows"]
    return {each["task"]: SimpleNamespace(**each, charted=[*each["bars"]]) for each in tasks}


@pytest.fixture
def viewer():
    return log_in("view_tasklockevent")


def shown(client, **query):
    return rows_of(client.get(PAGE, query), "singletask-numbers")


# The sums


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_every_database_gives_the_same_sums(settings, monkeypatch, alias):
    # Each bar is an hour of the clock: what began within the last ten minutes must be in the last.
    half_past = time.time() // HOUR * HOUR - HOUR / 2
    monkeypatch.setattr("time.time", lambda: half_past)
    keep_history_in(settings, alias)
    for number in range(1, 41):
        ran(HOUR + number, lasted=number / 4, task="a", timeout=5)
    ran(10, lasted=0, task="a", result="raised", timeout=5)
    ran(10, task="a", outcome="dead", result="", timeout=5)
    ran(10, lasted=500, task="a", outcome="expired", result="", timeout=5)
    row("run", 5, task="a", timeout=9)
    skipped(60, count=7, task="a")
    skipped(60, kind="duplicate", count=2, task="a")
    skipped(60, reason="requeue", task="a")
    ran(30 * HOUR, task="old")
    ran(60, name="nightly")
    found = facts()
    TaskLockEvent.objects.all().delete()
    assert set(found) == {"a", ""}
    a = found["a"]
    assert (a.runs, a.returned, a.raised, a.other) == (44, 40, 1, 2)
    assert a.others == [("dead", 1), ("expired", 1)]
    assert (a.conflicts, a.duplicates) == (8, 2)
    assert (a.p50, a.p95, a.longest) == pytest.approx((4.75, 9.5, 10), abs=0.001)
    assert sum(int(re.match(r"runs: (\d+)", bar["text"])[1]) for bar in a.charted) == 44
    assert a.held == 1
    assert a.charted[-1]["text"] == "runs: 4, raised: 1, trouble: 2, conflicts: 8"
    assert min(bar["x"] for bar in a.charted) >= 100 * 21 / 24
    assert max(part[2] for bar in a.charted for part in bar["parts"]) <= 100
    assert found[""].runs == 1


def test_percentiles_are_those_of_the_newest_runs(monkeypatch):
    inside.bound(monkeypatch, "runs of a percentile", 3)
    for lasted in (90, 1, 2, 3):
        ran(60, lasted, task="a")
    a = facts()["a"]
    assert (a.p50, a.p95, a.longest) == (2, 3, 3)


def test_week_has_bars_of_four_hours():
    ran(6 * 24 * HOUR, task="a")
    ran(60, task="a")
    assert facts()["a"].runs == 1
    first, last = facts("7d")["a"].charted
    assert first["x"] < 15 < 95 < last["x"]
    assert first["when"][14:] == "00:00"


def test_bars_of_the_day_on_which_the_clock_is_set_back_are_at_their_times():
    now = datetime(2025, 10, 26, 11, 30, tzinfo=UTC)
    facts = {"name": "a()", "key": "k", "task": "a", "outcome": "released", "ended_at": now}
    save(kind="run", ref="t", timeout=60, at=now, **facts)
    with override("Europe/Berlin"):
        [a] = charts.per_task(TaskLockEvent.objects.all(), windows.Window.past("24h", now))["rows"]
        [bar] = a["bars"]
    assert (bar["when"], bar["x"]) == ("2025-10-26 12:00:00", pytest.approx(100 * 23.5 / 24))


@pytest.mark.only_all("it writes many rows")
@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_no_more_rows_are_read_than_can_be_summed_up(settings, monkeypatch, alias):
    keep_history_in(settings, alias)
    fill(alias)
    inside.bound(monkeypatch, "rows of a sum", 100)
    asked = plans(alias, facts)
    number = sum(each.runs + each.conflicts for each in facts().values())
    TaskLockEvent.objects.all().delete()
    assert number == 100
    several = [plan for plan in asked if "LIMIT 1" not in plan.sql]
    assert [plan for plan in several if plan.reads_the_table()] == []


# The page


def test_page_shows_each_task(viewer):
    for lasted in (2, 2, 90):
        ran(60, lasted, task="feeds.tasks.fetch", timeout=60)
    ran(60, 1, task="feeds.tasks.fetch", result="retried", timeout=60)
    skipped(60, count=4, task="feeds.tasks.fetch")
    [text] = shown(viewer)
    assert text.startswith("feeds.tasks.fetch ")
    assert text.endswith(" History 4 3 0 1 retried × 1 4 0 2.00s 1m 30s 1m 30s")
    content = viewer.get(PAGE).content.decode()
    assert f'{BASE}history/?task=feeds.tasks.fetch&amp;range=24h"' in content
    assert f'{BASE}timeline/?task=feeds.tasks.fetch&amp;range=24h"' in content
    counts = re.findall(r"<title>[^<]*, runs: (\d)(?:, conflicts: (\d))?</title>", content)
    assert [sum(int(count or 0) for count in part) for part in zip(*counts, strict=True)] == [4, 4]


def test_locks_without_a_task_are_one_row_without_links(viewer):
    ran(60, name="nightly")
    row("run", 30, name="weekly")
    [text] = shown(viewer)
    assert text.startswith("Locks without a task ")
    assert "History" not in text


@pytest.mark.parametrize(
    ("sort", "order"),
    [("", "bac"), ("task", "abc"), ("-task", "cba"), ("runs", "cab"), ("-longest", "abc")],
)
def test_rows_are_sorted_by_a_column(viewer, sort, order):
    for task, runs, lasted in (("a", 2, 9), ("b", 3, 5), ("c", 1, 1)):
        for _ in range(runs):
            ran(60, lasted, task=task)
    assert "".join(text[0] for text in shown(viewer, sort=sort)) == order


def test_heading_of_the_sorted_column_turns_the_order_round(viewer):
    ran(60, task="a")
    for sort, order, link in (
        ("-p95", "descending", "p95"),
        ("p95", "ascending", "-p95"),
        ("task", "ascending", "-task"),
        ("-task", "descending", "task"),
    ):
        content = viewer.get(PAGE, {"sort": sort, "range": "7d"}).content.decode()
        heading = f'<th scope="col" aria-sort="{order}"><a href="?range=7d&amp;sort={link}">'
        assert content.count(heading) == content.count("aria-sort") == 1


@pytest.mark.parametrize("query", [{"range": "1h"}, {"sort": "pk"}, {"sort": "--runs"}])
def test_odd_address_shows_the_day_by_runs(viewer, query):
    ran(60, task="a")
    content = viewer.get(PAGE, query).content.decode()
    assert '?range=24h&amp;sort=-runs" aria-current="true"' in content


def test_cut_sums_say_since_when(viewer, monkeypatch):
    for seconds in (120, 60, 30):
        ran(seconds, task="a")
    inside.bound(monkeypatch, "rows of a sum", 2)
    assert "these are the newest, since " in viewer.get(PAGE).content.decode()
    assert len(shown(viewer)) == 1
    inside.bound(monkeypatch, "rows of a sum", 4)
    assert "these are the newest" not in viewer.get(PAGE).content.decode()


def test_empty_history_has_no_table(viewer):
    content = viewer.get(PAGE).content.decode()
    assert "Nothing happened in this time span." in content
    assert '<table class="singletask' not in content
