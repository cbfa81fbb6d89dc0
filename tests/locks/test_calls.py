"""How many functions of the package a lock, a delivery and a send call: no busy machine changes it.

Each layer more costs every run some time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import django
import pytest
import redis
from django.utils.module_loading import import_string

import django_singletask
from django_singletask import TaskLock
from django_singletask.signals import lock_event
from tests import inside
from tests.deliveries import collect_sent, receive
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(databases="__all__")

PACKAGE = str(Path(django_singletask.__file__).parent)
CYCLE, CONFLICT = 37, 28
"""At most so many calls, on Python 3.11; later versions call fewer functions.

A layer around each request, or around each attempt, is one too many.
"""
DELIVERY, SEND, UNIQUE_SEND = 64, 20, 42
ANY_CYCLE, ANY_CONFLICT = 81, 57
"""The same with the functions of Python, Django, Celery and redis-py, in :data:`VERSIONS`.

The client reads and packs with hiredis here; without it, it calls more functions.
"""
VERSIONS = (3, 13), (6, 1), (8, 1)


@pytest.fixture(autouse=True)
def no_history(settings: Any, monkeypatch: pytest.MonkeyPatch, on_redis: None) -> None:
    settings.SINGLETASK_HISTORY = "off"
    monkeypatch.setattr(lock_event, "receivers", [])  # the tests' application has one
    take_and_give_back()
    inside.emptied_long_ago("redis")


def calls(work: Callable[[], object], folder: str) -> int:
    """Return how many functions of the Python files in a folder are called."""
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folder)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def fewest(work: Callable[[], object], folder: str = PACKAGE) -> int:
    """Return the least number in some turns: one connects, starts a thread, or looks at a cache."""
    return min(calls(work, folder) for _ in range(5))


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
        often = fewest(meet_holder)
    with TaskLock("nightly"):
        assert calls(meet_holder, PACKAGE) > often


@pytest.mark.skipif(
    (sys.version_info[:2], django.VERSION[:2], redis.VERSION[:2]) != VERSIONS
    or not redis.connection.HIREDIS_AVAILABLE,
    reason="other versions call other functions, as does redis-py without hiredis",
)
def test_a_lock_calls_few_functions_of_anybody() -> None:
    assert fewest(take_and_give_back, "") <= ANY_CYCLE
    with TaskLock("nightly"):
        assert fewest(meet_holder, "") <= ANY_CONFLICT


def test_a_delivery_calls_few_functions() -> None:
    header = {"name": "n", "key": "singletask:n:1", "token": "t"}
    assert fewest(lambda: receive(tasks.whose, "a", header=header)) <= DELIVERY


def test_a_send_calls_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    collect_sent(tasks.hold.app, monkeypatch)
    assert fewest(lambda: tasks.hold.apply_async(("a",))) <= SEND


def test_a_send_that_stops_duplicates_calls_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = collect_sent(tasks.unique.app, monkeypatch)
    assert fewest(lambda: tasks.unique.apply_async((len(sent),))) <= UNIQUE_SEND


LISTS = Path(__file__).parents[2] / "docs/contributing/how-it-works.rst"
LISTED = re.findall(r"^    (\w+/\w+)\.py +([\w.]+)", LISTS.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("module", "function"), LISTED)
def test_a_function_that_the_docs_list_exists(module: str, function: str) -> None:
    thing, *method = function.split(".")
    found = import_string(f"django_singletask.{module.replace('/', '.')}.{thing}")
    assert not method or hasattr(found, method[0])


def test_the_docs_list_what_a_lock_calls() -> None:
    called = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
    try:
        take_and_give_back()
    finally:
        sys.setprofile(before)
    of_lock = [function.rpartition(".")[2] for _module, function in LISTED[:22]]
    assert of_lock[-1] == "tell"
    of_lock.remove("receive")  # the history is off
    calls_left = iter(called)
    assert [name for name in of_lock if name not in calls_left] == []
