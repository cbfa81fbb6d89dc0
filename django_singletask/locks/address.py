"""Where the entry of a lock is, who wants it, and the events about it."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

from celery._state import get_current_task
from celery.exceptions import SoftTimeLimitExceeded

from django_singletask.arguments import MAX_LEASE
from django_singletask.holder import Holder, clean
from django_singletask.locks.keys import LockKey
from django_singletask.locks.liveness import proof_of_death
from django_singletask.log import logger
from django_singletask.process import this_process
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry, Outcome

KEPT = "kept for"
"""The history's reason for a run that keeps its lock begins with this."""


class Run(NamedTuple):
    """The run of a task that wants a lock.

    ``token`` is chosen by the worker's main process (None: a random one). ``quiet`` is set for
    tasks with ``lock_history=False``. ``redelivered`` is set for a message that was delivered
    before, according to the broker or an earlier delivery.
    """

    task: str | None = None
    task_id: str | None = None
    retries: int = 0
    token: str | None = None
    quiet: bool = False
    redelivered: bool = False

    @classmethod
    def current(cls) -> Run:
        """Return the run of the Celery task whose body is running here, if one is."""
        task = get_current_task()  # current_task is a slower proxy of its result
        if task is None:
            return NO_RUN
        return cls(task.name, task.request.id, task.request.retries or 0)

    def holder(self, name: str, length: float, **others: Any) -> Holder:
        """Return the record of an acquisition by this run now; ``others`` are its other fields."""
        fields = vars(this_process()) | others
        fields |= {"task": self.task, "task_id": self.task_id, "retries": self.retries}
        token = self.token or os.urandom(16).hex()
        return Holder(token=token, name=name, since=time.time(), timeout=length, **fields)


NO_RUN = Run()


class Address:
    """The place of one entry, and the events about it.

    ``cache`` is an alias in ``CACHES``. ``name`` and ``key`` are those of ``lock_key``; for a lock
    with several slots, ``key`` is the key of one of them. ``quiet`` is a field of the events.
    """

    silent = False
    """Whether no event is sent."""

    def __init__(self, cache: str, lock_key: LockKey, quiet: bool = False) -> None:
        self.cache = cache
        self.lock_key = lock_key
        self.name, self.key = lock_key
        self.quiet = quiet

    def __str__(self) -> str:
        return f"{self.name} ({self.key})"

    def read(self) -> Entry | None:
        return get_store(self.cache).read(self.key)

    def read_holder(self) -> tuple[Entry | None, Holder]:
        """Return the entry that is there now, and its holder; without an entry an empty holder."""
        entry = self.read()
        return entry, Holder.decode(entry.value if entry else b"")

    def tell(
        self,
        kind: str,
        holder: Holder | None = None,
        *,
        caller: Run | Holder = NO_RUN,
        blocker: Holder | None = None,
        **facts: Any,
    ) -> None:
        """Send an event about a holder of this entry, or about a ``caller`` in this process.

        ``blocker`` is another holder, and ``facts`` are fields of the event. Django logs the error
        of a receiver. Only a soft time limit, which is meant for the task, is raised.
        """
        if self.silent or not lock_event.receivers:
            return
        run, process = holder or caller, holder or this_process()
        if holder:
            since = datetime.fromtimestamp(holder.since, UTC) if holder.since else None
            facts |= {"token": holder.token, "timeout": holder.timeout, "since": since}
        if blocker:
            facts |= {"blocked_by": blocker.token, "blocked_by_task_id": blocker.task_id or ""}
        facts |= {"task": run.task or "", "task_id": run.task_id or "", "host": process.host}
        facts |= {"cache": self.cache, "quiet": self.quiet, "pid": process.pid}
        event = object.__new__(LockEvent)
        # This takes a tenth of the time of a frozen dataclass's __init__.
        vars(event).update(facts, kind=kind, name=self.name, key=self.key, at=datetime.now(UTC))
        for _receiver, error in lock_event.send_robust(sender=LockEvent, event=event):
            if isinstance(error, SoftTimeLimitExceeded):
                raise error

    def free_dead(self, entry: Entry, holder: Holder, how: str) -> bool:
        """Free the entry of a dead holder; return whether it was freed.

        ``how`` is the proof of death, for the log and the history. If several processes see the
        same dead holder, only one frees its entry, and one takes it:

          A: add -> dead holder X         B: add -> dead holder X
          A: release X -> freed
          A: add -> taken
                                          B: release X -> A has it by now: refused
                                          B: add -> conflict with A
        """
        if get_store(self.cache).release(self.key, entry.value) is not Outcome.OK:
            return False
        logger.warning("%s was held by %s: freed, because %s.", self, holder, how)
        held_for = max(0.0, time.time() - holder.since)  # by one clock: it was on this host
        self.tell("dead", holder, reason=how, held_for=held_for)
        return True

    def free_killed(self, token: str, how: str) -> bool:
        """Free the entry if the dead holder with this token still has it; see :meth:`free_dead`."""
        entry, holder = self.read_holder()
        # An entry that a returned run keeps (at_least) has its token, too, and stays.
        dead = holder.token == token and not holder.kept
        return entry is not None and dead and self.free_dead(entry, holder, how)

    def clear(self, token: str | None, actor: str, reason: str = "") -> bool:
        """Free the entry of any holder, or only of the holder with ``token``.

        Return whether the entry was freed.
        """
        entry, holder = self.read_holder()
        if not entry or token not in (None, holder.token):
            return False
        # The marker must last until the holder's next renewal; extend() may have changed the
        # length in the record.
        lease = max(holder.timeout, MAX_LEASE if entry.remaining is None else entry.remaining)
        store = get_store(self.cache)
        if proof_of_death(holder):  # a full server refuses the marker, which only the living need
            is_freed = store.release(self.key, entry.value) is Outcome.OK
        else:
            is_freed = store.clear(self.key, entry.value, lease)
        if not is_freed:
            return False
        reason = clean(reason, 255)
        why = f": {reason}" if reason else "."
        logger.warning("%s, held by %s, was cleared by %s%s", self, holder, actor or "code", why)
        self.tell("cleared", holder, actor=actor, reason=reason)
        return True
