"""``manage.py locks``: what an operator asks about the locks, and what an operator can do."""

from __future__ import annotations

import argparse
import getpass
import os
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations
from django.utils import timezone

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import NoHistory, reading
from django_singletask.history.sweep import prune
from django_singletask.holder import clean
from django_singletask.log import logger
from django_singletask.management import output
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held, words
from django_singletask.operators.explain import Fact, facts, why
from django_singletask.operators.held import HOLDING, SAID, cannot_ask
from django_singletask.operators.names import select
from django_singletask.operators.probe import probe
from django_singletask.operators.recorded import SCANNED, find
from django_singletask.operators.starving import HOUR, Starving, starving
from django_singletask.operators.words import WORDS, duration, few, parse_duration, plural
from django_singletask.stores import get_store
from django_singletask.stores.keys import PREFIX
from django_singletask.stores.locmem import LocMemStore

__all__ = ["Command"]

ACTIONS = {
    "list": "List the locks that are held now. This is the default action.",
    "why": "Explain why one lock is held, or that it is free; or sum up a task.",
    "clear": "Free locks. Their tasks keep running.",
    "history": "List what happened, the latest first.",
    "metrics": "Count the locks in each state, in the text format of Prometheus.",
    "probe": "Test whether the cache is fit to hold locks.",
    "prune": "Delete old history, in small batches.",
}
LOCKS = (
    "a lock (its name or key), a call such as 'import_feed(feed_id=7)', a task (its name, or the "
    "last part of it), a task id, a token or a host (not of history); * stands for any text"
)
IN_USE = HOLDING - {"kept"}
"""States in which a lock can be held for too long."""
FREE = ("lock", "free", "Freed")
FORGET = ("queued call", "forget", "Forgot")
"""What is cleared, and the words for that."""
UNKNOWN = 3
"""Exit code if nothing can be said; Django itself uses 1, for broken settings."""


def check_name(text: str) -> str:
    """Refuse an empty text, as from an unset variable of the shell, and broken Unicode."""
    if not text or text != text.encode(errors="replace").decode():
        raise argparse.ArgumentTypeError(f"'{clean(text)}' is not a name.")
    return text


def moment(text: str) -> datetime:
    """Read a time, in the time zone of the project, or how long ago it is."""
    with suppress(ValueError, OverflowError):
        return words.to_moment(text)
    with suppress(argparse.ArgumentTypeError):
        return timezone.now() - timedelta(seconds=parse_duration(text))
    message = f"{text!r} is neither a time such as '2026-11-21 14:05' nor a duration such as 2h."
    raise argparse.ArgumentTypeError(message)


def count(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number.")
    return int(text)


def usage_exit(status: int = 0, message: str | None = None) -> NoReturn:
    if message:
        sys.stderr.write(message)
    if status:
        sys.exit(UNKNOWN)
    sys.exit(0)


class Alarm(CommandError):
    """What a monitor must know."""


class Command(BaseCommand):
    """List the locks that are held now, explain one, clear some; read and prune their history."""

    help = "List the locks that are held now, explain one, clear some; read their history."
    requires_system_checks: list[str] = []

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a separate process, whose output may end early."""
        try:
            try:
                super().run_from_argv(argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            # Python would write what is left in the buffer at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + 13)  # as if by SIGPIPE; 0 would say that nothing is wrong

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options; keep the actions and the default of each."""
        parser.allow_abbrev = False  # "clear --al" must not mean --all
        # Options may stand between the words, and a wrong one is no alarm.
        parser.parse_args = parser.parse_intermixed_args  # type: ignore[method-assign]
        parser.exit = usage_exit  # type: ignore[method-assign]
        parser.add_argument("names", nargs="*", type=check_name, metavar="LOCK", help=LOCKS)
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.usage = "%(prog)s [ACTION] [LOCK ...] [options]"
        groups = {name: parser.add_argument_group(name, what) for name, what in ACTIONS.items()}
        self.options: list[tuple[str, argparse.Action]] = []

        def add(actions: str, option: str, what: str, **facts: Any) -> None:
            if not facts:
                facts = {"action": "store_true"}
            added = groups[actions.split()[0]].add_argument(option, help=what, **facts)
            self.options.append((actions, added))

        longer = "exit with 2 if a lock is held for longer than this"
        hungry = "exit with 2 if a lock has starved for this long: see --starving"
        queued = "forget queued calls instead of freeing locks, so that identical calls can be sent"
        older = "delete rows that are older than this (default: SINGLETASK_HISTORY_DAYS)"
        starve = "list the locks that calls find held, with no run completed, for an hour or more"
        add("list", "--starving", starve)
        add("list", "--fail-if-held-over", longer, type=parse_duration, metavar="1h")
        add("list", "--fail-if-starving", hungry, type=parse_duration, metavar="1h")
        add("clear", "--dead", "free the locks of processes that are proven dead")
        add("clear", "--all", "free every lock")
        add("clear", "--queued", queued)
        add("clear", "--reason", "why, for the history, which keeps 255 characters", default="")
        add("clear", "--yes", "do not ask")
        add("clear or prune", "--dry-run", "only show what would be freed, or be deleted")
        since = "only rows that began after this time, such as '2026-11-21 14:05', or this long ago"
        add("history", "--what", "only runs and calls of which the list says this", choices=WORDS)
        add("history", "--since", since, type=moment, metavar="2h")
        add("history", "--until", "only rows that began before this time", type=moment)
        add("history", "--limit", "print at most this many rows (50)", type=count, default=50)
        add("prune", "--older-than", older, type=parse_duration, metavar="7d")

    @no_translations  # only the words that the admin has, too, are translated
    def handle(self, *args: Any, **options: Any) -> None:
        self.prints_json = options["json"]
        names = options["names"]
        action = "list"
        if names and names[0] in ACTIONS:
            action = names.pop(0)
        try:
            problem = self.problem_of(action, options)
            if problem:
                raise CommandError(problem, returncode=UNKNOWN)
            getattr(self, action)(options)
        except (*SAID, LockUnavailable, RuntimeError) as error:
            raise CommandError(clean(cannot_ask(error)), returncode=UNKNOWN) from error
        except KeyboardInterrupt as error:
            text = "Interrupted. What is done is done: run the command again to continue."
            raise CommandError(text) from error

    def problem_of(self, action: str, options: dict[str, Any]) -> str:
        """Return what does not fit the action, or makes it impossible; empty if all is well."""
        for actions, option in self.options:
            if action not in actions and options[option.dest] != option.default:
                return f"{option.option_strings[0]} is an option of {actions}."
        names = options["names"]
        if action in {"metrics", "probe", "prune"} and names:
            return f"{action!r} takes no name."
        if action == "why" and (len(names) != 1 or "*" in names[0]):
            return (
                "'why' explains one lock or one task. 'manage.py locks' lists what fits a pattern."
            )
        if action == "clear":
            if options["json"] and not (options["yes"] or options["dry_run"]):
                return "With --json the command cannot ask you: add --yes or --dry-run."
            if not (names or options["dead"] or options["queued"] or options["all"]):
                return (
                    "Say what to clear: a lock, a call, a task, an id or a host, or --dead, "
                    "--queued or --all. 'manage.py locks' lists what is held."
                )
        if action in {"history", "prune"}:
            return ""
        try:
            store = get_store(conf.cache)
            store.read(PREFIX)
        except Exception as error:  # a cache that is set up wrongly has errors of its own
            return clean(cannot_ask(error))
        if type(store) is LocMemStore and action != "probe":
            return (
                f"SINGLETASK_CACHE = {conf.cache!r} is in local memory: this command cannot see "
                "the locks of other processes."
            )
        return ""

    def list(self, options: dict[str, Any]) -> None:
        """Print the locks that are held now; raise :class:`Alarm` if a limit is reached."""
        selectors = [*map(select, options["names"])]
        locks = held.add_conflicts(held.add_states(held.list_held(selectors)))
        held.must_be_known(selectors, locks)
        hungry = list[Starving]()
        with nullcontext() if options["starving"] else suppress(NoHistory):
            hungry = starving(HOUR, selectors)
        lines = output.lock_table(locks)
        none = "lock is held"
        if options["starving"]:
            lines = output.starving_table(hungry)
            none = "lock starves"
        if selectors:
            none = f"matching {none}"
        self.show({"starving": hungry, "locks": locks}, lines, f"No {none}.")
        if hungry and not (options["json"] or options["starving"]):
            number = f"{len(hungry)} locks starve"
            if len(hungry) == 1:
                number = "1 lock starves"
            self.stdout.write(f"{number}: manage.py locks --starving names them.")
        alarms = []
        limit = options["fail_if_held_over"]
        if limit:
            late = [lock for lock in locks if lock.state in IN_USE and lock.held_for > limit]
            names = [f"{lock.name} ({duration(lock.held_for)})" for lock in late]
            if names:
                alarms.append(f"Held for more than {duration(limit)}: {few(names)}.")
        limit = options["fail_if_starving"]
        if limit:
            names = []
            for state in starving(limit, selectors):
                met = plural(state.conflicts, "conflict")
                names.append(f"{state.name} ({met} in {duration(state.unmet)})")
            if names:
                alarms.append(f"Starving for {duration(limit)} or more: {few(names)}.")
        if alarms:
            raise Alarm(" ".join(alarms), returncode=2)

    def why(self, options: dict[str, Any]) -> None:
        known = why(options["names"][0])
        self.show(vars(known), output.fact_lines(known.name, known.state, facts(known)))

    def clear(self, options: dict[str, Any]) -> None:
        """Show the locks that were asked for, ask, and free them."""
        queued = options["queued"]
        dead = options["dead"]
        dry_run = options["dry_run"]
        noun, verb, done = FREE
        if queued:
            noun, verb, done = FORGET
        selectors = [*map(select, options["names"])]
        locks = held.list_held(selectors)
        held.must_be_known(selectors, locks)
        chosen = [lock for lock in locks if lock.queued == queued and lock.state != "expired"]
        if dead:
            chosen = [lock for lock in chosen if lock.state == "dead"]
        chosen = held.add_conflicts(held.add_states(chosen))
        missing = [
            each.text
            for each in selectors
            if not (each.is_pattern or any(map(each.selects, chosen)))
        ]
        nothing = _not_there(missing, {lock.state for lock in locks}, queued, dead)
        if queued and (missing or not chosen):  # the history does not say which calls are queued
            next(get_store(conf.cache).entries(), None)
        if missing:
            raise CommandError(clean(nothing))
        if not (chosen and options["json"]):
            self.show({"locks": []}, output.lock_table(chosen), nothing)
        if not chosen:
            return  # nothing was named, so finding nothing is not an error
        number = plural(len(chosen), noun)
        if not (options["yes"] or dry_run):
            confirm(number, queued, dead)
        if not logger.hasHandlers():
            logger.setLevel("ERROR")  # the table and the result say what the warnings do
        to_free = chosen
        if dry_run:
            to_free = []
        freed, refused = held.clear_all(to_free, actor=actor(), reason=options["reason"])
        result = f"{done} {plural(len(freed), noun)}."
        if dry_run:
            result = f"Would {verb} {number}."
        keys = {lock.key for lock in freed}
        rows = [{**output.as_json(lock), "freed": lock.key in keys} for lock in chosen]
        self.show({"locks": rows}, (), result)
        problems = []
        for why_not, kept in refused.items():
            names = ", ".join(lock.name for lock in kept)
            problems.append(f"Not freed: {names}. {clean(why_not)}")
        if problems:
            status = UNKNOWN
            if refused.keys() == {held.GONE}:
                status = 1
            raise CommandError(" ".join(problems), returncode=status)

    def history(self, options: dict[str, Any]) -> None:
        selectors = [*map(select, options["names"])]
        conditions: list[dict[str, Any]] = [{}]
        if selectors:
            conditions = [each for selector in selectors for each in selector.conditions()]
        narrowed = {name: options[name] for name in ("what", "since", "until", "limit")}
        rows, complete = find(conditions, **narrowed)
        held.must_be_known(selectors)
        if not complete and len(rows) < options["limit"]:
            self.stderr.write(f"Only the newest {SCANNED} rows were searched.")
        if conf.history == "off":
            self.stderr.write(
                "SINGLETASK_HISTORY = 'off': nothing is recorded, and all rows are old."
            )
        self.show({"rows": rows}, output.history_table(rows), "The history has no matching row.")

    def metrics(self, options: dict[str, Any]) -> None:
        """Print how many locks are in each state, and how many starve, if the history says so."""
        locks = held.list_held()
        hungry = list[Starving]()
        number = None
        with suppress(NoHistory):
            hungry = starving()
            number = len(hungry)
        counts = held.count_states(held.add_states(locks, hungry))
        states = {state: counts[state] for state in words.STATES}
        self.show({"states": states, "starving": number}, output.gauges(states, number))

    def probe(self, options: dict[str, Any]) -> None:
        """Print whether the cache can hold locks; exit with 1 if it cannot."""
        result = probe(conf.cache)
        found = [Fact(finding.level, finding.text) for finding in result.findings]
        server = f"{result.backend.rpartition('.')[2]}, {result.server}"
        lines = [*output.fact_lines(f"Cache {result.cache!r}", server, found)]
        if result.fit:
            lines.append("Fit to hold locks.")
        self.show(output.as_json(result), lines)
        if not result.fit:
            raise CommandError(f"The cache {conf.cache!r} cannot hold locks: see 'unfit' above.")

    def prune(self, options: dict[str, Any]) -> None:
        """Delete old history, and say how many rows are gone."""
        seconds = options["older_than"] or conf.history_days * 86_400
        dry_run = options["dry_run"]
        with reading(even_if_off=True):
            if dry_run:
                done = "Would delete"
                number = TaskLockEvent.objects.primary().older_than(seconds).count()
            else:
                done = "Deleted"
                number = sum(prune(older_than=seconds))
        facts = {"deleted": number, "older_than": seconds, "dry_run": dry_run}
        self.show(facts, (), f"{done} {plural(number, 'row')} older than {duration(seconds)}.")

    def show(self, known: dict[str, Any], lines: Iterable[str], none: str = "") -> None:
        """Print JSON, or else a table, its head in colour on a terminal; without rows, say so."""
        if self.prints_json:
            self.stdout.write(output.to_json(known))
            return
        printed = [*lines]
        if printed:
            printed[0] = self.style.MIGRATE_HEADING(printed[0])
        else:
            printed = [none]
        self.stdout.write("\n".join(printed))


def confirm(number: str, queued: bool, dead: bool) -> None:
    """Ask; anything but yes ends the command."""
    question = f"Free {number}?"
    if queued:
        question = (
            f"Forget {number}? If the broker still has the message, the call runs, and an "
            "identical call can run at the same time."
        )
    elif not dead:
        question += " What runs keeps running, and a second copy can start meanwhile."
    answer = ""
    with suppress(EOFError, KeyboardInterrupt):
        answer = input(f"{question} [y/N] ")
    if answer.strip().lower() not in {"y", "yes"}:
        raise CommandError("Nothing was freed. To skip the question, add --yes.")


def actor() -> str:
    """Name the user who runs the command."""
    user = "unknown user"
    # A container may run under a user that has no name.
    with suppress(ImportError, KeyError, OSError):
        user = getpass.getuser()
    return f"{user} on {socket.gethostname()} (manage.py locks)"


def _not_there(missing: list[str], states: set[str], queued: bool, dead: bool) -> str:
    """Say that what was asked for is not there, and why, where that is known."""
    what = "lock is held"
    if queued:
        what = "call is queued"
    elif dead:
        what = "lock is held by a dead process"
    text = f"No {what}."
    if missing:
        text = f"No matching {what}: {', '.join(missing)}."
    if "expired" in states:
        text += " An expired lock is not held: there is nothing to free."
    if "queued" in states and not (queued or dead):
        text += " A call is queued: add --queued to forget it."
    return text
