from __future__ import annotations

import pytest

from django_singletask.operators.words import compact, duration, in_words, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604_800), ("1h30m", 5400), ("0h5m", 300)],
)
def test_duration_is_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "5", "s", "-5s", "1.5h", " 5s", "5 s", "5S", "30m1h", "1h1h", "1w", "٣s"),
        *("9" * 60 + "s", "5s\n"),
    ],
)
def test_refused_duration_says_how_to_write_one(text):
    with pytest.raises(ValueError, match=r"is no duration: write it as 90s, 15m, 2h or 7d\."):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0s", "0h0m", "40000d"])
def test_duration_out_of_range_says_what_it_must_be(text):
    with pytest.raises(
        ValueError, match=rf"^'{text}': a duration must be positive, 36500d at most"
    ):
        parse_duration(text)


@pytest.mark.parametrize("text", ["90s", "15m", "2h", "7d", "1h30m", "3d4h5m6s"])
def test_compact_duration_can_be_read_again(text):
    assert parse_duration(compact(parse_duration(text))) == parse_duration(text)


def test_compact_writes_zero():
    assert compact(0.2) == "0s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.9, "0s"),
        (59.9, "59s"),
        (60, "1m 00s"),
        (134, "2m 14s"),
        (3600, "1h 00m"),
        (3720, "1h 02m"),
        (86_399, "23h 59m"),
        (86_400, "1d 00h"),
        (100 * 86_400, "100d 00h"),
    ],
)
def test_duration_is_written_in_its_two_largest_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.001, "less than 0.01 s"),
        (0.04, "0.04 s"),
        (4.2, "4 s"),
        (60, "60 s"),
        (60.4, "60 s"),
        (60.5, "1m 00s"),
        (108, "1m 48s"),
        (134, "2m 14s"),
    ],
)
def test_duration_of_a_sentence(seconds, text):
    assert in_words(seconds) == text
