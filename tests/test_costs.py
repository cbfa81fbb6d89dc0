"""How many functions of this package one call runs: a count that no busy machine changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import django_singletask
from tests.deliveries import collect_sent, receive
from tests.testapp import tasks

pytestmark = pytest.mark.usefixtures("on_redis")

PACKAGE = str(Path(django_singletask.__file__).parent)


def fewest(job):
    """Return the least number of calls in some turns: in one, the cache may be asked for more."""
    return min(count(job) for _ in range(5))


def count(job):
    names = []

    def note(frame, event, _arg):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(None)
    return len(names)


@pytest.mark.django_db(databases="__all__")
class TestCalls:
    @pytest.fixture(autouse=True)
    def without_history(self, settings):
        settings.SINGLETASK_HISTORY = "off"

    def test_of_a_delivery(self):
        header = {"name": "n", "key": "singletask:n:1", "token": "t"}
        assert fewest(lambda: receive(tasks.whose, "a", header=header)) <= 115

    def test_of_a_send(self, monkeypatch):
        collect_sent(tasks.hold.app, monkeypatch)
        assert fewest(lambda: tasks.hold.apply_async(("a",))) <= 38

    def test_of_a_send_that_stops_duplicates(self, monkeypatch):
        sent = collect_sent(tasks.unique.app, monkeypatch)
        assert fewest(lambda: tasks.unique.apply_async((len(sent),))) <= 74
