"""Show a table that is redrawn in place on a terminal, and lines from time to time elsewhere."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from typing import TextIO

WIDTH = 80


class Screen:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.every = 1.0  # the least time between two lines, in seconds
        self._drawn = 0
        self._shown = 0.0

    def say(self, text: str = "") -> None:
        """Print a text that stays, below the table."""
        self._drawn = 0
        self.stream.write(text + "\n")
        self.stream.flush()

    def clear(self) -> None:
        """Remove the table, so that something else can be printed in its place."""
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def show(self, table: Callable[[], Sequence[str]], line: Callable[[], str]) -> None:
        """Draw `table` over the last table, or print `line` if the stream is not a terminal."""
        size = shutil.get_terminal_size()
        now = time.monotonic()
        if now - self._shown < (0.2 if self.live else self.every):
            return
        self._shown = now
        lines = table() if self.live else []
        if lines and len(lines) < size.lines:
            # Wider lines would wrap, and the cursor would not return to the first line.
            width = min(WIDTH, size.columns - 1)
            up = f"\x1b[{self._drawn}A" if self._drawn else ""
            self.stream.write(up + "".join(f"\r{fit(text, width)}\x1b[K\n" for text in lines))
            self.stream.flush()
            self._drawn = len(lines)
        else:
            self.say(fit(line(), WIDTH - 1))


def fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
