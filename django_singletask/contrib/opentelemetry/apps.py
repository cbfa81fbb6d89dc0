"""Count what happens to the locks, with the API of OpenTelemetry.

* ``singletask.lock.hold``: a histogram of how many seconds locks were held, by ``task`` and
  ``outcome``.
* ``singletask.lock.conflicts``: calls that found their lock held, by ``task``, ``result`` and
  ``reason``.
* ``singletask.lock.duplicates``: calls that were not sent, by ``task``.
* ``singletask.lock.trouble``: locks of dead processes, locks that expired, were lost, retaken or
  cleared, and runs without their lock, by ``task`` and ``kind``.

Lock names are not attributes, because their number is unlimited. The metrics go to the meter
provider of the process, which may be set later.
"""

from __future__ import annotations

from typing import Any

from celery import signals
from django.apps import AppConfig
from opentelemetry import metrics

from django_singletask.signals import LockEvent, lock_event

BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600)
"""Seconds; a view of the meter provider can set others."""

meter: metrics.Meter = metrics.get_meter("django_singletask")
holds: metrics.Histogram = meter.create_histogram(
    "singletask.lock.hold",
    unit="s",
    description="Seconds for which a lock was held.",
    explicit_bucket_boundaries_advisory=BUCKETS,
)
conflicts: metrics.Counter = meter.create_counter(
    "singletask.lock.conflicts", description="Calls that found their lock held."
)
duplicates: metrics.Counter = meter.create_counter(
    "singletask.lock.duplicates", description="Calls that an identical queued call stopped."
)
trouble: metrics.Counter = meter.create_counter(
    "singletask.lock.trouble", description="Locks that expired, were lost, retaken or cleared."
)

FIRST_RESULT = {"skip": "skipped", "raise": "failed", "wait": "waiting", "requeue": "waiting"}
"""What becomes first of a call that meets a conflict, by its policy."""


class OpenTelemetryConfig(AppConfig):
    """The app that a project adds to ``INSTALLED_APPS``; it records metrics in this process."""

    name = "django_singletask.contrib.opentelemetry"
    label = "django_singletask_opentelemetry"

    def ready(self) -> None:
        lock_event.connect(record, sender=LockEvent)
        signals.worker_process_init.connect(begin)
        signals.worker_ready.connect(begin)


def record(*, event: LockEvent, **kwargs: Any) -> None:
    task = {"task": event.task}
    if event.held_for is not None:
        holds.record(event.held_for, {**task, "outcome": outcome_of(event)})
    if event.kind == "acquired":
        # Code outside a worker is known only when it takes a lock.
        trouble.add(0, {**task, "kind": "lost"})
    elif event.kind == "conflict":
        conflicts.add(1, {**task, "result": event.result, "reason": event.reason})
    elif event.kind == "duplicate":
        duplicates.add(1, task)
    elif event.kind != "released":
        trouble.add(1, {**task, "kind": event.kind})


def outcome_of(event: LockEvent) -> str:
    """Return how a hold ended: how its body did, unless its lock was no longer there by then."""
    if event.outcome == "lost":
        return "lost"
    if event.result:
        return event.result
    return event.kind


def begin(**kwargs: Any) -> None:
    """Begin the series of the registered tasks with 0, in a worker and in each of its processes.

    Prometheus sees an increase only between two numbers of a series. Without the 0, the first
    loss would begin its series, and raise no alert:

      process:     starts: 0                  lost: 1
      exports:               0 ... 0 ... 0            1    an increase of 1
      without the 0:                                  1    no increase
    """
    # Django must have loaded the models before.
    from django_singletask.models import RETAKEN, TROUBLE
    from django_singletask.task.base import singleton_tasks

    for name, lock_task in singleton_tasks().items():
        task = {"task": name}
        policy = lock_task.on_conflict
        conflicts.add(0, {**task, "result": FIRST_RESULT[policy], "reason": policy})
        if lock_task.unique_until:
            duplicates.add(0, task)
        for kind in (*TROUBLE, RETAKEN):
            trouble.add(0, {**task, "kind": kind})
