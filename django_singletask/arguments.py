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
    error: type[Exception] = ValueError
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        error = TypeError
    elif 0 < value <= MAX_LEASE or (zero and value == 0) or (infinite and value == math.inf):
        return value
    least = "above 0"
    if zero:
        least = "0 or more"
    end = ""
    if infinite:
        end = ", or math.inf"
    raise error(
        f"{option} must be a number of seconds, {least} and at most {MAX_LEASE} (30 days){end}, "
        f"not {value!r}."
    )


def check_choice(option: str, value: Any, choices: tuple[Any, ...], where: str = "") -> None:
    """Raise ``TypeError`` or ``ValueError`` if the value of an option is not one of a few."""
    error: type[Exception] = ValueError
    types = tuple(map(type, choices))
    if not isinstance(value, types):  # 1 == True, but 1 is not valid
        error = TypeError
    elif value in choices:
        return
    names = ", ".join(map(str, choices))
    raise error(f"{option}={value!r}{where} is not one of {names}.")
