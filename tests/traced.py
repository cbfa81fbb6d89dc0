"""Let each message have the inner headers of a tool that traces calls.

The variable SINGLETASK_TEST_TRACE says what traces them here and in the worker: ``signal``, or
``sentry`` for the sentry-sdk that can be imported.
"""

from __future__ import annotations

import os
from typing import Any

KIND = os.environ.get("SINGLETASK_TEST_TRACE", "")


def add_inner_headers(headers: dict[str, Any], **kwargs: object) -> None:
    headers.setdefault("headers", {})["trace-id"] = "1"


def trace() -> None:
    """Let each message have inner headers, which hide the others in ``request.headers``."""
    if KIND == "signal":
        from celery.signals import before_task_publish

        before_task_publish.connect(add_inner_headers)
    elif KIND == "sentry":
        import sentry_sdk
        from sentry_sdk.integrations.celery import CeleryIntegration

        sentry_sdk.init(
            dsn="http://key@127.0.0.1:1/1",
            transport=lambda event: None,
            integrations=[CeleryIntegration()],
            default_integrations=False,
            traces_sample_rate=1.0,
        )
