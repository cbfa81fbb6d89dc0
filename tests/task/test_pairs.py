"""The table of pairs of options in the reference is what the three places say of each pair."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from celery import Celery

from django_singletask import LockConflict, SingletonTask
from django_singletask.testing import hold
from tests import inside
from tests.limits import OPTIONS, report

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/options.rst").read_text()
TEXT = PAGE.partition("Options that cannot be used together\n---")[2].partition("\n---")[0]
VALUES = {name: limit.usual for name, limit in OPTIONS.items()}
DEFAULTS = {name: values[0] for name, values in VALUES.items()}
APP = Celery("paired", set_as_current=False, broker="memory://")


def buy(a: int) -> str:
    return "ran"


class Row(NamedTuple):
    one: list[tuple[str, Any]]
    other: list[tuple[str, Any]]
    error: str | None

    @property
    def names(self) -> set[str]:
        return {self.one[0][0], self.other[0][0]}

    def is_about(self, options: dict[str, Any]) -> bool:
        return all(
            any(options[name] == value for name, value in side) for side in (self.one, self.other)
        )


def read_side(cell: str) -> list[tuple[str, Any]]:
    """Read ``name=value`` or further values of the same name."""
    name, side = "", []
    for literal in re.findall(r"``(.+?)``", cell):
        named = re.fullmatch(r"(\w+)=(.+)", literal)
        name, value = named.groups() if named else (name, literal)
        side.append((name, eval(value, {"report": report})))
    return side


def read_table() -> list[Row]:
    rows = []
    for text in TEXT.split("\n   * - ")[2:]:
        one, other, own, travelling, _because = re.split(r"\n     - ", text, maxsplit=4)
        verdict = re.fullmatch(r"Error, ``(\w+)``|no effect", own)
        assert verdict, own
        [error] = verdict.groups()
        assert travelling == (f"``{error}``" if error else "no effect")
        rows.append(Row(read_side(one), read_side(other), error))
    return rows


TABLE = read_table()


def test_every_value_of_the_table_is_tried():
    sides = [side for row in TABLE for side in (*row.one, *row.other)]
    assert [(name, value) for name, value in sides if value not in VALUES[name]] == []


@pytest.fixture
def define(monkeypatch):
    """Make a task with options in its decorator; what is sent goes nowhere."""
    monkeypatch.setattr(APP, "send_task", lambda *args, **options: None)

    def define_task(**options: Any) -> SingletonTask:
        APP.tasks.pop("shop.buy", None)
        facts = {"base": SingletonTask, "name": "shop.buy", "lazy": False, "shared": False}
        return APP.task(buy, **facts, **options)

    return define_task


@pytest.mark.parametrize("names", [*itertools.combinations(VALUES, 2)], ids=" and ".join)
def test_a_pair_is_what_the_table_says(define, names):
    for values in itertools.product(*map(VALUES.get, names)):
        given = dict(zip(names, values, strict=True))
        rows = [row for row in TABLE if row.is_about({**DEFAULTS, **given})]
        problems = inside.problems_of("of shop.buy", **{**DEFAULTS, **given})
        errors = [type(error).__name__ for error in problems]
        assert errors == [row.error or "UserWarning" for row in rows], given

        wrong = [(row, said(each)) for row, each in zip(rows, problems, strict=True) if row.error]
        texts = [text for _row, text in wrong]
        task = define(**given)
        for use in (task, task.delay):
            assert raised(use, 1) == texts[:1], given
        if not wrong:
            run_and_meet_a_conflict(task)

        of_call = [text for row, text in wrong if row.names & given.keys()]
        expected = [text.replace("of shop.buy", "in lock_options of shop.buy") for text in of_call]
        travelling = {name: value for name, value in given.items() if not callable(value)}
        send = define().apply_async
        assert raised(send, (1,), lock_options=travelling) == expected[:1], given


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def raised(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Call a function with all locks free."""
    try:
        with hold("another lock"):
            function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return [said(error)]
    return []


def run_and_meet_a_conflict(task: SingletonTask) -> None:
    """Run a call with a free lock, and one that finds it held: it works or is a conflict."""
    with hold("another lock"):
        assert task.apply((1,)).get() == "ran"
    with hold(task, 1), suppress(LockConflict):
        assert task.apply((1,)).get() in (None, "busy", "reported")


def test_skip_result_has_an_effect_beside_what_returns_it_too():
    for option in ({"on_outage": "skip"}, {"on_duplicate": "replace", "unique_until": "start"}):
        for unused in ({"on_conflict": "raise"}, {"on_skip": report}):
            options = {**DEFAULTS, "skip_result": "busy", **option, **unused}
            assert inside.problems_of("of shop.buy", **options) == []
