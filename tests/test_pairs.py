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
from django_singletask.task.options import NAMES, LockOptions
from django_singletask.testing import hold

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/reference/options.rst").read_text()
TEXT = PAGE.partition("Options that cannot be used together\n---")[2].partition("\n---")[0]


def report(*args: Any, **kwargs: Any) -> str:
    return "reported"


def buy(a: int) -> str:
    return "ran"


VALUES: dict[str, list[Any]] = {
    "lock_timeout": [None, 30],
    "lock_renew": [True, False],
    "lock_on": [None, [], ["a"]],
    "lock_name": [None, "x:{a}"],
    "on_conflict": ["skip", "raise", "wait", "requeue", "rerun"],
    "lock_wait": [None, 0, 0.5],
    "lock_at_least": [0, 5],
    "lock_slots": [1, 2],
    "on_skip": [None, report],
    "on_outage": ["raise", "run", "skip"],
    "skip_result": [None, "busy"],
    "unique_until": [None, "start", "finish", "expiry"],
    "unique_for": [3600, 60],
    "on_duplicate": ["return", "raise", "replace"],
    "lock_history": [True, False],
}
"""The values of each option that are tried, its default first."""


class Row(NamedTuple):
    one: list[tuple[str, Any]]
    other: list[tuple[str, Any]]
    error: str | None
    in_each_run: bool
    """Whether the class can be created, and only the check and each run refuse the pair."""

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
        verdict = re.fullmatch(r"(Error, )?``(\w+)``|no effect", own)
        assert verdict, own
        in_each_run, error = verdict.groups()
        assert travelling == (f"``{error}``" if error else "no effect")
        rows.append(Row(read_side(one), read_side(other), error, bool(in_each_run)))
    return rows


TABLE = read_table()


def test_every_value_of_the_table_is_tried():
    sides = [side for row in TABLE for side in (*row.one, *row.other)]
    assert [(name, value) for name, value in sides if value not in VALUES[name]] == []


def test_every_option_is_tried():
    assert VALUES.keys() == NAMES
    assert {name: values[0] for name, values in VALUES.items()} == {
        name: getattr(LockOptions, name) for name in NAMES
    }


@pytest.fixture
def define(monkeypatch):
    """Make a task with options in its decorator; what is sent goes nowhere."""
    app = Celery("paired", set_as_current=False, broker="memory://")
    monkeypatch.setattr(app, "send_task", lambda *args, **options: None)

    def define_task(**options: Any) -> SingletonTask:
        app.tasks.pop("shop.buy", None)
        return app.task(
            buy, base=SingletonTask, name="shop.buy", lazy=False, shared=False, **options
        )

    return define_task


@pytest.mark.parametrize("names", [*itertools.combinations(VALUES, 2)], ids=" and ".join)
def test_a_pair_is_what_the_table_says(define, names):
    for values in itertools.product(*map(VALUES.get, names)):
        given = dict(zip(names, values, strict=True))
        options = {**{name: values[0] for name, values in VALUES.items()}, **given}
        expected = [row for row in TABLE if row.is_about(options)]
        problems = list(LockOptions(**options).problems("of shop.buy"))
        errors = [type(error).__name__ for _, error in problems]
        assert errors == [row.error or "UserWarning" for row in expected], given
        early = [row.error for row in expected if row.error and not row.in_each_run]
        assert raised(define, **given) == early[:1], given
        if not early:
            in_run = [row.error for row in expected if row.error]
            with hold("another lock"):
                assert raised(define(**given).apply_async, (1,)) == [], given
                assert raised(define(**given), 1) == in_run[:1], given
        late = [row.error for row in expected if row.error and names_of(row) & set(given)]
        with hold("another lock"):
            send = define().apply_async
            assert raised(send, (1,), lock_options=travelling(given)) == late[:1], given
        if not any(row.error for row in expected):
            run_and_meet_a_conflict(define(**given))


def names_of(row: Row) -> set[str]:
    return {row.one[0][0], row.other[0][0]}


def travelling(given: dict[str, Any]) -> dict[str, Any]:
    """Leave out a function, which a message cannot carry."""
    return {name: value for name, value in given.items() if not callable(value)}


def raised(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    try:
        function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return [type(error).__name__]
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
            options = LockOptions(skip_result="busy", **option, **unused)
            assert list(options.problems("of shop.buy")) == []
