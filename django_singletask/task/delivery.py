"""One delivery of a message under its lock, or one call without a message."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from django_singletask.exceptions import Dropped, LockUnavailable, Postponed
from django_singletask.locks.keys import NO_LOCK
from django_singletask.locks.run import NO_RUN, Run, result_of
from django_singletask.task.delivery_lock import DeliveryLock
from django_singletask.task.header import LOOKS, WAITS, Header, hidden_in_message, is_marked
from django_singletask.task.options import LockOptions
from django_singletask.task.postpone import FIRST_HOP, SHORT_HOP, hop, postpone, raise_or_retry
from django_singletask.task.rerun import gives_way
from django_singletask.task.unique import QueuedCall

logger = logging.getLogger("django_singletask")

CLOCK_SKEW = 1.0
"""Seconds by which the clocks of two hosts may differ; see the timelines in header.py."""

QUEUED_AGAIN = "singletask_queued_again"
"""Attribute of a request whose body has sent its call again: seconds until that call starts."""


@dataclasses.dataclass
class Delivery:
    """One delivery: the body of a task, with its lock, options and header.

    ``policy`` is called if the lock is held. ``request`` is the request of the message; it is None
    for a call without a message, which cannot be postponed. The header of a direct call has no
    task id.
    """

    task: Task[..., Any]
    lock: DeliveryLock
    options: LockOptions
    header: Header
    body: partial[Any]
    policy: Callable[[Delivery], Any]
    request: Any = None
    queued_call: QueuedCall | None = None
    redelivered: bool = False  # the broker says so, or an earlier delivery met its own run
    has_begun: bool = False
    outcome: tuple[Any, BaseException | None] | None = None
    """The result and the error of the body, when it has ended."""

    def run(self) -> Any:
        """Run the body under its lock, or do what ``on_conflict`` says.

        The result or the error of the body stands. An error that comes after it is logged, such as
        a soft time limit during the release.
        """
        try:
            return self._run_and_free()
        except Exception as error:
            if self.outcome is None or error is self.outcome[1]:
                raise
            result, failure = self.outcome
            if self.lock.lease is not None and self.lock.lease.held:
                self.lock.lease.give_back(result_of(failure))
            if self.queued_call is not None:
                self.queued_call.give_back(kept=self.lock.is_kept)
            logger.exception(
                "%s: this error came after the body had ended, so it changes nothing.",
                self.lock.address,
            )
        finally:
            self.outcome = None  # the error refers to this object
        if failure is not None:
            raise failure
        return result

    def _run_and_free(self) -> Any:
        queued_call = self.queued_call
        if queued_call is None:
            return self._run()
        try:
            result = self._run()
        except (Postponed, Dropped):
            raise  # another delivery of this message exists, and the entry belongs to it
        except BaseException as error:
            # The body's own error decides, not a soft time limit that came after it.
            self._queue_again(queued_call, self.outcome[1] if self.outcome else error)
            queued_call.give_back(kept=self.lock.is_kept)
            raise
        self._queue_again(queued_call)
        queued_call.give_back(kept=self.lock.is_kept)
        return result

    def _queue_again(self, queued_call: QueuedCall, error: BaseException | None = None) -> None:
        """Keep the entry if the call was sent again, or goes back to the broker."""
        delay = getattr(self.request, QUEUED_AGAIN, None)
        if isinstance(error, Reject) and getattr(error, "requeue", False) and self.task.acks_late:
            delay = 0.0
        if delay is not None:
            queued_call.queue_again(delay)

    def _run(self) -> Any:
        try:
            return self._run_under_lock()
        except (Ignore, Reject):
            raise
        except Exception as error:
            if self.has_begun or not self.header.task_id:
                raise
            raise_or_retry(self.task, error)

    def _run_under_lock(self) -> Any:
        if is_marked(self.request):
            self._drop_if_done(marked=True)
        # The first run of a redelivery may still be running; this result must not replace its own.
        if not self.redelivered and self._is_superseded():
            return self.options.skip_result
        # The lock is released before Celery stores the result and publishes the next link of a
        # chain, which may want the same lock.
        with self.lock as lock:
            if lock.outage is not None:
                return self._meet_outage(lock.outage)
            if lock:
                if self.header.redelivered and not (lock.lease and lock.lease.took_over):
                    self._leave_to_first_run()
                # A later call may have run while this one waited for the lock.
                asks = lock.wait or self.redelivered
                if asks and lock.lease and self._is_superseded():
                    lock.lease.give_back("ignored")
                    return self.options.skip_result
                return self._run_body()
        if self.request is not None:
            self._postpone_behind_itself()
        return self.policy(self)

    def _meet_outage(self, outage: LockUnavailable) -> Any:
        """Postpone a message that was promised its turn; else do what ``on_outage`` says."""
        # The first run, or a holder that this delivery has met, may still be running.
        if self.redelivered:
            self.postpone("redelivery", redelivered=WAITS)
        runs = self.options.on_outage == "run" and self.lock.blocker is None
        if not runs:
            if self.lock.is_requeued:
                self.policy(self)
            if self.header.hops:
                self.postpone("outage")
            if self.options.on_outage != "skip":
                raise outage
        self.lock.report_outage()
        return self._run_body() if runs else self.options.skip_result

    def _run_body(self) -> Any:
        self.has_begun = True
        if self.header.ticket is not None and self.request is not None:
            # From now on, no later call replaces this call or its retries.
            self.request.headers = self.header.without_ticket().into(self.request.headers)
        if self.queued_call is not None:
            self.queued_call.start()
        try:
            self.outcome = self.body(), None
        except BaseException as error:
            self.outcome = None, error
        result, failure = self.outcome
        if self.queued_call is not None:
            self._queue_again(self.queued_call, failure)
        if failure is not None:
            raise failure
        return result

    # A message that meets its own earlier run; the timelines are in header.py

    def _postpone_behind_itself(self) -> None:
        """Postpone the message if it met its own earlier run, now or before; else return."""
        blocker, request = self.lock.blocker, self.request
        if blocker is None:
            return
        # If a chain replaces a task, its first link has a new id, and the task is its parent.
        others = (blocker, *(self.lock.lease.others if self.lock.lease else ()))
        replaces = request.replaced_task_nesting > 0 and any(
            other.is_run_of(request.parent_id) for other in others
        )
        itself = blocker.is_run_of(request.id)
        # A retry that was sent by a body that returned has more retries: it is not a redelivery.
        if itself and blocker.kept and blocker.retries >= request.retries:
            # The result may be stored already, or soon; or there is none.
            self._drop_if_done()
            if self.header.redelivered != LOOKS:
                self.postpone("redelivery", redelivered=LOOKS)
            # A run from before this message was due belongs to another call with this id.
            # Otherwise the body has returned: the call must neither fail nor run again. A skip lets
            # the rest of its chain run.
            its_own = blocker.since > self.header.due - CLOCK_SKEW
            if its_own and self.options.on_conflict != "skip":
                logger.info("Task %s was delivered again after it returned: dropped.", request.id)
                raise Dropped
            return
        if replaces or (itself and blocker.retries < request.retries):
            self.postpone("redelivery", SHORT_HOP)
        if itself:
            self.postpone("redelivery", redelivered=WAITS)
        if self.header.redelivered:
            # Another run has the lock by now. The first run's result may not be stored yet.
            if self.header.redelivered == LOOKS:
                self._drop_if_done()
            self.postpone("redelivery", redelivered=LOOKS)

    def _leave_to_first_run(self) -> None:
        if self.header.redelivered == WAITS:
            self.postpone(None, longest=FIRST_HOP, redelivered=LOOKS)
        self._drop_if_done()

    def _drop_if_done(self, *, marked: bool = False) -> None:
        """Drop the message if the result backend shows that its work is done, or that it retries.

        ``marked``: only the broker says that the message was delivered before, so the result must
        be newer than the message. For a message that has met its first run, it must not be older.
        """
        ignored = vars(self.request).get("ignore_result")
        if self.task.ignore_result if ignored is None else ignored:
            return
        try:
            result = self.task.AsyncResult(self.request.id)
            state = result.state
            newer = self._seconds_until(result.date_done) if state == "SUCCESS" else 0
        except NotImplementedError:
            return  # there is no result backend: run again
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            logger.exception(
                "The result of task %s cannot be read, so it runs again.", self.request.id
            )
            return
        # In the state RETRY, the message of the next try is already published.
        retries = state == "RETRY" and not self.request.retries and not marked
        done = state == "SUCCESS" and newer > (CLOCK_SKEW if marked else -CLOCK_SKEW)
        if done or retries:
            logger.info(
                "Task %s was delivered again, but its work is done: dropped.", self.request.id
            )
            raise Dropped

    def _seconds_until(self, moment: datetime | None) -> float:
        """Return the seconds from when the message was due until ``moment``; 0 if unknown."""
        # The meaning of a time without a zone depends on the backend and its settings.
        known = self.header.due and moment is not None and moment.tzinfo is not None
        return moment.timestamp() - self.header.due if moment and known else 0.0

    # Postponing

    def postpone(
        self,
        reason: str | None,
        first: float = FIRST_HOP,
        longest: float = math.inf,
        **changes: Any,
    ) -> NoReturn:
        """Publish the message again, at most ``longest`` seconds later, and end this delivery.

        ``reason``, or the outage, is reported at the first hop. ``changes`` change the header.
        """
        count = "hops" if self.lock.outage is None else "outage_hops"
        hops = getattr(self.header, count)
        if reason and not hops:
            self.lock.report_conflict(reason, "waiting")
        lease = self.lock.lease
        assert lease is not None
        delay = hop(self.task.app, (lease.blocker or lease.holder).timeout, first, hops, longest)
        fresh = {"token": None, "outage_hops": 0, "requeued_at": 0.0, count: hops + 1}
        header = self.header._replace(lock_key=self.lock.lock_key, **{**fresh, **changes})
        postpone(self.task, self.request, header, delay, lost=reason != "redelivery")

    def _is_superseded(self) -> bool:
        """Return whether a later call replaces this one (``"rerun"`` or ``"replace"``)."""
        address, ticket = self.lock.address, self.header.ticket
        if ticket is None or not gives_way(address, self.task.name, ticket):
            return False
        if not self.header.hops:  # otherwise its conflict was already reported
            logger.info("%s: a later call replaces task %s.", address, self.header.task_id)
            address.tell_of_conflict("superseded", "skipped", self.lock.run or NO_RUN, None)
        return True


def deliver(
    task: Any,
    policies: Mapping[str, Callable[[Delivery], Any]],
    header: Header,
    body: Callable[..., Any],
    args: Any,
    kwargs: Any,
    request: Any = None,
) -> Any:
    """Run the body of a task under its lock, or apply the policy of ``on_conflict``.

    ``request`` is the request of the message or of ``apply()``; None for a direct call.
    """
    options = LockOptions.of(task).but(header.overrides)
    key = header.lock_key
    if key is None:
        hidden = request and hidden_in_message(task.app, request, args, kwargs)
        key = task.lock_key(args, kwargs, options, shown=hidden)
    if key == NO_LOCK:
        return body(*args, **kwargs)
    task_id, retries = (request.id, request.retries or 0) if request is not None else (None, 0)
    message = None if request is None or request.is_eager else request
    if message is None:  # the rest of the header is about a message
        header = Header(header.task_id, header.task)
        if options.on_conflict in {"requeue", "rerun"}:  # it cannot be postponed
            options = options._replace(on_conflict="raise")
    again = bool(header.redelivered or is_marked(message))
    run = Run(task.name, task_id, retries, header.token, not options.lock_history, again)
    queued_call = QueuedCall(key, options, run, header.queued) if header.queued else None
    try:
        options.check_run(task.name)
        lock = DeliveryLock(key, options, run)
    except (TypeError, ValueError):
        if queued_call is not None:
            queued_call.give_back()  # otherwise it would stop duplicates for unique_for
        raise
    policy, call = policies[options.on_conflict], partial(body, *args, **kwargs)
    return Delivery(task, lock, options, header, call, policy, message, queued_call, again).run()
