"""Write the shell command that stops a task, ready to be pasted."""

from __future__ import annotations

import shlex
import sys

from celery.app import app_or_default

__all__ = ["stop_command"]

ATTRIBUTES = ("app", "celery", "celery_app")
"""Names that a Celery application usually has in its module, or in the package around it."""


def stop_command(task_id: str, *, queued: bool = False) -> str:
    """Return the shell command that stops a running task, or discards a queued call."""
    what = ["revoke"] if queued else ["terminate", "SIGTERM"]
    return f"celery -A {_app()} control {shlex.join([*what, task_id])}"


def _app() -> str:
    """Return the name by which ``celery -A`` finds the application, as far as it is imported."""
    app = app_or_default()
    modules = [
        name
        for name, module in sys.modules.copy().items()
        if any(getattr(module, "__dict__", {}).get(each) is app for each in ATTRIBUTES)
    ]
    # Any of these modules will do; the shortest name is that of the package.
    return min({*modules} - {"__main__"}, key=len, default="<app>")
