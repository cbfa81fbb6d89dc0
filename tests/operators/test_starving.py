from __future__ import annotations

import pytest

from django_singletask.models import TaskLockEvent
from tests import inside
from tests.inside import starving
from tests.past_rows import before_now, keep_history_in, new, ran, row, skipped
from tests.plans import plans

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history", "whole_second"),
]


def names(*wanted):
    return [state.name for state in starving(3600, *wanted)]


# The rule


def test_lock_whose_calls_meet_it_for_long_starves():
    ran(9000, task="t")
    skipped(8000, 60, 30, task="t")
    skipped(50, 40, 2, task="t")
    [state] = starving(3600)
    assert (state.name, state.task, state.conflicts) == ("nightly", "t", 32)
    assert (state.since_completed, state.unmet, state.last_conflict) == (9000, 8000, 40)


@pytest.mark.parametrize(
    ("result", "starves"),
    [
        *[("returned", False), ("raised", False)],
        # It is to come again.
        *[("retried", True), ("postponed", True), ("ignored", True)],
    ],
)
def test_lock_starves_until_a_run_completes(result, starves):
    skipped(8000, 100, 30)
    ran(90, result=result)
    assert names() == ["nightly"] * starves


def test_lock_that_met_itself_once_does_not_starve_since_yesterday():
    ran(86_000)
    skipped(60)
    assert starving(3600) == []


def test_lock_that_was_never_completed_starves():
    skipped(8000, 60)
    assert starving(3600)[0].since_completed is None


@pytest.mark.parametrize("kind", ["conflict", "duplicate"])
def test_lock_that_was_met_once_does_not_starve(kind):
    skipped(8000, kind=kind)
    row("run", 7000, outcome="cleared")
    assert names("nightly") == []


@pytest.mark.parametrize(
    ("first", "last", "count", "starves"),
    [
        (90_000, 3500, 100, True),
        (90_000, 3700, 100, False),  # it was called each quarter of an hour
        (90_000, 80_000, 2, False),
        (160_000, 80_000, 2, True),  # it is called each day, and will be again in some minutes
        (200_000, 150_000, 3, False),
    ],
)
def test_lock_that_is_no_longer_called_does_not_starve(first, last, count, starves):
    row("run", 300_000, token="t")
    skipped(first, last, count, blocked_by="t")
    assert names() == ["nightly"] * starves
    assert names("nightly") == ["nightly"] * starves


def test_duplicates_of_a_call_that_does_not_come_count():
    skipped(8000, 60, kind="duplicate", reason="")
    assert names() == ["nightly"]


@pytest.mark.parametrize("reason", ["redelivery", "retry"])
def test_message_that_meets_its_own_run_is_no_other_call(reason):
    skipped(8000, 60, reason=reason)
    assert starving(3600) == []


@pytest.mark.parametrize("kind", ["conflict", "duplicate"])
def test_call_that_met_a_completed_run_does_not_starve_by_a_clock_that_is_ahead(kind):
    ran(7200, 60, token="t")
    skipped(7200 - 2, kind=kind, blocked_by="t")
    assert starving(3600) == []
    skipped(7000, 60, kind=kind, blocked_by="u")
    [state] = starving(3600)
    assert (state.conflicts, state.unmet) == (1, 7000)


def test_call_that_met_a_run_that_died_is_unmet():
    ran(9000, token="t")
    ran(7200, 60, token="u", outcome="dead", result="")
    skipped(7190, 60, blocked_by="u")
    assert names() == ["nightly"]


def test_last_completed_run_is_looked_for_far_back():
    ran(7000)
    for number in range(30):
        skipped(6000 - number, 60)
    assert starving(3600)[0].since_completed == 7000


def test_times_without_time_zones_are_times_too(settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Kathmandu"
    ran(9000, 5)
    skipped(8000, 60)
    assert starving(3600)[0].unmet == 8000


# What is looked at


def test_those_whose_calls_have_come_to_nothing_for_longest_are_first():
    skipped(8000, 60, name="b")
    skipped(9000, 60, name="a")
    assert names() == ["a", "b"]


@pytest.mark.parametrize("last", [3500, 7100])
def test_name_that_was_met_within_an_hour_and_the_limit_is_looked_at(last):
    skipped(50_000, last, 50)
    assert len(starving(3600)) == (last < 3600)
    assert len(starving(7200)) == 1


def test_hold_of_days_is_found_below_newer_conflicts(monkeypatch):
    inside.bound(monkeypatch, "conflicts of what starves", 5)
    row("run", 300_000, token="old")
    skipped(299_000, 30, 500, blocked_by="old")
    for number in range(10):
        skipped(20, name=f"other {number}")
    assert names() == ["nightly"]


def test_starving_takes_a_query_a_name_and_few_more(django_assert_num_queries):
    for number in range(10):
        skipped(8000, 60, name=f"lock {number}")
    row("run", 100, name="held", token="h")
    with django_assert_num_queries(2 + 4 + 10):  # the savepoint first
        assert len(starving(3600)) == 10


def test_names_whose_holders_completed_cost_no_query_each(django_assert_num_queries):
    for number in range(9):
        ran(30, 60, name=f"other {number}", token=f"t{number}")
        skipped(50, 20, name=f"other {number}", blocked_by=f"t{number}")
    skipped(8000, 60)
    with django_assert_num_queries(2 + 4 + 1):
        assert names() == ["nightly"]


def test_names_that_are_asked_for_are_always_looked_at(monkeypatch):
    inside.bound(monkeypatch, "conflicts of what starves", 1)
    skipped(8000, 60)
    skipped(20, name="other")
    assert names("nightly", "other", "none") == ["nightly"]


def test_names_of_a_task_are_found_below_those_of_others(monkeypatch):
    inside.bound(monkeypatch, "conflicts of what starves", 2)
    skipped(8000, 60, task="t")
    for number in range(9):
        skipped(20, name=f"other {number}", task="u")
    assert names("t") == ["nightly"]


def test_conflicts_with_open_holds_are_read_by_the_index_of_their_holders(settings):
    keep_history_in(settings, "sqlite")
    rows = [
        new(kind="run", name="n", key="k", ref=f"t{n}", at=before_now(9000)) for n in range(100)
    ]
    TaskLockEvent.objects.bulk_create(rows)
    statements = plans("sqlite", lambda: starving(3600))
    [statement] = [each for each in statements if '"blocked_by" IN' in each.sql]
    assert "singletask_blocked_by" in statement.text
