"""How many functions of the package a lock calls. Each layer more costs every run some time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import django_singletask
from django_singletask import TaskLock

PACKAGE = str(Path(django_singletask.__file__).parent)
CYCLE, CONFLICT = 73, 58
"""At most so many calls. A layer around each request, or around each attempt, is one too many."""


@pytest.fixture(autouse=True)
def no_history(settings: Any, on_redis: None) -> None:
    settings.SINGLETASK_HISTORY = "off"


def calls(work: Callable[[], object], *, again: bool = True) -> int:
    """Return how many functions of the package are called; by default, the second time."""
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    if again:
        work()  # it connects, loads the scripts and starts the thread of renewals
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def take_and_give_back() -> None:
    with TaskLock("nightly"):
        pass


def meet_holder() -> None:
    assert not TaskLock("nightly").acquire()


def test_to_take_and_give_back_calls_few_functions() -> None:
    assert calls(take_and_give_back) <= CYCLE


def test_a_conflict_calls_few_functions() -> None:
    with TaskLock("nightly"):
        assert calls(meet_holder) <= CONFLICT


def test_control_a_record_that_is_read_for_the_first_time_is_noticed() -> None:
    with TaskLock("nightly"):
        meet_holder()
    with TaskLock("nightly"):
        assert calls(meet_holder, again=False) > CONFLICT
