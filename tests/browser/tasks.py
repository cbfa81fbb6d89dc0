"""Tasks with the names of a real site; the worker of the browser tests includes them."""

from __future__ import annotations

import time

from celery import shared_task
from django.core.cache import caches

from django_singletask import SingletonTask

STOP = "stop-the-browser-tests"


def body() -> str:
    until = time.monotonic() + 120
    while time.monotonic() < until and not caches["redis"].get(STOP):
        time.sleep(0.1)
    return "done"


@shared_task(name="news.tasks.fetch_feed", base=SingletonTask, lock_on=["feed_url"])
def fetch_feed(feed_url: str) -> str:
    return body()


@shared_task(name="reports.tasks.monthly", base=SingletonTask)
def monthly() -> str:
    return body()
