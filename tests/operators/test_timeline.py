"""What the timeline draws, and within which limits."""

from __future__ import annotations

import datetime
import uuid
from types import SimpleNamespace

import pytest
from django.db import connections

from django_singletask.models import TaskLockEvent
from django_singletask.operators import timeline, windows
from tests import inside, past_rows

pytestmark = pytest.mark.django_db(databases="__all__")

NOW = datetime.datetime(2026, 1, 2, 12, 0, tzinfo=datetime.UTC)


@pytest.fixture(autouse=True)
def empty_history(db, settings):
    settings.TIME_ZONE = "UTC"
    for alias in {"default", "sqlite", "mariadb"}.intersection(connections):
        TaskLockEvent.objects.using(alias).all().delete()


def ago(minutes):
    return NOW - datetime.timedelta(minutes=minutes)


def hold(begin, end=None, **facts):
    """Write a hold that lasted from ``begin`` to ``end`` minutes ago, or goes on."""
    ending = {"outcome": "released", "result": "returned", "ended_at": ago(end or 0)}
    lasting = {"timeout": 1e9} if end is None else ending
    return event(begin, kind="run", **{**lasting, **facts})


def trouble(minutes, outcome="lost", begin=None, **facts):
    """Write a run whose lease ended so many minutes ago, when it had begun or ``begin`` ago."""
    facts = {"outcome": outcome, "noticed_at": ago(minutes), **facts}
    return event(begin or minutes, kind="run", **facts)


def event(minutes, kind="conflict", **facts):
    """Write what began so many minutes ago."""
    usual = {"name": "nightly", "key": "k", "timeout": 60, "at": ago(minutes), "kind": kind}
    usual["ref"] = uuid.uuid4().hex
    usual |= {"result": "skipped", "reason": "skip"} if kind == "conflict" else {}
    return past_rows.save(**{**usual, **facts})


def drawn(span="1h", *, rows=None, now=NOW, **only):
    rows = TaskLockEvent.objects.all() if rows is None else rows
    return SimpleNamespace(**timeline.draw(rows, windows.Window.past(span, now), now=now, **only))


def lanes(**only):
    return [*drawn(**only).lanes]


def marks(span="1h", **only):
    """Return shape, state, place and width of each mark."""
    return [
        (mark.shape, mark.state, f"{mark.x:.2f}%", f"{mark.width:.2f}%")
        for lane in drawn(span, **only).lanes.values()
        for each in lane
        for mark in each.marks
    ]


def texts(**only):
    """Return the texts of what is drawn, in their order."""
    return [each.text for each in drawn(**only).drawn]


# What is drawn, and where


@pytest.mark.parametrize(
    ("begin", "end", "place"),
    [
        (30, 15, "50.00% 25.00%"),
        # It began before the time span: it begins at its edge.
        (90, 45, "0.00% 25.00%"),
        # It is wide enough to be seen, but does not reach beyond the edge.
        (30, 30, "50.00% 0.30%"),
        (4 / 60, 4 / 60, "99.70% 0.30%"),
        (0, 0, "99.70% 0.30%"),
        # Another clock wrote its end: before it began, or in the future.
        (30, 31, "50.00% 0.30%"),
        (30, -5, "50.00% 50.00%"),
    ],
)
def test_hold_is_a_bar(begin, end, place):
    hold(begin, end)
    assert marks() == [("bar", "returned", *place.split())]


def test_open_hold_reaches_to_now():
    hold(6)
    assert marks() == [("bar", "held", "90.00%", "10.00%")]


@pytest.mark.parametrize(("begin", "end"), [(90, 61), (200, 100)])
def test_hold_that_ended_before_the_time_span_is_left_out(begin, end):
    hold(begin, end)
    assert marks() == []


@pytest.mark.parametrize("outcome", ["dead", "expired", "lost", "cleared"])
def test_trouble_is_a_bar_of_its_colour_and_a_sign_where_it_was_noticed(outcome):
    trouble(15, outcome, begin=30)
    assert marks() == [("bar", outcome, "50.00%", "25.00%"), ("sign", outcome, "75.00%", "0.30%")]
    [each] = drawn().drawn
    assert [bool(mark.path) for mark in each.marks] == [False, True]


def test_fixed_lease_ends_when_its_time_was_over():
    trouble(15, "expired", begin=30, timeout=300, fixed=True)
    assert marks() == [
        ("bar", "expired", "50.00%", "8.33%"),
        ("sign", "expired", "58.33%", "0.30%"),
    ]
    assert texts() == ["expired after 5m"]


def test_renewed_lease_ends_at_the_latest_when_that_was_noticed():
    trouble(15, "expired", begin=30)
    assert texts() == ["expired after ≤15m"]


def test_cleared_hold_ends_there_though_its_run_goes_on():
    trouble(15, "cleared", begin=30, ended_at=ago(5), result="returned")
    assert marks() == [
        ("bar", "cleared", "50.00%", "25.00%"),
        ("sign", "cleared", "75.00%", "0.30%"),
    ]


def test_run_without_a_lock_is_a_sign_alone():
    trouble(15, "unguarded")
    assert marks() == [("sign", "unguarded", "75.00%", "0.30%")]


def test_retaken_is_a_sign_at_its_time_on_a_bar_of_any_colour():
    hold(30, 15, retaken=2, retaken_at=ago(20))
    assert marks() == [
        ("bar", "returned", "50.00%", "25.00%"),
        ("sign", "retaken", "66.67%", "0.30%"),
    ]
    assert texts() == ["returned after 15m, retaken × 2"]


def test_marks_of_a_host_whose_clock_is_ahead_stand_at_the_edge_of_a_window_until_now():
    trouble(-1, "lost", begin=-0.5)
    assert marks() == [("bar", "lost", "99.70%", "0.30%"), ("sign", "lost", "99.70%", "0.30%")]


def test_sign_outside_the_window_is_left_out():
    hold(90, 5, retaken=1, retaken_at=ago(80))
    assert marks() == [("bar", "returned", "0.00%", "91.67%")]


@pytest.mark.parametrize(
    ("count", "size"), [(1, 12), (2, 17), (8, 27), (32, 36), (1000, 36), (10**9, 36)]
)
def test_height_of_a_tick_grows_with_the_number_of_conflicts(count, size):
    event(15, count=count)
    [each] = drawn().drawn
    assert (each.marks[0].shape, each.height) == ("tick", size)


def test_counted_conflicts_are_drawn_where_the_last_of_them_was():
    event(120, count=3, last_at=ago(15))
    assert marks() == [("tick", "conflict", "75.00%", "0.30%")]


def test_each_event_is_listed_once_the_newest_first():
    hold(30, 20, retaken=1, retaken_at=ago(25))
    trouble(15, begin=40, name="other")
    assert [each.event.name for each in drawn().drawn] == ["other", "nightly"]


def test_open_hold_that_has_expired_is_a_sign_and_no_hold_of_now():
    hold(30, timeout=60)
    assert marks() == [
        ("bar", "expired", "50.00%", "50.00%"),
        ("sign", "expired", "99.70%", "0.30%"),
    ]
    assert texts() == ["expired"]


def test_window_in_the_past_shows_what_met_it():
    hold(90, 50)
    hold(45, 10, name="after")
    hold(200, 5, name="throughout")
    hold(70, 62, name="before")
    window = windows.Window(ago(60), ago(50))
    drawing = timeline.draw(TaskLockEvent.objects.all(), window, now=NOW)
    assert [*drawing["lanes"]] == ["nightly", "throughout"]
    assert drawing["lanes"]["throughout"][0].marks[0].width == 100


def test_lanes_are_ordered_by_name():
    for name in ("b", "a", "c"):
        hold(30, 15, name=name)
    assert lanes() == ["a", "b", "c"]


def test_one_lock_or_one_task_can_be_drawn_alone():
    hold(30, 15, name="a(1)", task="a")
    hold(30, 15, name="a(2)", task="a")
    hold(30, name="b")
    assert lanes(name="a(2)") == ["a(2)"]
    assert lanes(task="a") == ["a(1)", "a(2)"]


@pytest.mark.parametrize("alias", ["default", "sqlite", "mariadb"])
def test_every_database_finds_the_open_holds(alias):
    facts = {"name": "nightly", "key": "k", "at": ago(500), "kind": "run", "timeout": 1e9}
    past_rows.new(**facts, ref="open").save(using=alias)
    ended = {"outcome": "released", "ended_at": ago(400), "ref": "ended"}
    past_rows.new(**facts, **ended).save(using=alias)
    rows = TaskLockEvent.objects.using(alias).all()
    assert [mark[1] for mark in marks("15m", rows=rows)] == ["held"]


# Limits


def test_only_the_most_important_locks_are_drawn(monkeypatch):
    inside.bound(monkeypatch, "lanes of the timeline", 3)
    hold(50, 49, name="trouble", retaken=1, retaken_at=ago(50))
    hold(50, name="open")
    for number in range(5):
        hold(40 - number, 35 - number, name=f"old-{number}")
    drawing = drawn()
    assert [*drawing.lanes] == ["old-4", "open", "trouble"]
    assert drawing.lanes_left_out == 4


def test_as_many_events_as_can_be_drawn_are_drawn(monkeypatch):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    hold(50, 40)
    hold(30, 29)
    assert (len(marks()), "drawn_since" in vars(drawn())) == (2, False)


def test_of_more_events_the_newest_are_drawn_and_shorter_windows_named(monkeypatch):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    for minutes in (50, 40, 30):
        hold(minutes, minutes - 1)
    drawing = drawn()
    assert [mark[2] for mark in marks()] == ["50.00%", "33.33%"]
    assert drawing.drawn_since == "11:21:00"
    assert (drawing.later.start, drawing.later.end) == (ago(39), NOW)
    assert (drawing.earlier.start, drawing.earlier.end) == (ago(60), ago(39))


def test_shorter_window_is_drawn_whole(monkeypatch):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    hold(500, name="open")
    for minutes in (50, 40, 30):
        hold(minutes, minutes - 1)
    drawing = timeline.draw(TaskLockEvent.objects.all(), drawn().later, now=NOW)
    assert [*drawing["lanes"]] == ["nightly", "open"]
    assert "drawn_since" not in drawing


@pytest.mark.parametrize("went_on", [2, 3])
def test_what_happened_in_a_window_is_drawn_however_much_went_on_after_it(monkeypatch, went_on):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    trouble(55, "dead", begin=58, name="victim")
    for number in range(went_on):
        hold(90, 10 - number, name=f"through-{number}")
    window = windows.Window(ago(60), ago(50))
    drawing = timeline.draw(TaskLockEvent.objects.all(), window, now=NOW)
    assert len(drawing["lanes"]) == 3
    assert "victim" in drawing["lanes"]
    assert drawing["more_go_on"] == (went_on == 3)
    assert "drawn_since" not in drawing


def test_events_of_one_moment_that_are_too_many_are_named_without_shorter_windows(monkeypatch):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    for _ in range(3):
        trouble(60, "cleared", begin=70)
    drawing = drawn()
    assert drawing.drawn_since == "11:00:00"
    assert not {"later", "earlier"} & {*vars(drawing)}


@pytest.mark.parametrize("only", [{}, {"name": "old"}, {"task": "t"}])
def test_open_hold_is_drawn_however_much_happened_since(monkeypatch, only):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    hold(500, name="old", task="t", key="z")
    for minutes in (3, 2, 1):
        hold(minutes, minutes, name="old", task="t", key="z")
    assert "held" in {mark[1] for mark in marks(**only)}


# Words


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"outcome": "released", "ended_at": ago(29)}, "released after 1m, task x, web-1:40"),
        ({"timeout": 1e9}, "held for 30m, task x, web-1:40"),
        (
            {"kind": "conflict", "result": "waiting", "reason": "requeue", "count": 2},
            "conflict × 2, waiting: requeue, task x, web-1:40",
        ),
        (
            {"kind": "conflict", "blocked_by": "t"},
            "conflict, skipped, blocked by t, task x, web-1:40",
        ),
        (
            {"outcome": "cleared", "noticed_at": ago(29), "actor": "ada"},
            "cleared after 1m, by ada, task x, web-1:40",
        ),
        (
            {"outcome": "expired", "noticed_at": ago(29), "reason": "gone"},
            "expired after ≤1m, gone, task x, web-1:40",
        ),
        (
            {"outcome": "dead", "noticed_at": ago(29), "actor": "web-1:9"},
            "dead after 1m, noticed by web-1:9, task x, web-1:40",
        ),
        ({"outcome": "cleared", "noticed_at": ago(29), "pid": 0}, "cleared after 1m, task x"),
    ],
)
def test_text_of_an_event(facts, text):
    event(30, **{"kind": "run", "task_id": "x", "host": "web-1", "pid": 40, **facts})
    assert texts() == [text]


@pytest.mark.parametrize(
    ("span", "labels", "first"),
    [("15m", 5, "11:48"), ("1h", 6, "11:10"), ("24h", 6, "16:00"), ("7d", 7, "Sat 27")],
)
def test_labels_are_round_times(span, labels, first):
    texts = [text for _x, text in drawn(span).labels]
    assert len(texts) == labels
    assert texts[0] == first
    assert texts[-1] in ("12:00", "Fri 2")


def test_marks_of_long_time_spans_are_dated():
    hold(300, 290)
    assert [each.when for each in drawn("24h").drawn] == [
        "2026-01-02 07:00:00 – 2026-01-02 07:10:00"
    ]
