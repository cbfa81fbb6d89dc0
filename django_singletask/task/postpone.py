"""Publish a message again with a delay, and end this delivery of it."""

from __future__ import annotations

import logging
import math
import random
from typing import Any, NoReturn

from celery import Celery, Task
from celery.app.autoretry import add_autoretry_behaviour
from celery.exceptions import Reject, SoftTimeLimitExceeded

try:
    from celery.utils.quorum_queues import detect_quorum_queues
except ImportError:  # Celery 5.4
    detect_quorum_queues = None  # type: ignore[assignment]

from django_singletask.exceptions import Postponed
from django_singletask.task.header import Header

logger = logging.getLogger("django_singletask")

FIRST_HOP = 1.0
SHORT_HOP = 0.05
"""Seconds of the first hop; the short one is behind an earlier run that is about to end."""


def postpone(
    task: Task[..., Any], request: Any, header: Header, delay: float, *, lost: bool
) -> NoReturn:
    """Publish the message of a request again with this header, then raise :class:`Postponed`.

    Task id, chord, chain, headers and retries stay the same. With ``acks_late`` this delivery is
    acknowledged after the next one is published: a process that is killed in between leaves two,
    and the lock decides between them. ``lost``: the broker may not have the message any more, so
    an error is raised.
    """
    signature = task.signature_from_request(request, countdown=delay, retries=request.retries)
    # Celery does not keep these by itself: no version keeps the first two, 5.4 not the third.
    names = ("argsrepr", "kwargsrepr", "ignore_result")
    kept = {name: vars(request)[name] for name in names if name in vars(request)}
    headers = header.into(signature.options.get("headers"))
    try:
        signature.set(headers=headers, **kept).apply_async()
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        logger.exception("Task %s could not be postponed.", request.id)
        if lost and not task.acks_late:
            raise
        # The task has not failed: return the message to the broker.
        raise Reject(error, requeue=True) from error
    raise Postponed


def hop(app: Celery, lease: float, first: float, hops: int, at_most: float = math.inf) -> float:
    """Return the seconds until the next delivery of a message that was postponed ``hops`` times.

    ``lease`` is the length of the holder's lease in seconds, 0 if unknown. Hops are short, because
    the broker delivers a message again that waits longer than the visibility timeout.
    """
    transport = app.conf.broker_transport_options or {}
    longest = float(transport.get("visibility_timeout") or 3600) / 3
    if lease:
        longest = min(longest, lease / 4)
    # After a short first hop, continue with the ordinary ones.
    seconds = first if hops == 0 else max(first, FIRST_HOP) * 1.5 ** min(hops - 1, 20)
    seconds = min(min(seconds, longest) * random.uniform(0.75, 1), at_most)
    # Quorum queues of RabbitMQ delay a message themselves, for a whole second at least.
    return float(max(seconds, 1.0) if _has_quorum_queues(app) else seconds)


def _has_quorum_queues(app: Celery) -> bool:
    if detect_quorum_queues is None:
        return False
    driver = app.producer_pool.connections.connection.transport.driver_type
    return bool(detect_quorum_queues(app, driver)[0])


def raise_or_retry(task: Task[..., Any], error: Exception) -> NoReturn:
    """Raise an error of the lock, or the ``Retry`` that ``autoretry_for`` makes of it.

    Celery's wrapper is around the body, so it does not see this error. This function wraps a body
    that raises the error, in a copy of the task, because Celery wraps a task only once.
    """

    def run(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    failing = object.__new__(type(task))
    vars(failing).update(vars(task), run=run)
    vars(failing).pop("_orig_run", None)
    add_autoretry_behaviour(failing)
    failing.run()
    raise AssertionError("the body above returns nothing")
