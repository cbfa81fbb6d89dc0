from __future__ import annotations

import datetime
import time

import pytest
from django.db import connections

from django_singletask.history import queries
from django_singletask.locks.keys import QUEUED
from django_singletask.models import TaskLockEvent
from django_singletask.operators import recorded, timeline
from django_singletask.operators.names import Selector
from django_singletask.operators.windows import Window
from django_singletask.operators.words import WORDS
from tests import inside
from tests.admin_pages import drop_table
from tests.past_rows import before_now, keep_history_in, new, ran, row, skipped
from tests.plans import plans

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history", "whole_second"),
]

TABLE = TaskLockEvent._meta.db_table
history = TaskLockEvent.objects


# What is read


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_every_database_gives_the_same_rows(settings, alias):
    keep_history_in(settings, alias)
    at = before_now(60)
    run = ran(60, name="a(1)", task="a", key="singletask:a:1", token="t1", task_id="5d1c")
    other = ran(50, name="a(10)", task="a%", key="singletask:a%:1", token="t2")
    held = row("run", 40, name="b", task="b", key="singletask:b:1", token="t3")
    skip = skipped(30, name="a(1)", task="a", blocked_by="t3")
    lost = ran(20, name="c", token="t4", outcome="lost", retaken=1)

    def ids(rows):
        return [row.pk for row in rows]

    assert ids(history.open()) == [held.pk]
    assert ids(history.of_task("a")) == [skip.pk, run.pk]
    assert ids(history.of_task("a%")) == [other.pk]
    assert ids(history.named("a(1)")) == [skip.pk, run.pk]
    assert ids(history.newest().of_state("run", "lost")) == [lost.pk]
    assert ids(history.newest().of_state("run", "released")) == [other.pk, run.pk]
    assert ids(history.newest().of_state("conflict")) == [skip.pk]
    assert ids(history.of_trouble("lost")) == [lost.pk]
    assert ids(history.of_trouble("retaken")) == [lost.pk]
    assert ids(history.of_trouble("dead")) == []
    assert ids(within(history, at)) == [lost.pk, skip.pk, held.pk, other.pk, run.pk]
    assert ids(within(history, at, before_now(25))) == [skip.pk, held.pk, other.pk, run.pk]
    assert ids(within(history, before_now(20.5), before_now(20.2))) == [lost.pk, held.pk]
    assert ids(within(history.of_task("a"), at)) == [skip.pk, run.pk]
    assert sorted(ids(history.runs(["t1", "t2", ""]))) == [run.pk, other.pk]
    assert ids(history.calls_blocked_by(["t3", "t1"])) == [skip.pk]
    assert history.values_list("result", "count").calls_blocked_by(["t3", "t1"]) == [("skipped", 1)]
    assert history.name_of_key("singletask:a:1") == "a(1)"
    assert history.task_names(2) == ["a", "a%"]
    TaskLockEvent.objects.all().delete()


def within(rows, start, end=None, limit=100):
    return rows.newest_of(rows.parts_within(start, end), limit, start, end)


def questions():
    """Return what the history is asked, under the index that must serve it.

    SQLite names the one of a constraint itself, with the column behind it.
    """
    tokens = [f"t{number}" for number in range(10)]
    return {
        "singletask_state": [
            lambda: list(history.open()[:100]),
            lambda: list(history.of_state("duplicate").newest()[:1000]),
            lambda: list(history.of_trouble("lost")[:1000]),
        ],
        "singletask_retaken": [
            lambda: list(history.of_trouble("retaken")[:1000]),
        ],
        "singletask_task": [
            lambda: list(history.of_task("t5")[:1000]),
            lambda: list(history.of_task("none")[:1000]),
            lambda: history.task_names(3),
            lambda: history.usual_hold("t5(5)", "t5"),
        ],
        "singletask_name": [
            lambda: list(history.named("t5(2)")[:1000]),
            lambda: history.usual_hold("t5(5)"),
        ],
        "singletask_happened": [
            lambda: list(history.older_than(5500).order_by("happened_at")[:100]),
            lambda: list(
                history.totals_by_task(before_now(2000), before_now(1990), before_now(1980))
            ),
        ],
        "ref": [lambda: history.runs(tokens)],
        "singletask_blocked_by": [
            lambda: history.calls_blocked_by(tokens),
            lambda: history.values_list("result", "count").calls_blocked_by(tokens),
        ],
        "": [
            lambda: list(history.of_state("conflict").newest()[:100]),
            lambda: history.name_of_key("singletask:t5:305"),
            *[lambda what=what: find(what=what) for what in WORDS],
            *[lambda what=what: find(what=what, since=before_now(60)) for what in WORDS],
            *[lambda name=name: find(name) for name in ("t5", "t5(5)", "id 6", "web-1", "t5(*")],
            lambda: find("t5", what="raised", since=before_now(60)),
            lambda: find("t5", what="trouble", since=before_now(2000), until=before_now(1940)),
            *[
                lambda rows=rows, window=window: list(within(rows, *map(before_now, window)))
                for rows in parts_of_the_history()
                for window in WINDOWS
            ],
            *[
                lambda rows=rows, window=window: timeline.newest_rows(rows, timeline_of(window))
                for rows in parts_of_the_history()
                for window in WINDOWS
            ],
        ],
    }


WINDOWS = [(60,), (2000, 1940)]
"""Begin and end of a window, or its begin alone, in seconds before now."""


def timeline_of(window):
    start, *end = map(before_now, window)
    if end:
        return Window(start, *end)
    return Window(start, before_now(0), "1h")


def find(*names, **narrowed):
    """Look for what these names mean, as an operator does who types them."""
    return recorded.find([*map(Selector, names)], **narrowed)


def parts_of_the_history():
    return [
        history.all(),
        history.of_task("t5"),
        history.named("t5(2)"),
        history.of_trouble("lost"),
        history.of_trouble("retaken"),
        history.of_state("conflict"),
    ]


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
def test_each_question_is_answered_by_an_index(settings, monkeypatch, alias):
    # In a day is more than half of the rows here: to read all of them would be right.
    monkeypatch.setattr(queries, "DAY", datetime.timedelta(minutes=1))
    inside.bound(monkeypatch, "rows of a search", 100)
    inside.bound(monkeypatch, "rows of a list", 100)
    inside.bound(monkeypatch, "marks of the timeline", 100)
    # As many open rows as PostgreSQL expects are no small part of the rows here.
    inside.bound(monkeypatch, "open rows", 100)
    keep_history_in(settings, alias)
    fill(alias)
    row("run", 90, timeout=1)  # open, and shown as expired
    sent = {
        index: [plan for ask in asked for plan in plans(alias, ask)]
        for index, asked in questions().items()
    }
    TaskLockEvent.objects.all().delete()
    assert all(len(sent[index]) >= len(asked) for index, asked in questions().items())
    assert [plan for each in sent.values() for plan in each if plan.reads_the_table()] == []
    if alias != "mariadb":  # which has each index for all rows, and chooses others
        others = [plan for index, each in sent.items() for plan in each if index not in plan.text]
        assert others == []


def fill(alias):
    """Write so many rows that it pays to use an index, half of them of runs that have ended."""
    count = 6000
    rows = [
        new(kind="run", ref=f"o{number}", name="open", key="o", at=before_now(0))
        for number in range(20)
    ]
    for number in range(0, count, 2):
        task, at = f"t{number % 300}", before_now(count - number)
        facts = {"task": task, "name": f"{task}({number % 7})", "key": f"singletask:{task}:1"}
        run = {"kind": "run", "outcome": "released", "result": "returned", "ended_at": at}
        token = f"t{number}"
        rows.append(new(at=at, ref=token, task_id=f"id {number}", **run, **facts))
        met = {"kind": "conflict", "result": "skipped", "ref": f"{token}:skip:skipped"}
        rows.append(new(at=at, blocked_by=token, **met, **facts))
    history.bulk_create(rows, batch_size=500)
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ANALYZE {'TABLE ' if alias == 'mariadb' else ''}{TABLE}")


def test_control_a_question_that_reads_the_table_is_noticed(settings):
    keep_history_in(settings, "sqlite")
    [plan] = plans("sqlite", lambda: list(history.filter(host="web-1").order_by()))
    assert plan.reads_the_table()


def test_sqlite_reads_open_rows_by_their_own_index_without_statistics(settings):
    keep_history_in(settings, "sqlite")
    [statement] = plans("sqlite", lambda: list(history.open()[:100]))
    assert "singletask_state" in statement.text


def test_rows_of_a_task_are_read_in_the_order_of_their_index():
    ran(60, task="a", name="one", key="singletask:a:1")
    statements = plans("default", lambda: history.name_of_key("singletask:a:1"))
    statements += plans("default", lambda: list(history.of_task("a")))
    assert len(statements) == 2
    for statement in statements:
        assert '."task" ASC' in statement.sql
        assert '"task" >= %s' in statement.sql


def test_many_tokens_are_looked_up_in_batches(monkeypatch, django_assert_num_queries):
    inside.bound(monkeypatch, "tokens of a question", 10)
    for number in range(25):
        ran(60, name=f"lock {number}", token=f"t{number}")
    with django_assert_num_queries(3):
        assert len(history.runs(f"t{number}" for number in range(25))) == 25
    with django_assert_num_queries(0):
        assert history.runs(["", ""]) == []


MINUTE = 60
HOUR = 60 * MINUTE


def test_window_has_what_began_happened_or_lasted_in_it():
    """The window is from 20 to 10 minutes ago; what is to be found is named for its place."""
    ran(25 * MINUTE, name="ended before")
    ran(15 * MINUTE, HOUR, name="ended in it")
    ran(5 * MINUTE, 10 * MINUTE, name="began in it")
    ran(5 * MINUTE, HOUR, name="lasted through it")
    ran(5 * MINUTE, 1 * MINUTE, name="began after")
    row("run", 2 * HOUR, name="open before it")
    row("run", 5 * MINUTE, name="opened after")
    noticed_at = before_now(15 * MINUTE)
    row("run", HOUR, name="noticed in it", outcome="cleared", noticed_at=noticed_at)
    row(
        "run",
        HOUR,
        name="queued, cleared in it",
        key=f"{QUEUED}nightly",
        outcome="cleared",
        noticed_at=noticed_at,
    )
    retaken_at = before_now(12 * MINUTE)
    row("run", HOUR, name="retaken in it", retaken=1, retaken_at=retaken_at, timeout=60)
    skipped(HOUR, 11 * MINUTE, name="skipped in it")
    skipped(HOUR, 5 * MINUTE, name="skipped through it")
    skipped(HOUR, 30 * MINUTE, name="skipped before")
    window = within(history, before_now(20 * MINUTE), before_now(10 * MINUTE))
    assert {row.name for row in window} == {
        "ended in it",
        "began in it",
        "lasted through it",
        "open before it",
        "noticed in it",
        "queued, cleared in it",
        "retaken in it",
        "skipped in it",
        "skipped through it",
    }
    assert {row.name for row in within(history, before_now(10 * MINUTE))} == {
        "began in it",
        "lasted through it",
        "began after",
        "open before it",
        "opened after",
        "retaken in it",
        "skipped through it",
    }


def test_window_has_the_newest_by_the_last_thing_that_happened():
    for minutes in (3, 1, 2):
        ran(minutes * MINUTE, HOUR, name=str(minutes))
    row("run", 2 * HOUR, name="open")
    found = within(history, before_now(HOUR), limit=3)
    assert [row.name for row in found] == ["1", "2", "3"]
    found = within(history, before_now(HOUR), before_now(90), limit=1)
    assert [row.name for row in found] == ["2"]


def fill_a_window():
    """Write what meets the window from 20 to 10 minutes ago; the names say in which order."""
    ran(15 * MINUTE, HOUR, name="2")
    ran(12 * MINUTE, name="1", outcome="dead", result="")
    ran(5 * MINUTE, 10 * MINUTE, name="4")
    ran(1 * MINUTE, 2 * HOUR, name="6")
    ran(8 * MINUTE, 4 * MINUTE, name="3")
    row("run", HOUR, name="5", timeout=1e9)
    return before_now(20 * MINUTE), before_now(10 * MINUTE)


@pytest.mark.parametrize("alias", ["default", "mariadb", "sqlite"])
@pytest.mark.parametrize("limit", range(1, 7))
def test_what_happened_in_a_window_is_not_cut_for_what_only_went_on(settings, alias, limit):
    keep_history_in(settings, alias)
    since, until = fill_a_window()
    rows = [*within(history, since, until, limit)]
    listed, _complete = find(since=since, until=until, limit=limit)
    without_a_begin, _complete = find(until=until, limit=limit)
    TaskLockEvent.objects.all().delete()
    assert "".join(row.name for row in rows) == "123456"[:limit]
    assert listed == rows
    assert {row.name for row in without_a_begin[:2]} <= {"1", "2"}


def test_name_of_a_key_is_found_by_the_name_of_a_lock_without_a_task():
    key = ran(60, name="nightly").key
    assert history.name_of_key(key) == "nightly"
    assert history.name_of_key(f"{key}0") == ""


# How long it is held


def test_usual_hold_is_that_of_the_task():
    for lasted in (1, 2, 9):
        ran(60, lasted, task="a", name=f"a({lasted})")
    ran(60, 100, task="b")
    assert history.usual_hold("a(1)", "a") == queries.UsualHold(2, 9, 3)


def test_usual_hold_of_a_lock_without_a_task_is_that_of_its_name():
    ran(60, 5, name="nightly")
    ran(60, 50, name="weekly")
    assert history.usual_hold("nightly").median == 5


def test_runs_that_did_not_release_the_lock_are_not_usual():
    ran(60, 100, outcome="dead", result="")
    row("run", 5000)
    skipped(30)
    assert history.usual_hold("nightly") is None


@pytest.mark.parametrize("result", ["raised", "terminated", "retried", "ignored", "postponed"])
def test_run_that_did_not_return_is_not_usual(result):
    """A run that hung until it was stopped would hide the next run that hangs."""
    ran(60, 5000, result=result)
    ran(60, 5)
    assert history.usual_hold("nightly") == queries.UsualHold(5, 5, 1)


def test_only_the_last_hundred_runs_are_usual():
    ran(5000, 1000)
    for _ in range(100):
        ran(60, 1)
    assert history.usual_hold("nightly") == queries.UsualHold(1, 1, 100)


# Without a history


def test_without_history_nothing_is_usual(settings):
    ran(60)
    settings.SINGLETASK_HISTORY = "off"
    assert history.usual_hold("nightly") is None


def test_without_its_table_nothing_is_usual():
    drop_table()
    assert history.usual_hold("nightly") is None


# What is asked for


def test_a_result_is_looked_for_among_the_newest_rows(monkeypatch):
    for seconds in (50, 40, 30, 20, 10):
        ran(seconds, name="a", result="raised" if seconds == 40 else "returned")
    assert find(what="raised")[1]
    inside.bound(monkeypatch, "rows of a search", 2)
    assert find(what="raised") == ([], False)
    statements = plans("default", lambda: find(what="raised"))
    assert '"happened_at" >= %s' in statements[1].sql


def test_times_without_time_zones_are_times_of_the_project(settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Kathmandu"
    ran(9000, 5)
    [[run], _complete] = find()
    assert run.at == datetime.datetime.fromtimestamp(time.time() - 9005)
    assert queries.ago(run.ended_at) == 9000


def test_lock_that_was_cleared_in_a_window_happened_in_it_though_its_run_went_on():
    cleared = ran(5 * MINUTE, HOUR, name="1", outcome="cleared")
    TaskLockEvent.objects.update(noticed_at=before_now(15 * MINUTE))
    for number in range(3):
        ran(1 * MINUTE, 18 * MINUTE, name=f"went on {number}")
    since, until = before_now(20 * MINUTE), before_now(10 * MINUTE)
    rows, _complete = find(since=since, until=until, limit=4)
    listed = history.newest_of(history.parts_within(since, until), 4, since, until)
    assert rows[0] == listed[0] == cleared
