from __future__ import annotations

import re

import pytest

from django_singletask.management import output
from tests import inside
from tests.command_line import hold, locks
from tests.entries import key_of
from tests.past_rows import ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second", "eighty_columns"),
]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 3, "abc"), ("abcdefgh", 5, "ab…gh"), ("abcdefgh", 6, "ab…fgh"), ("", 5, "")],
)
def test_long_text_is_cut_in_the_middle(text, width, expected):
    assert output.cut(text, width) == expected


def test_a_difference_near_the_beginning_is_not_shown_twice():
    shown = output.cut("…call_partner_retry(customer_id='c2')", 27, differs_at=13)
    assert shown == "…call_partner_retry(custom…"


@pytest.mark.parametrize("char", ["x", "ж", "\x1b", "\u202e"])
def test_list_fits_eighty_columns(char):
    hold(name=char * 255, host=char * 255, token="1")
    hold(name="nightly", token="2", since=1)
    lines = locks().splitlines()
    assert len(lines) == 4
    assert 79 <= max(map(len, lines)) <= 80


def names_of(output):
    """Return the column of names."""
    lines = output.splitlines()[2:]
    return [re.split(r"  +", line)[1] for line in lines]


@pytest.fixture
def alike():
    """Hold eight locks whose names differ in the middle."""
    for number in range(8):
        name = f"shop.tasks.cooldown_many(customer_id={number}, currency='EUR', seconds=0.1)"
        hold(name=name, token=str(number))


def test_names_that_are_cut_differ(alike):
    hold(name="shop.tasks.bill()", host="web-production-7d5f9c-x2v9k", token="long host")
    names = names_of(locks())
    assert len({*names}) == 9
    for number in range(8):
        assert any(f"={number}" in name for name in names)


def test_name_that_is_cut_selects_its_lock(alike):
    for name in names_of(locks()):
        assert len(names_of(locks(name))) == 1


def test_locks_that_starve_fit_eighty_columns():
    skipped(8000, 60, name="x" * 255)
    head, line = locks("--starving").splitlines()
    assert "  COMPLETED" in head
    assert len(line) <= 80


def test_modules_are_cut_first_and_then_the_lease():
    call = "import_feed(number=1, kind='daily')"
    hold(name=f"a.package.of.tasks.{call}", token="1")
    head, line = locks().splitlines()[1:]
    assert f"  …{call}" in line
    assert "LEASE" not in head
    hold(name="a.package.of.tasks.sync()", token="2")
    assert "  …sync()" in locks()


def test_modules_that_differ_stay():
    hold(name=f"a.package.of.a.project.one.sync({'x' * 40})", token="1")
    hold(name=f"a.package.of.a.project.two.sync({'x' * 40})", token="2")
    one, two = sorted(names_of(locks()))
    assert ".one." in one
    assert ".two." in two


def test_column_stays_that_has_room():
    hold(name="shop.tasks.sync()")
    head, line = locks().splitlines()[1:]
    assert " LEASE " in head
    assert " shop.tasks.sync() " in line


def test_state_is_never_cut():
    key = inside.queued_key(key_of("nightly"), "t")
    hold(name="x" * 200, host="h" * 200, slots=1000)
    hold(name="y" * 200, key=key, pid=0, task_id="z" * 200, token="2")
    states = {line.partition("  ")[0] for line in locks().splitlines()[2:]}
    assert states == {"held (1 of 1000)", "queued"}


@pytest.mark.parametrize("char", ["x", "\x1b"])
def test_history_fits_eighty_columns(char):
    row("run", 1, outcome="cleared", key="singletask:x", name=char * 200, actor=char * 200)
    ran(60, name="nightly")
    skipped(1, reason="superseded", count=1234, host="web-1", pid=40)
    assert 78 <= max(map(len, locks("history").splitlines())) <= 80


def test_long_actor_and_reason_leave_room_for_names_and_processes():
    ran(60, name="feeds.import_feed('https://example.org')", host="web-3", pid=8121)
    row("run", 1, outcome="cleared", actor="ada" * 50, reason="it hangs " * 28)
    [_head, cleared, returned] = locks("history").splitlines()
    assert re.search(r"  cleared .*  ada.*…$", cleared)
    assert re.search(r"  …\S+xample.org'\)  returned  web-3:8121$", returned)
    assert len(cleared) <= 80


def test_without_a_terminal_nothing_is_cut(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "80")
    hold(name="x" * 200, host="h" * 200)
    assert re.search(r"^held   x{200}  .*  h{200}:8121$", locks(), re.MULTILINE)


def test_function_and_end_of_a_long_name_are_shown():
    hold(name=f"feeds.tasks.import_feed(feed_url='https://example.org/{'x' * 90}/7.xml')")
    assert re.search(r"^held   …import_feed\S*…x+/7\.xml'\)  ", locks(), re.MULTILINE)


@pytest.mark.parametrize("place", ["name", "host"])
@pytest.mark.parametrize(
    "evil", ["\x00", "\ud800", "\x1b[2J", "\r", "\n", "\x9b31m", "\u202e"], ids=ascii
)
def test_control_characters_are_escaped(place, evil):
    hold(**{place: f"a{evil}b"})
    escaped = evil.encode("unicode_escape").decode()
    assert f"a{escaped}b" in locks().splitlines()[2]
