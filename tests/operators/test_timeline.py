"""What the timeline draws, and within which limits."""

from __future__ import annotations

import datetime
import uuid
from types import SimpleNamespace

import pytest
from django.db import connections

from django_singletask.models import TaskLockEvent
from django_singletask.operators import charts, windows
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
    return SimpleNamespace(**charts.draw(rows, windows.Window.past(span, now), now=now, **only))


def lanes(**only):
    return [*drawn(**only).lanes]


def marks(span="1h", **only):
    """Return shape, state, place and width of each mark."""
    look = "{shape} {state} {x:.2f}% {width:.2f}%".format_map
    return [tuple(look(mark).split()) for mark in drawn(span, **only).marks]


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
    assert drawn().marks[1]["path"]


def test_cleared_hold_ends_there_though_its_run_goes_on():
    trouble(15, "cleared", begin=30, ended_at=ago(5), result="returned")
    assert marks() == [
        ("bar", "cleared", "50.00%", "25.00%"),
        ("sign", "cleared", "75.00%", "0.30%"),
    ]


def test_run_without_a_lock_is_a_sign_alone():
    trouble(15, "unguarded")
    assert marks() == [("sign", "unguarded", "75.00%", "0.30%")]


def test_retaken_is_a_sign_on_a_bar_of_any_colour():
    hold(30, 15, retaken=2)
    trouble(15, begin=30, retaken=1, name="other")
    looks = {
        (mark["event"].name, mark["shape"], mark["state"], mark["text"]) for mark in drawn().marks
    }
    assert looks == {
        ("nightly", "bar", "returned", "returned after 15m"),
        ("nightly", "sign", "retaken", "retaken × 2"),
        ("other", "bar", "lost", "lost after 15m"),
        ("other", "sign", "retaken", "retaken × 1"),
        ("other", "sign", "lost", "lost"),
    }


@pytest.mark.parametrize(
    ("count", "size"), [(1, 12), (2, 17), (8, 27), (32, 36), (1000, 36), (10**9, 36)]
)
def test_height_of_a_tick_grows_with_the_number_of_conflicts(count, size):
    event(15, count=count)
    [mark] = drawn().marks
    assert (mark["shape"], mark["parts"]) == ("tick", [("conflict", 64, size)])


def test_counted_conflicts_are_drawn_where_the_last_of_them_was():
    event(120, count=3, last_at=ago(15))
    assert marks() == [("tick", "conflict", "75.00%", "0.30%")]


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
    TaskLockEvent.objects.using(alias).create(**facts, ref="open")
    ended = {"outcome": "released", "ended_at": ago(400), "ref": "ended"}
    TaskLockEvent.objects.using(alias).create(**facts, **ended)
    rows = TaskLockEvent.objects.using(alias).all()
    assert [mark["state"] for mark in drawn("15m", rows=rows).marks] == ["held"]


# Limits


def test_only_the_most_important_locks_are_drawn(monkeypatch):
    inside.bound(monkeypatch, "lanes of the timeline", 3)
    hold(50, 49, name="trouble", retaken=1)
    hold(50, name="open")
    for number in range(5):
        hold(40 - number, 35 - number, name=f"old-{number}")
    drawing = drawn()
    assert [*drawing.lanes] == ["old-4", "open", "trouble"]
    assert drawing.lanes_left_out == 4


# Sums


@pytest.fixture
def summed(monkeypatch):
    inside.bound(monkeypatch, "marks of the timeline", 1)


def sums_in(lane):
    return [mark for mark in lane if "event" not in mark]


def sums(span="1h", **only):
    """Return the lane, the time and the text of each sum."""
    lanes = drawn(span, **only).lanes.items()
    return [(label, bar["when"], bar["text"]) for label, lane in lanes for bar in sums_in(lane)]


def test_as_many_events_as_can_be_drawn_are_not_summed_up(monkeypatch):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    hold(90, 80)
    hold(30, 29)
    hold(20, 19)
    assert (drawn().summed, drawn().read_back_to, len(drawn().marks)) == ("", "", 2)


@pytest.mark.parametrize("alias", ["default", "sqlite", "mariadb"])
def test_every_database_sums_up_lanes_and_buckets(summed, alias):
    base = {"key": "k", "kind": "run", "outcome": "released", "task": "t", "host": "h"}
    met = {"kind": "conflict", "outcome": "", "result": "waiting", "count": 9}
    rows = [
        {"at": ago(30), "ended_at": ago(29.8), "result": "returned"},
        {"at": ago(29.6), "ended_at": ago(27.5), "result": "raised"},
        {"at": ago(29.2), "noticed_at": ago(27.5), "outcome": "dead"},
        {"at": ago(28.9), "outcome": ""},
        {"at": ago(200), "last_at": ago(2), **met},
        {"at": ago(29.6), **met},
        {"at": ago(20), "ended_at": ago(19.75), "task": "", "name": "alone"},
    ]
    for number, row in enumerate(rows):
        TaskLockEvent.objects.using(alias).create(**{**base, "name": "t(1)", "ref": number, **row})
    assert sorted(sums(rows=TaskLockEvent.objects.using(alias).all())) == [
        ("", "11:40:00", "runs: 1"),
        ("t", "11:30:00", "runs: 3, raised: 1, trouble: 1, conflicts: 9"),
        ("t", "11:31:00", "runs: 1"),
    ]


def test_sums_of_one_task_are_those_of_its_locks(summed):
    for number in (1, 2):
        hold(30, 29.9, task="t", name=f"t({number})")
    assert [lane for lane, _when, _text in sums(task="t")] == ["t(1)", "t(2)"]
    assert [lane for lane, _when, _text in sums(name="t(1)")] == []
    hold(30, 29.9, task="t", name="t(1)")
    assert [lane for lane, _when, _text in sums(name="t(1)")] == ["t(1)"]


def test_parts_of_a_bar_stand_on_each_other_and_the_highest_bar_fills_its_lane(summed):
    for _ in range(3):
        hold(30, 29.5)
    hold(29.9, 29.25, result="raised")
    hold(20, 19)
    high, low = drawn(name="nightly").lanes["nightly"]
    assert high["parts"] == [("returned", 25, 75), ("raised", 0, 25)]
    assert low["parts"] == [("returned", 75, 25)]
    assert (high["x"], high["width"]) == (50, pytest.approx(1.5))


def test_only_the_locks_of_a_task_that_are_drawn_are_summed_up(summed, monkeypatch):
    inside.bound(monkeypatch, "lanes of the timeline", 3)
    inside.bound(monkeypatch, "marks of the timeline", 9)
    asked, sums = [], charts.sums
    monkeypatch.setattr(charts, "sums", lambda rows, *of: asked.append(rows) or sums(rows, *of))
    trouble(49, name="trouble", task="t")
    for number in range(10):
        hold(40 - number, 40 - number, name=f"old-{number}", task="t")
    drawing = drawn(task="t")
    assert {row.name for row in asked[0]} == {"trouble", "old-9", "old-8"}
    assert [*drawing.lanes] == ["old-8", "old-9", "trouble"]
    assert drawing.lanes_left_out == 8


def test_sums_end_with_their_window(summed):
    hold(30, 5)
    hold(30.5, 30.25)
    window = windows.Window(ago(60), ago(29.75))
    lane = charts.draw(TaskLockEvent.objects.all(), window, now=NOW, name="nightly")["lanes"][
        "nightly"
    ]
    assert [bar["rank"][-1] for bar in lane] == [ago(30), ago(29.75)]


def test_task_that_only_had_duplicates_has_no_lane(summed):
    for _ in range(2):
        event(30, kind="duplicate", task="t", name="t(1)")
    assert drawn().lanes == {}


def test_sum_leads_to_its_events(summed):
    for _ in range(2):
        hold(30, 29.9, task="t", name="t(1)")
    [bar] = drawn().lanes["t"]
    assert bar["query"].startswith("task=t&from=2026-01-02T11%3A30%3A00%2B00%3A00&to=")
    [bar] = drawn(task="t").lanes["t(1)"]
    assert bar["query"].startswith("q=t%281%29&from=")


def test_trouble_and_open_holds_are_drawn_one_by_one_together_with_sums(summed):
    hold(56, name="open")
    for outcome in ("lost", "lost", "expired"):
        trouble(55, outcome, name="trouble")
    hold(2, 1, name="quiet")
    lanes = drawn(name="open").lanes | drawn(name="trouble").lanes
    shapes = {
        label: sorted(mark["shape"] for mark in lane if "event" in mark)
        for label, lane in lanes.items()
    }
    assert shapes == {"open": ["bar"], "trouble": ["sign"] * 3}
    [lane] = drawn().lanes.values()  # none of them has a task
    assert [mark["shape"] for mark in lane if "event" in mark].count("sign") == 3
    assert "held" in {mark["state"] for mark in lane if "event" in mark}


def test_drawing_says_how_far_back_its_sums_go(summed, monkeypatch):
    inside.bound(monkeypatch, "rows of a sum", 3)
    for minute in (50, 40, 30, 20, 15):
        hold(minute, minute - 1)
    drawing = drawn()
    assert len(sums()) == 3
    assert (drawing.summed, drawing.read_back_to, drawing.unread) == ("1m", "11:30:00", "50.00%")


@pytest.mark.parametrize("only", [{"name": "old"}, {"task": "t"}])
def test_open_hold_of_one_lock_is_drawn_however_many_others_are_open(monkeypatch, only):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    hold(500, name="old", task="t", key="z")
    for number in range(5):
        hold(400, name=f"open {number}", key=f"a{number}")
    for minutes in (3, 2, 1):
        hold(minutes, minutes, name="old", task="t", key="z")
    assert "held" in {mark["state"] for mark in drawn(**only).marks}


@pytest.mark.parametrize("only", [{"name": "old"}, {"task": "t"}])
def test_trouble_of_one_lock_is_drawn_however_much_others_have(monkeypatch, only):
    inside.bound(monkeypatch, "marks of the timeline", 2)
    inside.bound(monkeypatch, "troubles of the timeline", 2)
    for minutes in (40, 39, 38):
        trouble(minutes, name="old", task="t")
    for minutes in (30, 29, 28):
        trouble(minutes, name="other")
    for minutes in (3, 2, 1):
        hold(minutes, minutes, name="old", task="t")
    assert [mark["state"] for mark in drawn(**only).marks].count("lost") == 2


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
            "cleared, by ada, task x, web-1:40",
        ),
        (
            {"outcome": "expired", "noticed_at": ago(29), "reason": "gone"},
            "expired, gone, task x, web-1:40",
        ),
        (
            {"outcome": "dead", "noticed_at": ago(29), "actor": "web-1:9"},
            "dead, noticed by web-1:9, task x, web-1:40",
        ),
        ({"outcome": "cleared", "noticed_at": ago(29), "pid": 0}, "cleared, task x"),
    ],
)
def test_text_of_a_mark(facts, text):
    event(30, **{"kind": "run", "task_id": "x", "host": "web-1", "pid": 40, **facts})
    assert [mark["text"] for mark in drawn().marks][-1] == text


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
    assert [mark["when"] for mark in drawn("24h").marks] == [
        "2026-01-02 07:00:00 – 2026-01-02 07:10:00"
    ]
