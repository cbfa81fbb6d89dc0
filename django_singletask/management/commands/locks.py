"""``manage.py locks``: what an operator asks about the locks, and what an operator can do."""

from __future__ import annotations

import errno
import gc
import getpass
import json
import os
import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_singletask.checks import check_cache
from django_singletask.conf import conf
from django_singletask.history.queries import NoHistory, reading
from django_singletask.history.sweep import prune
from django_singletask.management import alarms, listings
from django_singletask.management.arguments import add_actions, check_choice
from django_singletask.management.sentences import explain
from django_singletask.management.tables import printable
from django_singletask.models import Result, TaskLockEvent
from django_singletask.operators import held
from django_singletask.operators.errors import cannot_ask
from django_singletask.operators.explain import why
from django_singletask.operators.names import Selector, UnknownName, select, select_task
from django_singletask.operators.past import SCANNED, find
from django_singletask.operators.probe import probe
from django_singletask.operators.rows import HeldLock
from django_singletask.operators.words import compact, plural

__all__ = ["Command"]

LOCMEM = {"django_singletask.E004", "django_singletask.W001"}
"""Checks that say that each process has locks of its own."""


class Command(BaseCommand):
    """List the locks that are held now, explain one, clear some; read and prune their history."""

    help = "List the locks that are held now, explain one, clear some; read their history."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        add_actions(parser)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a process of its own, whose output may end early or lack characters."""
        gc.set_threshold(50_000)  # to look for garbage took a tenth of the time of a long list
        with suppress(AttributeError):  # closed, or replaced by something simpler
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        try:
            try:
                super().run_from_argv(argv)
            finally:
                sys.stdout.flush()
        except OSError as error:
            if error.errno not in {errno.EPIPE, errno.ENOSPC}:
                raise
            # Python would write what is left in the buffer at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:
                sys.exit(128 + 13)  # as if by SIGPIPE; 0 would say that nothing is wrong
            sys.stderr.write(f"CommandError: The output cannot be written: {error}\n")
            sys.exit(1)

    def handle(self, *args: Any, **options: Any) -> None:
        action = options["action"] or "list"
        messages = check_cache() if action in {"list", "why", "clear"} else []
        for message in messages:
            if message.id in LOCMEM:
                raise CommandError(f"{message.msg} Those of others cannot be seen. {message.hint}")
        try:
            getattr(self, action)(options)
        except UnknownName as error:
            raise CommandError(str(error), returncode=3) from error
        except (ImproperlyConfigured, NoHistory) as error:
            raise CommandError(printable(str(error))) from error

    def list(self, options: dict[str, Any]) -> None:
        """Print the locks that are held now; exit with 1 on what a monitor must know."""
        held_over, starving = options["fail_if_held_over"], options["fail_if_starving"]
        with asking_the_cache():
            names, task = selectors(options)
            locks = held.with_history(held.held(names, task=task))
            held.must_be_known([*names, *filter(None, [task])], locks)
        if not locks and conf.history != "off":
            try:
                with reading():
                    TaskLockEvent.objects.newest().first()
            except NoHistory as error:  # a hold that expired would not be seen
                self.stderr.write(printable(str(error)))
        if options["json"]:
            self.print_lines(listings.json_rows(locks))
        elif locks:
            self.print_table(listings.lock_table(locks))
        else:
            self.stdout.write("No matching lock is held." if names or task else "No lock is held.")
        messages = alarms.held_over(locks, held_over) + alarms.starving_over(names, task, starving)
        if messages:
            raise CommandError(" ".join(messages))

    def why(self, options: dict[str, Any]) -> None:
        with asking_the_cache():
            facts = why(options["name"])
        if options["json"]:
            self.print_json(facts)
        else:
            self.stdout.write("\n".join(explain(facts)))

    def clear(self, options: dict[str, Any]) -> None:
        """Show the locks that were asked for, ask, and free them."""
        check_choice(options)
        with asking_the_cache():
            names, task = selectors(options)
            if options["queued"] and not names:
                held.must_list()
            locks = held.held(names, task=task)
            held.must_be_known([*names, *filter(None, [task])], locks)
            chosen = held.with_history([lock for lock in locks if _is_chosen(lock, options)])
            missing = [each.text for each in names if not any(map(each.matches, chosen))]
            nothing = _not_there(missing, locks, options) if missing or not chosen else ""
        if nothing and (names or task or options["token"]):
            raise CommandError(nothing)
        if nothing:  # nothing was named, so finding nothing is not an error
            self.stdout.write("[]" if options["json"] else nothing)
            return
        if not options["json"]:
            self.print_table(listings.lock_table(chosen))
        if not (options["yes"] or options["dry_run"]):
            self.confirm(len(chosen), options)
        with asking_the_cache():
            to_free = [] if options["dry_run"] else chosen
            by = {"actor": actor(), "reason": options["reason"]}
            freed = {lock.key for lock in to_free if held.clear(lock, **by)}
        self.report(chosen, freed, options)

    def confirm(self, count: int, options: dict[str, Any]) -> None:
        """Ask; anything but yes ends the command."""
        question = (
            f"Forget {plural(count, 'queued call')}? Those that the broker has still run, and "
            "equal ones can be sent beside them. [y/N] "
            if options["queued"]
            else f"Free {plural(count, 'lock')}? The runs above go on, and others can start "
            "beside them. [y/N] "
        )
        try:
            answer = input(question)
        except (EOFError, KeyboardInterrupt):
            self.stdout.write("")
            answer = ""
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was freed; --yes frees without asking.")

    def report(
        self, locks: Sequence[HeldLock], freed: Collection[str], options: dict[str, Any]
    ) -> None:
        """Say what was freed (``freed`` are keys), or would be; exit with 1 if a lock was not."""
        noun, would, done = "lock", "Would free", "Freed"
        if options["queued"]:
            noun, would, done = "queued call", "Would forget", "Forgot"
        if options["json"]:
            rows = [{**listings.as_json(lock), "freed": lock.key in freed} for lock in locks]
            self.print_lines(listings.json_rows(rows))
        elif options["dry_run"]:
            self.stdout.write(f"{would} {plural(len(locks), noun)}.")
        elif freed:
            self.stdout.write(self.style.SUCCESS(f"{done} {plural(len(freed), noun)}."))
        kept = [printable(lock.name) for lock in locks if lock.key not in freed]
        if kept and not options["dry_run"]:
            raise CommandError(
                f"Not freed: {', '.join(kept)}. The holder that was shown no longer has it."
            )

    def history(self, options: dict[str, Any]) -> None:
        narrowed = {name: options[name] for name in ("kind", "outcome", "since", "limit")}
        if narrowed["outcome"] in Result.values:
            narrowed["result"], narrowed["outcome"] = narrowed["outcome"], None
        names, task = selectors(options)
        conditions = [[each for name in names for each in name.conditions()]] if names else []
        rows, complete = find(*conditions, *([task.conditions()] if task else []), **narrowed)
        held.must_be_known([*names, *filter(None, [task])])
        if not complete and len(rows) < options["limit"]:
            self.stderr.write(f"Only the newest {SCANNED} rows were searched.")
        if conf.history == "off":
            self.stderr.write("SINGLETASK_HISTORY = 'off': only old rows are there.")
        if options["json"]:
            self.print_lines(listings.json_rows(rows))
        elif rows:
            self.print_table(listings.history_table(rows))
        else:
            self.stdout.write("Nothing of this is in the history.")

    def probe(self, options: dict[str, Any]) -> None:
        """Print whether the cache can hold locks; exit with 1 if it cannot."""
        with asking_the_cache():
            result = probe(conf.cache)
        if options["json"]:
            self.print_json({**listings.as_json(result), "fit": result.fit})
        else:
            self.stdout.write("\n".join(listings.probe_report(result)))
        if not result.fit:
            raise CommandError(f"The cache {conf.cache!r} is unfit to hold locks.")

    def prune(self, options: dict[str, Any]) -> None:
        """Delete old history, and say meanwhile how many rows are gone."""
        older_than, limit, dry_run = options["older_than"], options["limit"], options["dry_run"]
        count, interrupted = 0, True
        with reading(even_if_off=True), suppress(KeyboardInterrupt):
            if dry_run:
                count = TaskLockEvent.objects.primary().older_than(older_than)[:limit].count()
            else:
                for deleted in prune(older_than=older_than, limit=limit):
                    count += deleted
                    if self.stdout.isatty() and not options["json"]:
                        self.stdout.write(f"\r{count} rows deleted …\r", ending="")
                        self.stdout.flush()
            interrupted = False
        if interrupted:
            self.stdout.write("")
            raise CommandError(
                f"Interrupted: {plural(count, 'row')} of the history "
                f"{'is' if count == 1 else 'are'} gone. Run it again to go on."
            )
        seconds = older_than or conf.history_days * 86_400
        if options["json"]:
            self.print_json({"deleted": count, "older_than": seconds, "dry_run": dry_run})
        else:
            verb = "Would delete" if dry_run else "Deleted"
            self.stdout.write(f"{verb} {plural(count, 'row')} older than {compact(seconds)}.")

    def print_json(self, data: Any) -> None:
        self.stdout.write(json.dumps(data, indent=2, default=listings.as_json))

    def print_table(self, lines: Iterator[str]) -> None:
        """Print a table, its head in colour on a terminal."""
        self.print_lines(chain([self.style.MIGRATE_HEADING(next(lines))], lines))

    def print_lines(self, lines: Iterator[str]) -> None:
        """Print lines while they are made: there may be very many."""
        while some := [*islice(lines, 1000)]:
            self.stdout.write("\n".join(some))


@contextmanager
def asking_the_cache() -> Iterator[None]:
    """Turn any error of the block, since each client has errors of its own, into one message."""
    try:
        yield
    except (CommandError, UnknownName):
        raise
    except Exception as error:
        raise CommandError(printable(cannot_ask(error))) from error


def selectors(options: dict[str, Any]) -> tuple[Sequence[Selector], Selector | None]:
    """Read the names and the task that were typed."""
    task = options["task"]
    return [*map(select, options["names"])], None if task is None else select_task(task)


def actor() -> str:
    """Name the user who runs the command."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may run under a user that has no name
        user = "unknown user"
    return f"{user} on {socket.gethostname()}{listings.COMMAND}"


def _is_chosen(lock: HeldLock, options: dict[str, Any]) -> bool:
    return (
        options["token"] in (None, lock.token)
        and lock.queued == options["queued"]
        and lock.state != "expired"
        and (lock.state == "dead" or not options["dead"])
    )


def _not_there(missing: Sequence[str], locks: Sequence[HeldLock], options: dict[str, Any]) -> str:
    """Say that what was asked for is not there, and why, where that is known."""
    token, task, queued, dead = (options[name] for name in ("token", "task", "queued", "dead"))
    what = "queued" if queued else "held by a dead process" if dead else "held"
    criteria = missing or [f"--task {task}"] * bool(task) or [f"--token {token}"] * bool(token)
    sentences = [f"No {'call' if queued else 'lock'} is {what}."]
    if criteria:
        by = " by that token" if token and missing else ""
        sentences = [f"Not {what}{by}: {', '.join(map(printable, criteria))}."]
    states = {lock.state for lock in locks if token in (None, lock.token)}
    if "expired" in states:
        sentences.append("Expired is not held: there is nothing to free.")
    if "queued" in states and not (queued or dead):
        sentences.append("A call is queued: --queued lets an equal one be sent.")
    return " ".join(sentences)
