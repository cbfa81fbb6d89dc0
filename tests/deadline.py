"""Wait for a condition, instead of sleeping for as long as it might take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], what: str, deadline: float = 30) -> T:
    """Return the first true result of ``condition``. Fail after ``deadline`` seconds."""
    until = time.monotonic() + deadline
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > until:
            raise AssertionError(f"Not within {deadline} s: {what}")
        time.sleep(0.01)
