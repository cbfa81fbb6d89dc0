"""One delivery of a message under its lock, or one call without a message."""

from __future__ import annotations

import dataclasses
import math
import random
import time
import weakref
from typing import Any, NoReturn

from celery import Celery, Task
from celery.app.autoretry import add_autoretry_behaviour
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from django_singletask import clock
from django_singletask.conf import conf
from django_singletask.exceptions import LockConflict, LockUnavailable
from django_singletask.holder import mark_of
from django_singletask.locks.keys import NO_LOCK
from django_singletask.locks.lease import Lease, Postponed, here
from django_singletask.locks.ref import LockRef
from django_singletask.log import logger
from django_singletask.stores.base import Slots
from django_singletask.stores.keys import MAX_SLOTS
from django_singletask.task.ended import DONE, may_store, note
from django_singletask.task.header import READS, WAITS, Header, hidden_in_message
from django_singletask.task.latest import gives_way
from django_singletask.task.options import LockOptions
from django_singletask.task.started import store_started
from django_singletask.task.unique import QueuedCall

SHORT_WAIT = 0.02
"""Seconds for which a delivery of "requeue" waits before it is postponed.

Many calls that wait for one lock often meet a very short run, and postponing a call takes longer.
"""


class Dropped(Ignore):
    """End this delivery of a message: another delivery did the work, or is still doing it."""


try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:  # Celery 5.4
    detect_quorum_queues = None  # type: ignore[assignment]


FIRST_HOP = 1.0
SHORT_HOP = 0.05
"""Seconds of the first hop; the short one is behind an earlier run that is about to end."""
END_MARGIN = 0.05
"""Seconds after the end of a lock at which a message that waits for it is delivered."""


def visibility_timeout(app: Celery) -> float:
    """Return the seconds after which the broker delivers a message again that waits in a worker."""
    transport = app.conf.broker_transport_options or {}
    return float(transport.get("visibility_timeout") or 3600)


def hop(app: Celery, lease: Lease, first: float, hops: int, at_most: float) -> float:
    """Return the seconds until the next delivery of a message that was postponed ``hops`` times.

    ``lease`` has met the lock that the message waits for. Hops are short, because what is freed
    early must be found, and because the broker delivers a message again that waits longer than the
    visibility timeout. No hop is longer than until the lock may end. If the broker cannot delay a
    message for as short as ``at_most``, this waits, and returns 0.

    memcached counts whole seconds, so there an entry lasts up to 2 s longer than its record says:

        record:     since ------------ timeout -------------| end
        memcached:                                                ... ends
        message:              hop -------------------------->  1 s> free: takes the lock

    A message that has hopped often waits a little longer, because others were faster. Otherwise
    all of many messages would hop at the end of each of many slots.
    """
    length = lease.length
    if lease.blocker is not None:
        length = lease.blocker.timeout
    longest = visibility_timeout(app) / 3
    if length:  # otherwise another program wrote the entry
        longest = min(longest, length / 4)
    seconds = first
    if hops > 0:  # after a short first hop, continue with the ordinary ones
        seconds = max(first, FIRST_HOP) * 1.5 ** min(hops - 1, 20)
    seconds = min(seconds, longest) * random.uniform(0.75, 1)
    until_free = max(lease.free_in + END_MARGIN, FIRST_HOP, hops / 20)
    seconds = min(seconds, until_free, at_most)
    if not has_quorum_queues(app):
        return seconds
    # RabbitMQ delays a message itself, for a whole second at least.
    if at_most < 1:
        time.sleep(seconds)
        return 0.0
    return max(seconds, 1.0)


def has_quorum_queues(app: Celery) -> bool:
    """Return whether the messages of an app go to quorum queues, which RabbitMQ alone has."""
    if detect_quorum_queues is None:
        return False
    connection = app.producer_pool.connections.connection
    found, _name = detect_quorum_queues(app, connection.transport.driver_type)
    return bool(found)


def as_retry(task: Task[..., Any], error: BaseException) -> BaseException:
    """Return an error of the lock, or the ``Retry`` that ``autoretry_for`` makes of it.

    Celery's wrapper is around the body, so it does not see this error. This function wraps a body
    that raises the error, in a copy of the task, because Celery wraps a task only once.
    """

    def run(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    failing = object.__new__(type(task))
    vars(failing).update(vars(task), run=run)
    vars(failing).pop("_orig_run", None)
    add_autoretry_behaviour(failing)
    try:
        failing.run()
    except BaseException as raised:
        return raised
    raise AssertionError("the body above returns nothing")


CLOCK_SKEW = 1.0
"""Seconds by which the clocks of two hosts may differ; see task/__init__.py."""


class Delivery:
    """One delivery: the body of a task, with its lock, options and header.

    It is made from the request of a message or of ``apply()``; from None for a direct call, whose
    header has no id. The attribute ``request`` is None for each call without a message, which
    cannot be postponed. ``again``: the message may have been delivered before. Either an earlier
    delivery has met its first run, or the header is ``marked``: the broker marks the message, or
    it has waited in the worker for so long that the broker has delivered it to another one.
    """

    lease: Lease
    """The lock of the delivery, from before it is taken."""
    shown_lock: Any = None
    """The :class:`TaskLock` of the lease, once the body has asked for it."""
    outage: LockUnavailable | None = None
    """The error of a cache that could not be used."""
    queued_call: QueuedCall | None = None
    has_ended: bool = False
    result: Any = None
    failure: BaseException | None = None
    """The result and the error of the body, when it has ended; or the error that kept it away."""

    def __init__(
        self, task: Any, request: Any, header: Header, body: Any, args: Any, kwargs: Any
    ) -> None:
        options = LockOptions.of(task, header.options)
        key = header.lock_key
        if key is None:
            shown = None
            if request is not None:
                shown = hidden_in_message(task.app, request, args, kwargs)
            key = options.key(task, args, kwargs, shown=shown)
        retries = 0
        if request is not None and request.retries is not None:
            retries = request.retries
        if request is not None and request.is_eager:
            # The rest is about a message.
            request = None
            header = Header(header.id, header.task)
        if request is None and options.on_conflict == "requeue":
            options.on_conflict = "raise"  # it cannot be postponed
        self.task = task
        self.request: Any = request
        self.header = header
        # Not as one partial: if the body is one, too, its own arguments would look like the call's.
        self.body = body
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.key = key
        self.has_hopped: bool = header.redelivered == READS
        if request is not None and not header.redelivered:
            if request.delivery_info and request.delivery_info.get("redelivered"):
                header.marked = True
            elif header.received:
                has_waited = time.time() - header.received
                if has_waited > FIRST_HOP and has_waited > visibility_timeout(task.app):
                    # It was delivered first. Each other delivery hops, and notes its end.
                    header.marked = True
                    self.has_hopped = True
        self.again: bool = header.marked or bool(header.redelivered)
        self.ref: LockRef = LockRef(
            conf.cache,
            key.name,
            key.key,
            task.name,
            header.id or None,
            retries,
            header.token,
            is_delivery=True,
            quiet=not options.lock_history,
        )
        if header.queued:
            self.queued_call = QueuedCall(self.ref, options, header.queued)
            # For apply_async(), if the body sends its call again, or another with the same entry.
            request.singletask_queued_call = self.queued_call  # pyright: ignore[reportOptionalMemberAccess]

    def run(self) -> Any:
        """Run the body under its lock, or do what ``on_conflict`` says.

        The result or the error of the body stands. An error that comes after it is logged, such as
        a soft time limit during the release.
        """
        if self.key == NO_LOCK:
            if self.task.stores_started:
                store_started(self.task, self.request)
            return self.body(*self.args, **self.kwargs)
        try:
            return self._run()
        except Exception as error:
            if not self.has_ended or error is self.failure:
                raise
            # A signal may have come before the block of the lease could end.
            self.lease.leave_body(self.failure)
            self.lease.leave_block()
            if self.queued_call:
                self._free(self.queued_call)
            text = "%s: this error came after the body had ended, so it changes nothing."
            logger.exception(text, self.ref)
            result = self.result
            failure = self.failure
        finally:
            self.failure = None  # it refers to this object
        if failure is not None:
            raise failure
        return result

    def _run(self) -> Any:
        options = self.options
        try:
            self.lease = self._new_lease()
            if self.header.marked:
                self._drop_if_done()
            # The first run of a redelivery may still be running; this result must not replace its
            # own.
            if not self.again and self._is_superseded():
                return options.skip_result
            # The lock is released before Celery stores the result and publishes the next link of a
            # chain, which may want the same lock.
            with self.lease as lease:
                if self._take():
                    # A later call may have run while this one waited for the lock.
                    has_waited = self.again or lease.wait > 0
                    if not has_waited or not self._is_superseded():
                        return self._run_body()
                    lease.leave_body(result="ignored")
                    return options.skip_result
            if self.outage is not None:
                return self._meet_outage(self.outage)
            return self._meet_conflict()
        except (Postponed, Dropped):
            self.queued_call = None  # another delivery of this message exists, and has the entry
            raise
        except BaseException as error:
            if not self.has_ended:
                if self.header.id and not isinstance(error, Reject):
                    error = as_retry(self.task, error)
                self.failure = error
            raise error
        finally:
            if self.queued_call:
                self._free(self.queued_call)

    def _new_lease(self) -> Lease:
        """Return a lease of the lock, not taken.

        A delivery takes no second slot for one message, so it looks for its mark. A redelivery
        reads all slots that there can be, to find its own first run. A retry does so, too, because
        the previous try may not have released its slot yet.

        A deploy that lowers the number of slots from 5 to 2 leaves runs in the slots 3 to 5. A
        process that allows 2 neither takes nor counts those slots. So until the old processes are
        gone, there are at most 5 runs: the greatest number that a process allows.
        """
        options = self.options
        slots = None
        if options.lock_slots > 1 or self.again:
            read = options.lock_slots
            if self.again or self.ref.retries:
                read = MAX_SLOTS
            keys = self.key.slots(read)
            slots = Slots(keys, options.lock_slots, mark_of(self.ref.task_id))
        lease = Lease(self.ref, options.lock_timeout, slots)
        lease.renews = options.lock_renew
        lease.at_least = options.lock_at_least
        lease.origin = here()
        lease.in_block = True
        lease.delivery = weakref.ref(self)
        if options.on_conflict == "requeue":
            lease.wait = SHORT_WAIT
        elif options.on_conflict == "wait" and options.lock_wait is not None:
            lease.wait = options.lock_wait
        lease.waits_behind = self.header.met
        if self.header.requeued_at:
            waited = max(0.0, time.time() - self.header.requeued_at)
            lease.waits_since = clock.now() - waited
        return lease

    def _take(self) -> bool:
        """Take the lock; return whether this delivery has it, and may run."""
        lease = self.lease
        try:
            if lease.take() is not None:
                return False
        except LockUnavailable as error:
            self.outage = error
            return False
        lease.enter()
        if self.again and not lease.took_over:
            self._follow_own_run()
        return True

    def _free(self, queued_call: QueuedCall) -> None:
        """Free the entry of a queued call, unless the call or its lock goes on."""
        self._keep_entry(queued_call)
        kept = None
        if self.has_ended and self.lease.kept:
            kept = self.lease
        queued_call.give_back(kept, self.failure)

    def _keep_entry(self, queued_call: QueuedCall) -> None:
        """Keep the entry if the call was sent again, or goes back to the broker."""
        goes_back = isinstance(self.failure, Reject) and getattr(self.failure, "requeue", False)
        if goes_back and self.task.acks_late:
            queued_call.sent_again(0.0, self.request.expires)
        queued_call.queue_again()

    def _meet_outage(self, outage: LockUnavailable) -> Any:
        """Postpone a message that was promised its turn; else do what ``on_outage`` says."""
        # The first run, or a holder that this delivery has met, may still be running.
        if self.again:
            raise self.postpone("redelivery", redelivered=WAITS)
        lease = self.lease
        on_outage = self.options.on_outage
        if on_outage == "run" and lease.blocker is None:
            return self._run_unguarded(outage)
        if self.options.on_conflict == "requeue":
            raise self.requeue()
        if self.header.hops:
            raise self.postpone("outage")
        if on_outage == "skip":
            text = "%s: %s is skipped (on_outage='skip'). %s"
            logger.warning(text, lease, lease.holder, outage)
            self._tell_skip("outage")
            return self.options.skip_result
        raise outage

    def _run_unguarded(self, outage: LockUnavailable) -> Any:
        """Run the body without its lock."""
        lease = self.lease
        text = "%s: %s runs without its lock (on_outage='run'). %s"
        logger.error(text, lease, lease.holder, outage)
        lease.ref.tell("unguarded", lease.holder, reason=str(outage))
        lease.is_unguarded = True
        with lease:
            lease.enter()
            return self._run_body()

    def _meet_conflict(self) -> Any:
        policy = self.options.on_conflict
        if self.lease.is_behind_itself:
            raise self.refuse("wait")
        if policy == "requeue":
            self.lease.note = ""  # it waits for its turn
        if self.request is not None:
            self._meet_own_run()
        if policy == "skip":
            return self.skip()
        if policy == "requeue":
            raise self.requeue()
        raise self.refuse(policy)  # "wait" has already waited

    def _run_body(self) -> Any:
        if self.header.ticket is not None and self.request is not None:
            # From now on, no later call replaces this call or its retries.
            self.header.ticket = None
            self.request.update(self.header.into(None))
        if self.queued_call:
            self.queued_call.start()
        if self.task.stores_started:
            store_started(self.task, self.request)
        # Last, so that whatever keeps the body away keeps no lock.
        self.lease.began_at = clock.now()
        try:
            self.result = self.body(*self.args, **self.kwargs)
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.has_ended = True
            if self.queued_call:
                self._keep_entry(self.queued_call)
            if self.again:
                note(self.key, self.request.id, DONE)  # pyright: ignore[reportOptionalMemberAccess]
        if isinstance(self.result, Retry) and self.result.is_eager:  # type: ignore[attr-defined]
            self.lease.at_least = 0  # of retry(throw=False); see Lease.leave_body()
        return self.result

    # A message that meets its own earlier run; see task/__init__.py

    def _meet_own_run(self) -> None:
        """Postpone or drop the message if its first run has the lock, or had it; else return."""
        blocker: Any = self.lease.blocker
        request = self.request
        header = self.header
        is_own = blocker.is_run_of(request.id)
        # If a chain replaces a task, its first link has a new id, and the task is its parent.
        replaces = request.replaced_task_nesting > 0 and any(
            holder.is_run_of(request.parent_id) for holder in self.lease.others
        )
        # A retry that was sent by a body has more retries: it is not a redelivery.
        if is_own and blocker.retries < request.retries:
            raise self.postpone("retry", SHORT_HOP)
        if replaces:
            raise self.postpone("redelivery", SHORT_HOP)
        # The run is alive, or its body has ended in another way than by returning: then the
        # message comes again because its work is not done, and waits for the rest of lock_at_least.
        #
        #   first run:  begins   Reject(requeue=True)   kept .................... ends
        #   message:                    again: kept, but not returned: waits      free: runs
        #   its retry:                  again: kept, of an earlier try: waits     free: runs
        if is_own and not blocker.returned:
            raise self.postpone("redelivery", redelivered=WAITS, marked=False)
        if is_own:
            header.marked = False
        elif not header.redelivered:
            return
        self._drop_if_done()
        if not is_own or header.redelivered != READS:
            raise self.postpone("redelivery", redelivered=READS)
        # A run from before this message was due belongs to another call with this id. Otherwise
        # the body has returned and keeps the lock: the call must neither fail nor run again. A skip
        # lets the rest of its chain run.
        is_of_this_call = blocker.since > header.due - CLOCK_SKEW
        if is_of_this_call and self.options.on_conflict != "skip":
            logger.info("Task %s was delivered again after it returned: dropped.", request.id)
            raise Dropped

    def _follow_own_run(self) -> None:
        """Postpone or drop the message, which has the lock, if its first run may have ended."""
        shows_end = self._drop_if_done()
        if shows_end and may_store(self.key, self.request.id, has_hopped=self.has_hopped):
            raise self.postpone(None, longest=FIRST_HOP, redelivered=READS)

    def _drop_if_done(self) -> bool:
        """Drop the message if the result backend shows that its work is done, or that it retries.

        Return whether a result can show that at all.
        """
        if vars(self.request).get("ignore_result", self.task.ignore_result):
            return False
        header = self.header
        try:
            result = self.task.AsyncResult(self.request.id)
            state = result.state
            ended = None
            retries = False
            if state == "SUCCESS":
                ended = result.date_done
            elif state == "RETRY" and not self.request.retries:
                # The message of the next try is already published. But if Celery has cancelled a
                # run after the broker was away, the error is itself a Retry, and this message is
                # that try.
                retries = not isinstance(result.result, Retry)
        except NotImplementedError:
            return False  # there is no result backend: run again
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            logger.exception(
                "The result of task %s cannot be read, so it runs again.", self.request.id
            )
            return True
        # A message that has met its first run needs no certainty. The meaning of a time without a
        # zone depends on the backend and its settings.
        is_newer = not header.marked
        if header.due and ended and ended.tzinfo:
            earliest = header.due - CLOCK_SKEW
            if header.marked:
                earliest = header.due - header.delay + CLOCK_SKEW
            is_newer = ended.timestamp() > earliest
        is_done = state == "SUCCESS" and is_newer
        if is_done or retries:
            logger.info(
                "Task %s was delivered again, but its work is done: dropped.", self.request.id
            )
            raise Dropped
        return True

    # Postponing

    def postpone(
        self,
        reason: str | None,
        first: float = FIRST_HOP,
        longest: float = math.inf,
        **changes: Any,
    ) -> Postponed:
        """Publish the message again, at most ``longest`` seconds later; return what to raise then.

        ``reason`` is reported once for each holder that the message meets, and an outage at the
        first hop. ``changes`` change the header.
        """
        lease = self.lease
        count = "hops"
        met = self.header.met
        if self.outage is not None:
            count = "outage_hops"
        elif lease.blocker is not None:
            met = lease.blocker.token
        hops = getattr(self.header, count)
        if reason and (not hops or met != self.header.met):
            if self.outage is not None:
                text = "%s: the call of %s is postponed. %s"
                logger.warning(text, lease, lease.holder, self.outage)
            else:
                lease.report_conflict(reason, "waiting")
        delay = hop(self.task.app, lease, first, hops, longest)
        fresh = {"outage_hops": 0, "requeued_at": 0.0, "met": met, count: hops + 1}
        header = dataclasses.replace(self.header, **(fresh | changes))
        header.name = self.key.name
        header.key = self.key.key
        # Task id, chord, chain, headers and retries stay the same. With acks_late this delivery is
        # acknowledged after the next one is published: a process that is killed in between leaves
        # two, and the lock decides between them.
        task = self.task
        request = self.request
        signature = task.signature_from_request(request, countdown=delay, retries=request.retries)
        # Celery does not keep these by itself: no version keeps the first two, 5.4 not the third.
        names = ("argsrepr", "kwargsrepr", "ignore_result")
        kept = {name: value for name, value in vars(request).items() if name in names}
        headers = header.into(signature.options.get("headers"))
        try:
            signature.set(headers=headers, **kept).apply_async()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            logger.exception("Task %s could not be postponed.", request.id)
            if reason not in ("redelivery", "retry") and not task.acks_late:
                raise  # the broker may not have the message any more
            # The task has not failed: return the message to the broker.
            raise Reject(error, requeue=True) from error
        return Postponed()

    # What on_conflict says

    def _conflict(self) -> LockConflict:
        """Return the error of the conflict; it has the lock as other code has it."""
        lock = self.options.lock(self.key, self.task.name)
        return self.lease.conflict(lock)

    def refuse(self, reason: str) -> LockConflict:
        """Report that the conflict fails the call; return what to raise."""
        self.lease.report_conflict(reason, "failed")
        return self._conflict()

    def skip(self) -> Any:
        self.lease.report_conflict("skip", "skipped")
        if self.options.on_skip is None:
            return self.options.skip_result
        return self.options.on_skip(self._conflict(), *self.args, **self.kwargs)

    def _tell_skip(self, reason: str) -> None:
        caller = self.lease.holder
        self.ref.tell("conflict", caller, of_call=True, reason=reason, result="skipped")

    def requeue(self) -> Exception:
        """Postpone the message until ``lock_wait`` is over; return what to raise."""
        limit = self.options.lock_wait
        if limit is None:
            limit = math.inf
        since = self.header.requeued_at
        if not since:
            since = time.time()
        left = since + limit - time.time()
        if left <= 0:
            if self.outage is not None:
                return self.outage
            self.lease.note_wait(limit)
            return self.refuse("requeue")
        return self.postpone("requeue", longest=left, requeued_at=since)

    def _is_superseded(self) -> bool:
        """Return whether a later call replaces this one (``on_duplicate="replace"``)."""
        ticket = self.header.ticket
        if not ticket or not gives_way(self.ref, ticket):
            return False
        if not self.header.hops:  # otherwise its conflict was already reported
            logger.info("%s: a later call replaces task %s.", self.ref, self.header.id)
            self._tell_skip("superseded")
        return True
