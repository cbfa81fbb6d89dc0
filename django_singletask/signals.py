"""One signal for each thing that happens to a lock; the history is its first receiver."""

from __future__ import annotations

import dataclasses
import time
from datetime import datetime, timezone
from typing import Any

from django.dispatch import Signal

from django_singletask.holder import Holder, this_process

__all__ = ["LockEvent", "lock_event"]

lock_event = Signal(use_caching=True)
"""Sent with ``event``, a :class:`LockEvent`; an error in a receiver is logged, never raised."""


@dataclasses.dataclass(frozen=True)
class LockEvent:
    """One thing that happened to a lock.

    ``kind`` is ``acquired``, ``released``, ``skipped``, ``duplicate``, ``expired``, ``lost``,
    ``retaken``, ``cleared`` or ``unguarded`` (``on_outage="run"``). ``cache`` is the alias of the
    cache that holds the lock. ``token``, ``host``, ``pid``, ``task`` and ``task_id`` are those of
    the holder; if ``kind`` is ``skipped``, those of the run that was skipped. ``at`` is an aware
    UTC time, ``timeout`` and ``longest_renewal_gap`` are seconds. ``held_for`` is set when a hold
    ends: the seconds for which the lock was held. It is None where these are not known. ``quiet``
    is set for tasks with ``lock_history=False``.
    """

    kind: str
    name: str
    key: str
    at: datetime
    cache: str = ""
    task: str = ""
    task_id: str = ""
    token: str = ""
    host: str = ""
    pid: int = 0
    timeout: float = 0
    result: str = ""
    reason: str = ""
    outcome: str = ""
    blocked_by: str = ""
    blocked_by_task_id: str = ""
    actor: str = ""
    longest_renewal_gap: float | None = None
    quiet: bool = False
    held_for: float | None = None

    @classmethod
    def about(
        cls, kind: str, name: str, key: str, holder: Holder | None, **facts: Any
    ) -> LockEvent:
        """Describe what happens now to the lock of a holder; None: what this process meets."""
        process = holder or this_process()
        seconds = holder.since if holder is not None and kind == "acquired" else time.time()
        at, event = datetime.fromtimestamp(seconds, timezone.utc), object.__new__(cls)
        # In a tenth of the time of a frozen dataclass, which sets its fields one by one. The class
        # has the defaults of the others.
        vars(event).update(kind=kind, name=name, key=key, at=at, host=process.host, pid=process.pid)
        if holder is not None:
            vars(event).update(task=holder.task or "", task_id=holder.task_id or "")
            vars(event).update(token=holder.token, timeout=holder.timeout)
        vars(event).update(facts)
        return event
