"""The run of a task that wants a lock, and how its body ended."""

from __future__ import annotations

from typing import NamedTuple

from celery import current_task
from celery.exceptions import Ignore, Reject, Retry

from django_singletask.exceptions import Postponed
from django_singletask.holder import Holder

__all__ = ["NO_RUN", "Run", "result_of"]


class Run(NamedTuple):
    """The run of a task that wants a lock.

    ``token`` is the one that the worker's main process chose for it (None: a random one);
    ``quiet`` is set for tasks with ``lock_history=False``, ``redelivered`` for a message that the
    broker, or an earlier delivery, says was delivered before.
    """

    task: str | None = None
    task_id: str | None = None
    retries: int = 0
    token: str | None = None
    quiet: bool = False
    redelivered: bool = False

    @classmethod
    def current(cls) -> Run:
        """Describe the Celery task whose body is running here, if one is."""
        task = current_task._get_current_object()  # type: ignore[attr-defined] # noqa: SLF001
        if task is None:  # current_task is a proxy, never None itself: test what is behind it
            return NO_RUN
        return cls(task.name, task.request.id, task.request.retries or 0)

    def holder(self, name: str, length: float, slots: int = 1) -> Holder:
        """Return the record of an acquisition by this run, in this process, now."""
        task, task_id, retries, token, *_ = self
        more = {"slots": slots} if slots > 1 else {}
        return Holder.new(
            name, length, token=token, task=task, task_id=task_id, retries=retries, **more
        )


NO_RUN = Run()


def result_of(error: BaseException | None) -> str:
    """Return the word of the history for the end of a body, given the error that ended it."""
    if isinstance(error, Retry):
        return "retried"
    if isinstance(error, Postponed):
        return "postponed"
    if isinstance(error, (Ignore, Reject)):
        return "ignored"
    return "raised" if error else "returned"
