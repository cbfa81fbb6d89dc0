"""A command as a process: its arguments, its exit codes, and output that may end early."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_singletask.management.arguments import with_action

__all__ = ["UNKNOWN", "Alarm", "ProcessCommand"]

UNKNOWN = 3
"""Exit code if nothing can be said; monitors take 1 for a warning, and 2 for critical."""


class Alarm(CommandError):
    """What a monitor must know: the message begins with WARNING or CRITICAL."""


class ProcessCommand(BaseCommand):
    """A command whose exit codes are those that monitors know."""

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a separate process, whose output may end early or lack characters."""
        gc.set_threshold(50_000)  # to look for garbage took a tenth of the time of a long list
        with suppress(AttributeError):  # closed, or replaced by something simpler
            sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
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
        except OSError as error:
            # Python would write what is left in the buffer at exit, and fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(128 + 13)  # as if by SIGPIPE; 0 would say that nothing is wrong
            sys.stderr.write(f"Error: The output cannot be written: {error}\n")
            sys.exit(UNKNOWN)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Print an error without the name of its class, and an alarm as it is."""
        try:
            return super().execute(*args, **options)
        except CommandError as error:
            if options["traceback"] or not self._called_from_command_line:
                raise
            self.stderr.write(str(error) if isinstance(error, Alarm) else f"Error: {error}")
            sys.exit(error.returncode)
