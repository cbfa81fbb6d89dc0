"""The Celery application of the benchmarks: one no-op task for each candidate.

Each is configured as the README of its library says. All ignore results.
"""

from __future__ import annotations

import os
import struct
import time
from functools import cache
from typing import Any

import django
from celery import Celery, Task
from celery.signals import task_prerun
from celery_once import QueueOnce
from celery_singleton import Singleton

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
django.setup()

from django.apps import apps  # noqa: E402
from django.core.cache import cache as django_cache  # noqa: E402

from benchmarks.settings import REDIS  # noqa: E402

NOTE = struct.Struct("=iid")
RUNS = -1

app = Celery("benchmarks")
app.conf.update(
    broker_url=f"{REDIS}/1",
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    singleton_backend_url=f"{REDIS}/2",
    singleton_lock_expiry=3600,
)
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": f"{REDIS}/2", "default_timeout": 3600},
}


WORK = 0.02
"""Seconds that a task computes which is no no-op."""


@cache
def marks() -> int:
    return os.open(os.environ["BENCHMARK_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


@cache
def deliveries() -> int:
    path = os.environ["BENCHMARK_DELIVERIES"]
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(number: int, hops: int) -> None:
    """Note a delivery of a call and how often it was postponed before, or that it runs."""
    os.write(deliveries(), NOTE.pack(number, hops, time.monotonic()))


def ran() -> None:
    # Write the time to a file: that takes 2 µs. A request to a server would cost as much as a lock.
    os.write(marks(), struct.pack("d", time.monotonic()))


def work() -> None:
    ends = time.thread_time() + WORK
    while time.thread_time() < ends:
        pass
    ran()


@app.task
def plain(number: int) -> None:
    ran()


@app.task
def plain_works(number: int) -> None:
    work()


@app.task
def recipe(number: int) -> None:
    # As in Celery's cookbook: a run that took longer than the expiry does not delete the lock.
    timeout_at = time.monotonic() + 57
    key = f"recipe-lock-{number}"
    if django_cache.add(key, "oid", 60):
        try:
            ran()
        finally:
            if time.monotonic() < timeout_at:
                django_cache.delete(key)


@app.task(base=Singleton)
def celery_singleton(number: int) -> None:
    ran()


@app.task(base=QueueOnce)
def celery_once(number: int) -> None:
    ran()


if apps.is_installed("django_singletask"):
    from django_singletask import SingletonTask
    from django_singletask.task.header import Header

    @app.task(base=SingletonTask)
    def ours(number: int) -> None:
        ran()

    @app.task(base=SingletonTask, unique_until="start")
    def ours_unique(number: int) -> None:
        ran()

    @app.task(base=SingletonTask, lock_on=[], on_conflict="requeue")
    def requeued(number: int) -> None:
        note(number, RUNS)

    if "BENCHMARK_DELIVERIES" in os.environ:

        @task_prerun.connect(sender=requeued)
        def deliver(task_id: str, task: Task, args: tuple[int], **kwargs: Any) -> None:
            header = Header.of(task.request.headers, task_id, task.name)
            note(args[0], header.hops if header else 0)

    @app.task(base=SingletonTask)
    def ours_works(number: int) -> None:
        work()
