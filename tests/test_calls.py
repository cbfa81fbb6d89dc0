"""How many functions of the package a lock, a delivery and a send call: no busy machine changes it.

Each layer more costs every run some time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import django_singletask
from django_singletask import TaskLock
from tests.deliveries import collect_sent, receive
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(databases="__all__")

PACKAGE = str(Path(django_singletask.__file__).parent)
CYCLE, CONFLICT = 65, 51
"""At most so many calls. A layer around each request, or around each attempt, is one too many."""
DELIVERY, SEND, UNIQUE_SEND = 103, 34, 64


@pytest.fixture(autouse=True)
def no_history(settings: Any, on_redis: None) -> None:
    settings.SINGLETASK_HISTORY = "off"


def calls(work: Callable[[], object]) -> int:
    """Return how many functions of the package are called."""
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def fewest(work: Callable[[], object]) -> int:
    """Return the least number in some turns: one connects, starts a thread, or looks at a cache."""
    return min(calls(work) for _ in range(5))


def take_and_give_back() -> None:
    with TaskLock("nightly"):
        pass


def meet_holder() -> None:
    assert not TaskLock("nightly").acquire()


def test_to_take_and_give_back_calls_few_functions() -> None:
    assert fewest(take_and_give_back) <= CYCLE


def test_a_conflict_calls_few_functions() -> None:
    with TaskLock("nightly"):
        assert fewest(meet_holder) <= CONFLICT


def test_control_a_record_that_is_read_for_the_first_time_is_noticed() -> None:
    with TaskLock("nightly"):
        meet_holder()
    with TaskLock("nightly"):
        assert calls(meet_holder) > CONFLICT


def test_a_delivery_calls_few_functions() -> None:
    header = {"name": "n", "key": "singletask:n:1", "token": "t"}
    assert fewest(lambda: receive(tasks.whose, "a", header=header)) <= DELIVERY


def test_a_send_calls_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    collect_sent(tasks.hold.app, monkeypatch)
    assert fewest(lambda: tasks.hold.apply_async(("a",))) <= SEND


def test_a_send_that_stops_duplicates_calls_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = collect_sent(tasks.unique.app, monkeypatch)
    assert fewest(lambda: tasks.unique.apply_async((len(sent),))) <= UNIQUE_SEND
