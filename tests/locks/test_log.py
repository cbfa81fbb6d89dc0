"""Lines of the log: no text of a user steers a terminal, or looks like another line."""

from __future__ import annotations

import logging
from typing import Any
from unicodedata import category

import pytest
from celery import Celery
from celery.exceptions import Reject

from django_singletask import SingletonTask, TaskLock
from tests.deliveries import held_by, receive
from tests.testapp import tasks

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis"),
]

HARMFUL = "a\u2028b\u2029c\u202ed\u2066e\u00adf"
SHOWN = "a\\u2028b\\u2029c\\u202ed\\u2066e\\xadf"


@pytest.fixture
def log(caplog: Any) -> Any:
    """Return the lines of the log as one text, which must be harmless."""
    caplog.set_level(logging.INFO, "django_singletask")

    def text() -> str:
        lines = [record.getMessage() for record in caplog.records]
        assert {category(char) for line in lines for char in line}.isdisjoint(
            {"Cc", "Cf", "Zl", "Zp"}
        )
        return "\n".join(lines)

    return text


@pytest.mark.parametrize("cleared_by", ["ada", HARMFUL], ids=ascii)
def test_name_of_a_lock_and_who_clears_it_are_escaped(log: Any, cleared_by: str) -> None:
    lock = TaskLock(HARMFUL)
    assert lock.acquire()
    assert not TaskLock(HARMFUL, on_conflict="skip").acquire()
    assert lock.clear(actor=cleared_by)
    lock.release()
    assert f"{SHOWN} (singletask:" in log()
    assert f"was cleared by {cleared_by.replace(HARMFUL, SHOWN)}" in log()


def test_name_that_is_made_of_arguments_is_escaped(log: Any) -> None:
    @Celery("log", set_as_current=False).task(base=SingletonTask, lock_name="of {a}")
    def task(a: str) -> None:
        raise AssertionError("it runs beside the holder")

    with TaskLock(f"of {HARMFUL}"):
        task(HARMFUL)
    assert f"of {SHOWN} (singletask:" in log()


def test_id_of_a_task_is_escaped(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("the broker is away")

    monkeypatch.setattr(tasks.hold.app, "send_task", fail)
    with held_by(HARMFUL), pytest.raises(Reject):
        receive(tasks.hold, "a", task_id=HARMFUL)
    assert f"Task {SHOWN} could not be postponed." in log()


def test_control_usual_line_stays_as_it_is(caplog: Any) -> None:
    """Spaces and letters of other languages are no harm, and the arguments of the line stay."""
    name = "\u65e5\u672c\u3000\u8a9e \u043a\u043b\u044e\u0447 caf\u00e9\u00a0!"
    caplog.set_level(logging.INFO, "django_singletask")
    with TaskLock(name), TaskLock(name, on_conflict="skip") as second:
        assert not second
    assert name in caplog.text
    assert caplog.records[-1].args
