"""What this package adds to the headers of a message."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

from celery import Celery
from celery.utils.saferepr import saferepr

from django_singletask.locks.keys import LockKey
from django_singletask.task.options import NAMES

HEADER = "singletask"
"""Name of the message header of this package."""

# A message and the lock of its own earlier run
#
# The same task id can meet its own lock. A retry or a replacement is published by the body, so it
# can arrive before the body has ended. A redelivery can arrive while the first run is still
# running. To skip such a message would lose the work, and to raise would fail the task.
#
#   first run: takes the lock ........... result stored? not yet  -> releases -> result SUCCESS
#   message:             again: postponed     postponed       free: one more hop -> SUCCESS: drop
#
# The lock is released before the result is stored, hence one more hop after the release, unless
# the result is there already. If the first run was killed, there is no result, and the message
# runs: at least once.
#
# A redelivery can also arrive after its first run, if the broker died before the acknowledgement,
# or if the message waited in a worker for longer than the visibility timeout. The broker marks it.
# It looks at the result before it takes the lock. If it then has the lock, its first run may have
# ended just before, so it hops once and looks again:
#
#   first run: takes the lock ... releases                        result SUCCESS
#   message:            marked: no result   takes the lock: hops                 SUCCESS -> drop
#
# A message that waited for so long is delivered to several workers, and the delivery without the
# mark may be the last to run. Its worker knows since when it has waited. It does not hop, since all
# others do; ended.py says how they know of each other.
#
# A caller may use the same id each day, and yesterday's result must not drop today's message. So
# the message carries the time of its sending, by the clock of its sender. A result counts only if
# it is newer, by the clock of the host that stored it:
#
#   yesterday: message  result SUCCESS        today: message (redelivered)   older -> runs
#
# Clocks that NTP sets differ by far less than a second. If it is not certain which is newer, a
# message that is only marked runs. One that has met its first run is dropped. An id may be sent
# again only after its earlier call has ended, because a result does not show to which of two calls
# it belongs.

# Where a request has the header
#
# Celery makes the headers of a message attributes of the request. ``request.headers`` are the same
# headers, but only if the message has no header of the name "headers". Sentry and ddtrace add one:
#
#   message: singletask={…}  headers={"trace-id": …}     request.singletask  request.headers: traces
#   apply(), and a message of protocol 1:                request.headers["singletask"]
#
# So the attribute is read first. What a tool has copied into the inner headers can be older: it
# lacks the token of the worker's main process.

VERSION = 1
"""Grows if a field gets another meaning. Of a newer header only the lock is read."""
ENDLESS = "inf"
"""Stands in the message for ``math.inf``, which JSON does not have."""
WAITS = 1
"""``redelivered`` of a message that waits for the end of its first run."""
READS = 2
"""``redelivered`` of a message whose first run has ended, if there was one: its next delivery reads
the result for the last time."""


@dataclasses.dataclass
class Header:
    """What this package writes into a message; a field that is empty is not sent.

    Bodies pass ``headers=self.request.headers`` to other calls. So a header contains the id and
    the task of the call that it was made for, and other calls ignore it.

    ``apply_async`` writes the fields up to ``queued``, ``due``, ``delay`` and ``ticket``. The
    delivery writes the others, unless noted.
    """

    id: str
    task: str
    name: str | None = None  # of the lock
    key: str | None = None  # None: the worker computes it
    options: dict | None = None  # type: ignore[type-arg] # the lock options of this call
    queued: str | None = None  # the duplicate entry (unique_until), as the producer added it
    token: str | None = None  # from the worker's main process, for one delivery; never sent on
    due: float | int = 0.0  # the earliest start as a Unix time, kept while postponed; 0: unknown
    delay: float | int = 0.0  # the seconds from the sending to that time
    hops: int = 0  # how often the message was postponed, apart from outages
    met: str | None = None  # the token of the holder that it met last
    outage_hops: int = 0  # how often this outage of the cache has postponed it
    requeued_at: float | int = 0.0  # since when "requeue" postpones it (Unix time); 0: it does not
    redelivered: int = 0  # WAITS or READS
    marked: bool = False  # it may have been delivered before, but has not met its first run
    received: float | int = 0.0  # when the worker got this delivery (Unix time); never sent on
    # Its place among the calls that replace each other, until its body begins.
    ticket: list | None = None  # type: ignore[type-arg]
    # The key before retry() or replace() changed the arguments: from signature_from_request to
    # apply_async, which does not send it.
    was: str | None = None
    version: int = VERSION

    @classmethod
    def of(cls, fields: Mapping[str, Any] | None, task_id: str | None, task: str) -> Header | None:
        """Read the header of a call; None if there is none, or if it is of another call.

        ``fields`` are the attributes of a request, or the headers of a message. Raises
        ``ValueError`` if a field has a wrong type: another program wrote it.
        """
        if not fields or task_id is None:
            return None
        for place in (fields, fields.get("headers")):
            if not isinstance(place, Mapping):
                continue
            wire = place.get(HEADER)
            if isinstance(wire, dict) and (wire.get("id"), wire.get("task")) == (task_id, task):
                break
        else:
            return None
        header, version = cls(wire["id"], task), wire.get("version", VERSION)
        if isinstance(version, int) and version > VERSION:
            wire = {field: wire[field] for field in ("name", "key") if field in wire}
        for field, value in wire.items():
            if field in TYPES:  # a newer header may have other fields
                if not isinstance(value, TYPES[field]):
                    raise ValueError(
                        f"The message header {HEADER!r} has an invalid {field!r}, of type "
                        f"{type(value).__name__}."
                    )
                setattr(header, field, value)
        if header.options:
            header.options = {name: header.options[name] for name in NAMES & header.options.keys()}
            if header.options.get("lock_wait") == ENDLESS:
                header.options["lock_wait"] = math.inf
        return header

    def into(self, headers: Mapping[str, Any] | None) -> dict[str, Any]:
        wire = {field: value for field, value in vars(self).items() if value}
        if self.options and self.options.get("lock_wait") == math.inf:
            wire["options"] = {**self.options, "lock_wait": ENDLESS}
        return {**(headers or {}), HEADER: wire}

    @property
    def lock_key(self) -> LockKey | None:
        return LockKey(self.name or self.key, self.key) if self.key else None

    def forget_message(self) -> None:
        """Empty what the next message of the call, such as a retry, does not keep."""
        self.token, self.met, self.redelivered = None, None, 0
        self.marked = False
        self.hops = self.outage_hops = 0
        self.due = self.requeued_at = 0.0


TYPES = get_type_hints(Header)
"""The types of the fields, also in the message."""


def hidden_arguments(options: Mapping[str, Any]) -> str | None:
    """Return the ``argsrepr`` and ``kwargsrepr`` of a caller, shown instead of the arguments."""
    texts = [options[name] for name in ("argsrepr", "kwargsrepr") if options.get(name)]
    return ", ".join(map(str, texts)) or None


def hidden_in_message(app: Celery, request: Any, args: Any, kwargs: Any) -> str | None:
    """Return the text that the sender of a message shows instead of the arguments, or None.

    Celery always sends a representation of the arguments. If it differs from the usual one, the
    sender chose it to hide something.
    """
    texts = {}
    for name, value in (("argsrepr", tuple(args)), ("kwargsrepr", kwargs)):
        text = getattr(request, name, None)
        if text and text != saferepr(value, getattr(app.amqp, f"{name}_maxsize")):
            texts[name] = text
    return hidden_arguments(texts)
