from __future__ import annotations

from typing import Any

from celery import current_task, shared_task
from django.conf import settings

from django_singletask import SingletonTask
from example_project.feeds import importer
from example_project.feeds.run_log import recorded_run


@shared_task(base=SingletonTask)
def import_feed(feed_url: str) -> dict[str, Any]:
    """Import one feed, one run at a time for each feed."""
    with recorded_run(settings.FEEDS_RUN_LOG, feed_url, current_task.request.id):
        return importer.import_feed(feed_url)


@shared_task
def import_feed_without_lock(feed_url: str) -> dict[str, Any]:
    """Do the same with no lock: the negative control of `manage.py demo --no-lock`."""
    with recorded_run(settings.FEEDS_RUN_LOG, feed_url, current_task.request.id):
        return importer.import_feed(feed_url)
