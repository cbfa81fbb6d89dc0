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

from django.apps import AppConfig
from opentelemetry import metrics

from django_singletask.signals import LockEvent, lock_event

meter = metrics.get_meter("django_singletask")
holds = meter.create_histogram(
    "singletask.lock.hold", unit="s", description="Seconds for which a lock was held."
)
conflicts = meter.create_counter(
    "singletask.lock.conflicts", description="Calls that found their lock held."
)
duplicates = meter.create_counter(
    "singletask.lock.duplicates", description="Calls that an identical queued call stopped."
)
trouble = meter.create_counter(
    "singletask.lock.trouble", description="Locks that expired, were lost, retaken or cleared."
)


class OpenTelemetryConfig(AppConfig):
    """The app that a project adds to ``INSTALLED_APPS``; it records metrics in this process."""

    name = "django_singletask.contrib.opentelemetry"
    label = "django_singletask_opentelemetry"

    def ready(self) -> None:
        lock_event.connect(record, sender=LockEvent)


def record(*, event: LockEvent, **kwargs: Any) -> None:
    task = {"task": event.task}
    if event.held_for is not None:
        outcome = event.kind
        if event.result:
            outcome = event.result
        elif event.outcome:
            outcome = event.outcome
        holds.record(event.held_for, {**task, "outcome": outcome})
    if event.kind == "conflict":
        conflicts.add(1, {**task, "result": event.result, "reason": event.reason})
    elif event.kind == "duplicate":
        duplicates.add(1, task)
    elif event.kind not in ("acquired", "released"):
        trouble.add(1, {**task, "kind": event.kind})
