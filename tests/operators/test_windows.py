"""Time windows as the address of a page names them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.utils.timezone import override

from django_singletask.operators import windows

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def window(**query):
    """Return the start and the end in UTC, without the date of NOW."""
    found, problem = windows.window_of({name.strip("_"): text for name, text in query.items()}, NOW)
    assert problem == ""
    return f"{found.start.astimezone(UTC):%m-%d %H:%M}", f"{found.end.astimezone(UTC):%m-%d %H:%M}"


@pytest.mark.parametrize(
    ("query", "start", "end"),
    [
        ({"from_": "2026-01-01T03:00", "to": "2026-01-01T04:30"}, "01-01 02:00", "01-01 03:30"),
        ({"from_": "2026-01-01T03:00Z", "to": "2026-01-01 05:00+01"}, "01-01 03:00", "01-01 04:00"),
        ({"from_": "2026-01-02T12:30"}, "01-02 11:30", "01-02 12:00"),
        ({"to": "2026-01-02T12:30"}, "01-02 10:30", "01-02 11:30"),
        ({"range": "15m"}, "01-02 11:45", "01-02 12:00"),
        ({"range": "15m", "to": "2026-01-02T12:30"}, "01-02 10:30", "01-02 11:30"),
    ],
)
def test_window_is_in_the_time_zone_of_the_user(query, start, end):
    with override("Europe/Berlin"):
        assert window(**query) == (start, end)


def test_address_of_a_window_names_the_same_window():
    with override("Europe/Berlin"):
        first, _problem = windows.window_of({"from": "2025-10-26T02:30"}, NOW)
        query = dict(pair.split("=") for pair in first.query().split("&"))
        query = {name: text.replace("%3A", ":").replace("%2B", "+") for name, text in query.items()}
        assert windows.window_of(query, NOW) == (first, "")


def test_window_of_a_project_without_time_zones_is_naive(settings):
    settings.USE_TZ = False
    now = datetime(2026, 1, 2, 12)
    found, problem = windows.window_of({"from": "2026-01-02T03:00"}, now)
    assert (found, problem) == (windows.Window(datetime(2026, 1, 2, 3), now), "")


def test_labels_of_the_day_on_which_the_clock_is_set_are_at_their_places():
    with override("Europe/Berlin"):
        start = datetime(2025, 10, 25, 22, tzinfo=UTC)
        day = windows.Window(start, start + timedelta(hours=25))
        labels = {text: place for place, text in day.labels()}
        assert labels["04:00"] == "20.00%"
        week = windows.Window(start - timedelta(days=3), day.end)
        assert ("96.94%", "Mon 27") not in [*week.labels()]
        assert [text for _place, text in week.labels()][-2:] == ["Sun 26", "Mon 27"]


@pytest.mark.parametrize("year", ["0001", "0020", "9999"])
def test_year_that_is_typed_by_mistake_breaks_no_page(year):
    """Many browsers send what was typed so far."""
    found, problem = windows.window_of(
        {"from": f"{year}-01-01T00:00", "to": "9999-12-31T23:00"}, NOW
    )
    assert [*found.labels()] if found else "must end after it begins" in problem
