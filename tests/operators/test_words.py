from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import UTC, datetime

import pytest
from django.utils.timezone import override

from django_singletask.models import TaskLockEvent
from django_singletask.operators import words


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604_800), ("1h30m", 5400), ("0h5m", 300)],
)
def test_duration_is_read(text, seconds):
    assert words.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "s", "-5s", "1.5h", " 5s", "5 s", "5S", "30m1h", "1h1h", "1w", "٣s"),
        *("9" * 60 + "s", "5s\n", "0s", "0h0m", "40000d"),
    ],
)
def test_refused_duration_says_how_to_write_one(text):
    message = r"is not a duration: write it as 90s, 15m, 2h or 7d, up to 36500d\."
    with pytest.raises(ArgumentTypeError, match=message):
        words.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m"),
        (134, "2m 14s"),
        (3600, "1h"),
        (3720, "1h 02m"),
        (86_399, "23h 59m"),
        (86_400, "1d"),
        (90_000, "1d 01h"),
        (100 * 86_400, "100d"),
    ],
)
def test_duration_is_written_in_its_two_largest_units(seconds, text):
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.00s"), (0.123, "0.12s"), (9.99, "9.99s"), (10, "10s")]
)
def test_short_holds_have_hundredths(seconds, text):
    assert words.hold_time(seconds) == text


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "04:04:05"),
        (datetime(2026, 1, 2, 3, 4, 5), "03:04:05"),
        (1767323045.9, "04:04:05"),
    ],
)
def test_time_is_written_in_the_time_zone_of_the_user(at, text):
    with override("Europe/Berlin"):
        assert words.clock_time(at) == text
        assert words.clock_time(at, dated=True) == f"2026-01-02 {text}"


@pytest.mark.parametrize(
    ("zone", "text"),
    [("Europe/Berlin", "04:04:05 CET"), ("UTC", "03:04:05 UTC"), ("Asia/Dubai", "07:04:05 +04")],
)
def test_time_can_carry_its_zone(zone, text):
    with override(zone):
        assert words.clock_time(1767323045.9, zone=True) == text


@pytest.mark.parametrize(
    ("host", "pid", "text"), [("web-1", 7, "web-1:7"), ("web-1", 0, ""), ("", 7, "")]
)
def test_process_is_named_if_it_is_known(host, pid, text):
    assert words.process(TaskLockEvent(host=host, pid=pid)) == text


def test_plural():
    assert [words.plural(count, "lock") for count in (0, 1, 2)] == ["0 locks", "1 lock", "2 locks"]
