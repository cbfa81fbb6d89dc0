"""The lock of each call of a task: its options as attributes, and questions about it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from celery.result import AsyncResult

from django_singletask.locks.keys import NO_LOCK, LockKey, call_key
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.parameters import Parameters
from django_singletask.locks.run import Run
from django_singletask.task.chained import ChainedTask
from django_singletask.task.options import LockOptions
from django_singletask.task.unique import QueuedCall

__all__ = ["LockedTask"]


class LockedTask(ChainedTask):
    """A task that knows the lock of each of its calls; see :class:`SingletonTask`."""

    abstract = True

    lock_timeout: float | None = None
    lock_renew: bool = True
    lock_on: Sequence[str] | None = None
    lock_name: Any = None
    on_conflict: str = "skip"
    lock_wait: float | None = None
    lock_at_least: float = 0
    lock_slots: int = 1
    on_skip: Any = None
    on_outage: str = "raise"
    skip_result: Any = None
    unique_until: str | None = None
    unique_for: float = 3600
    on_duplicate: str = "return"
    lock_history: bool = True

    parameters: Parameters
    """Of the body: what calls are bound to."""

    def __new__(cls, *args: Any, **kwargs: Any) -> LockedTask:
        # Not in __init__: a task class may have one that does not call this one.
        task: LockedTask = super().__new__(cls)
        task.parameters = Parameters(inspect.signature(task.run))
        return task

    def lock(self, /, *args: Any, **kwargs: Any) -> TaskLock:
        """Return the lock of a call with these arguments, not acquired.

        ``task.lock(7).locked()`` asks whether that call is running. Arguments that do not make the
        lock may be left out. Raises ``TypeError`` if the arguments do not fit the task or have no
        stable form, and :class:`LockError` if ``lock_name`` says that the call takes no lock.
        """
        options = LockOptions.of(self)
        return options.lock(self.lock_key(args, kwargs, partial=True), self.name)

    def queued(self, /, *args: Any, **kwargs: Any) -> AsyncResult[Any] | None:
        """Return the result of the call that stops one with these arguments at enqueue, if any.

        Asks the cache; the answer can be out of date when you act on it. Raises ``TypeError`` as
        :meth:`lock` does.
        """
        key, options = self.lock_key(args, kwargs, partial=True), LockOptions.of(self)
        if key == NO_LOCK:
            return None
        holder = QueuedCall(key, options, Run(self.name)).holder()
        return self.AsyncResult(holder.task_id) if holder and holder.task_id else None

    def lock_key(
        self, args: Any, kwargs: Any, options: LockOptions | None = None, **facts: Any
    ) -> LockKey:
        """Return name and key of the lock of a call with these options (default: the task's own).

        ``facts`` are the other arguments of :func:`call_key`.
        """
        options = LockOptions.of(self) if options is None else options
        facts |= {"lock_on": options.lock_on, "lock_name": options.lock_name}
        return call_key(self.name, self.parameters, args or (), kwargs or {}, **facts)
