"""The worker's main process: stop on a cache that cannot hold locks."""

from __future__ import annotations

import os
import sys
from typing import Any

from celery.signals import worker_init

from django_singletask.checks import run

__all__ = ["connect"]


def connect() -> None:
    """Listen to the worker's start."""
    worker_init.connect(refuse, dispatch_uid="django_singletask.refuse", weak=False)


def refuse(**kwargs: Any) -> None:
    """Let a worker exit whose locks would not lock.

    Celery's Django fixup runs the system checks and throws their result away. Only SystemExit
    ends the worker from here: Celery logs and swallows any other error of a signal's receiver.
    """
    if os.environ.get("CELERY_SKIP_CHECKS"):
        return
    errors = [message for message in run() if message.is_serious() and not message.is_silenced()]
    if errors:
        text = "\n".join(str(error) for error in errors)
        sys.stderr.write(f"The worker does not start: its locks would not hold.\n{text}\n")
        sys.stderr.flush()
        raise SystemExit(1)
