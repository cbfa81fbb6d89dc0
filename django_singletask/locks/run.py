"""The run of a task that wants a lock, and how its body ended."""

from __future__ import annotations

import dataclasses
from typing import Any

from celery import current_task
from celery.exceptions import Ignore, Reject, Retry

from django_singletask.exceptions import Postponed

__all__ = ["Run", "result_of"]


@dataclasses.dataclass(frozen=True)
class Run:
    """The run of a task that wants a lock.

    ``token`` is the one that the worker's main process chose for it (None: a random one);
    ``quiet`` is set for tasks with ``lock_history=False``.
    """

    task: str | None = None
    task_id: str | None = None
    retries: int = 0
    token: str | None = None
    quiet: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What the holder's record says of this run."""
        return {name: value for name, value in vars(self).items() if name != "quiet"}

    @classmethod
    def current(cls) -> Run:
        """Describe the Celery task whose body is running here, if one is."""
        task = current_task._get_current_object()  # type: ignore[attr-defined]
        if task is None:  # a Proxy of None, which is why the object itself is asked for
            return cls()
        return cls(task.name, task.request.id, task.request.retries or 0)


def result_of(error: BaseException | None) -> str:
    """Return the word of the history for the end of a body, given the error that ended it."""
    if isinstance(error, Retry):
        return "retried"
    if isinstance(error, Postponed):
        return "postponed"
    if isinstance(error, (Ignore, Reject)):
        return "ignored"
    return "raised" if error else "returned"
