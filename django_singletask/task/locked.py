"""A task whose calls have locks: its options as attributes, and its work with other bases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from celery import Task
from celery.contrib.django.task import DjangoTask
from celery.result import AsyncResult

from django_singletask.locks.keys import NO_LOCK, LockKey, call_key
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.parameters import Parameters
from django_singletask.locks.run import Run
from django_singletask.task.options import LockOptions
from django_singletask.task.unique import QueuedCall

__all__ = ["LockedTask"]

# Celery's __call__ ends the chain of super().__call__(). It pushes another request, empty (Celery
# 5.4) or a copy, so the request of the message does not see what the body does, such as retry().
# In a worker Celery prevents that only for the class that is called first.
ENDS_HERE = "singletask_chain_ends_here"
"""Attribute of a request that is to be pushed again instead of another request."""


class LockedTask(DjangoTask):  # type: ignore[type-arg] # it is not generic at run time
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
    """The parameters of the body."""

    def __new__(cls, *args: Any, **kwargs: Any) -> LockedTask:
        # Not in __init__, which a task class may override without super().
        task: LockedTask = super().__new__(cls)
        task.parameters = Parameters(inspect.signature(task.run))
        return task

    def lock(self, /, *args: Any, **kwargs: Any) -> TaskLock:
        """Return the lock of a call with these arguments, not acquired.

        ``task.lock(7).locked()`` asks whether that call is running. Arguments that are not part of
        the lock may be left out. Raises ``TypeError`` if the arguments do not fit the task or have
        no stable form, and :class:`LockError` if ``lock_name`` returns None: no lock.
        """
        options = LockOptions.of(self)
        return options.lock(self.lock_key(args, kwargs, partial=True), self.name)

    def queued(self, /, *args: Any, **kwargs: Any) -> AsyncResult[Any] | None:
        """Return the result of a queued call with these arguments; None if there is none.

        This asks the cache, and the answer can be outdated when you use it. Raises ``TypeError``
        as :meth:`lock` does.
        """
        key, options = self.lock_key(args, kwargs, partial=True), LockOptions.of(self)
        if key == NO_LOCK:
            return None
        holder = QueuedCall(key, options, Run(self.name)).holder()
        return self.AsyncResult(holder.task_id) if holder and holder.task_id else None

    def lock_key(
        self, args: Any, kwargs: Any, options: LockOptions | None = None, **facts: Any
    ) -> LockKey:
        """Return the name and key of a call's lock; ``facts`` are arguments of :func:`call_key`."""
        options = LockOptions.of(self) if options is None else options
        facts |= {"lock_on": options.lock_on, "lock_name": options.lock_name}
        return call_key(self.name, self.parameters, args or (), kwargs or {}, **facts)

    def rest_of_call(self, request: Any) -> Callable[..., Any]:
        """Return what to call under the lock: the body, or the ``__call__`` of other bases."""
        call = super().__call__
        if getattr(call, "__func__", None) is Task.__call__:
            return self.run  # no other base has one

        def call_others(*args: Any, **kwargs: Any) -> Any:
            setattr(request, ENDS_HERE, True)
            try:
                return call(*args, **kwargs)
            finally:
                vars(request).pop(ENDS_HERE, None)

        return call_others

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """Push a new request, or the current one again if its chain of calls ends here."""
        request: Any = self.request_stack.top
        ends_here = request is not None and vars(request).pop(ENDS_HERE, False)
        # Only Celery's __call__ passes exactly these two. If another base calls run() instead, this
        # request was pushed by the body.
        if ends_here and not args and kwargs.keys() == {"args", "kwargs"}:
            self.request_stack.push(request)
        else:
            super().push_request(*args, **kwargs)
