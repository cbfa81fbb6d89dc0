"""What this package adds to the headers of a message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.saferepr import saferepr

from django_singletask.locks.keys import LockKey
from django_singletask.task.options import NAMES
from django_singletask.task.rerun import Ticket

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
# The lock is released before the result is stored, hence one more hop after the release. If the
# first run was killed, there is no result, and the message runs: at least once.
#
# A redelivery can also arrive after its first run, if the broker died before the acknowledgement.
# The broker marks it. Without a look at the result it would take the free lock:
#
#   first run: takes the lock ... releases ... result SUCCESS   acknowledges: broker gone
#   message:                                                    redelivered: SUCCESS -> drop
#
# A caller may use the same id each day, and yesterday's result must not drop today's message. So
# the message carries the time from which it may run, by the clock of its sender. A result counts
# only if it is newer, by the clock of the host that stored it:
#
#   yesterday: message  result SUCCESS        today: message (redelivered)   older -> runs
#
# Clocks that NTP sets differ by far less than a second. If it is not certain which is newer, the
# message runs. An id may be sent again only after its earlier call has ended, because a result
# does not show to which of two calls it belongs.

OF_MESSAGE: Mapping[str, Any] = MappingProxyType(
    {"token": None, "due": 0.0, "hops": 0, "outage_hops": 0, "requeued_at": 0.0, "redelivered": 0}
)
"""Fields that the next message of a call, such as a retry, does not keep; their empty values."""
AS_IT_IS = (*OF_MESSAGE, "never_gives_way")
"""Fields that have the same name in the message."""
KINDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(AS_IT_IS, (int, float, bool)),
    **dict.fromkeys(("name", "key", "queued", "was", "token"), (str, NoneType)),
    "options": (dict, NoneType),
    "ticket": ((str, int), NoneType),
}
"""The types that a field can have in the message; of a list, the types of its parts."""
ENDLESS = "inf"
"""Stands in the message for ``math.inf``, which JSON does not have."""
WAITS = 1
"""``redelivered`` of a message that waits for the end of its first run."""
LOOKS = 2
"""``redelivered`` of a message whose first run has ended: its next delivery reads the result."""

NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})


def wire_of(
    headers: Mapping[str, Any] | None, task_id: str | None, task: str
) -> dict[str, Any] | None:
    """Return this package's header of a message; None if it was not made for this call.

    Raises ``ValueError`` if a field has a wrong type: another program wrote it.
    """
    wire = headers.get(HEADER) if headers and task_id is not None else None
    if not isinstance(wire, dict) or (wire.get("id"), wire.get("task")) != (task_id, task):
        return None
    for field, value in wire.items():
        kind = tuple(map(type, value)) if type(value) is list else type(value)
        if kind not in KINDS.get(field, (kind,)):
            wrong = f"an invalid {field!r}, of type {type(value).__name__}"
            raise ValueError(f"The message header {HEADER!r} has {wrong}.")
    return wire


class Header(NamedTuple):
    """What this package writes into a message.

    Bodies pass ``headers=self.request.headers`` to other calls. So a header contains the id and
    the task of the call that it was made for, and other calls ignore it.

    ``apply_async`` writes the fields up to ``queued``, ``due``, and the ticket of ``"replace"``.
    The delivery writes the others, unless noted.
    """

    task_id: str
    task: str
    lock_key: LockKey | None = None  # None: the worker computes it
    overrides: Mapping[str, Any] = NO_OVERRIDES  # the lock options of this call
    queued: bytes | None = None  # the duplicate entry (unique_until), as the producer added it
    token: str | None = None  # from the worker's main process, for one delivery; never sent on
    due: float = 0.0  # the earliest start as a Unix time, kept while postponed; 0: unknown
    hops: int = 0  # how often the message was postponed, apart from outages
    outage_hops: int = 0  # how often this outage of the cache has postponed it
    requeued_at: float = 0.0  # since when "requeue" postpones it (Unix time); 0: it does not
    redelivered: int = 0  # WAITS or LOOKS
    ticket: Ticket | None = None  # its place among the calls of "rerun" or "replace"
    # It has taken a number, but no later call replaces it: other calls wait for it, or its body has
    # begun. "rerun" takes no second number.
    never_gives_way: bool = False
    # The key before retry() or replace() changed the arguments: from signature_from_request to
    # apply_async, which does not send it.
    previous_key: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None, task_id: str | None, task: str) -> Header | None:
        """Read the header of a call; None if there is none for this call. See :func:`wire_of`."""
        wire = wire_of(headers, task_id, task)
        if wire is None:
            return None
        field, options = wire.get, wire.get("options")
        key, queued, ticket = field("key"), field("queued"), field("ticket")
        if options:
            if options.get("lock_wait") == ENDLESS:
                options = {**options, "lock_wait": math.inf}
            # Ignore options of a newer version.
            options = {name: options[name] for name in options if name in NAMES}
        return cls(
            wire["id"],
            task,
            LockKey(field("name") or key, key) if key else None,
            options or NO_OVERRIDES,
            queued.encode(errors="replace") if queued else None,
            ticket=Ticket(*ticket) if ticket else None,
            previous_key=field("was"),
            **{name: wire[name] for name in AS_IT_IS if name in wire},
        )

    def into(self, headers: Mapping[str, Any] | None) -> dict[str, Any]:
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
        """Return the header of another message of the same call, such as a retry."""
        return self._replace(**{**OF_MESSAGE, **changes})

    def without_ticket(self) -> Header:
        """Return the header of a call that no later call replaces."""
        never_gives_way = self.never_gives_way or self.ticket is not None
        return self._replace(ticket=None, never_gives_way=never_gives_way)


def is_marked(request: Any) -> bool:
    """Return whether the broker has marked this message as delivered before."""
    return request is not None and bool((request.delivery_info or {}).get("redelivered"))


def hidden_arguments(options: Mapping[str, Any]) -> str | None:
    """Return the ``argsrepr`` and ``kwargsrepr`` of a caller, shown instead of the arguments."""
    texts = [options[name] for name in ("argsrepr", "kwargsrepr") if options.get(name)]
    return ", ".join(map(str, texts)) if texts else None


def hidden_in_message(app: Celery, request: Any, args: Any, kwargs: Any) -> str | None:
    """Return the text that the sender of a message shows instead of the arguments, or None.

    Celery always sends a representation of the arguments. If it differs from the usual one, the
    sender chose it to hide something.
    """
    usual = {
        "argsrepr": saferepr(tuple(args), app.amqp.argsrepr_maxsize),
        "kwargsrepr": saferepr(kwargs, app.amqp.kwargsrepr_maxsize),
    }
    texts = {name: getattr(request, name, None) for name in usual}
    return hidden_arguments({name: texts[name] for name in usual if texts[name] != usual[name]})
