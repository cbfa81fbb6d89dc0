"""The settings, read late, so that ``override_settings`` and per-process settings work."""

from __future__ import annotations

import logging
import math
import re
import sys
from functools import lru_cache
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.signals import setting_changed

logger = logging.getLogger("django_singletask")
warn_once = lru_cache(maxsize=128)(logger.warning)

VERSION = "0.1.0.dev0"
"""The version of the package: the build and the documentation read it from here."""

DOCS = "https://django-singletask.readthedocs.io/en/"
DOCS += "latest" if "dev" in VERSION else VERSION
"""Where the documentation of this version is, for messages that name a page of it."""

MAX_LEASE = 30 * 24 * 60 * 60
"""Longest lease in seconds: memcached takes anything above as a date."""

DEFAULTS: dict[str, Any] = {
    # The alias in CACHES that holds the locks.
    "cache": "default",
    # The class of the store by the class of the cache, for caches that have none here.
    "stores": {},
    # The length of a lease in seconds.
    "lock_timeout": 60,
    # How the history is written: "background", "inline" or "off".
    "history": "background",
    # The days for which the history is kept.
    "history_days": 30,
    # Whether names show the arguments of a call.
    "record_arguments": True,
    # The address of a task's page in another tool, with the field {task_id}.
    "task_url": None,
}
TASK_URL = re.compile(r"https?://[^{}\s/?#]+[/?#](?:[^{}\s]*\{task_id\})+[^{}\s]*", re.IGNORECASE)
"""A valid ``SINGLETASK_TASK_URL``: no scheme that runs code, and no field in the host name."""
HISTORY_MODES = ("background", "inline", "off")


class Conf:
    """Each ``SINGLETASK_…`` setting by its short name, such as ``conf.lock_timeout``.

    A setting is read when it is needed first, and again after ``setting_changed``.
    """

    history: str
    """In tests an attribute of the class, which :meth:`forget` leaves."""
    was_changed = False
    """Whether a test has changed a setting; nothing else sends ``setting_changed``."""

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(name)
        values, default = vars(self), DEFAULTS[name]
        if name == "history" and is_test():
            # A thread would write outside the test's transaction and keep the database open.
            default = "inline"
        setting = f"SINGLETASK_{name.upper()}"
        value = getattr(settings, setting, default)
        if name == "lock_timeout":
            check_seconds(setting, value)
        if apps.ready:  # before that, a test environment is not known yet
            values[name] = value
        return value

    def forget(self, **kwargs: Any) -> None:
        """Read the settings again. A thread that reads one now writes it into the old dict."""
        self.__dict__ = {"was_changed": True}


conf = Conf()
setting_changed.connect(conf.forget)


def is_test() -> bool:
    """Return whether this process runs the tests of a project.

    Django's test runner and pytest-django both call ``setup_test_environment()``, which adds this
    outbox and this host. A test can change the hosts.
    """
    has_outbox = hasattr(sys.modules.get("django.core.mail"), "outbox")
    return has_outbox and (conf.was_changed or "testserver" in settings.ALLOWED_HOSTS)


def check_installed(**kwargs: Any) -> None:
    """Log once per process if locks are used but the app is not in ``INSTALLED_APPS``.

    A system check cannot report this, because the app itself registers the checks.
    """
    if apps.apps_ready and not apps.is_installed("django_singletask"):
        warn_once(
            "django_singletask is not in INSTALLED_APPS. Locks work, but there is no history, no "
            "system check and no 'manage.py locks', and the lock of a killed worker process stays "
            "until the next conflict on its host, or until its lease ends. Add "
            "\"django_singletask\" to INSTALLED_APPS and run 'manage.py migrate'."
        )


def in_words(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    return f"{type(error).__name__}: " + str(error).partition("\n")[0].rstrip(".")


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
