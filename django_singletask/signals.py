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
    """One thing that happened to a lock. Texts that are not known are empty, numbers are 0.

    * ``kind``: what happened: ``acquired``, ``released``, ``conflict``, ``duplicate``, ``dead``,
      ``expired``, ``lost``, ``retaken``, ``cleared`` or ``unguarded``.
    * ``name``, ``key``, ``cache``: the lock, its key, and the alias of its cache.
    * ``at``: when it happened, as an aware UTC time.
    * ``token``, ``task``, ``task_id``, ``host``, ``pid``: the holder; or, without a token, the call
      that did not get the lock or was not sent.
    * ``since``, ``timeout``: when the holder took the lock, and its lease in seconds.
    * ``fixed``: of ``acquired``: whether the lease is not renewed, and ends ``timeout`` seconds
      after ``since``.
    * ``result``: how the body of the run ended; of a conflict: what becomes of the call.
    * ``reason``: why; of a conflict or a duplicate a code, otherwise a sentence.
    * ``outcome``: of ``released`` only: ``released``, or ``lost`` if the lock was no longer there.
    * ``blocked_by``, ``blocked_by_task_id``: token and task id of the holder that a call met; of
      ``lost``: of the next holder.
    * ``actor``: who cleared the lock.
    * ``held_for``: for how many seconds the lock was held; None until the hold ends, and where it
      is unknown.
    * ``longest_renewal_gap``: the longest time between two renewals in seconds, or None.
    * ``retaken``: how often the holder has taken its lock again.
    * ``waited``: for how many seconds the run of ``acquired`` had waited for its lock, in its
      process or postponed; of a conflict that ``failed`` or was ``skipped``, how long the call had
      waited in vain.
    * ``was_waiting``: of a conflict that ``failed`` or was ``skipped``: whether the call was
      reported as ``waiting`` for the same holder before, so that two conflicts are one call.
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
