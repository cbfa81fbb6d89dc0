"""Let ``autoretry_for`` hold for the errors of the lock, too."""

from __future__ import annotations

from typing import Any, NoReturn

from celery import Task
from celery.app.autoretry import add_autoretry_behaviour

__all__ = ["raise_or_retry"]


def raise_or_retry(task: Task[..., Any], error: Exception) -> NoReturn:
    """Raise an error of the lock, or the ``Retry`` that ``autoretry_for`` makes of it.

    Celery wraps the body of a task, which runs inside the lock. So its wrapper is put around a body
    that raises the error, in a copy of the task: Celery wraps a task only once.
    """

    def run(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    failing = object.__new__(type(task))
    vars(failing).update(vars(task), run=run)
    vars(failing).pop("_orig_run", None)
    add_autoretry_behaviour(failing)
    failing.run()
    raise AssertionError("the body above returns nothing")
