"""Read the settings late, so that ``override_settings`` and per-process settings work."""

from __future__ import annotations

import math
import sys
from typing import Any

from django.conf import settings

MAX_LEASE = 30 * 24 * 60 * 60
"""Longest lease in seconds: memcached takes anything above as a date."""

DEFAULTS: dict[str, Any] = {
    "SINGLETASK_CACHE": "default",
    "SINGLETASK_LOCK_TIMEOUT": 60,
    "SINGLETASK_HISTORY": "background",
    "SINGLETASK_HISTORY_DAYS": 30,
    "SINGLETASK_RECORD_ARGUMENTS": True,
}
SETTINGS = {name.removeprefix("SINGLETASK_").lower(): name for name in DEFAULTS}
HISTORY_MODES = ("background", "inline", "off")


_ABSENT = object()


class Conf:
    """Give each ``SINGLETASK_…`` setting under its short name."""

    cache: str
    """Alias in ``CACHES`` that holds the locks."""
    lock_timeout: float
    """Length of a lease in seconds."""
    history: str
    """How the history is written: ``"background"``, ``"inline"`` or ``"off"``."""
    history_days: float
    """Days for which the history is kept."""
    record_arguments: bool
    """Whether names show the arguments of a call."""

    def __init__(self) -> None:
        self._source: object = None
        self._inherited: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        setting = SETTINGS.get(name)
        if setting is None:
            raise AttributeError(name)
        source = vars(settings)["_wrapped"]
        if self._source is not source:  # first use, override_settings() and its like
            getattr(settings, setting, None)  # lets Django read them first
            self._source = source = vars(settings)["_wrapped"]
            self._inherited = {}
        value = vars(source).get(setting, _ABSENT)
        if value is _ABSENT:
            # What an override does not name stands in the settings below it. Kept, since Django
            # takes 3 µs to find that it is nowhere.
            if setting not in self._inherited:
                self._inherited[setting] = getattr(settings, setting, _ABSENT)
            value = self._inherited[setting]
        if value is not _ABSENT:
            return value
        if name == "history" and _is_test():
            # A thread would write beside the transaction of the test, and keep its database open.
            return "inline"
        return DEFAULTS[setting]


def _is_test() -> bool:
    # What setup_test_environment() leaves, of Django's runner and of pytest-django.
    utils = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")


conf = Conf()


def check_seconds(option: str, value: Any, *, zero: bool = False) -> float:
    """Return ``value`` if it can be a duration of the option, in seconds.

    Raises ``TypeError`` for anything but a number and ``ValueError`` for a number that is not
    finite, not positive (``zero=True`` lets 0 pass) or above 30 days.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{option} must be a number of seconds, not {value!r}.")
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{option} must be a positive, finite number of seconds, not {value!r}.")
    if value > MAX_LEASE:
        raise ValueError(
            f"{option} must be at most {MAX_LEASE} seconds (30 days), not {value!r}: "
            "a lease is renewed while the task runs, so it need not be as long as the task."
        )
    return value
