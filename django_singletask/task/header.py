"""What this package adds to the headers of a message; the story is in task/__init__.py."""

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
    options: dict[str, Any] | None = None  # the lock options of this call
    queued: str | None = None  # the duplicate entry (unique_until), as the producer added it
    token: str | None = None  # from the worker's main process, for one delivery; never sent on
    due: float | int = 0.0  # the earliest start as a Unix time, kept while postponed; 0: unknown
    delay: float | int = 0.0  # the seconds from the sending to that time
    hops: int = 0  # how often the message was postponed, apart from outages
    met: str | None = None  # the token of the holder that the message met last
    outage_hops: int = 0  # how often this outage of the cache has postponed it
    requeued_at: float | int = 0.0  # since when "requeue" postpones the call (Unix time)
    redelivered: int = 0  # WAITS or READS
    marked: bool = False  # the message may be a redelivery, but has not met its first run
    received: float | int = 0.0  # when the worker got this delivery (Unix time); never sent on
    # The place of the call among the calls that replace each other, until its body begins.
    ticket: list[Any] | None = None
    # The key of the call before retry() or replace() changed the arguments. The field is there from
    # signature_from_request to apply_async, which does not send it.
    was: str | None = None
    version: int = VERSION

    @classmethod
    def of(cls, fields: Mapping[str, Any] | None, task_id: str | None, task: str) -> Header | None:
        """Return the header of a call; None without a header, or if the header is of another call.

        ``fields`` are the attributes of a request, or the headers of a message. Raises
        ``ValueError`` if a field has a wrong type: another program wrote it.
        """
        if not fields or task_id is None:
            return None
        for place in (fields, fields.get("headers")):
            if not isinstance(place, Mapping):
                continue
            wire = place.get(HEADER)
            if not isinstance(wire, dict):
                continue
            if wire.get("id") == task_id and wire.get("task") == task:
                break
        else:
            return None
        header = cls(task_id, task)
        version = wire.get("version", VERSION)
        if isinstance(version, int) and version > VERSION:  # other fields may mean something else
            wire = {field: wire[field] for field in ("name", "key") if field in wire}
        for field, value in wire.items():
            if field not in TYPES:  # a newer header may have other fields
                continue
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
        """Return the headers of a message, with this header among them."""
        wire = {field: value for field, value in vars(self).items() if value}
        if self.options and self.options.get("lock_wait") == math.inf:
            wire["options"] = {**self.options, "lock_wait": ENDLESS}
        if headers is None:
            headers = {}
        return {**headers, HEADER: wire}

    @property
    def lock_key(self) -> LockKey | None:
        if not self.key:
            return None
        name = self.name
        if not name:
            name = self.key
        return LockKey(name, self.key)

    def forget_message(self) -> None:
        """Empty what the next message of the call, such as a retry, does not keep."""
        self.token = None
        self.met = None
        self.redelivered = 0
        self.marked = False
        self.hops = 0
        self.outage_hops = 0
        self.due = 0.0
        self.requeued_at = 0.0


TYPES = {**get_type_hints(Header), "options": dict | None, "ticket": list | None}
"""The types of the fields, also in the message."""


def hidden_arguments(options: Mapping[str, Any]) -> str | None:
    """Return the ``argsrepr`` and ``kwargsrepr`` of a caller, or None if both are empty.

    They are shown instead of the arguments.
    """
    texts = [options[name] for name in ("argsrepr", "kwargsrepr") if options.get(name)]
    if not texts:
        return None
    return ", ".join(map(str, texts))


def hidden_in_message(app: Celery, request: Any, args: Any, kwargs: Any) -> str | None:
    """Return the text that the sender of a message shows instead of the arguments, or None.

    Celery always sends a representation of the arguments. If it differs from the usual one, the
    sender chose it to hide something.
    """
    texts = {}
    for name, value in (("argsrepr", tuple(args)), ("kwargsrepr", kwargs)):
        text = getattr(request, name, None)
        if not text:
            continue
        usual = saferepr(value, getattr(app.amqp, f"{name}_maxsize"))
        if text != usual:
            texts[name] = text
    return hidden_arguments(texts)
