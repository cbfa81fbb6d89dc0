"""``manage.py locks``: what an operator asks about the locks, and what an operator can do."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    no_translations,
)

from django_singletask.checks import check_cache
from django_singletask.conf import conf
from django_singletask.history.queries import reading
from django_singletask.history.sweep import prune
from django_singletask.management import alarms, output
from django_singletask.management.alarms import UNKNOWN
from django_singletask.management.arguments import add_actions, check_choice, with_action
from django_singletask.management.output import explain, printable
from django_singletask.models import Result, TaskLockEvent
from django_singletask.operators import held
from django_singletask.operators.errors import cannot_ask
from django_singletask.operators.explain import why
from django_singletask.operators.names import SCANNED, find, select
from django_singletask.operators.probe import probe
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.words import compact, plural
from django_singletask.stores import get_store

__all__ = ["Command"]

LOCMEM = {"django_singletask.E004", "django_singletask.W001"}
"""Checks that say that each process has locks of its own."""


class Command(BaseCommand):
    """List the locks that are held now, explain one, clear some; read and prune their history."""

    help = "List the locks that are held now, explain one, clear some; read their history."
    requires_system_checks: list[str] = []

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a separate process, whose output may end early."""
        argv = [*argv[:2], *with_action(argv[2:])]
        self._called_from_command_line = True
        try:
            self.create_parser(*argv[:2]).parse_args(argv[2:])
        except SystemExit as end:
            sys.exit(UNKNOWN if end.code == 2 else end.code)
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
        add_actions(parser)

    @no_translations  # only the words that the admin has, too, are translated
    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"] or "list"
        for message in check_cache() if action in {"list", "why", "clear"} else []:
            if message.id in LOCMEM:
                unseen = "This command cannot see the locks of other processes."
                raise CommandError(f"{message.msg} {unseen} {message.hint}", returncode=UNKNOWN)
        getattr(self, action)(options)

    def list(self, options: dict[str, Any]) -> None:
        """Print the locks that are held now; raise :class:`Alarm` if a limit is reached."""
        with asking():
            names = [*map(select, options["names"])]
            locks = held.with_history(held.held(names))
            held.must_be_known(names, locks)
        if options["json"]:
            self.print_lines(output.json_rows("locks", locks))
        elif locks:
            self.print_table(output.lock_table(locks))
        else:
            self.stdout.write("No matching lock is held." if names else "No lock is held.")
        held_over, starving_for = options["fail_if_held_over"], options["fail_if_starving"]
        alarms.watch(locks, names, held_over=held_over, starving_for=starving_for)

    def why(self, options: dict[str, Any]) -> None:
        with asking():
            facts = why(options["name"])
        if options["json"]:
            self.print_json(output.as_json(facts))
        else:
            self.stdout.write("\n".join(explain(facts, options["name"])))

    def clear(self, options: dict[str, Any]) -> None:
        """Show the locks that were asked for, ask, and free them."""
        check_choice(options)
        with asking():
            names = [*map(select, options["names"])]
            if options["queued"] and not options["names"]:
                # The history does not say which calls are queued.
                next(get_store(conf.cache).entries(), None)
            locks = held.held(names)
            held.must_be_known(names, locks)
            chosen = held.with_history([lock for lock in locks if _is_chosen(lock, options)])
            missing = [each.text for each in names if not any(map(each.matches, chosen))]
        if missing or not chosen:
            nothing = _not_there(missing, locks, options)
            if names:
                raise CommandError(nothing)
            # Nothing was named, so finding nothing is not an error.
            if options["json"]:
                self.print_lines(output.json_rows("locks", []))
            else:
                self.stdout.write(nothing)
            return
        if not options["json"]:
            self.print_table(output.lock_table(chosen))
        if not (options["yes"] or options["dry_run"]):
            self.confirm(len(chosen), options)
        with asking():
            to_free = [] if options["dry_run"] else chosen
            by = {"actor": actor(), "reason": options["reason"]}
            freed = {lock.key for lock in to_free if held.clear(lock, **by)}
        self.report(chosen, freed, options)

    def confirm(self, count: int, options: dict[str, Any]) -> None:
        """Ask; anything but yes ends the command."""
        if options["queued"]:
            question = (
                f"Forget {plural(count, 'queued call')}? If the broker still has the message, "
            )
            question += "the call runs, and an identical call can run at the same time."
        else:
            task = "The" if count == 1 else "Each"
            question = f"Free {plural(count, 'lock')}? {task} task keeps running, and a second "
            question += "copy can start at the same time."
        try:
            answer = input(f"{question} [y/N] ")
        except (EOFError, KeyboardInterrupt):
            self.stdout.write("")
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was freed. To skip the question, add --yes.")

    def report(
        self, locks: Sequence[HeldLock], freed: Collection[str], options: dict[str, Any]
    ) -> None:
        """Say what was freed (``freed`` are keys), or would be; exit with 1 if a lock was not."""
        queued = ("queued call", "Would forget", "Forgot")
        noun, would, done = queued if options["queued"] else ("lock", "Would free", "Freed")
        if options["json"]:
            rows = [{**output.as_json(lock), "freed": lock.key in freed} for lock in locks]
            self.print_lines(output.json_rows("locks", rows))
        elif options["dry_run"]:
            self.stdout.write(f"{would} {plural(len(locks), noun)}.")
        elif freed:
            self.stdout.write(self.style.SUCCESS(f"{done} {plural(len(freed), noun)}."))
        kept = [printable(lock.name) for lock in locks if lock.key not in freed]
        if kept and not options["dry_run"]:
            raise CommandError(
                f"Not freed: {', '.join(kept)}. The holder in the table no longer has the lock. "
                "List the locks again."
            )

    def history(self, options: dict[str, Any]) -> None:
        narrowed = {name: options[name] for name in ("kind", "outcome", "since", "limit")}
        if narrowed["outcome"] in Result.values:
            narrowed["result"], narrowed["outcome"] = narrowed["outcome"], None
        with asking():
            names = [*map(select, options["names"])]
            conditions = [each for name in names for each in name.conditions()] if names else [{}]
            rows, complete = find(conditions, **narrowed)
            held.must_be_known(names)
        if not complete and len(rows) < options["limit"]:
            self.stderr.write(f"Only the newest {SCANNED} rows were searched.")
        if conf.history == "off":
            self.stderr.write(
                "SINGLETASK_HISTORY = 'off': nothing is recorded, and all rows are old."
            )
        if options["json"]:
            self.print_lines(output.json_rows("rows", rows))
        elif rows:
            held.judge(rows)
            self.print_table(output.history_table(rows))
        else:
            self.stdout.write("The history has no matching row.")

    def probe(self, options: dict[str, Any]) -> None:
        """Print whether the cache can hold locks; exit with 1 if it cannot."""
        with asking():
            result = probe(conf.cache)
        if options["json"]:
            self.print_json({**output.as_json(result), "fit": result.fit})
        else:
            self.stdout.write("\n".join(output.probe_report(result)))
        if not result.fit:
            raise CommandError(f"The cache {conf.cache!r} cannot hold locks: see 'unfit' above.")

    def prune(self, options: dict[str, Any]) -> None:
        """Delete old history, and say meanwhile how many rows are gone."""
        older_than, dry_run = options["older_than"], options["dry_run"]
        count, interrupted = 0, True
        with asking(), reading(even_if_off=True), suppress(KeyboardInterrupt):
            if dry_run:
                count = TaskLockEvent.objects.primary().older_than(older_than).count()
            for deleted in () if dry_run else prune(older_than=older_than):
                count += deleted
                if self.stdout.isatty() and not options["json"]:
                    self.stdout.write(f"\r{count} rows deleted …\r", ending="")
                    self.stdout.flush()
            interrupted = False
        if interrupted:
            gone = f"Interrupted: {plural(count, 'row')} deleted."
            raise CommandError(f"{gone} Run the command again to continue.")
        seconds = older_than or conf.history_days * 86_400
        if options["json"]:
            self.print_json({"deleted": count, "older_than": seconds, "dry_run": dry_run})
        else:
            verb = "Would delete" if dry_run else "Deleted"
            self.stdout.write(f"{verb} {plural(count, 'row')} older than {compact(seconds)}.")

    def print_json(self, data: Any) -> None:
        self.stdout.write(output.to_json({"version": output.VERSION, **data}, indent=2))

    def print_table(self, lines: Iterator[str]) -> None:
        """Print a table, its head in colour on a terminal."""
        self.print_lines(chain([self.style.MIGRATE_HEADING(next(lines))], lines))

    def print_lines(self, lines: Iterator[str]) -> None:
        """Print lines while they are made: there may be very many."""
        while some := [*islice(lines, 1000)]:
            self.stdout.write("\n".join(some))


@contextmanager
def asking() -> Iterator[None]:
    """Turn any error of the block, since each client has errors of its own, into one message."""
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(printable(cannot_ask(error)), returncode=UNKNOWN) from error


def actor() -> str:
    """Name the user who runs the command."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may run under a user that has no name
        user = "unknown user"
    return f"{user} on {socket.gethostname()}{output.COMMAND}"


def _is_chosen(lock: HeldLock, options: dict[str, Any]) -> bool:
    return (
        lock.queued == options["queued"]
        and lock.state != "expired"
        and (lock.state == "dead" or not options["dead"])
    )


def _not_there(missing: Sequence[str], locks: Sequence[HeldLock], options: dict[str, Any]) -> str:
    """Say that what was asked for is not there, and why, where that is known."""
    queued, dead = options["queued"], options["dead"]
    what = "call is queued" if queued else f"lock is held{' by a dead process' * dead}"
    criteria = ", ".join(map(printable, missing))
    sentences = [f"No matching {what}: {criteria}." if criteria else f"No {what}."]
    states = {lock.state for lock in locks}
    if "expired" in states:
        sentences.append("An expired lock is not held: there is nothing to free.")
    if "queued" in states and not (queued or dead):
        sentences.append("A call is queued: add --queued to forget it.")
    return " ".join(sentences)
