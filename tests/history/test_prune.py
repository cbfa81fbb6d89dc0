from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_singletask.history.sweep import prune
from django_singletask.models import TaskLockEvent
from tests.inside import starving
from tests.past_rows import ran, row, skipped

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("empty_history", "whole_second"),
]


def test_what_went_on_until_later_is_no_older():
    ran(600, 7000)
    skipped(7000, 700, 5)
    row("run", 7200, outcome="cleared")
    assert sum(prune(older_than=3600)) == 1
    assert TaskLockEvent.objects.count() == 2


@pytest.mark.parametrize("limit", range(1, 8))
def test_prune_that_stops_halfway_lets_nothing_starve(limit):
    """Calls that met a completed run would, without it, have come to nothing."""
    ran(90_000, 1000, name="other")
    ran(700, 20_000, token="a")
    skipped(20_600, 720, 9, blocked_by="a", reason="skip")
    skipped(20_000, 800, 9, blocked_by="a", reason="requeue")
    assert starving(3600) == []
    assert sum(prune(older_than=600, limit=limit)) == min(limit, 4)
    assert starving(3600) == []


def test_statements_of_prune_do_not_grow():
    for _ in range(20):
        ran(31 * 86_400)
    with CaptureQueriesContext(connection) as queries:
        assert sum(prune(batch=2, older_than=86_400)) == 20
    lengths = [len(query["sql"]) for query in queries if query["sql"].startswith("SELECT")]
    for alike in (lengths[1::2], lengths[2::2]):  # for conflicts, and for old rows
        assert max(alike) - min(alike) < 10
