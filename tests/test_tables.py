from __future__ import annotations

import re
import time

import pytest

from django_singletask.management.output import columns, printable
from tests.command_line import hold, locks
from tests.past_rows import ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second", "eighty_columns"),
]


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("abc", None, "abc"),
        ("abc", 3, "abc"),
        ("abcdefgh", 5, "ab…gh"),
        ("abcdefgh", 6, "ab…fgh"),
        ("字字字字", 5, "字…字"),
        ("a\x1bb", None, "a\\x1bb"),
        ("", 5, ""),
        ("abc", 1, "…"),
    ],
)
def test_long_text_is_cut_in_the_middle(text, width, expected):
    assert printable(text, width) == expected


@pytest.mark.parametrize("char", ["x", "ж", "字", "e\u0301", "\x1b", "\u202e"])
def test_list_fits_eighty_columns(char):
    hold(name=char * 255, host=char * 255, token="1")
    hold(name="nightly", token="2", since=1)
    lines = locks().splitlines()
    assert len(lines) == 3
    assert 79 <= max(map(columns, lines)) <= 80


@pytest.mark.parametrize("char", ["x", "字", "\x1b"])
def test_history_fits_eighty_columns(char):
    row("run", 1, outcome="cleared", key="singletask:x", name=char * 200, actor=char * 200)
    ran(60, name="nightly")
    skipped(1, reason="superseded", count=1234, host="web-1", pid=40)
    assert 78 <= max(map(columns, locks("history").splitlines())) <= 80


def test_long_actor_and_reason_leave_room_for_names_and_processes():
    ran(60, name="feeds.import_feed('https://example.org')", host="web-3", pid=8121)
    row("run", 1, outcome="cleared", actor="ada" * 50, reason="it hangs " * 28)
    lines = locks("history").splitlines()
    assert re.fullmatch(r"    \((it hangs )+.*….* hangs \)", lines[2])
    assert re.search(r"  …import_feed\(…://example.org'\)  returned .*  web-3:8121$", lines[3])
    assert max(map(columns, lines)) == 80


def test_wide_terminal_shows_more(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    hold(name="x" * 120)
    assert "x" * 120 in locks()


def test_columns_are_aligned_in_any_script():
    hold(name="字字", token="1")
    hold(name="e\u0301", token="2")
    hold(name="long enough", token="3")
    ends = {columns(line[: line.index("web-3")]) for line in locks().splitlines()[1:]}
    assert len(ends) == 1


def test_function_and_end_of_a_long_name_are_shown():
    hold(name=f"feeds.tasks.import_feed(feed_url='https://example.org/{'x' * 90}/7.xml')")
    assert re.search(r"^…import_feed\(…x+/7\.xml'\)  ", locks(), re.MULTILINE)


def test_modules_of_a_long_name_are_cut_first():
    hold(name="a.package.of.a.project.tasks.import_feed(number=7)")
    line = locks().splitlines()[1]
    assert line.startswith("…f.a.project.tasks.import_feed(number=7)  ")
    assert len(line) == 80


@pytest.mark.parametrize("place", ["name", "host"])
@pytest.mark.parametrize("evil", ["\x1b[2J", "\r", "\n", "\x9b31m", "\u202e"], ids=ascii)
def test_control_characters_are_escaped(place, evil):
    hold(**{place: f"a{evil}b"})
    escaped = evil.encode("unicode_escape").decode()
    assert f"a{escaped}b" in locks().splitlines()[1]


def test_note_that_does_not_fit_is_on_the_next_line():
    for _ in range(5):
        ran(60, 5, task="t")
    hold(task="t", name="x" * 200, host="h" * 200, since=time.time() - 500)
    [_head, line, note] = locks().splitlines()
    assert re.search(r"^x+…x+ .*  hhh.*…h+:8121$", line)
    assert len(line) <= 80
    assert note == "    (slow: usual 5s)"


def test_note_does_not_shorten_the_name():
    """Two names that differ in the middle would look alike."""
    hold(task="t", name=f"imports.feed('{'x' * 20}', 1)", since=time.time() - 500)
    before = locks().splitlines()[1]
    for _ in range(5):
        ran(60, 5, task="t")
    line, *note = locks().splitlines()[1:]
    assert line == before
    assert note == ["    (slow: usual 5s)"]
