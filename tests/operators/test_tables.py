from __future__ import annotations

import re

import pytest

from django_singletask.management import output
from tests.command_line import hold, locks
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


@pytest.mark.parametrize("char", ["x", "ж", "\x1b", "\u202e"])
def test_list_fits_eighty_columns(char):
    hold(name=char * 255, host=char * 255, token="1")
    hold(name="nightly", token="2", since=1)
    lines = locks().splitlines()
    assert len(lines) == 3
    assert 79 <= max(map(len, lines)) <= 80


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
    assert re.search(r"  cleared .* ada.*….*hangs$", cleared)
    assert re.search(r"  …\S+xample.org'\)  returned .*  web-3:8121$", returned)
    assert len(cleared) <= 80


def test_without_a_terminal_nothing_is_cut(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("COLUMNS", "80")
    hold(name="x" * 200, host="h" * 200)
    assert re.search(r"^x{200}  held .*  h{200}:8121$", locks(), re.MULTILINE)


def test_function_and_end_of_a_long_name_are_shown():
    hold(name=f"feeds.tasks.import_feed(feed_url='https://example.org/{'x' * 90}/7.xml')")
    assert re.search(r"^\S+import_fe\S*…x+/7\.xml'\)  ", locks(), re.MULTILINE)


def test_modules_of_a_long_name_are_cut_first():
    hold(name="a.package.of.a.project.tasks.import_feed(number=7)")
    line = locks().splitlines()[1]
    assert re.match(r"…\S*tasks\.import_feed\(number=7\)  held ", line)
    assert len(line) == 80


@pytest.mark.parametrize("place", ["name", "host"])
@pytest.mark.parametrize(
    "evil", ["\x00", "\ud800", "\x1b[2J", "\r", "\n", "\x9b31m", "\u202e"], ids=ascii
)
def test_control_characters_are_escaped(place, evil):
    hold(**{place: f"a{evil}b"})
    escaped = evil.encode("unicode_escape").decode()
    assert f"a{escaped}b" in locks().splitlines()[1]
