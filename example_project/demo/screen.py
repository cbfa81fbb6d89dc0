"""What the demo shows: on a terminal a table that is drawn anew, else a line now and then."""

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
        self._drawn = 0
        self._shown = 0.0

    def say(self, text: str = "") -> None:
        """Print for good, below what is there."""
        self._drawn = 0
        self.stream.write(text + "\n")
        self.stream.flush()

    def clear(self) -> None:
        """Take the table away, to make room for another in its place."""
        if self._drawn:
            self.stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def show(
        self, table: Callable[[], Sequence[str]], line: Callable[[], str], *, every: float = 1.0
    ) -> None:
        """Draw `table` over the last one; where that cannot be, print `line` `every` seconds."""
        size = shutil.get_terminal_size()
        now = time.monotonic()
        if now - self._shown < (0.2 if self.live else every):
            return
        self._shown = now
        lines = table() if self.live else []
        if lines and len(lines) < size.lines:
            # Wider lines would wrap, and the cursor then not find back to the first.
            width = min(WIDTH, size.columns - 1)
            up = f"\x1b[{self._drawn}A" if self._drawn else ""
            self.stream.write(up + "".join(f"\r{fit(text, width)}\x1b[K\n" for text in lines))
            self.stream.flush()
            self._drawn = len(lines)
        else:
            self.say(fit(line(), WIDTH - 1))


def fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
