"""What a run does that finds its lock held; putting a message off."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from celery.exceptions import Reject, SoftTimeLimitExceeded

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:  # Celery 5.4
    detect_quorum_queues = None  # type: ignore[assignment]

from django_singletask.exceptions import Dropped, Postponed
from django_singletask.locks.keys import LATEST
from django_singletask.locks.lock import TaskLock
from django_singletask.locks.run import Run
from django_singletask.stores import Store, get_store
from django_singletask.task.rerun import Ticket, is_superseded, take_ticket
from django_singletask.task.unique import QueuedCall

if TYPE_CHECKING:
    from django_singletask.task.base import SingletonTask

__all__ = ["HEADER", "POLICIES", "own_header", "run"]

logger = logging.getLogger("django_singletask")

HEADER = "singletask"
"""The message header with the call's key, name, lock options and task id."""

POLICIES = ("skip", "raise", "wait", "requeue", "rerun")

FIRST_HOP = 1.0
SHORT_HOP = 0.05


QUEUED_AGAIN = "singletask_queued_again"
"""Attribute of a request whose body has sent its message again: seconds until that starts."""


def own_header(
    headers: Mapping[str, Any] | None, task_id: str | None, task: str
) -> Mapping[str, Any]:
    """Return our header if it was made for this id of this task.

    Bodies pass ``headers=self.request.headers`` on to the calls that they make, so a header that
    came along with another id, or of another task, says nothing about this call.
    """
    header = (headers or {}).get(HEADER)
    if not isinstance(header, Mapping) or task_id is None:
        return {}
    return header if (header.get("id"), header.get("task")) == (task_id, task) else {}


class DeliveryLock(TaskLock):
    """The lock of a delivery, which does itself what ``on_conflict`` says."""

    def meet_conflict(self) -> None:
        """Leave it to the delivery."""


def run(
    task: SingletonTask,
    lock: TaskLock,
    options: Mapping[str, Any],
    body: Any,
    args: Any,
    kwargs: Any,
    request: Any = None,
) -> Any:
    """Run a body under its lock, or do what ``on_conflict`` says.

    ``request`` is that of the message; None for a call that came as none and cannot be put off.
    """
    header = own_header(request.headers, request.id, task.name) if request is not None else {}
    call = None
    if header.get("queued"):
        call = task.queued_call(
            lock.lock_key, options, Run(task.name, request.id, request.retries, header.get("token"))
        )
        call.value = header["queued"].encode()
    with nullcontext() if call is None else _delivered(task, call):
        return _run(task, lock, options, partial(body, *args, **kwargs), request, header, call)


@contextmanager
def _delivered(task: SingletonTask, call: QueuedCall) -> Iterator[None]:
    """Give the entry of a queued call back at the end, unless the call goes on elsewhere."""
    try:
        yield
    except (Postponed, Dropped):
        raise  # the message is queued again, or was: the entry is that of the other delivery
    except BaseException as error:
        if not _comes_again(task, error):
            call.give_back()
        raise
    call.give_back()


@contextmanager
def _running(
    task: SingletonTask, call: QueuedCall, request: Any, header: Mapping[str, Any]
) -> Iterator[None]:
    """Let the entry of a queued call be that of its run, and again a queued one's if it is."""
    call.start()
    try:
        yield
    except Reject as reject:
        if _comes_again(task, reject):
            setattr(request, QUEUED_AGAIN, 0.0)
        raise
    finally:
        delay = getattr(request, QUEUED_AGAIN, None)
        if delay is not None:
            call.queue_again(delay)


def _comes_again(task: SingletonTask, error: BaseException) -> bool:
    """Say whether the broker delivers a message once more that ended with this error."""
    return isinstance(error, Reject) and getattr(error, "requeue", False) and task.acks_late


def _run(
    task: SingletonTask,
    lock: TaskLock,
    options: Mapping[str, Any],
    body: Callable[[], Any],
    request: Any,
    header: Mapping[str, Any],
    call: QueuedCall | None,
) -> Any:
    policy = task.option("on_conflict", options)
    if request is None and policy in ("requeue", "rerun"):
        policy = "raise"
    if "ticket" in header and _gives_way(task, lock, Ticket(*header["ticket"])):
        return task.option("skip_result", options)
    # The lock is given back here, so before Celery stores the result and publishes the next link
    # of a chain, which may want the same lock.
    with lock:
        if lock:
            if header.get("redelivered") and not (lock.lease and lock.lease.took_over):
                _leave_to_the_first_run(task, lock, request, header)
            if call is None:
                return body()
            with _running(task, call, request, header):
                return body()
    if request is not None:
        _put_off_behind_itself(task, lock, request, header)
    if policy == "requeue":
        put_off(task, lock, request, header, "requeue", FIRST_HOP)
    if policy == "rerun":
        _put_off_as_the_latest(task, lock, request, header)
    lock.report_conflict(policy)
    if policy in ("raise", "wait"):
        raise lock.conflict()
    return task.option("skip_result", options)


def _latest(task: SingletonTask, lock: TaskLock) -> tuple[Store, str]:
    return get_store(lock.address.cache), lock.lock_key.beside(LATEST, task.name).key


def _put_off_as_the_latest(
    task: SingletonTask, lock: TaskLock, request: Any, header: Mapping[str, Any]
) -> NoReturn:
    """Put the message off behind the holder, as the last that has met a conflict so far."""
    if "ticket" in header:
        put_off(task, lock, request, header, "rerun", FIRST_HOP)
    ticket = take_ticket(*_latest(task, lock))
    if ticket is None:  # the next time, then
        put_off(task, lock, request, header, "rerun", FIRST_HOP)
    try:
        put_off(task, lock, request, header, "rerun", FIRST_HOP, ticket=list(ticket))
    except Postponed:
        # From here on it is queued, and this delivery must not fail.
        with suppress(SoftTimeLimitExceeded):
            _gives_way(task, lock, ticket)
        raise


def _gives_way(task: SingletonTask, lock: TaskLock, ticket: Ticket) -> bool:
    try:
        return is_superseded(*_latest(task, lock), ticket)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        # Whoever is in doubt runs.
        logger.exception("%s: it is not known whether a later call waits for it.", lock)
        return False


# A message and the lock of its own earlier run
#
# The same task id can meet its own lock: a retry or a replacement is published by the body, so it
# can arrive before the body has ended; a redelivery can arrive while the first run goes on,
# because the broker took it for lost. To skip it would lose the work, to raise would fail it.
#
#   first run: takes the lock ........... result stored? no, yet  -> gives back -> result SUCCESS
#   message:             again: put off       put off        free: one more hop -> SUCCESS: drop
#
# The lock comes back before the result is stored, hence the one hop more after it is free. If the
# first run was killed, there is no result, and the message runs: at least once.

# What "redelivered" in the header says of this message:
WAITS = 1  # it waits for the end of its first run
LOOKS = 2  # that has ended; the next look at its result decides


def _put_off_behind_itself(
    task: SingletonTask, lock: TaskLock, request: Any, header: Mapping[str, Any]
) -> None:
    """Put the message off if it met a run of its own, or has met one; else return."""
    blocker = lock.blocker
    if blocker is None:
        return
    # The first link of a chain that replaces a task has a new id; the task is its parent.
    replaces = request.replaced_task_nesting > 0 and blocker.task_id == request.parent_id
    if replaces or (blocker.task_id == request.id and blocker.retries < request.retries):
        put_off(task, lock, request, header, "redelivery", SHORT_HOP)
    if blocker.task_id == request.id:
        put_off(task, lock, request, header, "redelivery", FIRST_HOP, redelivered=WAITS)
    if header.get("redelivered"):
        # Somebody else has the lock by now. The result of the first run may be on its way.
        if header["redelivered"] == LOOKS and _is_done(task, request):
            raise Dropped
        put_off(task, lock, request, header, "redelivery", FIRST_HOP, redelivered=LOOKS)


def _leave_to_the_first_run(
    task: SingletonTask, lock: TaskLock, request: Any, header: Mapping[str, Any]
) -> None:
    if header["redelivered"] == WAITS:
        put_off(task, lock, request, {**header, "hops": 0}, None, FIRST_HOP, redelivered=LOOKS)
    if _is_done(task, request):
        raise Dropped


def _is_done(task: SingletonTask, request: Any) -> bool:
    """Say whether the result backend knows that the work of a message was done, or goes on."""
    ignored = vars(request).get("ignore_result")
    if task.ignore_result if ignored is None else ignored:
        return False
    try:
        state = task.AsyncResult(request.id).state
    except NotImplementedError:
        # Celery's answer where no result backend is configured: nothing is known, so it runs.
        return False
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        logger.exception("The result of %s cannot be read: it runs again.", request.id)
        return False
    # After RETRY the next message is published already.
    return state == "SUCCESS" or (state == "RETRY" and not request.retries)


def put_off(
    task: SingletonTask,
    lock: TaskLock,
    request: Any,
    header: Mapping[str, Any],
    reason: str | None,
    first: float,
    **state: Any,
) -> NoReturn:
    """Publish the message again for a little later, and let this delivery go.

    ``reason`` is told once for all hops of a message; None: there was no conflict.

    Same task id, chord, chain, headers and retries. With ``acks_late`` this delivery is
    acknowledged after the next is published: a process that is killed in between leaves two, and
    the lock decides between them. The hops are short, because a delivery that waits for its time
    longer than the broker's visibility timeout is itself redelivered, and multiplies.
    """
    hops = header.get("hops") or 0
    if reason and not hops:
        lock.report_conflict(reason)
    signature = task.signature_from_request(
        request, countdown=_hop(task, lock, first, hops), retries=request.retries
    )
    headers = signature.options.get("headers") or {}
    own = {**header, "id": request.id, "task": task.name, "key": lock.key, "name": lock.name}
    put = {**headers, HEADER: {**own, "hops": hops + 1, **state}}
    # What the caller hides stays hidden, and a result that nobody wants is not stored: Celery keeps
    # the first on no version, the second not on 5.4.
    names = ("argsrepr", "kwargsrepr", "ignore_result")
    given = {name: vars(request)[name] for name in names if name in vars(request)}
    try:
        signature.set(headers=put, **given).apply_async()
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        logger.exception("%s could not be put off.", request.id)
        if reason != "redelivery" and not task.acks_late:
            raise  # the broker knows the message no longer: nobody else would tell of it
        # Not a failure of the task: back to the broker. Of a redelivery that it has forgotten,
        # the other run is there.
        raise Reject(error, requeue=True) from error
    raise Postponed


def _hop(task: SingletonTask, lock: TaskLock, first: float, hops: int) -> float:
    transport = task.app.conf.broker_transport_options or {}
    longest = float(transport.get("visibility_timeout") or 3600) / 3
    if lock.blocker is not None and lock.blocker.timeout:
        longest = min(longest, lock.blocker.timeout / 4)
    # After a short first hop, on to the ordinary ones.
    hop = first if hops == 0 else max(first, FIRST_HOP) * 1.5 ** min(hops - 1, 20)
    hop = min(hop, longest) * random.uniform(0.75, 1)
    # Quorum queues of RabbitMQ keep a message back themselves, for a whole second at least.
    return float(max(hop, 1.0) if _has_quorum_queues(task.app) else hop)


def _has_quorum_queues(app: Any) -> bool:
    if detect_quorum_queues is None:
        return False
    driver = app.producer_pool.connections.connection.transport.driver_type
    return bool(detect_quorum_queues(app, driver)[0])
