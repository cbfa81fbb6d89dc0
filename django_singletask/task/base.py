"""The Celery base class: a task that takes its lock around each run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from celery.contrib.django.task import DjangoTask
from celery.result import AsyncResult, EagerResult
from celery.utils import uuid
from celery.utils.saferepr import saferepr
from django.db import transaction

from django_singletask.exceptions import DuplicateTask, LockConflict
from django_singletask.holder import Holder
from django_singletask.locks.deferred import refuse_deferred
from django_singletask.locks.keys import LockKey, Parameters, call_key
from django_singletask.locks.lock import TaskLock, current_lock
from django_singletask.locks.run import Run
from django_singletask.task import delivery as conflicts
from django_singletask.task.delivery import HEADER, POLICIES, QUEUED_AGAIN, own_header
from django_singletask.task.options import (
    OPTIONS,
    check_lock_options,
    check_types,
    choice_error,
    refuse_misspelt,
    refuse_unwrapped,
)
from django_singletask.task.unique import QueuedCall, delay_of

__all__ = ["SingletonTask"]

logger = logging.getLogger("django_singletask")


class SingletonTask(DjangoTask):  # type: ignore[type-arg] # it is not generic at run time
    """A task of which only one run with the same arguments goes on at a time.

    Use it as ``@shared_task(base=SingletonTask)``. A message, ``.apply()`` and a direct call
    ``task(...)`` take the lock; ``task.run(...)`` is the bare body. The options below stand in
    the decorator or on a subclass, and hold for one call in
    ``apply_async(..., lock_options={"on_conflict": "raise"})``.

    * ``lock_timeout``: lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``), at most 30 days.
    * ``lock_renew``: renew the lease while the task runs; False needs ``lock_timeout``.
    * ``lock_on``: names of the arguments that make the lock; ``[]`` is one lock for the task.
    * ``lock_name``: the name itself, a format string over the arguments or a callable with them.
    * ``on_conflict``: ``"skip"``; ``"raise"`` (:class:`LockConflict`); ``"wait"``; ``"requeue"``:
      put off until it has run; ``"rerun"``: of all that conflict, the last runs after the holder.
      A call without a message (direct, ``apply()``) raises instead of these two.
    * ``lock_wait``: seconds that ``"wait"`` waits before it raises.
    * ``skip_result``: what a skipped run returns.
    * ``unique_until``: stop an equal call at enqueue until this one has begun (``"start"``) or
      ended (``"finish"``).
    * ``unique_for``: seconds for which a queued call stops equal ones at most, at most 30 days.
    * ``on_duplicate``: ``"return"`` the queued call's result, or ``"raise"``
      :class:`DuplicateTask`.
    * ``lock_history``: False records only trouble.

    Raises ``TypeError`` where the class is made for options of a wrong type and for coroutine
    and generator functions.
    """

    abstract = True

    lock_timeout: float | None = None
    lock_renew: bool = True
    lock_on: Sequence[str] | None = None
    lock_name: Any = None
    on_conflict: str = "skip"
    lock_wait: float = 0
    skip_result: Any = None
    unique_until: str | None = None
    unique_for: float = 3600
    on_duplicate: str = "return"
    lock_history: bool = True

    # An expected answer, not a crash: Celery logs it without a traceback.
    throws: tuple[type[Exception], ...] = (LockConflict,)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        what = str(cls.__dict__.get("name") or f"{cls.__module__}.{cls.__qualname__}")
        if "_decorated" in cls.__dict__:
            refuse_misspelt(what, cls.__dict__.keys() - set(dir(SingletonTask)))
        check_types(what, {name: cls.__dict__[name] for name in OPTIONS & cls.__dict__.keys()})
        if cls.lock_on is not None and cls.lock_name is not None:
            raise TypeError(f"{what}: lock_on and lock_name exclude each other; keep one.")
        run = cls.__dict__.get("run")
        if run is not None:
            refuse_deferred(inspect.unwrap(getattr(run, "__func__", run)), what)
        call = cls.__dict__.get("__call__")
        if call is not None and not _mentions(getattr(call, "__code__", None), "__call__"):
            raise TypeError(
                f"{what}.__call__ never calls super().__call__(*args, **kwargs), "
                "so the task would run without its lock."
            )
        if LockConflict not in cls.throws:
            cls.throws = (*cls.throws, LockConflict)
        if "_decorated" in cls.__dict__ and inspect.isfunction(cls.__dict__.get("lock_name")):
            # A function given in the decorator takes the task's arguments, not the task.
            cls.lock_name = staticmethod(cls.__dict__["lock_name"])

    parameters: Parameters
    """Of the body: what calls are bound to."""

    def __new__(cls, *args: Any, **kwargs: Any) -> SingletonTask:
        # Not in __init__: a task class may have one that does not call this one.
        task: SingletonTask = super().__new__(cls)
        task.parameters = Parameters(inspect.signature(task.run))
        return task

    # Asking

    def lock(self, /, *args: Any, **kwargs: Any) -> TaskLock:
        """Return the lock of a call with these arguments, not acquired.

        ``task.lock(7).locked()`` asks whether that call is running. Raises ``TypeError`` if the
        arguments do not fit the task or have no stable form.
        """
        return self.lock_for(self.lock_key(args, kwargs, {}), {})

    def queued(self, /, *args: Any, **kwargs: Any) -> AsyncResult[Any] | None:
        """Return the result of the call that stops one with these arguments at enqueue, if any.

        Asks the cache; the answer can be out of date when you act on it. Raises ``TypeError`` as
        :meth:`lock` does.
        """
        holder = self.queued_call(self.lock_key(args, kwargs, {}), {}, Run(self.name)).holder()
        return self.AsyncResult(holder.task_id) if holder and holder.task_id else None

    # Sending

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        *,
        lock_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Send the task, with its lock's key in the message.

        Celery's own options, and ``lock_options``: lock options for this one call. With
        ``unique_until``, the result of an equal call that is queued instead of a second one.
        Raises ``TypeError`` for unknown options, and if an argument has no stable form,
        :class:`DuplicateTask` with ``on_duplicate="raise"``, and the errors of the cache's client
        with ``unique_until``.
        """
        refuse_unwrapped(f"apply_async of {self.name}", options)
        again = bool(own_header(options.get("headers"), task_id, self.name))
        # Others wait for a call that has its id already, as the links of a chain and the members
        # of a group have, or that is to tell of its end: it must be sent.
        awaited = task_id or link or link_error or any(map(options.get, AWAITED))
        task_id = task_id or uuid()
        headers = self._headers(args, kwargs, task_id, lock_options, options)
        options["headers"] = headers
        own = headers[HEADER]
        call = None
        # A call that runs at once is never queued.
        if not (again or self.app.conf.task_always_eager) and self.option(
            "unique_until", own["options"]
        ):
            key = LockKey(own["name"], own["key"])
            call = self.queued_call(key, own["options"], Run(self.name, task_id))
        when = options.get("countdown") or options.get("eta")
        try:
            if call is not None:
                queued = call.enqueue(delay_of(when))
                if call.value is not None:
                    own["queued"] = call.value.decode()
                elif queued is not None and not awaited:
                    return self._duplicate(own, queued)
            result = super().apply_async(
                args, kwargs, task_id, producer, link, link_error, shadow, **options
            )
        except BaseException:
            if call is not None:
                call.give_back()
            raise
        if again and own.get("queued"):
            setattr(self.request, QUEUED_AGAIN, delay_of(when))
        return result

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Send the task when the transaction commits; a duplicate is dropped."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Send the task when the transaction commits; a duplicate is dropped.

        Nobody is there to be told: an error would stop the other hooks of the transaction.
        """
        transaction.on_commit(partial(self._send_unless_queued, *args, **kwargs))

    def _send_unless_queued(self, *args: Any, **kwargs: Any) -> None:
        with suppress(DuplicateTask):
            self.apply_async(*args, **kwargs)

    def queued_call(self, key: LockKey, options: Mapping[str, Any], run: Run) -> QueuedCall:
        """Return the entry of a queued call with this lock."""
        names = ("unique_until", "unique_for", "lock_timeout")
        return QueuedCall(key, {name: self.option(name, options) for name in names}, run)

    def _duplicate(self, header: Mapping[str, Any], queued: Holder) -> AsyncResult[Any]:
        lock = self.lock_for(LockKey(header["name"], header["key"]), header["options"])
        lock.blocker = queued
        logger.info("%s is queued already, as task %s.", lock, queued.task_id)
        lock.tell_of_blocker("duplicate", "queued")
        if self.option("on_duplicate", header["options"]) == "raise":
            raise DuplicateTask(lock.name, queued.task_id or "")
        return self.AsyncResult(queued.task_id or "")

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
            task_id = task_id or uuid()
            options["headers"] = self._headers(args, kwargs, task_id, lock_options, options)
        return super().apply(args, kwargs, link, link_error, task_id, *rest, **options)

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Describe the next message of a request, as ``retry()`` does."""
        signature = super().signature_from_request(request, args, kwargs, *rest, **options)
        header = (signature.options.get("headers") or {}).get(HEADER)
        if header:
            # How often this message was put off says nothing about the next one.
            kept = {k: v for k, v in header.items() if k not in HOPPING}
            if args is not None or kwargs is not None:
                # Other arguments may mean another lock: derive the key anew, keep the options.
                kept["was"] = kept.pop("key", None)
            signature.options["headers"] = {**signature.options["headers"], HEADER: kept}
        return signature

    def on_replace(self, sig: Any) -> Any:
        """Send what replaces this task, or run it here: then this task's run is over."""
        lock = current_lock()
        if (
            self.request.is_eager
            and lock
            and lock.lease
            and lock.run
            and lock.run.task_id == self.request.id
        ):
            # A message would be put off until this body has ended; eager, it runs inside it.
            lock.lease.give_back("ignored")
        return super().on_replace(sig)

    def _headers(
        self,
        args: Any,
        kwargs: Any,
        task_id: str,
        lock_options: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        headers = options.get("headers") or {}
        # The token is for one delivery only: it was made by the worker that received it.
        own = {k: v for k, v in own_header(headers, task_id, self.name).items() if k != "token"}
        overrides = own.get("options") or {}
        if lock_options is not None:
            check_lock_options(self, lock_options)
            overrides = {**overrides, **lock_options}
        if own.get("key") and lock_options is None:
            return {**headers, HEADER: own}
        key = self.lock_key(args, kwargs, overrides, _shown(options))
        # The key is made, and a callable could not travel.
        travels = {k: v for k, v in overrides.items() if not callable(v)}
        if key.key != own.pop("was", own.get("key")):
            own.pop("queued", None)  # the entry beside another lock
        made = {"id": task_id, "task": self.name, "key": key.key, "name": key.name}
        return {**headers, HEADER: {**own, **made, "options": travels}}

    # Running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock."""
        request: Any = self.request_stack.top
        if request is None or request.called_directly or request._protected:
            lock = self.lock_for(self.lock_key(args, kwargs, {}), {}, delivered=True)
            return conflicts.run(self, lock, {}, super().__call__, args, kwargs)
        # The worker's own call for a message, or apply()'s: the request is pushed already, and
        # Celery's __call__ would push an empty one above it in eager mode. The mark is Celery's:
        # a call of this task from its own body is a direct one.
        request._protected = 1
        own = own_header(request.headers, request.id, self.name)
        options = own.get("options") or {}
        if own.get("key"):
            key = LockKey(own["name"], own["key"])
        else:
            key = self.lock_key(args, kwargs, options, self._shown_by(request, args, kwargs))
        lock = self.lock_for(
            key, options, request.id, request.retries or 0, own.get("token"), delivered=True
        )
        message = None if request.is_eager else request
        return conflicts.run(self, lock, options, self.run, args, kwargs, message)

    def lock_for(
        self,
        key: LockKey,
        options: Mapping[str, Any],
        task_id: str | None = None,
        retries: int = 0,
        token: str | None = None,
        *,
        delivered: bool = False,
    ) -> TaskLock:
        """Return the lock of this key with the lock options of this task and of one call."""
        policy = self.option("on_conflict", options)
        if policy not in POLICIES:
            raise ValueError(choice_error(self.name, "on_conflict", policy))
        quiet = not self.option("lock_history", options)
        return (conflicts.DeliveryLock if delivered else TaskLock)(
            key,
            timeout=self.option("lock_timeout", options),
            renew=self.option("lock_renew", options),
            wait=self.option("lock_wait", options) if delivered and policy == "wait" else 0,
            run=Run(self.name, task_id, retries, token, quiet),
        )

    def option(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return an option of this task, or of one call where that has its own."""
        return options[name] if name in options else getattr(self, name)

    def lock_key(
        self, args: Any, kwargs: Any, options: Mapping[str, Any], shown: str | None = None
    ) -> LockKey:
        """Return name and key of the lock of a call; ``options`` are lock options of that call."""
        # Of the two, one call's own stands for both.
        own = (
            options
            if "lock_on" in options or "lock_name" in options
            else {"lock_on": self.lock_on, "lock_name": self.lock_name}
        )
        return call_key(
            self.name,
            self.parameters,
            args or (),
            kwargs or {},
            lock_on=own.get("lock_on"),
            lock_name=own.get("lock_name"),
            shown=shown,
        )

    def _shown_by(self, request: Any, args: Any, kwargs: Any) -> str | None:
        # Celery always sends a representation of the arguments. One that is not what it would
        # have made was given by the caller, to hide something.
        size = self.app.amqp.argsrepr_maxsize
        given = {name: getattr(request, name, None) for name in ("argsrepr", "kwargsrepr")}
        if given["argsrepr"] == saferepr(tuple(args), size):
            given["argsrepr"] = None
        if given["kwargsrepr"] == saferepr(kwargs, self.app.amqp.kwargsrepr_maxsize):
            given["kwargsrepr"] = None
        return _shown(given)


AWAITED = ("chain", "chord", "group_id")
HOPPING = ("hops", "redelivered", "ticket")
"""What the header says of a message while it is put off."""


def _shown(options: Mapping[str, Any]) -> str | None:
    given = [options[name] for name in ("argsrepr", "kwargsrepr") if options.get(name)]
    return ", ".join(map(str, given)) if given else None


def _mentions(code: Any, name: str) -> bool:
    if code is None or name in code.co_names:
        return True
    return any(_mentions(inner, name) for inner in code.co_consts if inspect.iscode(inner))
