"""Find the names that are like an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from django_singletask.operators.names import tasks

__all__ = ["nearest", "patterns"]

COMPARED = 2000
"""Calls of one task, at most, whose arguments are compared with those of an unknown name."""


def patterns() -> list[str]:
    """Return a call of each task that takes a lock, such as ``feeds.import_feed(feed_id=…)``."""
    calls = []
    for name, task in tasks().items():
        parameters = task.parameters.signature.parameters.values()
        needed = [f"{each.name}=…" for each in parameters if each.default is each.empty]
        calls.append(f"{name}({', '.join(needed)})")
    return calls


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return at most three of the candidates that are like a name, the most alike first.

    The tasks are compared first, in as many parts of their dotted names as ``name`` has, then the
    arguments: ``import_fed`` is like ``feeds.tasks.import_feed(feed_id=7)``.
    """
    typed = name.strip().lower()
    task = typed.partition("(")[0]
    alike: dict[str, list[str]] = {}
    for candidate in dict.fromkeys(candidates):
        parts = candidate.lower().partition("(")[0].split(".")[-task.count(".") - 1 :]
        # Whoever types a part of a name means that name.
        part = task if typed and typed in candidate.lower() else ".".join(parts)
        alike.setdefault(part, []).append(candidate)
    calls = (alike[part][:COMPARED] for part in get_close_matches(task, alike))
    return [each for some in calls for each in get_close_matches(typed, some, cutoff=0)][:3]
