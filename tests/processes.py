"""Programs of the tests that run as processes, in step with the test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


class Process:
    """A process that tells this one how far it is, and waits for it."""

    def __init__(self, module: str, *arguments: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **variables},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def says(self) -> str:
        """Return the next line that the process prints; an empty one if it has ended."""
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def running(module: str, *arguments: str, **variables: str) -> Iterator[Process]:
    """Run a program with these variables in its environment, and end it after the block."""
    process = Process(module, *arguments, **variables)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()
