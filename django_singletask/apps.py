"""Connect the checks, the history and the worker's side when Django starts."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

__all__ = ["SingletaskConfig"]


class SingletaskConfig(AppConfig):
    """The app to name in INSTALLED_APPS: ``"django_singletask"``."""

    name = "django_singletask"
    verbose_name = _("Task locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Imported here, because these modules import models.
        from django_singletask import checks  # noqa: F401, it registers its functions
        from django_singletask.history import recorder
        from django_singletask.worker import startup, sweeper  # noqa: F401, they connect signals

        recorder.connect()
