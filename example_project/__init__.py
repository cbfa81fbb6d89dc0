"""The feed importer of the Celery cookbook, working: one task a feed, one run at a time."""

from __future__ import annotations

from example_project.celery import app as celery_app

# Celery's own advice: loaded with the project, so that shared_task finds this app everywhere.
__all__ = ["celery_app"]
