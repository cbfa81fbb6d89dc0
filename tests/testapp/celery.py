"""The Celery application of the tests, in the test process and in the workers that it starts."""

from __future__ import annotations

import json
import os
from urllib.parse import urlsplit

from celery import Celery

REDIS = urlsplit(os.environ.get("SINGLETASK_TEST_REDIS_URL", "redis://127.0.0.1:1/0")).netloc

app = Celery("tests")
app.conf.update(
    broker_url=os.environ.get("SINGLETASK_TEST_BROKER", f"redis://{REDIS}/1"),
    result_backend=f"redis://{REDIS}/2",
    broker_connection_retry_on_startup=True,
    task_default_queue=os.environ.get("SINGLETASK_TEST_QUEUE", "celery"),
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    result_expires=600,
    **json.loads(os.environ.get("SINGLETASK_TEST_CELERY", "{}")),
)
app.autodiscover_tasks()
