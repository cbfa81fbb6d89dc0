"""The app that a project adds to ``INSTALLED_APPS``."""

from __future__ import annotations

from django.apps import AppConfig

__all__: list[str] = []


class OpenTelemetryConfig(AppConfig):
    """Record metrics of the locks in this process."""

    name = "django_singletask.contrib.opentelemetry"
    label = "django_singletask_opentelemetry"

    def ready(self) -> None:
        from django_singletask.contrib.opentelemetry import metrics

        metrics.connect()
