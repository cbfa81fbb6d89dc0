"""LockRef: which lock in which cache, and which run wants it or has it."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

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


class LockRef(NamedTuple):
    """Which lock in which cache, and which run wants it or has it.

    ``cache`` is an alias in ``CACHES``. ``key`` is the key of one entry: of a lock with several
    slots, that of one slot. ``task``, ``task_id`` and ``retries`` are those of the run; code
    outside a task has none. ``token`` is chosen by the worker's main process (None: a random one).
    ``is_delivery``: the run itself wants the lock, and not code in its body. ``quiet`` is set for
    tasks with ``lock_history=False``. ``silent``: there are no events, because the entry is not a
    lock, but stands for a queued call.
    """

    cache: str
    name: str
    key: str
    task: str | None = None
    task_id: str | None = None
    retries: int = 0
    token: str | None = None
    is_delivery: bool = False
    quiet: bool = False
    silent: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.key})"

    @property
    def lock_key(self) -> LockKey:
        return LockKey(self.name, self.key)

    def beside(self, kind: str) -> LockRef:
        """Return the run's other entry next to this lock; see :meth:`LockKey.beside`."""
        other = self.lock_key.beside(kind, self.task or "")
        return self._replace(key=other.key, silent=True)

    def holder(self, length: float, *, slots: int = 1) -> Holder:
        """Return the record of an acquisition by this run and this process, which begins now."""
        token = self.token
        if token is None:
            token = os.urandom(16).hex()
        process = this_process()
        return Holder(
            host=process.host,
            boot_id=process.boot_id,
            pid_ns=process.pid_ns,
            time_ns=process.time_ns,
            pid=process.pid,
            start=process.start,
            token=token,
            name=self.name,
            task=self.task,
            task_id=self.task_id,
            retries=self.retries,
            since=time.time(),
            timeout=length,
            slots=slots,
        )

    # What is there

    def read(self) -> Entry | None:
        return get_store(self.cache).read(self.key)

    def read_holder(self) -> tuple[Entry | None, Holder]:
        """Return the entry that is there now, and its holder; without an entry an empty holder."""
        entry = self.read()
        if entry is None:
            return None, Holder.decode(b"")
        return entry, Holder.decode(entry.value)

    def of_token(self, token: str, slots: int) -> LockRef:
        """Return the slot whose holder has this token; if none has, the first slot."""
        if slots > 1:
            keys = self.lock_key.slots(slots)
            for key, entry in get_store(self.cache).read_many(keys).items():
                if Holder.decode(entry.value).token == token:
                    return self._replace(key=key)
        return self

    # Events

    def tell(
        self,
        kind: str,
        holder: Holder,
        *,
        of_call: bool = False,
        blocker: Holder | None = None,
        **facts: Any,
    ) -> None:
        """Send an event about a holder of this entry.

        With ``of_call`` the event is about a call that did not get the lock, or was not sent. The
        ``holder`` then only says who called, so token, timeout and since stay empty. ``blocker`` is
        another holder, and ``facts`` are fields of the event. Django logs the error of a receiver.
        Only a soft time limit, which is meant for the task, is raised.
        """
        if self.silent or not lock_event.receivers:
            return
        facts.setdefault("at", datetime.now(UTC))
        if not of_call:
            facts["token"] = holder.token
            facts["timeout"] = holder.timeout
            if holder.since:
                facts["since"] = datetime.fromtimestamp(holder.since, UTC)
        if blocker is not None:
            facts["blocked_by"] = blocker.token
            facts["blocked_by_task_id"] = blocker.task_id or ""
        event = LockEvent(
            kind=kind,
            name=self.name,
            key=self.key,
            cache=self.cache,
            task=holder.task or "",
            task_id=holder.task_id or "",
            host=holder.host,
            pid=holder.pid,
            quiet=self.quiet,
            **facts,
        )
        for _receiver, error in lock_event.send_robust(sender=LockEvent, event=event):
            if isinstance(error, SoftTimeLimitExceeded):
                raise error

    # Freeing what another holder has

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
        # If it is kept, its body has ended (at_least), so its death changes nothing.
        if entry is None or holder.token != token or holder.kept:
            return False
        return self.free_dead(entry, holder, how)

    def clear(self, token: str | None, actor: str, reason: str = "") -> bool:
        """Free the entry of any holder, or only of the holder with ``token``.

        Return whether the entry was freed.
        """
        entry, holder = self.read_holder()
        if entry is None or token not in (None, holder.token):
            return False
        store = get_store(self.cache)
        if proof_of_death(holder):  # a full server refuses the marker, which only the living need
            is_freed = store.release(self.key, entry.value) is Outcome.OK
        else:
            # The marker must last until the holder's next renewal; extend() may have changed the
            # length in the record.
            rest = entry.remaining
            if rest is None:
                rest = MAX_LEASE
            is_freed = store.clear(self.key, entry.value, max(holder.timeout, rest))
        if not is_freed:
            return False
        reason = clean(reason, 255)
        why = f": {reason}" if reason else "."
        logger.warning("%s, held by %s, was cleared by %s%s", self, holder, actor or "code", why)
        # If it is kept, its body has ended, and the run may have no row that says so.
        self.tell("cleared", holder, actor=actor, reason=reason, result=holder.result)
        return True
