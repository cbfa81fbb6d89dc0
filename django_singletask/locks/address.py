"""Where the entry of a lock is: its cache, name and key; and the events about it."""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

from celery.exceptions import SoftTimeLimitExceeded

from django_singletask.conf import MAX_LEASE, check_seconds, conf
from django_singletask.holder import Holder, clean
from django_singletask.locks.keys import LockKey
from django_singletask.locks.run import Run
from django_singletask.signals import LockEvent, lock_event
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry, Outcome

logger = logging.getLogger("django_singletask")


def lease_length(timeout: float | None) -> float:
    """Return the length of a lease in seconds: ``timeout``, or ``SINGLETASK_LOCK_TIMEOUT``."""
    if timeout is not None:
        return timeout
    return check_seconds("SINGLETASK_LOCK_TIMEOUT", conf.lock_timeout)


class Address(NamedTuple):
    """The place of one entry.

    ``cache`` is an alias in ``CACHES``. ``quiet`` is a field of the events. ``silent``: no event is
    sent, because the entry of a queued call is not a lock.
    """

    cache: str
    lock_key: LockKey
    quiet: bool = False
    silent: bool = False

    def __str__(self) -> str:
        return f"{self.lock_key.name} ({self.lock_key.key})"

    @property
    def key(self) -> str:
        """The cache key, before the cache's own key function."""
        return self.lock_key.key

    def read(self) -> Entry | None:
        return get_store(self.cache).read(self.key)

    def look(self) -> tuple[Entry | None, Holder]:
        """Return the entry that is there now, and its holder; without an entry an empty holder."""
        entry = self.read()
        return entry, Holder.decode(b"" if entry is None else entry.value)

    def tell(self, kind: str, holder: Holder | None, **facts: Any) -> None:
        """Send an event about a holder of this entry, or about this process (None).

        ``facts`` are fields of the event. Django logs the error of a receiver. Only a soft time
        limit, which is meant for the task, is raised.
        """
        if self.silent or not lock_event.receivers:
            return
        event = LockEvent.about(
            kind, *self.lock_key, holder, cache=self.cache, quiet=self.quiet, **facts
        )
        for _receiver, error in lock_event.send_robust(sender=LockEvent, event=event):
            if isinstance(error, SoftTimeLimitExceeded):
                raise error

    def tell_of_conflict(
        self, reason: str, result: str, run: Run | Holder, blocker: Holder | None
    ) -> None:
        """Send an event about a call that found the lock held; ``result`` says what became of it.

        Without a result the call is the duplicate of a queued one.
        """
        facts = {"task": run.task or "", "task_id": run.task_id or "", **blocker_facts(blocker)}
        kind = "conflict" if result else "duplicate"
        self.tell(kind, None, reason=reason, result=result, **facts)

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

    def bury(self, token: str, how: str) -> bool:
        """Free the entry if the dead holder with this token still has it; see :meth:`free_dead`."""
        entry, holder = self.look()
        # An entry that a returned run keeps (at_least) has its token, too, and stays.
        dead = holder.token == token and not holder.kept
        return entry is not None and dead and self.free_dead(entry, holder, how)

    def clear(
        self,
        token: str | None,
        actor: str,
        timeout: float | None,
        reason: str = "",
        *,
        tell: bool = True,
    ) -> bool:
        """Free the entry of any holder, or only of the holder with ``token``.

        ``timeout`` is the length of the lease in seconds if the holder's record has none. Without
        ``tell`` there is no event. Return whether the entry was freed.
        """
        entry, holder = self.look()
        if entry is None or token not in (None, holder.token):
            return False
        # The marker must last until the holder's next renewal; extend() may have changed the
        # length in the record.
        lease = holder.timeout or lease_length(timeout)
        lease = max(lease, MAX_LEASE if entry.remaining is None else entry.remaining)
        if not get_store(self.cache).clear(self.key, entry.value, lease):
            return False
        reason = clean(reason, 255)
        why = f": {reason}" if reason else "."
        logger.warning("%s, held by %s, was cleared by %s%s", self, holder, actor or "code", why)
        if tell:
            self.tell("cleared", holder, actor=actor, reason=reason)
        return True


def blocker_facts(blocker: Holder | None) -> dict[str, str]:
    if blocker is None:
        return {"blocked_by": "", "blocked_by_task_id": ""}
    return {"blocked_by": blocker.token, "blocked_by_task_id": blocker.task_id or ""}
