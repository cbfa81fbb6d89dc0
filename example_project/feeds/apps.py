from __future__ import annotations

from django.apps import AppConfig


class FeedsConfig(AppConfig):
    name = "example_project.feeds"
    default_auto_field = "django.db.models.BigAutoField"
