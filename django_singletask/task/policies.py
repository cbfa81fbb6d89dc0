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


def skip(delivery: Delivery) -> Any:
    lock, options = delivery.lock, delivery.options
    lock.report_conflict("skip", "skipped")
    if options.on_skip is None:
        return options.skip_result
    conflict = LockConflict.of(lock)
    conflict.lock = options.lock(lock.lock_key, delivery.task.name)  # it raises, as others do
    return options.on_skip(conflict, *delivery.body.args, **delivery.body.keywords)


def refuse(delivery: Delivery) -> NoReturn:
    """Raise ``LockConflict``, or the error of an outage; ``wait`` has already waited."""
    if delivery.lock.outage is not None:
        raise delivery.lock.outage
    delivery.lock.refuse(delivery.options.on_conflict)


def requeue(delivery: Delivery) -> NoReturn:
    limit, now = delivery.options.lock_wait, time.time()
    since = delivery.header.requeued_at or now
    left = math.inf if limit is None else since + limit - now
    if limit is not None and left <= 0:
        delivery.lock.say_gave_up(limit)
        refuse(delivery)
    delivery.postpone("requeue", longest=left, requeued_at=since)


def rerun(delivery: Delivery) -> NoReturn:
    """Postpone the message behind the holder, as the last one that has met a conflict."""
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


ON_CONFLICT = {
    "skip": skip,
    "raise": refuse,
    "wait": refuse,
    "requeue": requeue,
    "rerun": rerun,
}
