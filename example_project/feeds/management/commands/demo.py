from __future__ import annotations

import argparse
import sys
from typing import Any
from urllib.parse import urlsplit

from django.core.management import BaseCommand, CommandError

from example_project.demo import launch


class Command(BaseCommand):
    help = (
        "Send many identical imports to real Celery workers, show which process holds each lock, "
        "and check that no two runs of one feed overlapped. Needs no server, and leaves no files."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--cache",
            type=cache_url,
            metavar="URL",
            help="Keep the locks in redis://host:port/db or memcached://host:port.",
        )
        parser.add_argument(
            "--broker",
            type=broker_url,
            metavar="URL",
            help="Use redis://host:port/db or another Celery broker.",
        )
        parser.add_argument(
            "--serve",
            type=port,
            nargs="?",
            const=0,
            metavar="PORT",
            help="Then serve the admin, with a lock in each state, on this port or a free one.",
        )
        parser.add_argument(
            "--no-lock",
            action="store_true",
            help="Import without locks, as a negative control: the demo must then find overlaps.",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        if launch.is_launched():
            try:
                super().run_from_argv(argv)
            finally:
                launch.clean_up()
            return
        # As Django does, so that a wrong option prints the usage.
        self._called_from_command_line = True
        options = self.create_parser(argv[0], argv[1]).parse_args(argv[2:])
        try:
            launch.restart(vars(options))
        except CommandError as error:
            self.stderr.write(f"{type(error).__name__}: {error}")
            sys.exit(error.returncode)

    def handle(self, *args: Any, **options: Any) -> None:
        if not launch.is_launched():
            raise CommandError("Run this from the command line: python manage.py demo")
        # Import it here: the demo needs a POSIX system, and launch.py checks that first.
        from example_project.demo.main import run

        if code := run(options):
            sys.exit(code)


def cache_url(text: str) -> str:
    scheme = urlsplit(text).scheme
    if scheme not in ("redis", "rediss", "unix", "memcached") or not text.partition("://")[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not redis://… or memcached://host:port")
    return text


def broker_url(text: str) -> str:
    if not all(text.partition("://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address like redis://host:port/0")
    return text


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)
