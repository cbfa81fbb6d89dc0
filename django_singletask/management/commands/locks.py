"""``manage.py locks``: what an operator asks about the locks, and what an operator can do."""

from __future__ import annotations

import argparse
import getpass
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NoReturn, TypeAlias

from django.core.management.base import BaseCommand, CommandError, CommandParser, no_translations
from django.utils import timezone

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.history.queries import ONLY_TROUBLE, NoHistory, reading
from django_singletask.history.sweep import prune
from django_singletask.holder import clean
from django_singletask.log import logger
from django_singletask.management import output
from django_singletask.models import TaskLockEvent
from django_singletask.operators import held, words
from django_singletask.operators.explain import Fact, facts, why
from django_singletask.operators.held import EXPLAINED, HOLDING, HeldLock, cannot_ask
from django_singletask.operators.names import Selector, SeveralMeant, UnknownName
from django_singletask.operators.probe import probe
from django_singletask.operators.recorded import SCANNED, find
from django_singletask.operators.starving import HOUR, Starving, starving
from django_singletask.operators.words import WORDS, duration, few, parse_duration, plural
from django_singletask.stores import get_store
from django_singletask.stores.keys import PREFIX
from django_singletask.stores.locmem import LocMemStore

__all__ = ["Command"]

ACTIONS = {
    "list": "List the locks that are held now, the worst first. This is the default action.",
    "why": "Explain why one lock is held, or that it is free; or sum up a task.",
    "clear": "Free locks. Their tasks keep running.",
    "history": "List what happened, the latest first.",
    "metrics": "Count the locks in each state, in the text format of Prometheus.",
    "probe": "Test whether the cache can hold locks, and count what its restart would lose.",
    "prune": "Delete old history, in small batches.",
}
NAMELESS = {"metrics", "probe", "prune"}
"""Actions that take no names."""
WITHOUT_CACHE = {"history", "prune"}
"""Actions that work while the cache is away."""
LOCKS = (
    "what the list shows of a lock: its name, or the last part of it, its task, the task id, the "
    "host or process (web-3:8121); or its key or token; * stands for any text"
)
IN_USE = HOLDING - {"kept"}
"""States in which a lock can be held for too long."""
FREE = ("lock", "free", "Freed")
FORGET = ("queued call", "forget", "Forgot")
"""What is cleared, and the words for that."""
CLOCK = re.compile("[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?")
Options: TypeAlias = Any
"""A parser, or a group of its options: ``argparse`` has no public type for both."""
UNKNOWN = 3
"""Exit code if nothing can be said; Django itself uses 1, for broken settings."""


def moment(text: str) -> datetime:
    """Read a time, in the time zone of the project, or how long ago it is."""
    with suppress(ValueError, OverflowError):
        if CLOCK.fullmatch(text):
            return last_time(text)
        return words.to_moment(text)
    with suppress(argparse.ArgumentTypeError):
        return timezone.now() - timedelta(seconds=parse_duration(text))
    message = f"{text!r} is neither a time such as '2026-11-21 14:05' nor a duration such as 2h."
    raise argparse.ArgumentTypeError(message)


def last_time(clock: str) -> datetime:
    """Return the last moment at which a clock showed this time of the day."""
    now = timezone.now()
    today = words.to_local(now).date()
    at = words.to_moment(f"{today} {clock}")
    if at > now:
        yesterday = today - timedelta(days=1)
        at = words.to_moment(f"{yesterday} {clock}")
    return at


def count(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number.")
    return int(text)


def usage_exit(status: int = 0, message: str | None = None) -> NoReturn:
    """End as ``argparse`` does, but with ``UNKNOWN`` for wrong options: 2 is for alarms."""
    if message:
        sys.stderr.write(message)
    if status:
        status = UNKNOWN
    sys.exit(status)


def add_list_options(parser: Options) -> None:
    parser.add_argument(
        "--starving",
        action="store_true",
        help="list the locks whose calls come to nothing: no run has completed for an hour",
    )
    parser.add_argument(
        "--fail-if-held-over",
        type=parse_duration,
        metavar="1h",
        help="exit with 2 if a lock is held for longer than this",
    )
    parser.add_argument(
        "--fail-if-starving",
        type=parse_duration,
        metavar="1h",
        help="exit with 2 if a lock has starved for this long: see --starving",
    )


def add_clear_options(parser: Options) -> None:
    parser.add_argument(
        "--dead",
        action="store_true",
        help="free the locks of processes that are proven dead",
    )
    parser.add_argument("--all", action="store_true", help="free every lock")
    parser.add_argument(
        "--queued",
        action="store_true",
        help="forget queued calls instead of freeing locks, so that equal calls can be sent",
    )
    parser.add_argument(
        "--reason",
        default="",
        help="why, for the history, which keeps 255 characters",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--dry-run", action="store_true", help="only show what would be freed")


def add_history_options(parser: Options) -> None:
    parser.add_argument(
        "--what",
        choices=WORDS,
        help="only runs and calls of which the list says this",
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="2h",
        help="only what went on after this time ('2026-11-21 14:05', 14:05), or this long ago",
    )
    parser.add_argument(
        "--until",
        type=moment,
        help="only what went on before this time",
    )
    parser.add_argument(
        "--limit",
        type=count,
        default=50,
        help="print at most this many rows (50)",
    )


def add_prune_options(parser: Options) -> None:
    parser.add_argument(
        "--older-than",
        type=parse_duration,
        metavar="7d",
        help="delete rows that are older than this (default: SINGLETASK_HISTORY_DAYS)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only count the rows")


ADD_OPTIONS = {
    "list": add_list_options,
    "clear": add_clear_options,
    "history": add_history_options,
    "prune": add_prune_options,
}
"""What adds the options of an action; the other actions have none."""


def options_of(action: str) -> set[str]:
    """Return the options of an action, as the keywords that ``call_command`` takes."""
    parser = argparse.ArgumentParser()
    if action in ADD_OPTIONS:
        ADD_OPTIONS[action](parser)
    return {*vars(parser.parse_args([]))}


class Alarm(CommandError):
    """What a monitor must know."""


class Command(BaseCommand):
    """List the locks that are held now, explain one, clear some; read and prune their history."""

    help = "List the locks that are held now, explain one, clear some; read their history."
    requires_system_checks = []
    # ``call_command`` checks the keywords against these: it does not know the action.
    stealth_options = tuple(set[str]().union(*map(options_of, ACTIONS)))
    typed_action: str = ""

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

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return a parser that first reads the action, then the options of this action only."""
        create = partial(super().create_parser, prog_name, subcommand, **kwargs)
        self.typed_action = ""  # the object may be used again

        def parse_args(args: list[str], namespace: None = None) -> argparse.Namespace:
            # The action decides what "--help" prints, so this parser only looks for the action.
            finder = create(add_help=False)
            finder.add_argument("-h", "--help", action="store_true")
            found, _rest = finder.parse_known_intermixed_args(args)
            words = [*args]
            if found.names and found.names[0] in ACTIONS:
                self.typed_action = found.names[0]
                at = words.index(self.typed_action)
                # The finder has no options of actions. Behind such an option, the word could be the
                # value of the option.
                _found, unknown = finder.parse_known_intermixed_args(words[:at])
                if unknown:
                    finder.error(f"write {self.typed_action!r} before {' '.join(unknown)}")
                del words[at]
            # This parser has the options of the action: see add_arguments().
            return create().parse_intermixed_args(words)

        parser = create()
        parser.parse_args = parse_args  # type: ignore[method-assign, assignment]
        return parser

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options of the action that was typed; without one, those of the list."""
        parser.allow_abbrev = False  # "clear --al" must not mean --all
        parser.exit = usage_exit  # type: ignore[method-assign]
        names = parser.add_argument("names", nargs="*", metavar="LOCK", help=LOCKS)
        parser.add_argument("--json", action="store_true", help="print JSON")
        action = self.typed_action
        if action:
            parser.description = ACTIONS[action]
            parser.usage = f"%(prog)s {action} [LOCK ...] [options]"
            if action in NAMELESS:
                names.help = argparse.SUPPRESS
                parser.usage = f"%(prog)s {action} [options]"
            if action in ADD_OPTIONS:
                ADD_OPTIONS[action](parser)
            return
        parser.usage = "%(prog)s [ACTION] [LOCK ...] [options]"
        parser.epilog = "'locks ACTION --help' names the options of an action."
        for each, what in ACTIONS.items():
            group = parser.add_argument_group(each, what)
            if each == "list":
                add_list_options(group)

    @no_translations  # only the words that the admin has, too, are translated
    def handle(self, *args: Any, **options: Any) -> None:
        self.prints_json: bool = options["json"]
        action = self.typed_action
        if not action:
            action = "list"
        try:
            check_options(action, options)
            check_words(action, options["names"])
            if action not in WITHOUT_CACHE:
                check_cache(action)
            getattr(self, action)(options)
        except UnknownName as error:
            text = str(error)
            if not self.typed_action:
                text += f" The actions are {', '.join(ACTIONS)}."
            raise wrong(text) from error
        except (*EXPLAINED, LockUnavailable, RuntimeError) as error:
            raise wrong(clean(cannot_ask(error))) from error
        except KeyboardInterrupt as error:
            text = "Interrupted. What is done is done: run the command again to continue."
            raise CommandError(text) from error

    def list(self, options: dict[str, Any]) -> None:
        """Print the locks that are held now; raise :class:`Alarm` if a limit is reached."""
        selectors = [*map(Selector, options["names"])]
        locks = held.list_held(selectors)
        held.must_be_known(selectors, locks)
        hungry = starving_locks(options, selectors)
        held.add_conflicts(held.add_states(locks, hungry))
        what = "lock"
        if selectors:
            what = "matching lock"
        known = {"states": held.count_states(locks), "starving": hungry, "locks": locks}
        if options["json"] or options["starving"]:  # the JSON has both tables
            self.show(known, output.starving_table(hungry), f"No {what} starves.")
        else:
            if locks:
                self.stdout.write(held.summary(locks))
            self.show(known, output.lock_table(locks), f"No {what} is held.")
            if hungry:
                verb = "starve"
                if len(hungry) == 1:
                    verb = "starves"
                number = plural(len(hungry), "lock")
                self.stdout.write(f"{number} {verb}: manage.py locks --starving names them.")
        alarms = [*held_alarms(locks, options), *starving_alarms(selectors, options)]
        if alarms:
            raise Alarm(" ".join(alarms), returncode=2)

    def why(self, options: dict[str, Any]) -> None:
        known = why(options["names"][0])
        self.show(vars(known), output.fact_lines(known.name, known.state, facts(known)))

    def clear(self, options: dict[str, Any]) -> None:
        """Show the locks that were asked for, ask, and free them."""
        check_choice(options)
        chosen, nothing = choose(options)
        if not chosen:  # no lock was named, so finding none is not an error
            self.show({"locks": []}, (), nothing)
            return
        if not options["json"]:  # the JSON is printed once, with what was freed
            self.show({}, output.lock_table(chosen))
        noun, verb, done = FREE
        if options["queued"]:
            noun, verb, done = FORGET
        if options["dry_run"]:
            what = plural(len(chosen), noun)
            self.show_freed(chosen, (), f"Would {verb} {what}.")
            return
        if not options["yes"]:
            confirm(chosen, options)
        if not logger.hasHandlers():
            logger.setLevel("ERROR")  # the table and the result say what the warnings do
        freed, refused = held.clear_all(chosen, actor=actor(), reason=options["reason"])
        what = plural(len(freed), noun)
        self.show_freed(chosen, freed, f"{done} {what}.")
        if refused:
            raise not_freed(refused)

    def show_freed(
        self, chosen: Sequence[HeldLock], freed: Sequence[HeldLock], result: str
    ) -> None:
        keys = {lock.key for lock in freed}
        rows = [{**output.as_json(lock), "freed": lock.key in keys} for lock in chosen]
        self.show({"locks": rows}, (), result)

    def history(self, options: dict[str, Any]) -> None:
        since = options["since"]
        until = options["until"]
        if since and until and since >= until:
            raise wrong("--until must be later than --since.")
        selectors = [*map(Selector, options["names"])]
        limit = options["limit"]
        rows, complete = find(
            selectors, limit=limit, what=options["what"], since=since, until=until
        )
        held.must_be_known(selectors)
        if len(rows) == limit:
            if not self.prints_json:
                self.stderr.write(f"No more than {plural(limit, 'row')}: see --limit.")
        elif not complete:
            self.stderr.write(f"Only the newest {SCANNED} rows were searched.")
        if conf.history == "off":
            self.stderr.write(
                "SINGLETASK_HISTORY = 'off': nothing is recorded, and all rows are old."
            )
        elif conf.history_keeps == "trouble":
            self.stderr.write(ONLY_TROUBLE)
        self.show({"rows": rows}, output.history_table(rows), "The history has no matching row.")

    def metrics(self, options: dict[str, Any]) -> None:
        """Print how many locks are in each state, and how many starve, if the history says so."""
        hungry = None
        with suppress(NoHistory):
            hungry = starving()
        states = held.count_states(held.add_states(held.list_held(), hungry))
        self.show({"states": states, "starving": hungry}, output.gauges(states, hungry))

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
        seconds = options["older_than"]
        if seconds is None:
            seconds = conf.history_days * 86_400
        dry_run = options["dry_run"]
        with reading(even_if_off=True):
            if dry_run:
                done = "Would delete"
                number = TaskLockEvent.objects.primary().older_than(seconds).count()
            else:
                done = "Deleted"
                number = sum(prune(older_than=seconds))
        facts = {"deleted": number, "older_than": seconds, "dry_run": dry_run}
        rows = plural(number, "row")
        self.show(facts, (), f"{done} {rows} older than {duration(seconds)}.")

    def show(self, known: dict[str, Any], lines: Iterable[str], none: str = "") -> None:
        """Print JSON, or else the lines, the first one in colour; without lines print ``none``."""
        if self.prints_json:
            self.stdout.write(output.to_json(known))
            return
        printed = [*lines]
        if printed:
            printed[0] = self.style.MIGRATE_HEADING(printed[0])
        else:
            printed = [none]
        self.stdout.write("\n".join(printed))


def wrong(text: str) -> CommandError:
    """Return the error for a command that cannot answer."""
    return CommandError(text, returncode=UNKNOWN)


def check_options(action: str, options: dict[str, Any]) -> None:
    """Refuse keywords for another action."""
    foreign = options.keys() & {*Command.stealth_options} - options_of(action)
    if foreign:
        raise wrong(f"{action!r} has no option {min(foreign)!r}.")


def check_words(action: str, names: Sequence[str]) -> None:
    """Refuse words that do not fit the action, and words that cannot be a name.

    An empty word comes from an unset variable of the shell. What UTF-8 cannot encode comes from
    bytes that are no text.
    """
    for name in names:
        as_text = name.encode(errors="replace").decode()
        if not name or "\0" in name or name != as_text:
            raise wrong(f"'{clean(name)}' is not a name.")
    if action in NAMELESS and names:
        raise wrong(f"{action!r} takes no name.")
    if action == "why" and len(names) != 1:
        raise wrong("'why' explains one lock or one task: name one.")


def check_cache(action: str) -> None:
    """Refuse a cache that is away, cannot hold locks, or hides those of other processes."""
    try:
        store = get_store(conf.cache)
        store.read(PREFIX)
    except Exception as error:  # a cache that is set up wrongly has errors of its own
        raise wrong(clean(cannot_ask(error))) from error
    if type(store) is LocMemStore and action != "probe":
        raise wrong(
            f"SINGLETASK_CACHE = {conf.cache!r} is in local memory: this command cannot see the "
            "locks of other processes."
        )


def starving_locks(options: dict[str, Any], selectors: Sequence[Selector]) -> list[Starving]:
    """Return the locks that starve; an error of the history matters only if they are asked for."""
    try:
        return starving(HOUR, selectors)
    except NoHistory:
        if options["starving"] or options["fail_if_starving"]:
            raise
        return []


def held_alarms(locks: Sequence[HeldLock], options: dict[str, Any]) -> Iterator[str]:
    limit = options["fail_if_held_over"]
    if limit is None:
        return
    late = [lock for lock in locks if lock.state in IN_USE and lock.held_for > limit]
    if late:
        names = [f"{lock.name} ({duration(lock.held_for)})" for lock in late]
        yield f"Held for more than {duration(limit)}: {few(names)}."


def starving_alarms(selectors: Sequence[Selector], options: dict[str, Any]) -> Iterator[str]:
    limit = options["fail_if_starving"]
    if limit is None:
        return
    names = []
    for each in starving(limit, selectors):
        met = plural(each.conflicts, "conflict")
        span = duration(each.unmet)
        names.append(f"{each.name} ({met} in {span})")
    if names:
        yield f"Starving for {duration(limit)} or more: {few(names)}."


def check_choice(options: dict[str, Any]) -> None:
    """Refuse to clear what nobody named, and to ask where nobody can answer."""
    if options["json"] and not (options["yes"] or options["dry_run"]):
        raise wrong("With --json the command cannot ask you: add --yes or --dry-run.")
    if not (options["names"] or options["dead"] or options["queued"] or options["all"]):
        raise wrong(
            "Say what to clear: a lock, a task, an id, a host or a process, or --dead, --queued or "
            "--all. 'manage.py locks' lists what is held."
        )


def choose(options: dict[str, Any]) -> tuple[list[HeldLock], str]:
    """Return the locks to clear, and the text for the case that there are none.

    Raise an error if one was named that is not there.
    """
    selectors = [*map(Selector, options["names"])]
    locks = held.list_held(selectors)
    held.must_be_known(selectors, locks)
    chosen = []
    for lock in locks:
        if lock.queued != options["queued"] or lock.state == "expired":
            continue
        if lock.state == "dead" or not options["dead"]:
            chosen.append(lock)
    missing = []
    for selector in selectors:
        refuse_two_meanings(selector, chosen)
        if not (selector.is_pattern or any(map(selector.selects, chosen))):
            missing.append(selector.text)
    if options["queued"] and (missing or not chosen):
        # The history does not know the queued calls: a cache that cannot list them raises an error.
        next(get_store(conf.cache).entries(), None)
    nothing = not_there(missing, {lock.state for lock in locks}, options)
    if missing:
        raise CommandError(clean(nothing))
    return held.add_conflicts(held.add_states(chosen)), nothing


def refuse_two_meanings(selector: Selector, locks: Sequence[HeldLock]) -> None:
    """Raise an error if a text is the name of a host, and of a lock or a task of another host.

    To free all that the host has would be too much, if only the task was meant.
    """
    by_host = [lock for lock in locks if lock.host == selector.text]
    by_name = [lock.name for lock in locks if selector.fits(lock.name, lock.task)]
    if by_host and by_name:
        raise SeveralMeant(selector.text, [f"the host {selector.text}", *by_name])


def confirm(locks: Sequence[HeldLock], options: dict[str, Any]) -> None:
    """Ask; anything but yes ends the command."""
    if options["queued"]:
        question = (
            f"Forget {plural(len(locks), 'queued call')}? If the broker still has the message, the "
            "call runs, and an identical call can run at the same time."
        )
    else:
        question = f"Free {plural(len(locks), 'lock')}?"
        if not options["dead"]:
            question += " What runs keeps running, and a second copy can start meanwhile."
    answer = ""
    try:
        answer = input(f"{question} [y/N] ")
    except (EOFError, KeyboardInterrupt):
        print(flush=True)  # nobody has ended the line of the question
    if answer.strip().lower() not in {"y", "yes"}:
        raise CommandError("Nothing was freed. To skip the question, add --yes.")


def not_freed(refused: dict[str, list[HeldLock]]) -> CommandError:
    """Return the error for locks that are still there, with the reason of each."""
    problems = []
    for reason, locks in refused.items():
        names = ", ".join(lock.name for lock in locks)
        problems.append(f"Not freed: {names}. {clean(reason)}")
    status = UNKNOWN
    if refused.keys() == {held.GONE}:
        status = 1
    return CommandError(" ".join(problems), returncode=status)


def actor() -> str:
    """Name the user who runs the command."""
    user = "unknown user"
    # A container may run under a user that has no name.
    with suppress(ImportError, KeyError, OSError):
        user = getpass.getuser()
    return f"{user} on {socket.gethostname()} (manage.py locks)"


def not_there(missing: list[str], states: set[str], options: dict[str, Any]) -> str:
    """Say that what was asked for is not there, and why, where that is known."""
    what = "lock is held"
    if options["queued"]:
        what = "call is queued"
    elif options["dead"]:
        what = "lock is held by a dead process"
    text = f"No {what}."
    if options["names"]:
        text = f"No matching {what}."
    if missing:
        text = f"No matching {what}: {', '.join(missing)}."
    if "expired" in states:
        text += " An expired lock is not held: there is nothing to free."
    if "queued" in states and not (options["queued"] or options["dead"]):
        text += " A call is queued: add --queued to forget it."
    return text
