"""The feed importer of the Celery cookbook: one lock for each feed, one run at a time."""

from __future__ import annotations

from example_project.celery import app as celery_app

# As Celery advises: import the app with the project, so that shared_task always finds it.
__all__ = ["celery_app"]
