"""What a delivery does if its lock is held: one function for each ``on_conflict``."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any, NoReturn

from celery.exceptions import SoftTimeLimitExceeded

from django_singletask.exceptions import LockConflict, LockUnavailable, Postponed
from django_singletask.task.delivery import Delivery
from django_singletask.task.rerun import gives_way, take_ticket

__all__ = ["ON_CONFLICT"]


def skip(delivery: Delivery) -> Any:
    lock, options = delivery.lock, delivery.options
    lock.report_conflict("skip")
    if options.on_skip is None:
        return options.skip_result
    conflict = LockConflict.of(lock)
    conflict.lock = options.lock(lock.lock_key, delivery.task.name)  # it raises, as others do
    return options.on_skip(conflict, *delivery.body.args, **delivery.body.keywords)


def refuse(delivery: Delivery) -> NoReturn:
    """Raise ``LockConflict``; ``wait`` has already waited."""
    delivery.lock.refuse(delivery.options.on_conflict)


def requeue(delivery: Delivery) -> NoReturn:
    _must_be_a_message(delivery)
    limit, now = delivery.options.lock_wait, time.time()
    since = delivery.header.requeued_at or now
    left = math.inf if limit is None else since + limit - now
    if limit is not None and left <= 0:
        delivery.lock.say_gave_up(limit)
        delivery.lock.refuse("requeue")
    delivery.postpone("requeue", longest=left, requeued_at=since)


def rerun(delivery: Delivery) -> NoReturn:
    """Postpone the message behind the holder, as the last one that has met a conflict."""
    _must_be_a_message(delivery)
    entry, ticket = (delivery.lock.address, delivery.task.name), None
    with suppress(LockUnavailable):  # the next delivery meets the outage itself
        has_one = delivery.header.ticket or delivery.header.never_gives_way
        ticket = None if has_one else take_ticket(*entry)
    if ticket is None:  # it has one, or gets one the next time because others were faster
        delivery.postpone("rerun")
    try:
        delivery.postpone("rerun", ticket=ticket)
    except Postponed:
        # From here on the message is queued, and this delivery must not fail.
        with suppress(SoftTimeLimitExceeded):
            gives_way(*entry, ticket)
        raise


def _must_be_a_message(delivery: Delivery) -> None:
    if delivery.request is None:
        delivery.lock.refuse("raise")  # a direct call cannot be postponed


ON_CONFLICT = {
    "skip": skip,
    "raise": refuse,
    "wait": refuse,
    "requeue": requeue,
    "rerun": rerun,
}
