"""The settings, read late, so that ``override_settings`` and per-process settings work."""

from __future__ import annotations

import re
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core.signals import setting_changed

from django_singletask.arguments import check_seconds
from django_singletask.log import warn_once

DEFAULTS: Final = {
    # The alias in CACHES that holds the locks.
    "cache": "default",
    # The class of the store by the class of the cache, for caches that have none here.
    "stores": {},
    # The length of a lease in seconds.
    "lock_timeout": 60,
    # How the history is written: "background", "inline" or "off".
    "history": "background",
    # What it keeps: "all", or only "trouble", and the calls that found a lock held.
    "history_keeps": "all",
    # The days for which the history is kept.
    "history_days": 30,
    # Whether names show the arguments of a call.
    "record_arguments": True,
    # The address of a task's page in another tool, with the field {task_id}.
    "task_url": None,
    # Whether this process runs the tests of a project.
    "testing": False,
}
TASK_URL = re.compile(r"https?://[^{}\s/?#]+[/?#](?:[^{}\s]*\{task_id\})+[^{}\s]*", re.IGNORECASE)
"""A valid ``SINGLETASK_TASK_URL``: no scheme that runs code, and no field in the host name."""
HISTORY_MODES = ("background", "inline", "off")
HISTORY_KEEPS = ("all", "trouble")


class Conf:
    """Each ``SINGLETASK_…`` setting by its short name, such as ``conf.lock_timeout``.

    A setting is read when it is needed first, and again after ``setting_changed``.
    """

    lock_timeout: float
    history: str
    """The helpers of ``testing`` set it on the class, where :meth:`forget` leaves it."""

    def __getattr__(self, name: str) -> Any:
        if name not in DEFAULTS:
            raise AttributeError(name)
        values = vars(self)
        default = DEFAULTS[name]
        if name == "history" and self.testing:
            # A thread would write outside the test's transaction and keep the database open.
            default = "inline"
        setting = f"SINGLETASK_{name.upper()}"
        value = getattr(settings, setting, default)
        if name == "lock_timeout":
            check_seconds(setting, value)
        if apps.ready:  # before that, ready() of another app may change a setting
            values[name] = value
        return value

    def forget(self, **kwargs: Any) -> None:
        """Read the settings again. A thread that reads one now writes it into the old dict."""
        self.__dict__ = {}


conf: Conf = Conf()
setting_changed.connect(conf.forget)


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
