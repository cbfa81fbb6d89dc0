"""``manage.py locks``: list and clear the locks that are held."""

from __future__ import annotations

import argparse
import getpass
import json
import shutil
import socket
import unicodedata
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from django_singletask import registry
from django_singletask.conf import conf
from django_singletask.registry import HeldLock, duration

__all__ = ["Command"]

WIDTH = 80
NOTHING = "No lock is held."


class Command(BaseCommand):
    """List the locks that are held now, or clear some."""

    help = "List the locks that are held now, or clear some."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Add ``list`` (the default) and ``clear``."""
        actions = parser.add_subparsers(dest="action", metavar="list | clear")
        listing = actions.add_parser("list", help="list the locks that are held now (the default)")
        clearing = actions.add_parser(
            "clear",
            help="free locks; the runs that hold them go on",
            description="Free locks. The runs that hold them go on, and others can start beside "
            "them. Each lock is freed only if the holder that was shown still has it.",
        )
        clearing.add_argument("names", nargs="*", metavar="LOCK", help="name or key of a lock")
        clearing.add_argument("--token", help="free the lock of this holder only")
        clearing.add_argument("--task", help="free the locks of this task")
        clearing.add_argument("--all", action="store_true", help="free every lock")
        clearing.add_argument(
            "--queued",
            action="store_true",
            help="instead of locks, forget queued calls, so that equal ones can be sent again",
        )
        clearing.add_argument("--yes", action="store_true", help="do not ask")
        clearing.add_argument("--dry-run", action="store_true", help="show what would be freed")
        listing.add_argument("names", nargs="*", metavar="LOCK", help="name or key of a lock")
        listing.add_argument("--task", help="list the locks of this task")
        parser.add_argument("--json", action="store_true", help="print JSON")
        for action in (listing, clearing):
            # Without a default, which would win over --json before the action.
            action.add_argument(
                "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON"
            )

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the action."""
        try:
            if options["action"] == "clear":
                self.clear(**options)
            else:
                self.show(**options)
        except CommandError:
            raise
        except (ImproperlyConfigured, registry.CannotList) as error:
            raise CommandError(str(error)) from error
        except Exception as error:
            raise CommandError(
                f"The cache {conf.cache!r} (SINGLETASK_CACHE) cannot be asked: "
                f"{type(error).__name__}: {printable(str(error))}"
            ) from error

    def show(self, **options: Any) -> None:
        """Print the locks that are held now."""
        locks = registry.held(options.get("names") or (), task=options.get("task"))
        if options["json"]:
            self.stdout.write(json.dumps([_as_dict(lock) for lock in locks], indent=2))
        elif locks:
            self.table(locks)
        else:
            asked = options.get("names") or options.get("task")
            self.stdout.write("None of these is held." if asked else NOTHING)

    def table(self, locks: Sequence[HeldLock]) -> None:
        """Print locks as a table that fits the terminal, or 80 columns where there is none."""
        rows = [
            (
                duration(lock.held_for),
                "-" if lock.remaining is None or lock.queued else duration(lock.remaining),
                "-" if lock.skipped is None else str(lock.skipped),
            )
            for lock in locks
        ]
        heads = ("HELD FOR", "LEASE", "SKIPPED")
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        width = max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
        left = width - sum(widths) - 2 * len(widths) - 2
        # Of two names that begin alike the ends differ, and so do those of pods: cut the middle.
        holders = [printable(who(lock), left // 3) for lock in locks]
        left -= max(map(columns, ("HOLDER", *holders)))
        names = [printable(lock.name, left) for lock in locks]
        first = max(map(columns, ("LOCK", *names)))
        for name, row, holder in zip(
            ("LOCK", *names), (heads, *rows), ("HOLDER", *holders), strict=True
        ):
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            line = "  ".join((name + " " * (first - columns(name)), *cells, holder))
            self.stdout.write(self.style.MIGRATE_HEADING(line) if row is heads else line)

    def clear(self, **options: Any) -> None:
        """Free the locks that were asked for, after showing them."""
        names, token, task = options["names"], options["token"], options["task"]
        if options["json"] and not (options["yes"] or options["dry_run"]):
            raise CommandError("--json cannot ask: add --yes or --dry-run.")
        if not (names or token or task or options["all"] or options["queued"]):
            raise CommandError(
                "Say what to clear: the name or key of a lock, --token, --task, --queued or --all. "
                "'manage.py locks' lists what is held."
            )
        if options["queued"] and not names:
            registry.must_list()
        locks = [
            lock
            for lock in registry.held(names, task=task)
            if (token is None or lock.holder.token == token) and lock.queued == options["queued"]
        ]
        keys, shown = {lock.key for lock in locks}, {lock.name for lock in locks}
        missing = [n for n in names if n not in shown and not keys & {*registry.keys_of(n)}]
        if missing or not locks:
            asked = missing or [f"--task {task}"] * bool(task) or [f"--token {token}"] * bool(token)
            by = " by that token" if token and missing else ""
            raise CommandError(
                f"Not {'queued' if options['queued'] else 'held'}{by}: "
                f"{', '.join(map(printable, asked))}."
                if asked
                else ("No call is queued." if options["queued"] else NOTHING)
            )
        if not options["json"]:
            self.table(locks)
        if options["dry_run"]:
            freed = None
        else:
            if not options["yes"]:
                self.confirm(locks, **options)
            freed = [lock for lock in locks if registry.clear(lock, actor=actor())]
        self.report(locks, freed, **options)

    def confirm(self, locks: Sequence[HeldLock], **options: Any) -> None:
        """Ask; anything but yes ends the command."""
        question = (
            f"Forget {plural(len(locks), 'queued call')}? Those that the broker has still run, "
            "and equal ones can be sent beside them. [y/N] "
            if options["queued"]
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
        noun = "queued call" if options["queued"] else "lock"
        kept = [] if freed is None else [lock for lock in locks if lock not in freed]
        if options["json"]:
            states = [
                {**_as_dict(lock), "freed": freed is not None and lock in freed} for lock in locks
            ]
            self.stdout.write(json.dumps(states, indent=2))
        elif freed is None:
            self.stdout.write(f"Would free {plural(len(locks), noun)}.")
        elif freed:
            self.stdout.write(self.style.SUCCESS(f"Freed {plural(len(freed), noun)}."))
        if kept:
            names = ", ".join(printable(lock.name) for lock in kept)
            raise CommandError(
                f"Not freed: {names}. Meanwhile given back, or taken by another holder."
            )


def actor() -> str:
    """Name who runs the command."""
    try:
        user = getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may run under a user that has no name
        user = "unknown user"
    return f"{user} on {socket.gethostname()} (manage.py locks)"


def who(lock: HeldLock) -> str:
    """Name the process that holds a lock, or the task id of the call that is queued."""
    holder = lock.holder
    if lock.queued:
        return f"queued {holder.task_id}"
    return f"{holder.host}:{holder.pid}" if holder.host else "unknown"


def printable(text: str, width: int | None = None) -> str:
    """Escape what could steer a terminal, and cut the middle out of what is wider than ``width``.

    Format characters go too: they can turn the direction of what follows.
    """
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if width is None or columns(text) <= width:
        return text
    head, tail = text, ""
    while columns(head) > (width - 1) // 2:
        head = head[:-1]
    for char in reversed(text):
        if columns(head) + columns(tail) + columns(char) + 1 > width:
            break
        tail = char + tail
    return f"{head}…{tail}"


def columns(text: str) -> int:
    """Count the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def plural(count: int, noun: str) -> str:
    """Write a count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _as_dict(lock: HeldLock) -> dict[str, Any]:
    holder = lock.holder
    return {
        "name": lock.name,
        "key": lock.key,
        "queued": lock.queued,
        "held_for": round(lock.held_for, 3),
        "remaining": None if lock.remaining is None else round(lock.remaining, 3),
        "skipped": lock.skipped,
        "token": holder.token,
        "task": holder.task,
        "task_id": holder.task_id,
        "host": holder.host,
        "pid": holder.pid,
        "since": holder.since,
        "timeout": holder.timeout,
    }
