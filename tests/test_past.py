from __future__ import annotations

import math
import time

import pytest
from django.db import InterfaceError, connection, connections
from django.test.utils import CaptureQueriesContext

from django_singletask.history import queries as past
from django_singletask.history.queries import NoHistory, find, usual_hold
from django_singletask.history.writing import SWEEPER
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held as registry
from django_singletask.operators import starving as starvation
from django_singletask.operators.starving import starving
from tests.past_rows import ran, row, skipped

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture(autouse=True)
def empty_history(db, monkeypatch):
    now = float(int(time.time()))
    monkeypatch.setattr("time.time", lambda: now)
    # Threads of other tests write outside of the transactions of those.
    TaskLockEvent.objects.all().delete()


@pytest.fixture
def unreadable(empty_history):
    table = TaskLockEvent._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")


def names(longer_than=3600.0, **options):
    return [state.name for state in starving(longer_than, **options)]


# How long it is held


def test_usual_hold_is_that_of_the_task():
    for lasted in (1, 2, 9):
        ran(60, lasted, task="a", name=f"a({lasted})")
    ran(60, 100, task="b")
    assert usual_hold("a(1)", "a") == (pytest.approx(2, abs=0.01), pytest.approx(9, abs=0.01), 3)


def test_usual_hold_of_a_lock_without_a_task_is_that_of_its_name():
    ran(60, 5, name="nightly")
    ran(60, 50, name="weekly")
    assert usual_hold("nightly").median == pytest.approx(5, abs=0.01)


def test_runs_that_did_not_give_it_back_are_not_usual():
    ran(60, 100, outcome="dead", result="")
    row("acquired", 5000)
    skipped(30)
    assert usual_hold("nightly") is None


@pytest.mark.parametrize("result", ["raised", "retried", "ignored", "postponed"])
def test_run_that_did_not_return_is_not_usual(result):
    """One that hung until it was stopped would hide the next that hangs."""
    ran(60, 5000, result=result)
    ran(60, 5)
    assert usual_hold("nightly") == (pytest.approx(5, abs=0.01), pytest.approx(5, abs=0.01), 1)


@pytest.mark.parametrize(("runs", "held_for", "slow"), [(4, 60, 0), (5, 60, 1), (5, 6, 0)])
def test_a_handful_of_runs_says_what_is_slow(runs, held_for, slow):
    for _ in range(runs):
        ran(60, 9)
    assert usual_hold("nightly").is_exceeded_by(held_for) == bool(slow)


def test_only_the_last_hundred_runs_are_usual():
    ran(5000, 1000)
    for _ in range(100):
        ran(60, 1)
    assert usual_hold("nightly").longest == pytest.approx(1, abs=0.01)
    assert usual_hold("nightly").runs == 100


def test_without_history_nothing_is_usual(settings):
    ran(60)
    settings.SINGLETASK_HISTORY = "off"
    assert usual_hold("nightly") is None


def test_without_its_table_nothing_is_usual(unreadable):
    assert usual_hold("nightly") is None


# Who starves


def test_lock_whose_calls_are_skipped_for_long_starves():
    ran(9000, task="t")
    skipped(8000, 60, 30, task="t")
    skipped(50, 40, 2, task="t")
    [state] = starving(3600)
    assert (state.name, state.task, state.skipped) == ("nightly", "t", 32)
    assert state.since_completed == pytest.approx(9000, abs=10)
    assert state.unmet == pytest.approx(8000, abs=10)
    assert state.last_skip == pytest.approx(40, abs=10)


def test_lock_that_completed_since_does_not_starve():
    skipped(8000, 100, 30)
    ran(90)
    assert starving(3600) == []


def test_lock_that_met_itself_once_does_not_starve_since_yesterday():
    ran(86_000)
    skipped(60)
    assert starving(3600) == []


def test_lock_that_was_never_completed_starves():
    skipped(8000, 60)
    assert starving(3600)[0].since_completed is None


@pytest.mark.parametrize("kind", ["skipped", "duplicate"])
def test_lock_that_was_skipped_once_does_not_starve(kind):
    skipped(8000, kind=kind)
    row("cleared", 7000)
    assert starving(3600) == []


@pytest.mark.parametrize(
    ("first", "last", "count", "starves"),
    [
        (200_000, 100_000, 2, False),  # for over a day
        (90_000, 3500, 100, True),
        (90_000, 3700, 100, False),  # it was called each quarter of an hour
        (90_000, 80_000, 2, False),
        (160_000, 80_000, 2, True),  # it is called each day, and again in some minutes
    ],
)
def test_lock_that_nobody_calls_any_more_does_not_starve(first, last, count, starves):
    skipped(first, last, count)
    assert names() == ["nightly"] * starves
    assert names(math.inf, times=count) == ["nightly"] * starves


def test_duplicates_of_a_call_that_does_not_come_count():
    skipped(8000, 60, kind="duplicate", reason="")
    assert names() == ["nightly"]


def test_message_that_meets_its_own_run_is_no_other_call():
    skipped(8000, 60, reason="redelivery")
    assert starving(3600) == []


def test_run_that_raised_came_to_an_end():
    skipped(8000, 60)
    ran(30, result="raised")
    assert starving(3600) == []


@pytest.mark.parametrize("result", ["retried", "postponed", "ignored"])
def test_run_that_is_to_come_again_has_not_completed(result):
    skipped(8000, 60)
    ran(30, result=result)
    assert names() == ["nightly"]


def test_times_count_skips_in_a_row():
    skipped(60, 10, 49)
    assert names(math.inf, times=50) == []
    skipped(9)
    assert names(math.inf, times=50) == ["nightly"]
    assert names(3600) == []


def test_most_patient_is_first():
    skipped(8000, 60, name="b")
    skipped(9000, 60, name="a")
    assert names() == ["a", "b"]


def test_hold_of_days_is_found_below_newer_skips(monkeypatch):
    monkeypatch.setattr(past, "NEWEST", 5)
    row("acquired", 300_000, token="old")
    skipped(299_000, 30, 500, blocked_by="old")
    for number in range(10):
        skipped(20, name=f"other {number}")
    assert names() == ["nightly"]


def test_lock_that_dies_again_and_again_is_found_below_newer_skips(monkeypatch):
    monkeypatch.setattr(past, "NEWEST", 5)
    ran(50, 8000, token="dead", outcome="expired", result="")
    skipped(8000, 60, blocked_by="dead")
    row("expired", 50, token="dead")
    for number in range(10):
        skipped(20, name=f"other {number}")
    assert names() == ["nightly"]


def test_last_completed_run_is_looked_for_far_back():
    ran(7000)
    for number in range(starvation.FEW):
        skipped(6000 - number, 60)
    assert starving(3600)[0].since_completed == pytest.approx(7000, abs=10)


def test_sweep_does_not_starve():
    skipped(8000, 60, name=SWEEPER)
    assert starving(3600) == []


def test_starving_takes_a_query_a_name_and_few_more(django_assert_num_queries):
    for number in range(10):
        skipped(8000, 60, name=f"lock {number}")
    with django_assert_num_queries(8 + 10):
        assert len(starving(3600)) == 10


def test_trouble_without_skips_takes_no_place(monkeypatch):
    monkeypatch.setattr(starvation, "SUSPECTS", 3)
    for number in range(9):
        row("acquired", 100, name=f"held {number}", token=f"h{number}")
        row("cleared", 50, name=f"cleared {number}", token=f"c{number}")
    skipped(8000, 60)
    assert starvation.who_starves(3600) == (starving(3600), 0)
    assert names() == ["nightly"]


def test_completed_names_take_no_place(monkeypatch, django_assert_num_queries):
    monkeypatch.setattr(starvation, "SUSPECTS", 3)
    skipped(8000, 60)
    for number in range(9):
        skipped(70, name=f"other {number}")
        ran(30, name=f"other {number}")
    with django_assert_num_queries(8 + 1):
        assert names() == ["nightly"]


def test_calls_that_met_completed_runs_take_no_place(monkeypatch):
    monkeypatch.setattr(starvation, "SUSPECTS", 3)
    monkeypatch.setattr(starvation, "NEAR", 1)
    for number in range(9):
        ran(30, 60, name=f"other {number}", token=f"t{number}")
        skipped(50, 20, name=f"other {number}", blocked_by=f"t{number}")  # by a clock ahead
    skipped(8000, 60)
    assert starvation.who_starves(3600) == (starving(3600), 0)
    assert names() == ["nightly"]


def test_completed_run_below_the_nearest_rows_is_found_all_the_same(monkeypatch):
    monkeypatch.setattr(starvation, "NEAR", 1)
    ran(30, 8000)
    skipped(7000, 60)
    skipped(20, name="other")
    assert names() == []


def test_more_suspects_than_are_looked_at_are_counted(monkeypatch):
    monkeypatch.setattr(starvation, "SUSPECTS", 3)
    for number in range(9):
        skipped(8000, 60, name=f"lock {number}", task="t")
    states, more = starvation.who_starves(3600)
    assert (len(states), more) == (3, 6)


def test_names_that_are_asked_for_are_always_looked_at(monkeypatch):
    monkeypatch.setattr(starvation, "SUSPECTS", 0)
    monkeypatch.setattr(past, "NEWEST", 1)
    skipped(8000, 60)
    skipped(20, name="other")
    [state], more = starvation.who_starves(3600, names=["nightly", "other", "none"])
    assert (state.name, more) == ("nightly", 0)
    assert starvation.who_starves(3600, names=["nightly"], task="t") == ([], 0)


def test_names_of_a_task_are_found_below_those_of_others(monkeypatch):
    monkeypatch.setattr(starvation, "SUSPECTS", 1)
    monkeypatch.setattr(past, "NEWEST", 2)
    skipped(8000, 60, task="t")
    for number in range(9):
        skipped(20, name=f"other {number}", task="u")
    [state], more = starvation.who_starves(3600, task="t")
    assert (state.name, more) == ("nightly", 0)


@pytest.mark.parametrize("kind", ["skipped", "duplicate"])
def test_call_that_met_a_completed_run_does_not_starve_by_a_clock_that_is_ahead(kind):
    ran(7200, 60, token="t")
    skipped(7200 - 2, kind=kind, blocked_by="t")
    assert starving(3600) == []
    skipped(7000, 60, kind=kind, blocked_by="u")
    [state] = starving(3600)
    assert state.skipped == 1
    assert state.unmet == pytest.approx(7000, abs=10)


def test_call_that_met_a_run_that_died_is_unmet():
    ran(9000, token="t")
    ran(7200, 60, token="u", outcome="dead", result="")
    skipped(7190, 60, blocked_by="u")
    assert names() == ["nightly"]


def test_skips_against_open_holds_are_read_by_the_index_of_their_holders(monkeypatch):
    on_sqlite(monkeypatch)
    facts = {"kind": "acquired", "key": "k", "at": "2026-01-01T00:00Z"}
    for number in range(100):
        TaskLockEvent.objects.using("sqlite").create(name="nightly", token=f"t{number}", **facts)
    plans = sqlite_plans(lambda: list(starvation._skips(starvation.django_now(), None)))
    plans += sqlite_plans(lambda: starvation._last_completed(["nightly", "weekly"]))
    assert "singletask_name" in plans[-1][1]
    [plan] = [plan for sql, plan in plans if '"blocked_by" IN' in sql]
    assert "singletask_blocked_by" in plan


def on_sqlite(monkeypatch):
    rows = TaskLockEvent.objects.using("sqlite")
    rows.all().delete()
    for module in (past, registry, starvation):
        monkeypatch.setattr(module, "rows", lambda: rows.order_by("-id"))


def sqlite_plans(ask):
    """Return the statements to SQLite, and how it goes about each."""
    there = connections["sqlite"]
    with CaptureQueriesContext(there) as queries:
        ask()
    found = []
    for query in queries.captured_queries:
        if query["sql"].startswith("SELECT"):
            with there.cursor() as cursor:
                cursor.execute(f"EXPLAIN QUERY PLAN {query['sql']}")
                found.append((query["sql"], " ".join(line[3] for line in cursor.fetchall())))
    return found


def test_expired_holds_are_looked_at_again_by_their_ids(monkeypatch, settings):
    settings.SINGLETASK_CACHE = "redis"
    on_sqlite(monkeypatch)
    facts = {"kind": "acquired", "key": "k", "at": "2026-01-01T00:00Z", "timeout": 60}
    for number in range(100):
        TaskLockEvent.objects.using("sqlite").create(name=f"lock {number}", token="t", **facts)
    found = []
    plans = sqlite_plans(lambda: found.extend(registry._expired(())))
    assert len(found) == 100
    [plan] = [plan for sql, plan in plans if '"id" IN' in sql]
    assert "INTEGER PRIMARY KEY" in plan


def test_starving_without_history_says_so(settings):
    settings.SINGLETASK_HISTORY = "off"
    with pytest.raises(NoHistory, match="SINGLETASK_HISTORY = 'off'"):
        starving(3600)


def test_starving_without_its_table_says_so(unreadable):
    with pytest.raises(NoHistory, match=r"cannot be read: .*Has 'manage\.py migrate' run\?"):
        starving(3600)


def test_naive_times_are_times_too(settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Kathmandu"
    ran(9000, 5)
    skipped(8000, 60)
    assert starving(3600)[0].unmet == pytest.approx(8000, abs=10)


# What is asked for


def test_rows_are_found_by_every_filter():
    ran(7000, task="a", name="one")
    ran(60, task="b", name="two")
    skipped(50, task="b", name="two")

    def kinds(**facts):
        return [found.kind for found in find(**facts)]

    assert kinds() == ["skipped", "acquired", "acquired"]
    assert kinds(limit=1) == ["skipped"]
    assert kinds(names=["one", "three"]) == ["acquired"]
    assert kinds(task="b") == ["skipped", "acquired"]
    assert kinds(kind="skipped") == ["skipped"]
    assert kinds(outcome="released", since=3600) == ["acquired"]


def test_rows_without_their_table_are_an_error(unreadable):
    with pytest.raises(NoHistory):
        find()


def test_database_that_is_away_is_an_error_that_says_so(monkeypatch):
    def away(*args):
        raise InterfaceError("connection already closed")

    with connection.execute_wrapper(away):
        for ask in (find, lambda: past.last_rows("a"), lambda: past.names_of_key("k"), names):
            with pytest.raises(NoHistory, match="cannot be read: connection already closed"):
                ask()
        assert usual_hold("nightly") is None


def test_no_name_has_no_rows():
    ran(60)
    assert find(names=[]) == []
    assert len(find(names=None)) == 1


def test_rows_of_a_task_are_read_in_the_order_of_their_index():
    ran(60, task="a", name="one", key="singletask:a:1")
    with CaptureQueriesContext(connection) as queries:
        assert past.names_of_key("singletask:a:1") == ["one"]
        assert [found.name for found in find(task="a")] == ["one"]
    assert len(queries) == 2
    for query in queries:
        assert '."task" ASC' in query["sql"]
        assert "\"task\" >= 'a'" in query["sql"]
