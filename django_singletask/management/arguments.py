"""The actions of ``manage.py locks`` and their options."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandParser

from django_singletask.management.tables import printable
from django_singletask.models import HoldOutcome, Kind
from django_singletask.operators.words import parse_duration

__all__ = ["add_actions"]


def add_actions(actions: Any) -> None:
    """Add the actions and their options."""
    add: Callable[..., CommandParser] = actions.add_parser
    listing = add("list", help="list the locks that are held now (the default)")
    explaining = add("why", help="say why a lock is held, or is not")
    clearing = add(
        "clear",
        help="free locks; the runs that hold them go on",
        description="Free locks. The runs that hold them go on, and others can start beside "
        "them. Each lock is freed only if the holder that was shown still has it.",
    )
    history = add("history", help="list what happened to the locks, the latest first")
    probing = add(
        "probe", help="let processes race for locks in this cache, and look at its server"
    )
    pruning = add("prune", help="delete old history, in small batches")

    name = "name or key of a lock, or a call: feeds.tasks.import_feed(7)"
    for action in (listing, clearing):
        action.add_argument("names", nargs="*", metavar="LOCK", help=name)
    history.add_argument("names", nargs="*", metavar="LOCK", help=f"{name}; or a task id")
    explaining.add_argument("name", metavar="LOCK", help=name)

    listing.add_argument("--task", help="list the locks of this task")
    over, hungry = "--fail-if-held-over", "--fail-if-starving"
    listing.add_argument(
        over, type=span, metavar="1h", help="exit with 1 if a lock is held for longer"
    )
    listing.add_argument(
        hungry,
        type=span_or_times,
        metavar="1h|50x",
        help="exit with 1 if for so long, or so many times in a row, a lock's calls were skipped "
        "and none was completed, and the calls go on",
    )

    clearing.add_argument("--token", help="free the lock of this holder only")
    clearing.add_argument("--task", help="free the locks of this task")
    clearing.add_argument(
        "--dead", action="store_true", help="free the locks of processes that are proven dead"
    )
    clearing.add_argument("--all", action="store_true", help="free every lock")
    clearing.add_argument(
        "--queued",
        action="store_true",
        help="instead of locks, forget queued calls, so that equal ones can be sent again",
    )
    clearing.add_argument("--yes", action="store_true", help="do not ask")
    clearing.add_argument("--dry-run", action="store_true", help="show what would be freed")

    history.add_argument("--task", help="only what happened to locks of this task")
    history.add_argument("--kind", choices=Kind.values, help="only what is of this kind")
    history.add_argument("--outcome", choices=HoldOutcome.values, help="only holds that ended so")
    history.add_argument("--since", type=span, metavar="2h", help="only what is no older")
    history.add_argument(
        "--limit", type=count, default=50, metavar="50", help="at most so many rows (50)"
    )

    probing.add_argument(
        "--processes", type=racers, default=8, metavar="8", help="processes that race (8)"
    )
    probing.add_argument(
        "--keys", type=count, default=200, metavar="200", help="keys that they race for (200)"
    )

    pruning.add_argument(
        "--older-than", type=span, metavar="7d", help="instead of SINGLETASK_HISTORY_DAYS"
    )
    pruning.add_argument("--limit", type=count, metavar="N", help="delete at most so many rows")
    pruning.add_argument("--dry-run", action="store_true", help="count what would be deleted")


def span(text: str) -> float:
    """Read a duration; argparse shows the message."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(printable(str(error))) from error


def span_or_times(text: str) -> tuple[float, int | None]:
    """Read a duration, or a number of times such as ``50x``."""
    if text.endswith("x") and text[:-1].isdigit():
        return math.inf, count(text[:-1])
    try:
        return span(text), None
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} Or a number of calls: 50x.") from None


def count(text: str) -> int:
    """Read a positive number."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is no positive number.")
    return int(text)


def racers(text: str) -> int:
    """Read how many processes race."""
    if count(text) < 2:
        raise argparse.ArgumentTypeError("one process alone is no race: at least 2.")
    return int(text)
