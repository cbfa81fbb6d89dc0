"""What travels in a message beside Celery's own headers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.saferepr import saferepr

from django_singletask.locks.keys import LockKey
from django_singletask.task.options import NAMES
from django_singletask.task.rerun import Ticket

__all__ = [
    "HEADER",
    "LOOKS",
    "WAITS",
    "Header",
    "hidden_arguments",
    "hidden_in_message",
    "put_token",
]

HEADER = "singletask"
"""Name of the message header that holds all this."""

# A message and the lock of its own earlier run
#
# The same task id can meet its own lock: a retry or a replacement is published by the body, so it
# can arrive before the body has ended; a redelivery can arrive while the first run goes on,
# because the broker took it for lost. To skip it would lose the work, to raise would fail it.
#
#   first run: takes the lock ........... result stored? not yet  -> gives back -> result SUCCESS
#   message:             again: postponed     postponed       free: one more hop -> SUCCESS: drop
#
# The lock comes back before the result is stored, hence one more hop after it is free. If the
# first run was killed, there is no result, and the message runs: at least once.
#
# A redelivery can also arrive after its first run: the broker died before the acknowledgement.
# The broker marks it. If it did not ask for the result first, it would take the free lock:
#
#   first run: takes the lock ... gives back ... result SUCCESS   acknowledges: broker gone
#   message:                                                      redelivered: SUCCESS -> drop
#
# A caller may use an id again each day, and today's message must not be dropped for the result of
# yesterday. So the message carries the time from which it may run, as its sender's clock says, and
# a result says something only if it is newer, as the clock of the host that stored it says:
#
#   yesterday: message  result SUCCESS        today: message (redelivered)   older -> runs
#
# Hosts that keep their clocks by NTP differ by far less than a second. If it is not certain which
# is newer, the message runs. An id may be sent again only after its earlier call has ended: a
# result does not say to which of two calls with one id it belongs.

AS_IT_IS = ("token", "due", "hops", "requeued_at", "redelivered", "never_gives_way")
"""Fields that travel under their own name."""
ENDLESS = "inf"
"""What travels for ``math.inf``, which JSON does not have."""
WAITS = 1
"""``redelivered`` of a message that waits for the end of its first run."""
LOOKS = 2
"""``redelivered`` of a message whose first run has ended; the result decides at the next look."""

NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


def wire_of(
    headers: Mapping[str, Any] | None, task_id: str | None, task: str
) -> dict[str, Any] | None:
    """Return what the headers of a message carry for this call; None if there is none."""
    wire = headers.get(HEADER) if headers else None
    if not isinstance(wire, dict) or task_id is None:
        return None
    return wire if wire.get("id") == task_id and wire.get("task") == task else None


class Header(NamedTuple):
    """What this package writes into a message, and who writes and reads it.

    Bodies pass ``headers=self.request.headers`` on to the calls that they make. So a header names
    the call that it was made for, and says nothing about another id or another task.
    """

    task_id: str  # written by apply_async, read by of()
    task: str  # written by apply_async, read by of()
    # Written by apply_async, read by the delivery and by the watcher. None: the worker computes it.
    lock_key: LockKey | None = None
    # The lock options of this call: written by apply_async, read by the delivery and the watcher.
    overrides: Mapping[str, Any] = NO_OVERRIDES
    # The entry of the queued call (unique_until), as the producer has added it: written by
    # apply_async, read by the delivery, the watcher and a worker that discards the message.
    queued: bytes | None = None
    # Chosen by a worker's main process for one delivery, read by the delivery; never sent on.
    token: str | None = None
    # When it may run at the earliest, in seconds since 1970: written by apply_async, kept while the
    # message is postponed, read by the delivery. 0: not known.
    due: float = 0.0
    hops: int = 0  # how often it was postponed; written and read by the delivery
    # When "requeue" met its first conflict, in seconds since 1970; written and read likewise.
    requeued_at: float = 0.0
    redelivered: int = 0  # WAITS or LOOKS; written and read by the delivery
    ticket: Ticket | None = None  # its place among those that "rerun"; written and read likewise
    # Whether it has taken a number, but gives way to no other: others wait for the call, or its
    # body has begun. Written by apply_async and the delivery; read by "rerun", which takes no
    # second number.
    never_gives_way: bool = False
    # The key before retry() or replace() gave other arguments: written by signature_from_request,
    # read by apply_async, which sends it no further.
    previous_key: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None, task_id: str | None, task: str) -> Header | None:
        """Read the header of a call; None if there is none that was made for this call."""
        wire = wire_of(headers, task_id, task)
        if wire is None:
            return None
        field, options = wire.get, wire.get("options")
        key, queued, ticket = field("key"), field("queued"), field("ticket")
        if options:
            if options.get("lock_wait") == ENDLESS:
                options = {**options, "lock_wait": math.inf}
            # A newer version may know more options: those are ignored here.
            options = {name: options[name] for name in options if name in NAMES}
        return cls(
            wire["id"],
            task,
            LockKey(wire["name"], key) if key else None,
            options or NO_OVERRIDES,
            queued.encode() if queued else None,
            field("token"),
            field("due", 0.0),
            field("hops", 0),
            field("requeued_at", 0.0),
            field("redelivered", 0),
            Ticket(*ticket) if ticket else None,
            field("never_gives_way", False),
            field("was"),
        )

    def into(self, headers: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the headers of a message with this one among them."""
        name, key = self.lock_key or (None, None)
        endless = self.overrides.get("lock_wait") == math.inf
        wire = {
            "id": self.task_id,
            "task": self.task,
            "name": name,
            "key": key,
            "options": {**self.overrides, "lock_wait": ENDLESS} if endless else self.overrides,
            "queued": self.queued and self.queued.decode(),
            "ticket": self.ticket and list(self.ticket),
            "was": self.previous_key,
            **{field: getattr(self, field) for field in AS_IT_IS},
        }
        return {**(headers or {}), HEADER: {field: wire[field] for field in wire if wire[field]}}

    def next(self, **changes: Any) -> Header:
        """Return the header of another message of the same call.

        How often this message was postponed and when it was due say nothing about the next one, and
        the token is for one delivery.
        """
        fresh = {"token": None, "due": 0.0, "hops": 0, "requeued_at": 0.0, "redelivered": 0}
        return self._replace(**{**fresh, **changes})

    def without_ticket(self) -> Header:
        """Return the header of a call that gives way to no other, or not any more."""
        return self._replace(
            ticket=None, never_gives_way=self.never_gives_way or self.ticket is not None
        )


def put_token(headers: dict[str, Any], task_id: str, task: str, token: str) -> None:
    """Choose the token of a delivery in the headers of its message, whatever else is in them."""
    wire = wire_of(headers, task_id, task) or {"id": task_id, "task": task}
    headers[HEADER] = {**wire, "token": token}


def hidden_arguments(options: Mapping[str, Any]) -> str | None:
    """Return what a caller shows instead of the arguments, by ``argsrepr`` and ``kwargsrepr``."""
    texts = [options[name] for name in ("argsrepr", "kwargsrepr") if options.get(name)]
    return ", ".join(map(str, texts)) if texts else None


def hidden_in_message(app: Celery, request: Any, args: Any, kwargs: Any) -> str | None:
    """Return what the sender of a message shows instead of the arguments; None for nothing.

    Celery always sends a representation of the arguments. One that is not what Celery would have
    made was given by the sender, to hide something.
    """
    usual = {
        "argsrepr": saferepr(tuple(args), app.amqp.argsrepr_maxsize),
        "kwargsrepr": saferepr(kwargs, app.amqp.kwargsrepr_maxsize),
    }
    texts = {name: getattr(request, name, None) for name in usual}
    return hidden_arguments({name: texts[name] for name in usual if texts[name] != usual[name]})
