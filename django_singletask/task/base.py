"""SingletonTask, the Celery base class of a task with a lock; and how to find all such tasks."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Self, Unpack

from celery import Celery, Task, current_app
from celery.contrib.django.task import DjangoTask
from celery.exceptions import TaskPredicate
from celery.result import AsyncResult, EagerResult
from celery.signals import celeryd_after_setup, import_modules
from celery.utils import uuid
from django.db import transaction
from django.utils.module_loading import autodiscover_modules
from vine import promise

from django_singletask.conf import check_installed, conf
from django_singletask.exceptions import DuplicateTask, LockConflict
from django_singletask.locks.keys import NO_LOCK, QUEUED
from django_singletask.locks.lease import current_lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.parameters import Parameters, refuse_deferred
from django_singletask.locks.ref import LockRef
from django_singletask.task.delivery import Delivery
from django_singletask.task.header import Header, hidden_arguments
from django_singletask.task.options import (
    ELSEWHERE,
    GUIDE,
    NAMES,
    Attributes,
    CallOptions,
    LockOn,
    LockOptions,
    RunOptions,
    SendOptions,
    guess,
    unknown_options,
)
from django_singletask.task.unique import (
    Publish,
    QueuedCall,
    discard,
    seconds_to_block,
    seconds_until,
)

UNSENDABLE = {name: f"write lock_options={{{name!r}: …}}." for name in NAMES}
UNSENDABLE |= {name: f"use {here}. {GUIDE}" for name, here in ELSEWHERE.items()}
"""Names that are no options of ``apply_async``, and what to do instead."""
AWAITED = ("chain", "chord", "group_id", "link", "link_error")
"""Options of a call for which other calls wait."""


def refuse_unsendable(what: str, options: Mapping[str, Any], lock_options: Any) -> None:
    """Raise ``TypeError`` for options of ``apply_async`` that cannot be sent."""
    for name in UNSENDABLE.keys() & options.keys():
        raise TypeError(f"{what} has no option {name!r}: {UNSENDABLE[name]}")
    if isinstance(lock_options, Mapping) and callable(lock_options.get("on_skip")):
        raise TypeError(f"{what} cannot send on_skip, a function: set it on the task.")


def check_definition(cls: type) -> None:
    """Raise ``TypeError`` for an error in the body of a class, or in its decorator."""
    own = vars(cls)
    what = own.get("name")
    if not what:
        what = f"{cls.__module__}.{cls.__qualname__}"
    names: Iterable[str] = own
    if "_decorated" not in own:
        # A class may have attributes of its own. Only names almost like an option are errors.
        names = [name for name in own if guess(name) and name[0] != "_"]
    for name, hint in unknown_options(names, SingletonTask):
        raise TypeError(f"{what} has no option {name!r}: {hint}")
    LockOptions.check_class(cls, f"of {what}")
    run = own.get("run")
    if run is not None:
        refuse_deferred(inspect.unwrap(getattr(run, "__func__", run)), what)
    if callable(cls.Strategy):  # type: ignore[attr-defined] # Celery's is a path
        raise TypeError(
            f"{what} has a Strategy of its own, as with celery-batches: its body gets messages "
            "without their locks. Use the other base alone, and take a TaskLock in the body."
        )
    for inner in cls.__mro__[cls.__mro__.index(Task) + 1 : -1]:  # all but object
        if "__call__" in inner.__dict__:
            raise TypeError(
                f"{inner.__qualname__}.__call__ would never be called for {what}, since Celery's "
                f"Task comes before it. Derive {inner.__qualname__} from celery.Task, or "
                "put it before SingletonTask in the list of base classes."
            )


# Not in worker.startup, which only an installed app connects.
celeryd_after_setup.connect(check_installed)


# ``_protected`` of a request: Celery's private mark, which says how far its call has come. Another
# call of the task beside a request whose mark is not 0 is a direct call.
NOT_BEGUN = 0
BODY_RUNS = 1
CHAIN_RUNS = 2
"""Of this package: the lock is held, and the ``__call__`` of the base classes behind
``SingletonTask`` runs, which will end at Celery's."""


if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R_co = TypeVar("R_co", covariant=True, default=Any)
    Base = DjangoTask
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R_co = TypeVar("R_co", covariant=True)
    # Celery's class has type parameters only for type checkers. At run time, ``Base[P, R_co]`` in
    # the next class statement looks up this dict, and is DjangoTask itself.
    Base = {(P, R_co): DjangoTask}


class SingletonTask(Attributes, Base[P, R_co]):
    """A task that runs only once at a time for the same arguments.

    Use it as ``@shared_task(base=SingletonTask)``, or as ``@singleton_task``, which tells type
    checkers the parameters of the task. A message, ``.apply()`` and a direct call
    ``task(...)`` take the lock; ``task.run(...)`` runs only the body. Set the options below in
    the decorator or on a subclass, or for one call in
    ``apply_async(..., lock_options={"on_conflict": "raise"})``.

    * ``lock_timeout``: lease in seconds (default ``SINGLETASK_LOCK_TIMEOUT``), at most 30 days.
    * ``lock_renew`` (True): renew the lease while the task runs; False needs ``lock_timeout``.
    * ``lock_on``: names of the arguments that identify the lock (default: all arguments); ``[]``:
      one lock for all calls.
    * ``lock_name``: the lock's name: a format string over the arguments, or a function of them.
    * ``lock_slots`` (1): how many runs may hold the lock at once, at most 1,000.
    * ``on_conflict``: ``"skip"`` (default); ``"raise"`` (:class:`LockConflict`); ``"wait"``;
      ``"requeue"``: postpone the call until it can run. A call without a message (direct,
      ``apply()``) raises instead.
    * ``lock_wait``: seconds after which ``"wait"`` or ``"requeue"`` raises; ``math.inf``: never.
    * ``lock_at_least`` (0): a run that began keeps the lock until so many seconds after its start,
      however it ends, unless its process ends.
    * ``on_outage``: if the cache cannot be used, ``"raise"`` (default) :class:`LockUnavailable`,
      ``"run"`` without the lock, or ``"skip"`` the run. With ``"raise"`` and ``"skip"``, a message
      of ``"requeue"``, or one that was postponed before, is postponed until the cache answers.
    * ``skip_result`` (None): what a skipped run returns.
    * ``on_skip``: a function to call on a skip, with the :class:`LockConflict` and the call's
      arguments; it returns the result. A method, or a function with ``bind=True``, gets the task
      first.
    * ``unique_until`` (None): do not send an identical call until this one has started
      (``"start"``) or finished (``"finish"``), or for ``unique_for`` seconds after its sending
      (``"expiry"``).
    * ``unique_for`` (None, which means 3600): the longest time in seconds for which a queued call
      stops identical calls; at most 30 days. A call that has not begun stops them no longer than
      until 5 seconds after its ``expires``. If it is set, and ``on_duplicate`` is ``"replace"``, a
      run starts at the latest so many seconds after the first of the calls that replace each other.
    * ``on_duplicate``: ``"return"`` (default) the queued call's result, ``"raise"``
      :class:`DuplicateTask`, or ``"replace"`` the queued call, which is then skipped when a worker
      gets it.
    * ``lock_history`` (True): False records only trouble.

    Creating the class raises ``TypeError`` for misspelled options and those of a wrong type, and
    for coroutine and generator functions. The system check reports other invalid options, and the
    first call that is sent or run raises ``TypeError`` or ``ValueError``.
    """

    abstract = True

    # Methods of this class set these three.
    lock_on: LockOn | None
    lock_name: Any
    on_skip: Any

    stores_started: bool = False
    """Whether a delivery stores STARTED when its body begins; see started.py."""

    _options_are_checked: bool = False
    """Whether the options have been checked since Celery has bound the task."""

    # Celery logs these errors without a traceback.
    throws: tuple[type[Exception], ...] = (LockConflict,)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not in __init__, which a task class may override without super().
        task = super().__new__(cls)
        vars(task)["_parameters"] = Parameters(inspect.signature(task.run))
        return task

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_definition(cls)
        if LockConflict not in cls.throws:
            cls.throws = (*cls.throws, LockConflict)
        own = vars(cls)
        if "_decorated" not in own:
            return
        # A function from the decorator must not become a method, which would get the task first.
        # Only on_skip gets the task if the body does, too (bind=True).
        if callable(own.get("lock_name")):
            cls.lock_name = staticmethod(own["lock_name"])
        if callable(own.get("on_skip")):
            if isinstance(own["run"], staticmethod):
                cls.on_skip = staticmethod(own["on_skip"])
            else:
                cls.on_skip = partialmethod(own["on_skip"])

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Do what Celery's method does, and let the options be checked at the next use."""
        # Not here, although ``CELERY_TASK_ANNOTATIONS`` has set options now: Celery binds all tasks
        # together, when something asks for the first of them. One wrong option would stop
        # ``manage.py check``, which reports it, and each other command that looks at the tasks. A
        # worker runs the checks before it takes a message.
        super().on_bound(app)
        # Celery's own tasks are of this class, too, if it is the ``task_cls`` of the application.
        # They take no lock: a skipped ``celery.accumulate`` would lose the result of a workflow.
        if is_of_celery(cls):
            cls.lock_on = None
            cls.lock_name = staticmethod(lambda **arguments: None)
        cls._options_are_checked = False
        # Celery would store STARTED before the call.
        if cls.track_started:
            cls.track_started = False
            cls.stores_started = True

    def _check_options(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` if the options of the task cannot work."""
        for _names, error in LockOptions.problems_of(self):
            if not isinstance(error, Warning):
                raise error
        cls = type(self)
        cls._options_are_checked = True

    # The locks of its calls

    def lock(self, /, *args: Any, **kwargs: Any) -> TaskLock:
        """Return the :class:`TaskLock` of a call with these arguments, not acquired.

        ``task.lock(7).locked()`` asks whether that call is running. Arguments that are not part of
        the lock may be left out. Raises ``TypeError`` for arguments that do not fit the task or
        have no stable form, and :class:`LockError` if ``lock_name`` returns None.
        """
        if not self._options_are_checked:
            self._check_options()
        options = LockOptions.of(self)
        return options.lock(options.key(self, args, kwargs, partial=True), self.name)

    def queued(self, /, *args: Any, **kwargs: Any) -> AsyncResult[R_co] | None:
        """Return the ``AsyncResult`` of a queued call with these arguments, or None.

        The answer can be outdated when you use it. Raises ``TypeError`` as :meth:`lock` does.
        """
        if not self._options_are_checked:
            self._check_options()
        key = LockOptions.of(self).key(self, args, kwargs, partial=True)
        if key == NO_LOCK:
            return None
        ref = LockRef(conf.cache, *key, task=self.name)
        _entry, holder = ref.beside(QUEUED).read_holder()
        if holder.task_id is None or holder.kept or proof_of_death(holder):
            return None
        return self.AsyncResult(holder.task_id)

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
        lock_options: CallOptions | None = None,
        **celery_options: Unpack[SendOptions],
    ) -> AsyncResult[R_co]:
        """Send the task, with its lock's key in the message.

        The options are Celery's, and ``lock_options`` for this call. With ``unique_until``, a
        duplicate is not sent: this returns the queued call's result, or raises
        :class:`DuplicateTask` (``on_duplicate="raise"``) or :class:`LockUnavailable`. Raises
        ``TypeError`` and ``ValueError`` for wrong lock options or arguments.
        """
        options: Any = celery_options
        # Pass these by name, and only if the caller did: another base may override this method as
        # apply_async(self, args, kwargs, **options), and set defaults in its options.
        passed = {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        options |= {name: value for name, value in passed.items() if value is not None}
        if lock_options or not UNSENDABLE.keys().isdisjoint(options):
            refuse_unsendable(f"apply_async of {self.name}", options, lock_options)
        header = Header.of(options.get("headers"), task_id, self.name)
        is_new = header is None
        # A call with an id (as in a chain or a group), a callback or a chord must be sent, because
        # other calls wait for it.
        awaited = any(map(options.get, AWAITED))
        if task_id:
            awaited = True
        else:
            task_id = uuid()
        if header is None:
            header = Header(task_id, self.name)
        merged = self._fill_in(header, args, kwargs, lock_options, options)

        def publish() -> AsyncResult[R_co]:
            options["headers"] = header.into(options.get("headers"))
            return super(SingletonTask, self).apply_async(
                args, kwargs, task_id=header.id, **options
            )

        return self._send(header, merged, options, publish, is_new=is_new, awaited=awaited)

    def _send(
        self,
        header: Header,
        merged: LockOptions,
        options: dict[str, Any],
        publish: Publish,
        *,
        is_new: bool,
        awaited: bool,
    ) -> AsyncResult[Any]:
        """Publish a call, or stop it if it is new, and a duplicate."""
        delay = 0.0
        start = options.get("countdown")
        if not start:
            start = options.get("eta")
        if start:
            delay = max(0.0, seconds_until(start))
        expires = options.get("expires", self.expires)
        if not header.due:
            header.due = round(time.time() + delay, 3)
            header.delay = delay
        # The body that sends this call may have an entry.
        of_run = getattr(self.request_stack.top, "singletask_queued_call", None)
        result: AsyncResult[Any]
        if is_new and merged.unique_until:
            key = header.lock_key
            # Without a lock there are no duplicates, and an eager call is never queued. Celery
            # takes 5 µs to look up a setting, so that comes last.
            if key and key != NO_LOCK and not self.app.conf.task_always_eager:
                quiet = not merged.lock_history
                ref = LockRef(conf.cache, *key, task=self.name, task_id=header.id, quiet=quiet)
                queued_call = QueuedCall(ref, merged)
                queued_call.sender = of_run
                seconds = seconds_to_block(merged, delay, expires)
                result = queued_call.send(
                    header, options, seconds, publish, self.AsyncResult, awaited=awaited
                )
                return result
        result = publish()
        # Another base may publish the call later, or never. Then it returned None.
        if header.queued and of_run and result is not None:
            of_run.sent_again(delay, expires)
        return result

    def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None:  # type: ignore[override]
        """Send the task when the transaction commits; a duplicate is dropped."""
        self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Send the task when the transaction commits; a duplicate is dropped without an error."""

        def send() -> None:
            with suppress(DuplicateTask):
                self.apply_async(*args, **kwargs)

        transaction.on_commit(send)

    def apply(
        self,
        args: Any = None,
        kwargs: Any = None,
        *rest: Any,
        lock_options: RunOptions | CallOptions | None = None,
        **options: Any,
    ) -> EagerResult[R_co]:
        """Run the task here and now, under its lock; see :meth:`apply_async`.

        Its ``lock_options`` can also have ``on_skip``.
        """
        if lock_options:
            task_id = options.get("task_id")
            if not task_id:
                task_id = uuid()
            headers = options.get("headers")
            header = Header.of(headers, task_id, self.name)
            if header is None:
                header = Header(task_id, self.name)
            options["task_id"] = task_id
            self._fill_in(header, args, kwargs, lock_options, options)
            options["headers"] = header.into(headers)
        return super().apply(args, kwargs, *rest, **options)

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """Return the signature of a request's next message, as for ``retry()``."""
        signature = super().signature_from_request(request, args, kwargs, *rest, **options)
        if request is None:
            request = self.request
        header = Header.of(vars(request), request.id, self.name)
        if header:
            header.forget_message()
            if args is not None or kwargs is not None:
                # Other arguments may need another lock: compute the key again, keep the options.
                header.was = header.key
                header.name = None
                header.key = None
            signature.options["headers"] = header.into(signature.options["headers"])
        return signature

    def on_replace(self, sig: Any) -> Any:
        """Send the replacement of this task; an eager one runs here, so release the lock first."""
        lease = current_lease()
        if self.request.is_eager and lease is not None:
            is_own = lease.ref.is_delivery and lease.ref.task_id == self.request.id
            if is_own:
                lease.at_least = 0  # nobody could wait for the rest of it
                lease.leave_body(result="ignored")
        return super().on_replace(sig)

    def _fill_in(
        self, header: Header, args: Any, kwargs: Any, lock_options: Any, options: dict[str, Any]
    ) -> LockOptions:
        """Write options and key of a call's lock into its header; return all its lock options."""
        if not self._options_are_checked:
            self._check_options()
        header.token = None
        header.received = 0.0
        if lock_options is not None:
            LockOptions.check_call(self, lock_options)
            earlier = header.options
            if earlier is None:
                earlier = {}
            header.options = {**earlier, **lock_options}
        merged = LockOptions.of(self, header.options)
        if lock_options is None and header.key is not None:
            return merged
        key = merged.key(self, args, kwargs, shown=hidden_arguments(options))
        previous = header.was
        if previous is None:
            previous = header.key
        if key.key != previous:
            # The duplicate entry and the ticket belong to the previous lock.
            header.queued = None
            header.ticket = None
        header.name, header.key = key
        header.was = None
        if callable(merged.lock_name) and header.options:
            # A function cannot travel, and the key that it made is in the header.
            header.options.pop("lock_name", None)
        return merged

    # Running

    def update_state(self, task_id: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Update the state of a task; a direct call has none, so there this does nothing."""
        if task_id or self.request.id:
            super().update_state(task_id, *args, **kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the body under its lock."""
        request: Any = self.request_stack.top
        # If there are other base classes behind this one with a __call__, this begins a chain of
        # super().__call__(), which Celery's ends.
        call = super().__call__
        if request is None or request.called_directly or request._protected != NOT_BEGUN:  # noqa: SLF001
            if not self._options_are_checked:
                self._check_options()
            if request is not None:
                request._protected = BODY_RUNS  # noqa: SLF001
            result: R_co = Delivery(self, None, Header("", self.name), call, args, kwargs).run()
            return result
        # A call by the worker or by apply(): the request is already pushed.
        header = Header.of(vars(request), request.id, self.name)
        if header is None:
            header = Header(request.id, self.name)
        try:
            if not self._options_are_checked:
                self._check_options()
            if header.options:  # no message is trusted
                LockOptions.check_call(self, header.options)
        except (TypeError, ValueError):
            discard(vars(request), request.id, self.name)
            raise
        if getattr(call, "__func__", None) is Task.__call__:
            body = self.run
            request._protected = BODY_RUNS  # noqa: SLF001
        else:
            body = call
            request._protected = CHAIN_RUNS  # noqa: SLF001
        try:
            result = Delivery(self, request, header, body, args, kwargs).run()
            return result
        except TaskPredicate:
            raise
        except Exception:
            # Another base may catch the error and call again: not a direct call, the same message.
            request._protected = NOT_BEGUN  # noqa: SLF001
            raise

    def push_request(self, *args: Any, **kwargs: Any) -> None:
        """Do what Celery's method does, but keep the request of a message during its call."""
        # Celery's ``__call__`` ends the chain of other base classes, and cannot know that the
        # request is already pushed. So it pushes another one, empty (Celery 5.4) or a copy, and the
        # request of the message would not see what the body does, such as ``retry()``. In a worker
        # Celery prevents that itself, but only for the class that is called first:
        #
        #     tracer: pushes the request
        #       SingletonTask.__call__: takes the lock                      CHAIN_RUNS
        #         Other.__call__
        #           Task.__call__: push_request(args=…, kwargs=…)           here: BODY_RUNS
        #             run(): self.request is that of the message
        #
        # If ``Other`` calls ``run()`` itself, Celery's ``__call__`` is never reached, and the next
        # request is pushed by the body. Such a push does not have exactly the arguments ``args``
        # and ``kwargs`` by name: only Celery's ``__call__`` passes these.
        request: Any = self.request_stack.top
        if (
            request is not None
            and request._protected == CHAIN_RUNS  # noqa: SLF001
            and not args
            and kwargs.keys() == {"args", "kwargs"}
        ):
            request._protected = BODY_RUNS  # noqa: SLF001
            self.request_stack.push(request)
        else:
            super().push_request(*args, **kwargs)


def is_of_celery(task: type) -> bool:
    """Return whether a class is that of a task of Celery itself: ``celery.chord_unlock``."""
    return f"{task.__module__}.".startswith("celery.")


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
    return {
        name: task
        for name, task in tasks
        if isinstance(task, SingletonTask) and not is_of_celery(type(task))
    }
