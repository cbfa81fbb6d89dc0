"""Settings of a worker that records metrics and writes them into a file when a process ends."""

from __future__ import annotations

import os
from pathlib import Path

from celery.signals import worker_process_shutdown, worker_shutdown
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "django_singletask.contrib.opentelemetry"]  # noqa: F405

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))


def write(**kwargs: object) -> None:
    data = reader.get_metrics_data()
    if data is not None:
        path = Path(os.environ["SINGLETASK_TEST_METRICS"], f"{os.getpid()}.json")
        path.write_text(data.to_json())


worker_process_shutdown.connect(write)
worker_shutdown.connect(write)
