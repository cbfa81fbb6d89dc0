"""Read and write spans of time: one grammar for the command, the admin and its URLs."""

from __future__ import annotations

import re

__all__ = ["compact", "duration", "in_words", "parse_duration"]

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST = 100 * 365 * 86_400
"""Seconds; a time that lies further back than the calendar of a database is no use."""


def parse_duration(text: str) -> float:
    """Return the seconds of ``90s``, ``15m``, ``2h``, ``7d`` or ``1h30m``.

    Raises ``ValueError``, with a message that says what is expected, for anything else.
    """
    parts = re.findall(r"([0-9]+)([smhd])", text) if len(text) < 50 else []
    given = [unit for _number, unit in parts]
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    # Each unit once, the largest first: 1h30m, not 30m1h.
    ordered = given == [unit for unit in "dhms" if unit in given]
    whole = "".join(number + unit for number, unit in parts) == text
    if not (parts and ordered and whole):
        raise ValueError(f"{text!r} is no duration: write it as 90s, 15m, 2h or 7d.")
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"{text!r}: a duration must be positive, {compact(LONGEST)} at most.")
    return seconds


def compact(seconds: float) -> str:
    """Write a duration as :func:`parse_duration` reads it: ``7d``, ``1h30m``."""
    left, parts = round(seconds), []
    for unit in "dhms":
        number, left = divmod(left, UNITS[unit])
        parts += [f"{number}{unit}"] * bool(number)
    return "".join(parts) or "0s"


def duration(seconds: float) -> str:
    """Write a duration in its two largest units: ``3s``, ``2m 14s``, ``1h 02m``, ``3d 04h``."""
    total = int(seconds)
    minutes, secs = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    if minutes:
        return f"{minutes}m {secs:02d}s"
    return f"{secs}s"


def in_words(seconds: float) -> str:
    """Write a duration for a sentence: ``0.04 s``, ``60 s``, ``1m 48s``."""
    if 0 < seconds < 0.995:
        return f"{seconds:.2f} s" if seconds >= 0.005 else "less than 0.01 s"
    return f"{seconds:.0f} s" if seconds < 60.5 else duration(seconds)
