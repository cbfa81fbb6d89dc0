"""Shapes of workflows, and the result of each when no member meets another's lock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from celery import chain, chord, group

from tests.testapp.workflow_tasks import add, total

Keys = Callable[[], str]


class Shape(NamedTuple):
    make: Callable[[Any, Any, Keys], Any]  # from a task, the body of chords and the members' keys
    gives: Any
    one_by_one: bool  # its members run one after the other


SHAPES = {
    "chain": Shape(lambda a, t, k: chain(a.s(0, k()), a.s(k()), a.s(k())), 3, True),
    "immutable chain": Shape(lambda a, t, k: chain(a.si(0, k()), a.si(0, k())), 1, True),
    "group": Shape(
        lambda a, t, k: group(a.s(0, k()), a.s(10, k()), a.s(20, k())), [1, 11, 21], False
    ),
    "chord": Shape(lambda a, t, k: chord([a.s(0, k()), a.s(10, k())], t.s(k())), 12, False),
    "chord of one": Shape(lambda a, t, k: chord([a.s(0, k())], t.s(k())), 1, True),
    "starmap": Shape(lambda a, t, k: a.starmap([(0, k()), (1, k()), (2, k())]), [1, 2, 3], True),
    "chunks": Shape(
        lambda a, t, k: a.chunks([(n, k()) for n in range(4)], 2), [[1, 2], [3, 4]], False
    ),
    "chord in a chain": Shape(
        lambda a, t, k: chain(a.s(0, k()), group(a.s(k()), a.s(k())), t.s(k()), a.s(k())), 5, False
    ),
    "group in a chain": Shape(
        lambda a, t, k: chain(a.s(0, k()), group(a.s(k()), a.s(k()))), [2, 2], False
    ),
    "chain of chords": Shape(
        lambda a, t, k: chain(
            *(group(a.si(0, k()), a.si(10, k())), t.s(k())),
            *(group(a.s(k()), a.s(k())), t.s(k())),
        ),
        26,
        False,
    ),
    "group of chains": Shape(
        lambda a, t, k: group(a.s(0, k()) | a.s(k()), a.s(10, k()) | a.s(k())), [2, 12], False
    ),
    "chord of chains": Shape(
        lambda a, t, k: chord([a.s(0, k()) | a.s(k()), a.s(10, k()) | a.s(k())], t.s(k())),
        14,
        False,
    ),
    "group of chords": Shape(
        lambda a, t, k: group(
            chord([a.s(0, k()), a.s(10, k())], t.s(k())),
            chord([a.s(20, k()), a.s(30, k())], t.s(k())),
        ),
        [12, 52],
        False,
    ),
    "chord of chords": Shape(
        lambda a, t, k: chord(
            [chord([a.s(0, k()), a.s(10, k())], t.s(k())), chord([a.s(20, k())], t.s(k()))],
            t.s(k()),
        ),
        33,
        False,
    ),
    "group of groups": Shape(
        lambda a, t, k: group(group(a.s(0, k()), a.s(10, k())), group(a.s(20, k()))),
        [1, 11, 21],
        False,
    ),
}


def make(shape: str, flavour: str, keys: Keys) -> Any:
    """Return a canvas of this shape whose members all have one flavour."""
    return SHAPES[shape].make(add[flavour], total[flavour], keys)


def distinct(new: Keys, first: str | None = None) -> Keys:
    """Return keys for the members: a new key for each, except ``first`` for the first if given."""
    numbers = itertools.count()
    return lambda: first if next(numbers) == 0 and first else new()


def equal(key: str) -> Keys:
    return lambda: key
