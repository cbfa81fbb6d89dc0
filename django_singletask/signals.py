"""The signal that reports what happens to locks; the history is one of its receivers."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from django.dispatch import Signal

__all__ = ["LockEvent", "lock_event"]

lock_event: Signal = Signal(use_caching=True)
"""Sent with ``event``, a :class:`LockEvent`. An error in a receiver is logged, not raised."""


@dataclasses.dataclass(frozen=True)
class LockEvent:
    """One thing that happened to a lock. What is not known is empty, 0 or None.

    * ``kind``, ``outcome``, ``result``, ``reason``: codes; some reasons are sentences.
    * ``name``, ``key``, ``cache``: the lock, its key, and the alias of its cache.
    * ``at``: when it happened, as an aware UTC time.
    * ``token``, ``task``, ``task_id``, ``host``, ``pid``: the holder; without a token, the call
      that did not get the lock or was not sent.
    * ``since``, ``timeout``: when the lock was taken, and the seconds of its lease.
    * ``fixed``: whether the lease is never renewed; only of ``acquired``.
    * ``blocked_by``, ``blocked_by_task_id``: the holder in the way; of ``lost``: the next holder.
    * ``actor``: who cleared the lock.
    * ``held_for``, ``longest_renewal_gap``: seconds of the hold, and between two renewals.
    * ``retaken``: how often the lock was taken again.
    * ``waited``: seconds that the call had waited, if it then ran, ``failed`` or was ``skipped``.
    * ``was_waiting``: whether this conflict was reported as ``waiting`` before.
    * ``quiet``: whether the task has ``lock_history=False``.
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
    fixed: bool = False
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
    waited: float = 0
    was_waiting: bool = False
