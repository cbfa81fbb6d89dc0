"""Check the values that users pass: numbers of seconds, and words of a list."""

from __future__ import annotations

import math
from typing import Any

MAX_LEASE = 30 * 24 * 60 * 60
"""Longest lease in seconds: memcached takes anything above as a date."""


def check_seconds(option: str, value: Any, *, zero: bool = False, infinite: bool = False) -> float:
    """Return ``value`` if it is a valid number of seconds for the option.

    Raises ``TypeError`` for anything but a number. Raises ``ValueError`` for a number that is
    negative, 0 (unless ``zero=True``), infinite (unless ``infinite=True``) or above 30 days.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    in_range = is_number and (0 < value <= MAX_LEASE or (zero and value == 0))
    if in_range or (infinite and value == math.inf):
        return value  # type: ignore[no-any-return]
    least, end = "0 or more" if zero else "above 0", ", or math.inf" if infinite else ""
    error = ValueError if is_number else TypeError
    raise error(
        f"{option} must be a number of seconds, {least} and at most {MAX_LEASE} (30 days){end}, "
        f"not {value!r}."
    )


def check_choice(option: str, value: Any, choices: tuple[Any, ...], where: str = "") -> None:
    """Raise ``TypeError`` or ``ValueError`` if the value of an option is not one of a few."""
    fits = isinstance(value, tuple(map(type, choices)))  # 1 == True, but 1 is not valid
    if not fits or value not in choices:
        error, names = ValueError if fits else TypeError, ", ".join(map(str, choices))
        raise error(f"{option}={value!r}{where} is not one of {names}.")
