"""The actions of ``manage.py locks`` and their options."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_singletask.management.output import printable
from django_singletask.models import RETAKEN, HoldOutcome, Kind, Result
from django_singletask.operators.words import parse_duration

ACTIONS = ("list", "why", "clear", "history", "probe", "prune")
NAME = (
    "a lock (its name or key), a call such as 'feeds.tasks.import_feed(7)', a task (its name, or "
    "the last part of its name), a task id or a token"
)
NAMES = f"{NAME}; * stands for any text"


def add_actions(parser: CommandParser) -> None:
    """Add the actions and their options; without an action the locks are listed."""
    actions = parser.add_subparsers(dest="action", metavar=" | ".join(ACTIONS))
    parser.set_defaults(names=[], fail_if_held_over=None, fail_if_starving=None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.allow_abbrev = False  # "clear --al" must not mean --all
    add = partial(actions.add_parser, allow_abbrev=False)
    _add_list(add("list", help="list the locks that are held now (the default)"))
    add("why", help="explain why a lock is held, or that it is free").add_argument(
        "name", type=no_pattern, metavar="LOCK", help=NAME
    )
    _add_clear(add("clear", help="free locks; their tasks keep running"))
    _add_history(add("history", help="list what happened, the latest first"))
    add("probe", help="test whether the cache of the locks is fit for them")
    _add_prune(add("prune", help="delete old history, in small batches"))
    for action in actions.choices.values():
        _add_shared(action)


def _add_shared(action: argparse.ArgumentParser) -> None:
    """Add the options that can stand before the action too, and those of Django."""
    # With a default the action would overrule the same option before it.
    add = partial(action.add_argument, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print JSON")
    add("-v", "--verbosity", type=int, choices=range(4))
    for option in ("--settings", "--pythonpath"):
        add(option)
    for option in ("--traceback", "--no-color", "--force-color"):
        add(option, action="store_true")


def with_action(arguments: list[str]) -> list[str]:
    """Return the arguments of a command line with the action ``list`` if they name none."""
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_shared(shared)
    try:
        first = shared.parse_known_args(arguments)[1][:1]
    except argparse.ArgumentError:
        return arguments  # the whole parser says what is wrong
    is_complete = {*first} <= {*ACTIONS, "-h", "--help", "--version"}
    return arguments if is_complete else ["list", *arguments]


def _add_names(action: CommandParser) -> None:
    action.add_argument("names", nargs="*", type=named, default=[], metavar="LOCK", help=NAMES)


def _add_list(action: CommandParser) -> None:
    _add_names(action)
    add = action.add_argument
    longer = "exit with 2 if a lock is held for longer than this"
    add("--fail-if-held-over", type=span, metavar="1h", help=longer)
    hungry = "exit with 2 if the calls of a lock have found it held for this long, none completed, "
    hungry += "and calls still come"
    add("--fail-if-starving", type=span, metavar="1h", help=hungry)


def _add_clear(action: CommandParser) -> None:
    _add_names(action)
    add = action.add_argument
    add("--dead", action="store_true", help="free the locks of processes that are proven dead")
    add("--all", action="store_true", help="free every lock")
    queued = "forget queued calls instead of freeing locks, so that identical calls can be sent"
    add("--queued", action="store_true", help=queued)
    add("--reason", type=reason, default="", help="why, for the history (255 characters at most)")
    add("--yes", action="store_true", help="do not ask")
    add("--dry-run", action="store_true", help="show what would be freed")


def _add_history(action: CommandParser) -> None:
    _add_names(action)
    add = action.add_argument
    add("--kind", choices=Kind.values, help="only rows of this kind")
    ends = [*HoldOutcome.values, RETAKEN, *Result.values]
    add("--outcome", choices=ends, help="only runs and calls that ended like this")
    add("--since", type=span, metavar="2h", help="only rows that began at most this long ago")
    add("--limit", type=count, default=50, metavar="50", help="print at most this many rows (50)")


def _add_prune(action: CommandParser) -> None:
    add = action.add_argument
    older = "delete rows that are older than this (default: SINGLETASK_HISTORY_DAYS)"
    add("--older-than", type=span, metavar="7d", help=older)
    add("--dry-run", action="store_true", help="count what would be deleted")


def check_choice(options: dict[str, Any]) -> None:
    """Raise if the options of ``clear`` do not say what to clear, or contradict each other."""
    narrowed = any(options[option] for option in ("names", "dead"))
    problem = ""
    if options["json"] and not (options["yes"] or options["dry_run"]):
        problem = "With --json the command cannot ask you: add --yes or --dry-run."
    elif not (narrowed or options["all"] or options["queued"]):
        problem = "Say what to clear: the name or key of a lock, a task, a task id, a token, "
        problem += "--dead, --queued or --all. 'manage.py locks' lists what is held."
    elif narrowed and options["all"]:
        problem = "--all cannot be combined with a name or --dead."
    if problem:
        raise CommandError(problem, returncode=3)


def named(text: str) -> str:
    """Refuse an empty text, as from an unset variable of the shell, and broken Unicode."""
    if not text or text != text.encode(errors="replace").decode():
        reason = "it has broken Unicode" if text else "it is empty"
        raise argparse.ArgumentTypeError(f"'{printable(text)}' is not a name: {reason}.")
    return text


def no_pattern(text: str) -> str:
    if "*" in named(text):
        raise argparse.ArgumentTypeError(
            f"{printable(text)!r} is a pattern, but 'why' explains one lock or one task: "
            "'manage.py locks list' lists what fits the pattern."
        )
    return text


def reason(text: str) -> str:
    if len(printable(text)) > 255:
        raise argparse.ArgumentTypeError("the history keeps 255 characters at most.")
    return text


def span(text: str) -> float:
    """Read a duration; argparse shows the message."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(printable(str(error))) from error


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"{printable(text)!r} is not a positive number.")
    return int(text)
