"""``manage.py locks``: everything about the locks that an operator asks, and what he can do."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import getpass
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from django_singletask.checks import check_cache
from django_singletask.conf import conf
from django_singletask.history import queries as past
from django_singletask.history.writing import old_rows, prune
from django_singletask.management import listings
from django_singletask.management.alarms import (
    held_over,
    is_among,
    must_be_known,
    starving,
    unknown,
)
from django_singletask.management.arguments import add_actions
from django_singletask.management.sentences import explain
from django_singletask.management.tables import plural, printable
from django_singletask.operators import held as registry
from django_singletask.operators import names as calls
from django_singletask.operators import probe
from django_singletask.operators.explain import UnknownLock, why
from django_singletask.operators.held import HeldLock
from django_singletask.operators.words import compact

__all__ = ["Command"]

NOTHING = "No lock is held."
LOCMEM = {"django_singletask.E004", "django_singletask.W001"}
"""Checks that say that each process has locks of its own."""


class Command(BaseCommand):
    """List the locks that are held now, explain one, clear some; read and prune their history."""

    help = "List the locks that are held now, explain one, clear some; read their history."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the actions; ``list`` is the default."""
        actions = parser.add_subparsers(
            dest="action", metavar="list | why | clear | history | probe | prune"
        )
        add_actions(actions)
        parser.add_argument("--json", action="store_true", help="print JSON")
        for action in actions.choices.values():
            # Without a default, which would win over --json before the action.
            action.add_argument(
                "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
            )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a process of its own, whose output may end early or lack characters."""
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
            # What is left is not written again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:
                sys.exit(128 + 13)  # as if by SIGPIPE; 0 would say that nothing is wrong
            sys.stderr.write(f"CommandError: The output cannot be written: {error}\n")
            sys.exit(1)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the action."""
        action = options["action"] or "list"
        try:
            if action in ("list", "why", "clear"):
                _must_be_shared()
            getattr(self, action)(**options)
        except (ImproperlyConfigured, registry.CannotList, registry.NoHistory) as error:
            raise CommandError(printable(str(error))) from error

    def print_json(self, data: Any) -> None:
        """Print data as JSON."""
        self.stdout.write(json.dumps(data, indent=2))

    def print_table(self, lines: Sequence[str]) -> None:
        """Print a table, its head in colour on a terminal."""
        head, *rows = lines
        self.stdout.write(self.style.MIGRATE_HEADING(head))
        for row in rows:
            self.stdout.write(row)

    def list(self, **options: Any) -> None:
        """Print the locks that are held now; exit with 1 if one is what must not be."""
        names, task = options.get("names") or (), options.get("task")
        with asking_the_cache():
            locks = registry.held(names, task=task)
        if options.get("fail_if_held_over") or options.get("fail_if_starving"):
            with asking_the_cache():
                must_be_known(names, task, locks)
        if options["json"]:
            self.print_json(listings.as_dicts(locks))
        elif locks:
            self.print_table(listings.held(locks))
        else:
            self.stdout.write("None of these is held." if names or task else NOTHING)
        alarms = held_over(locks, options.get("fail_if_held_over"))
        hungry, more = starving(names, task, options.get("fail_if_starving"))
        if more:
            self.stderr.write(
                f"Not looked at, and perhaps starving: {plural(more, 'more lock')} whose calls "
                "were skipped lately. Name them, or a --task."
            )
        alarms += hungry
        if alarms:
            raise CommandError(" ".join(alarms))

    def why(self, **options: Any) -> None:
        """Print what is known of one lock."""
        try:
            with asking_the_cache():
                told = why(options["name"])
        except UnknownLock as error:
            raise CommandError(unknown("lock", error.name, error.matches)) from error
        if options["json"]:
            self.print_json(listings.why_as_dict(told))
        else:
            self.stdout.write("\n".join(explain(told)))

    def clear(self, **options: Any) -> None:
        """Free the locks that were asked for, after showing them."""
        names, task, queued = options["names"], options["task"], options["queued"]
        if options["json"] and not (options["yes"] or options["dry_run"]):
            raise CommandError("--json cannot ask: add --yes or --dry-run.", returncode=2)
        narrowed = names or any(options[choice] for choice in ("token", "task", "dead"))
        if not (narrowed or options["all"] or queued):
            raise CommandError(
                "Say what to clear: the name or key of a lock, --token, --task, --dead, --queued "
                "or --all. 'manage.py locks' lists what is held.",
                returncode=2,
            )
        if narrowed and options["all"]:
            raise CommandError(
                "--all does not go together with a name, --token, --task or --dead.", returncode=2
            )
        with asking_the_cache():
            if queued and not names:
                registry.must_list()
            found = registry.held(names, task=task)
        locks = [lock for lock in found if _is_chosen(lock, **options)]
        missing = [name for name in names if not is_among(name, locks)]
        if missing or not locks:
            with asking_the_cache():
                told = _not_there(missing, found, **options)
            if names or task or options["token"]:
                raise CommandError(told)
            # Who names nothing has it as he wants it.
            self.stdout.write("[]" if options["json"] else told)
            return
        if not options["json"]:
            self.print_table(listings.held(locks))
        if options["dry_run"]:
            freed = None
        else:
            if not options["yes"]:
                self.confirm(locks, queued)
            with _told_once(), asking_the_cache():
                freed = [lock for lock in locks if registry.clear(lock, actor=actor())]
        self.report(locks, freed, **options)

    def confirm(self, locks: Sequence[HeldLock], queued: bool) -> None:
        """Ask; anything but yes ends the command."""
        question = (
            f"Forget {plural(len(locks), 'queued call')}? Those that the broker has still run, "
            "and equal ones can be sent beside them. [y/N] "
            if queued
            else f"Free {plural(len(locks), 'lock')}? The runs above go on, "
            "and others can start beside them. [y/N] "
        )
        try:
            answer = input(question)
        except EOFError:
            self.stdout.write("")
            raise CommandError("Nobody answered; --yes frees without asking.") from None
        except KeyboardInterrupt:
            self.stdout.write("")
            raise CommandError("Nothing was freed.") from None
        if answer.strip().lower() not in {"y", "yes"}:
            raise CommandError("Nothing was freed.")

    def report(
        self, locks: Sequence[HeldLock], freed: Sequence[HeldLock] | None, **options: Any
    ) -> None:
        """Say what was freed; exit with 1 if a lock was not."""
        noun, would, done = "lock", "Would free", "Freed"
        if options["queued"]:
            noun, would, done = "queued call", "Would forget", "Forgot"
        kept = [] if freed is None else [lock for lock in locks if lock not in freed]
        if options["json"]:
            self.print_json(
                [
                    {**listings.as_dict(lock), "freed": freed is not None and lock in freed}
                    for lock in locks
                ]
            )
        elif freed is None:
            self.stdout.write(f"{would} {plural(len(locks), noun)}.")
        elif freed:
            self.stdout.write(self.style.SUCCESS(f"{done} {plural(len(freed), noun)}."))
        if kept:
            names = ", ".join(printable(lock.name) for lock in kept)
            raise CommandError(
                f"Not freed: {names}. Meanwhile given back, or taken by another holder."
            )

    def history(self, **options: Any) -> None:
        """Print what happened to the locks, the latest first."""
        names = {name for given in options["names"] for name in calls.names_of(given)}
        facts = ("task", "kind", "outcome", "since", "limit")
        # A name that can be no lock's finds nothing, and not all that no name was given for.
        only = sorted(names) if options["names"] else None
        narrowed = {fact: options[fact] for fact in facts}
        rows = past.find(names=only, **narrowed)
        if only is not None and not rows:
            # A lock that is no task's has no id, which is empty in its rows.
            ids = [given for given in options["names"] if given and given.isprintable()]
            rows = past.find(task_ids=ids, **narrowed)
        if conf.history == "off":
            self.stderr.write("SINGLETASK_HISTORY = 'off': only old rows are there.")
        if options["json"]:
            self.print_json([listings.row_as_dict(row) for row in rows])
        elif rows:
            self.print_table(listings.history(rows))
        else:
            self.stdout.write("Nothing of this is in the history.")

    def probe(self, **options: Any) -> None:
        """Print whether the cache can hold locks; exit with 1 if it cannot."""
        with asking_the_cache():
            told = probe.probe(conf.cache, processes=options["processes"], keys=options["keys"])
        if options["json"]:
            self.print_json(dataclasses.asdict(told) | {"fit": told.fit})
        else:
            self.stdout.write("\n".join(listings.findings(told)))
        if not told.fit:
            raise CommandError(f"The cache {conf.cache!r} is unfit to hold locks.")

    def prune(self, **options: Any) -> None:
        """Delete old history, with a word on how far it is."""
        older_than, limit = options["older_than"], options["limit"]
        if options["dry_run"]:
            try:
                count = old_rows(older_than).count()
            except Error as error:
                raise past.unreadable(error) from error
            count = count if limit is None else min(count, limit)
            self.told_pruned(count, "Would delete", dry=True, **options)
            return
        gone = 0

        def tell(deleted: int) -> None:
            nonlocal gone
            gone = deleted
            if self.stdout.isatty() and not options["json"]:
                self.stdout.write(f"\r{gone} rows deleted …", ending="")
                self.stdout.flush()

        try:
            prune(older_than=older_than, limit=limit, progress=tell)
        except KeyboardInterrupt:
            self.stdout.write("")
            raise CommandError(
                f"Interrupted: {plural(gone, 'row')} of the history "
                f"{'is' if gone == 1 else 'are'} gone. Run it again to go on."
            ) from None
        except Error as error:
            raise past.unreadable(error) from error
        if self.stdout.isatty() and gone and not options["json"]:
            self.stdout.write("\r", ending="")
        self.told_pruned(gone, "Deleted", dry=False, **options)

    def told_pruned(self, count: int, verb: str, *, dry: bool, **options: Any) -> None:
        """Say how many rows are gone, or would be."""
        seconds = options["older_than"] or conf.history_days * 86_400
        if options["json"]:
            self.print_json({"deleted": count, "older_than": seconds, "dry_run": dry})
        else:
            older = compact(seconds)
            self.stdout.write(f"{verb} {plural(count, 'row')} older than {older}.")


@contextmanager
def asking_the_cache() -> Iterator[None]:
    """Tell any error, since each client has errors of its own, as one of asking the cache."""
    try:
        yield
    except (
        CommandError,
        ImproperlyConfigured,
        UnknownLock,
        registry.CannotList,
        registry.NoHistory,
    ):
        raise
    except Exception as error:
        raise CommandError(
            f"The cache {conf.cache!r} (SINGLETASK_CACHE) cannot be asked: "
            f"{type(error).__name__}: {printable(probe.without_secrets(str(error)))}"
        ) from error


def actor() -> str:
    """Name who runs the command."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may run under a user that has no name
        user = "unknown user"
    return f"{user} on {socket.gethostname()}{listings.COMMAND}"


def _must_be_shared() -> None:
    """Raise if the locks of other processes cannot be seen, whatever they hold."""
    for message in check_cache():
        if message.id in LOCMEM:
            raise CommandError(f"{message.msg} Those of others cannot be seen. {message.hint}")


@contextmanager
def _told_once() -> Iterator[None]:
    """Keep what the command says itself from being logged to stderr too.

    That is where Python writes warnings as its last resort, if the project logs them nowhere.
    """

    def is_untold(record: logging.LogRecord) -> bool:
        return record.name != "django_singletask" or record.module != "lock"

    resort = logging.lastResort or logging.NullHandler()
    resort.addFilter(is_untold)
    try:
        yield
    finally:
        resort.removeFilter(is_untold)


def _is_chosen(lock: HeldLock, **options: Any) -> bool:
    return (
        (options["token"] is None or lock.holder.token == options["token"])
        and lock.queued == options["queued"]
        and lock.state != "expired"
        and (lock.state == "dead" or not options["dead"])
    )


def _not_there(missing: Sequence[str], found: Sequence[HeldLock], **options: Any) -> str:
    """Say that what was asked for is not there, and why if that can be told."""
    token, task = options["token"], options["task"]
    found = [lock for lock in found if token in (None, lock.holder.token)]
    asked = missing or [f"--task {task}"] * bool(task) or [f"--token {token}"] * bool(token)
    if options["queued"]:
        what = "Not queued" if asked else "No call is queued"
    elif options["dead"]:
        what = "Not held by a dead process" if asked else "No lock is held by a dead process"
    else:
        what = "Not held" if asked else NOTHING.rstrip(".")
    by = " by that token" if token and missing else ""
    names = f"{by}: {', '.join(map(printable, asked))}" if asked else ""
    told = [f"{what}{names}."]
    if any(lock.state == "expired" for lock in found):
        told.append("Expired is not held: there is nothing to free.")
    if any(lock.queued for lock in found) and not (options["queued"] or options["dead"]):
        told.append("A call is queued: --queued lets an equal one be sent.")
    if missing:
        try:
            why(missing[0])
        except UnknownLock as error:
            if error.matches:
                told.append(unknown("lock", error.name, error.matches))
    return " ".join(told)
