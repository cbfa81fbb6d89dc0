"""Wait for what must come, instead of sleeping for as long as it might take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, deadline: float = 20) -> T:
    """Return the first true answer of a condition; fail after ``deadline`` seconds."""
    until = time.monotonic() + deadline
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until:
            raise AssertionError(f"Not within {deadline} s: {what}")
        time.sleep(0.01)
