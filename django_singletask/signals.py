"""The signal that reports what happens to locks; the history is one of its receivers."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from django.dispatch import Signal

__all__ = ["LockEvent", "lock_event"]

lock_event = Signal(use_caching=True)
"""Sent with ``event``, a :class:`LockEvent`. An error in a receiver is logged, not raised."""


@dataclasses.dataclass(frozen=True)
class LockEvent:
    """One thing that happened to a lock.

    ``kind`` is ``acquired``, ``released``, ``conflict``, ``duplicate``, ``dead``, ``expired``,
    ``lost``, ``retaken``, ``cleared`` or ``unguarded`` (``on_outage="run"``). ``cache`` is the
    alias of the cache that stores the lock. ``token``, ``host``, ``pid``, ``task``, ``task_id`` and
    ``since`` describe the holder; or, without a token, the call that met the holder
    ``blocked_by``. ``at`` and ``since`` are aware UTC times. ``timeout`` and
    ``longest_renewal_gap`` are seconds. ``retaken`` is how often the holder has taken its lock
    again. ``held_for`` is the number of seconds for which the lock was held; it is None until the
    hold ends, and where it is unknown. ``quiet`` is true for tasks with ``lock_history=False``.
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
    since: datetime | None = None
    retaken: int = 0
