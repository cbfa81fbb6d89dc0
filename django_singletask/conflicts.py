"""What a run does that finds its lock held; putting a message off."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from celery.exceptions import Ignore

from django_singletask.exceptions import PutOff
from django_singletask.locks import TaskLock

if TYPE_CHECKING:
    from django_singletask.task import SingletonTask

__all__ = ["HEADER", "POLICIES", "own_header", "run"]

HEADER = "singletask"
"""The message header with the call's key, name, lock options and task id."""

POLICIES = ("skip", "raise", "wait")

FIRST_HOP = 1.0
SHORT_HOP = 0.05


def own_header(headers: Mapping[str, Any] | None, task_id: str | None) -> Mapping[str, Any]:
    """Return our header if it was made for this task id.

    Bodies pass ``headers=self.request.headers`` on to the calls that they make, so a header that
    came along with another id says nothing about this call.
    """
    header = (headers or {}).get(HEADER)
    if isinstance(header, Mapping) and header.get("id") == task_id and task_id is not None:
        return header
    return {}


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
    header = own_header(request.headers, request.id) if request is not None else {}
    policy = task.option("on_conflict", options)
    wait = task.option("lock_wait", options) if policy == "wait" else 0
    lock.wait, lock.on_conflict = wait, None
    # The lock is given back here, so before Celery stores the result and publishes the next link
    # of a chain, which may want the same lock.
    with lock:
        if lock:
            if header.get("redelivered") and not lock.took_over:
                _leave_to_the_first_run(task, request, header)
            return body(*args, **kwargs)
    if request is not None and lock.blocker is not None and lock.blocker.task_id == request.id:
        lock._report_conflict("redelivery")
        _put_off_behind_itself(task, lock, request, header)
    lock._report_conflict(policy)
    if policy != "skip":
        raise lock._conflict()
    return task.option("skip_result", options)


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


def _put_off_behind_itself(
    task: SingletonTask, lock: TaskLock, request: Any, header: Mapping[str, Any]
) -> NoReturn:
    assert lock.blocker is not None
    earlier = lock.blocker.retries < request.retries or request.replaced_task_nesting > 0
    first = SHORT_HOP if earlier else FIRST_HOP
    put_off(task, lock, request, header, first, redelivered=0 if earlier else 1)


def _leave_to_the_first_run(task: SingletonTask, request: Any, header: Mapping[str, Any]) -> None:
    if header["redelivered"] == 1:
        put_off(task, None, request, {**header, "hops": 0}, FIRST_HOP, redelivered=2)
    if _succeeded(task, request):
        raise Ignore


def _succeeded(task: SingletonTask, request: Any) -> bool:
    if request.ignore_result or task.ignore_result:
        return False
    try:
        return bool(task.AsyncResult(request.id).state == "SUCCESS")
    except NotImplementedError:  # no result backend is configured
        return False


def put_off(
    task: SingletonTask,
    lock: TaskLock | None,
    request: Any,
    header: Mapping[str, Any],
    first: float,
    **state: Any,
) -> NoReturn:
    """Publish the message again for a little later, and let this delivery go.

    Same task id, chord, chain, headers and retries. With ``acks_late`` this delivery is
    acknowledged after the next is published: a process that is killed in between leaves two, and
    the lock decides between them. The hops are short, because a delivery that waits for its time
    longer than the broker's visibility timeout is itself redelivered, and multiplies.
    """
    hops = header.get("hops") or 0
    signature = task.signature_from_request(
        request, countdown=_hop(task, lock, first, hops), retries=request.retries
    )
    headers = signature.options.get("headers") or {}
    put = {**headers, HEADER: {**header, "id": request.id, "hops": hops + 1, **state}}
    signature.set(headers=put).apply_async()
    raise PutOff


def _hop(task: SingletonTask, lock: TaskLock | None, first: float, hops: int) -> float:
    transport = task.app.conf.broker_transport_options or {}
    longest = float(transport.get("visibility_timeout") or 3600) / 3
    if lock is not None and lock.blocker is not None and lock.blocker.timeout:
        longest = min(longest, lock.blocker.timeout / 4)
    # After a short first hop, on to the ordinary ones.
    hop = first if hops == 0 else max(first, FIRST_HOP) * 1.5 ** min(hops - 1, 20)
    return float(min(hop, longest) * random.uniform(0.75, 1))
