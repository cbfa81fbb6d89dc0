"""The actions of ``manage.py locks`` and their options."""

from __future__ import annotations

import argparse
import math
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_singletask.management.tables import printable
from django_singletask.models import HoldOutcome, Kind, Result
from django_singletask.operators.words import parse_duration
from django_singletask.stores.base import PREFIX

__all__ = ["add_actions", "check_choice"]

NAME = "name or key of a lock, or a call: feeds.tasks.import_feed(7)"


def add_actions(parser: CommandParser) -> None:
    """Add the actions and their options; without an action the locks are listed."""
    actions = parser.add_subparsers(
        dest="action", metavar="list | why | clear | history | probe | prune"
    )
    parser.set_defaults(names=[], task=None, fail_if_held_over=None, fail_if_starving=None)
    _add_list(actions.add_parser("list", help="list the locks that are held now (the default)"))
    why = actions.add_parser("why", help="say why a lock is held, or is not")
    why.add_argument("name", type=no_pattern, metavar="LOCK", help=f"{NAME}; or a task, or its id")
    _add_clear(
        actions.add_parser(
            "clear",
            help="free locks; the runs that hold them go on",
            description="Free locks. The runs that hold them go on, and others can start beside "
            "them. Each lock is freed only if the holder that was shown still has it.",
        )
    )
    _add_history(actions.add_parser("history", help="list what happened, the latest first"))
    actions.add_parser("probe", help="find out whether this cache can hold locks")
    _add_prune(actions.add_parser("prune", help="delete old history, in small batches"))
    for each in (parser, *actions.choices.values()):
        each.allow_abbrev = False  # "clear --al" must not mean --all
        # With a default of its own the action would overrule a --json before it.
        default = False if each is parser else argparse.SUPPRESS
        each.add_argument("--json", action="store_true", default=default, help="print JSON")


def _add_list(action: CommandParser) -> None:
    add = action.add_argument
    add("names", nargs="*", metavar="LOCK", help=NAME)
    add("--task", help="list the locks of this task")
    longer = "exit with 1 if a lock is held for longer"
    add("--fail-if-held-over", type=span, metavar="1h", help=longer)
    hungry = "exit with 1 if for so long, or so many times in a row, a lock's calls were skipped "
    hungry += "and none was completed, and the calls go on"
    add("--fail-if-starving", type=span_or_times, metavar="1h|50x", help=hungry)


def _add_clear(action: CommandParser) -> None:
    add = action.add_argument
    add("names", nargs="*", metavar="LOCK", help=NAME)
    add("--token", help="free the lock of this holder only")
    add("--task", help="free the locks of this task")
    add("--dead", action="store_true", help="free the locks of processes that are proven dead")
    add("--all", action="store_true", help="free every lock")
    queued = "instead of locks, forget queued calls, so that equal ones can be sent again"
    add("--queued", action="store_true", help=queued)
    add("--reason", default="", help="why: the history keeps it")
    add("--yes", action="store_true", help="do not ask")
    add("--dry-run", action="store_true", help="show what would be freed")


def _add_history(action: CommandParser) -> None:
    add = action.add_argument
    add("names", nargs="*", metavar="LOCK", help=f"{NAME}; or a task id")
    add("--task", help="only what happened to locks of this task")
    add("--kind", choices=Kind.values, help="only what is of this kind")
    add("--outcome", choices=[*HoldOutcome.values, *Result.values], help="only holds that ended so")
    add("--since", type=span, metavar="2h", help="only what is no older")
    add("--limit", type=count, default=50, metavar="50", help="at most so many rows (50)")


def _add_prune(action: CommandParser) -> None:
    add = action.add_argument
    add("--older-than", type=span, metavar="7d", help="instead of SINGLETASK_HISTORY_DAYS")
    add("--limit", type=count, metavar="N", help="delete at most so many rows")
    add("--dry-run", action="store_true", help="count what would be deleted")


def check_choice(options: dict[str, Any]) -> None:
    """Raise if the options of ``clear`` do not say what to clear, or contradict each other."""
    narrowed = any(options[option] for option in ("names", "token", "task", "dead"))
    if options["json"] and not (options["yes"] or options["dry_run"]):
        raise CommandError("--json cannot ask: add --yes or --dry-run.", returncode=2)
    if not (narrowed or options["all"] or options["queued"]):
        raise CommandError(
            "Say what to clear: the name or key of a lock, --token, --task, --dead, --queued "
            "or --all. 'manage.py locks' lists what is held.",
            returncode=2,
        )
    if narrowed and options["all"]:
        raise CommandError(
            "--all does not go together with a name, --token, --task or --dead.", returncode=2
        )


def no_pattern(text: str) -> str:
    if "*" in text and not text.startswith(PREFIX):
        pattern = printable(text)
        hint = f"{pattern!r} is a pattern: 'manage.py locks list' takes patterns."
        raise argparse.ArgumentTypeError(hint)
    return text


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
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is no positive number.")
    return int(text)
