"""The logger, and errors in words."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Final

logger: logging.Logger = logging.getLogger("django_singletask")
warn_once: Final = lru_cache(maxsize=128)(logger.warning)


def in_words(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line.rstrip('.')}"
