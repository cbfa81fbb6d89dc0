"""Pairs of lock options that cannot be combined; the reference has the same table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A problem of ``options``.

    ``check`` is the id of the system check. A call with these options raises ``error``; if it is
    None, the check only warns. ``early``: the class body raises the error, too.
    """

    options: tuple[str, ...]
    text: str
    hint: str
    check: str
    error: type[Exception] | None = None
    early: bool = False


class Pair(NamedTuple):
    """Two options that cannot be combined, or of which ``one`` has no effect with ``other``.

    Each is the name of an option and the values in question; without values, all except its
    default. With any of ``unless``, ``one`` has an effect.
    """

    one: tuple[Any, ...]
    other: tuple[Any, ...]
    error: type[Exception] | None = None
    early: bool = False
    text: str = "{one} {where} has no effect with {other}."
    hint: str = "Change {1}, or remove {0}."
    unless: tuple[tuple[Any, ...], ...] = ()


def _has(options: Any, name: str, *values: Any) -> bool:
    value, default = getattr(options, name), options._field_defaults[name]
    return value in values if values else bool(value != default)


def _clash(one: tuple[Any, ...], other: tuple[Any, ...]) -> Pair:
    text = "{one} and {other} {where} cannot be combined."
    return Pair(one, other, TypeError, early=True, text=text, hint="Change one of them.")


def shown(value: Any) -> str:
    """Return the value of an option as text; of a function the name, without its address."""
    return str(getattr(value, "__qualname__", None) or repr(value))


NEVER_SKIP = ("raise", "wait", "requeue")
RETURN_SKIP_RESULT = (("on_outage", "skip"), ("on_duplicate", "replace"))

PAIRS = (
    _clash(("lock_on",), ("lock_name",)),
    _clash(("lock_slots",), ("unique_until", "finish", "expiry")),
    _clash(("on_duplicate", "replace"), ("unique_until", "expiry")),
    Pair(
        ("lock_renew", False),
        ("lock_timeout", None),
        TypeError,
        text="lock_renew=False {where} needs lock_timeout, a lease that is longer than any run.",
        hint="Set lock_timeout to more seconds than the task can run, or remove lock_renew=False.",
    ),
    Pair(
        ("on_conflict", "wait"),
        ("lock_wait", None, 0),
        ValueError,
        text='on_conflict="wait" {where} needs lock_wait, the longest wait in seconds.',
        hint='Set lock_wait to seconds or math.inf, or on_conflict to "raise".',
    ),
    Pair(("lock_wait",), ("on_conflict", "skip", "raise", "rerun")),
    Pair(("unique_for",), ("unique_until", None)),
    Pair(("on_duplicate",), ("unique_until", None)),
    Pair(("on_skip",), ("on_conflict", *NEVER_SKIP, "rerun")),
    Pair(("skip_result",), ("on_conflict", *NEVER_SKIP), unless=RETURN_SKIP_RESULT),
    Pair(("skip_result",), ("on_skip",), unless=RETURN_SKIP_RESULT),
)


def wrong_pairs(options: Any, where: str, wrong: set[str]) -> Iterator[Problem]:
    """Yield the problems of pairs, unless one of the two options is ``wrong`` by itself."""
    for one, other, error, early, text, hint, unless in PAIRS:
        names = one[0], other[0]
        if not (_has(options, *one) and _has(options, *other)) or wrong.intersection(names):
            continue
        if not any(_has(options, *side) for side in unless):
            first, second = (f"{name}={shown(getattr(options, name))}" for name in names)
            text = text.format(one=first, other=second, where=where)
            yield Problem(names, text, hint.format(*names), "E011", error, early)
