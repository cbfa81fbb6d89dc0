"""SingletonTask, the Celery base class of a task with a lock; and how to find all such tasks."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery import Task, current_app
from celery.contrib.django.task import DjangoTask
from celery.exceptions import TaskPredicate
from celery.result import AsyncResult, EagerResult
from celery.signals import celeryd_after_setup, import_modules
from celery.utils import uuid
from django.db import transaction
from django.utils.module_loading import autodiscover_modules
from vine import promise

from django_singletask.conf import check_installed
from django_singletask.exceptions import DuplicateTask, LockConflict
from django_singletask.locks.keys import NO_LOCK, LockKey, call_key
from django_singletask.locks.lock import TaskLock, current_lock
from django_singletask.locks.parameters import Parameters
from django_singletask.locks.run import Run
from django_singletask.task.definition import bind_functions, check_definition, refuse_unsendable
from django_singletask.task.delivery import QUEUED_AGAIN, deliver
from django_singletask.task.header import Header, hidden_arguments
from django_singletask.task.options import LockOptions
from django_singletask.task.policies import ON_CONFLICT
from django_singletask.task.unique import QueuedCall, delay_of

# Not in worker.startup, which only an installed app connects.
celeryd_after_setup.connect(check_installed)


# Celery's __call__ ends the chain of super().__call__(). It pushes another request, empty (Celery
# 5.4) or a copy, so the request of the message does not see what the body does, such as retry().
# In a worker Celery prevents that only for the class that is called first.
ENDS_HERE = "singletask_chain_ends_here"
"""Attribute of a request that is to be pushed again instead of another request."""


class SingletonTask(DjangoTask):  # type: ignore[type-arg] # it is not generic at run time
    """A task that runs only once at a time for the same arguments.

    Use it as ``@shared_task(base=SingletonTask)``. A message, ``.apply()`` and a direct call
    ``task(...)`` take the lock; ``task.run(...)`` runs only the body. Set the options below in
    the decorator or on a subclass, or for one call in
    ``apply_async(..., lock_options={"on_conflict": "raise"})``.

    * ``lock_timeout``: lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``), at most 30 days.
    * ``lock_renew``: renew the lease while the task runs; False needs ``lock_timeout``.
    * ``lock_on``: names of the arguments that identify the lock; ``[]``: one lock for all calls.
    * ``lock_name``: the lock's name: a format string over the arguments, or a function of them.
    * ``on_conflict``: ``"skip"``; ``"raise"`` (:class:`LockConflict`); ``"wait"``; ``"requeue"``:
      postpone the call until it can run; ``"rerun"``: of all calls that conflict, only the last
      runs afterwards. A call without a message (direct, ``apply()``) raises instead of these two.
    * ``lock_wait``: seconds after which ``"wait"`` or ``"requeue"`` raises; ``math.inf``: never.
    * ``lock_at_least``: a run that returns keeps the lock until so many seconds after its start.
    * ``on_outage``: if the cache cannot be used, ``"raise"`` :class:`LockUnavailable`, ``"run"``
      without the lock, or ``"skip"`` the run. Unless it is ``"run"``, a message of ``"requeue"``,
      and one that was postponed before, is postponed until the cache answers.
    * ``skip_result``: what a skipped run returns.
    * ``on_skip``: a function to call on a skip, with the :class:`LockConflict` and the call's
      arguments; it returns the result. A method, or a function with ``bind=True``, gets the task
      first.
    * ``unique_until``: do not send an identical call until this one has started (``"start"``) or
      finished (``"finish"``), or for ``unique_for`` seconds after its sending (``"expiry"``).
    * ``unique_for``: the longest time in seconds for which a queued call stops identical calls; at
      most 30 days.
    * ``on_duplicate``: ``"return"`` the queued call's result, ``"raise"`` :class:`DuplicateTask`,
      or ``"replace"`` the queued call, which is then skipped when a worker gets it.
    * ``lock_history``: False records only trouble.

    Creating the class raises ``TypeError`` for options of a wrong type, and for coroutine and
    generator functions.
    """

    abstract = True

    lock_timeout: float | None
    lock_renew: bool
    lock_on: Sequence[str] | None
    lock_name: Any
    on_conflict: str
    lock_wait: float | None
    lock_at_least: float
    lock_slots: int
    on_skip: Any
    on_outage: str
    skip_result: Any
    unique_until: str | None
    unique_for: float
    on_duplicate: str
    lock_history: bool
    vars().update(LockOptions._field_defaults)

    parameters: Parameters
    """The parameters of the body."""

    # Celery logs these errors without a traceback.
    throws: tuple[type[Exception], ...] = (LockConflict,)

    def __new__(cls, *args: Any, **kwargs: Any) -> SingletonTask:
        # Not in __init__, which a task class may override without super().
        task: SingletonTask = super().__new__(cls)
        task.parameters = Parameters(inspect.signature(task.run))
        return task

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_definition(cls, SingletonTask)
        if LockConflict not in cls.throws:
            cls.throws = (*cls.throws, LockConflict)
        if "_decorated" in cls.__dict__:
            bind_functions(cls)

    # The locks of its calls

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

    # Sending

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        *rest: Any,
        lock_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Send the task, with its lock's key in the message.

        The options are Celery's, and ``lock_options``: lock options for this call. With
        ``unique_until``, a duplicate is not sent, and the queued call's result is returned.
        Raises ``TypeError`` for unknown options, and for an argument without a stable form;
        :class:`DuplicateTask` with ``on_duplicate="raise"``; :class:`LockUnavailable` with
        ``unique_until``.
        """
        # Pass these by name, and only if the caller did: another base may override this method as
        # apply_async(self, args, kwargs, **options), and set defaults in its options.
        if len(rest) > len(POSITIONAL):
            raise TypeError(f"apply_async of {self.name} takes at most 7 arguments by position.")
        passed = {n: v for n, v in zip(POSITIONAL, rest, strict=False) if v is not None}
        options = dict(**passed, **options)  # it raises for an option that is passed twice
        refuse_unsendable(f"apply_async of {self.name}", options, lock_options)
        again = Header.of(options.get("headers"), task_id, self.name) is not None
        # A call with an id (as in a chain or a group), a callback or a chord must be sent, because
        # other calls wait for it.
        awaited = task_id or any(map(options.get, AWAITED))
        header = self._header(args, kwargs, task_id or uuid(), lock_options, options)
        when = options.get("countdown") or options.get("eta")
        queued_call = None if again else self._queued_call(header)
        try:
            if queued_call is not None:
                holder = queued_call.enqueue(delay_of(when))
                header = header.next(queued=queued_call.value, ticket=queued_call.ticket)
                header = header.without_ticket() if awaited else header
                if holder is not None and not awaited:
                    return self.AsyncResult(queued_call.duplicate_of(holder))
            due = header.due or round(time.time() + delay_of(when), 3)
            options["headers"] = header._replace(due=due).into(options.get("headers"))
            result = super().apply_async(args, kwargs, task_id=header.task_id, **options)
        except BaseException:
            if queued_call is not None:
                queued_call.give_back()
            raise
        if queued_call is not None:
            queued_call.note()
        if again and header.queued:
            setattr(self.request, QUEUED_AGAIN, delay_of(when))
        return result

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Send the task when the transaction commits; a duplicate is dropped."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Send the task when the transaction commits; a duplicate is dropped.

        :class:`DuplicateTask` is not raised, because it would stop the transaction's other hooks.
        """
        transaction.on_commit(partial(self._send_unless_queued, *args, **kwargs))

    def _send_unless_queued(self, *args: Any, **kwargs: Any) -> None:
        with suppress(DuplicateTask):
            self.apply_async(*args, **kwargs)

    def _queued_call(self, header: Header) -> QueuedCall | None:
        options, key = LockOptions.of(self).but(header.overrides), header.lock_key
        # Without a lock there are no duplicates, and an eager call is never queued. Celery takes
        # 5 µs to look up a setting, so that comes last.
        if not options.unique_until or key in (None, NO_LOCK) or self.app.conf.task_always_eager:
            return None
        return QueuedCall(key, options, Run(self.name, header.task_id))

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        link: Any = None,
        link_error: Any = None,
        task_id: str | None = None,
        *rest: Any,
        lock_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> EagerResult[Any]:
        """Run the task here and now, under its lock; see :meth:`apply_async`."""
        if lock_options:
            header = self._header(args, kwargs, task_id or uuid(), lock_options, options)
            task_id, options["headers"] = header.task_id, header.into(options.get("headers"))
        return super().apply(args, kwargs, link, link_error, task_id, *rest, **options)

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Return the signature of a request's next message, as for ``retry()``."""
        signature = super().signature_from_request(request, args, kwargs, *rest, **options)
        request = self.request if request is None else request
        header = Header.of(signature.options.get("headers"), request.id, self.name)
        if header is not None:
            header = header.next()
            if args is not None or kwargs is not None:
                # Other arguments may need another lock: compute the key again, keep the options.
                key = header.lock_key.key if header.lock_key else None
                header = header.next(lock_key=None, previous_key=key)
            signature.options["headers"] = header.into(signature.options["headers"])
        return signature

    def on_replace(self, sig: Any) -> Any:
        """Send the replacement of this task; an eager one runs here, so release the lock first."""
        lock = current_lock()
        run = lock.run if lock else None  # None for a TaskLock of the body
        if self.request.is_eager and lock and lock.lease and run and run.task_id == self.request.id:
            lock.lease.give_back("ignored")
        return super().on_replace(sig)

    def _header(
        self,
        args: Any,
        kwargs: Any,
        task_id: str,
        lock_options: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Header:
        """Return the header of a message, given the arguments of ``apply_async``."""
        header = Header.of(options.get("headers"), task_id, self.name)
        header = header or Header(task_id, self.name)
        overrides = header.overrides
        if lock_options is not None:
            LockOptions.of(self).check_call(self.name, lock_options)
            overrides = {**overrides, **lock_options}
        elif header.lock_key is not None:
            return header._replace(token=None)
        merged = LockOptions.of(self).but(overrides)
        key = self.lock_key(args, kwargs, merged, shown=hidden_arguments(options))
        previous = header.previous_key or (header.lock_key.key if header.lock_key else None)
        if key.key != previous:  # the duplicate entry and the ticket belong to the previous lock
            header = header._replace(queued=None, ticket=None, never_gives_way=False)
        return header._replace(
            token=None,
            lock_key=key,
            previous_key=None,
            # A function cannot travel, and the key that it made is in the header.
            overrides={n: v for n, v in overrides.items() if n != "lock_name" or not callable(v)},
        )

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock."""
        request: Any = self.request_stack.top
        if request is None or request.called_directly or request._protected:  # noqa: SLF001
            return deliver(self, ON_CONFLICT, Header("", self.name), super().__call__, args, kwargs)
        # A call by the worker or by apply(): the request is already pushed, and Celery's __call__
        # would push an empty one above it in eager mode. Celery uses the same private mark; with
        # it, a call of this task from its own body counts as a direct call.
        header = Header.of(request.headers, request.id, self.name) or Header(request.id, self.name)
        request._protected = 1  # noqa: SLF001
        body = self.rest_of_call(request)
        try:
            return deliver(self, ON_CONFLICT, header, body, args, kwargs, request)
        except TaskPredicate:
            raise
        except Exception:
            # Another base may catch the error and call again: not a direct call, the same message.
            request._protected = 0  # noqa: SLF001
            raise

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


POSITIONAL = ("producer", "link", "link_error", "shadow")
AWAITED = ("chain", "chord", "group_id", "link", "link_error")


def import_tasks() -> None:
    """Import the task modules that a worker imports.

    The loader's ``import_default_modules()`` would also make Celery run the checks. Of the
    receivers of its signal, only those of ``autodiscover_tasks()`` are promises.
    """
    autodiscover_modules("tasks")
    for (_, sender_id), receiver in [*import_modules.receivers]:
        if sender_id == id(current_app.loader.app) and isinstance(receiver, promise):
            receiver()
    for module in (*current_app.conf.imports, *current_app.conf.include):
        current_app.loader.import_task_module(module)


def singleton_tasks() -> dict[str, SingletonTask]:
    """Return the registered tasks that take locks, sorted by name; see :func:`import_tasks`."""
    tasks = sorted(current_app.tasks.items())
    return {name: task for name, task in tasks if isinstance(task, SingletonTask)}
