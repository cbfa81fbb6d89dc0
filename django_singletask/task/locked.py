"""A task whose calls have locks: its options as attributes, and its place among other bases."""

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

# Celery's own __call__ ends the chain of super().__call__(). As for a call without a message, it
# pushes another request, empty (Celery 5.4) or a copy, and what the body does, such as retry(), is
# not seen in the request of the message. In a worker Celery prevents that for the class that is
# called first, but here SingletonTask is called before.
ENDS_HERE = "singletask_chain_ends_here"
"""Attribute of a request: the next one that is pushed above it is itself."""


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

    # Other bases may have a __call__, which is called with the same request

    def rest_of_call(self, request: Any) -> Callable[..., Any]:
        """Return what is to be called under the lock, for a request that is pushed already."""
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
        """Push a new request, or once more the one whose chain of calls ends here."""
        request: Any = self.request_stack.top
        ends_here = request is not None and vars(request).pop(ENDS_HERE, False)
        # Celery's __call__ gives these two alone. Another base may call run() instead, and then
        # this is a request that the body has pushed.
        if ends_here and not args and kwargs.keys() == {"args", "kwargs"}:
            self.request_stack.push(request)
        else:
            super().push_request(*args, **kwargs)
