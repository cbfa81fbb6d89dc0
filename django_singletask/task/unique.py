"""Stop a call at enqueue while an equal one is queued (``unique_until``)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware

from django_singletask.conf import MAX_LEASE, conf
from django_singletask.holder import Holder
from django_singletask.locks import renewal
from django_singletask.locks.keys import QUEUED, LockKey
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.lock import CORPSES, TaskLock
from django_singletask.locks.renewal import clock
from django_singletask.stores import Outcome, get_store

if TYPE_CHECKING:
    from django_singletask.task.base import SingletonTask

__all__ = ["ON_DUPLICATE", "UNIQUE_UNTIL", "QueuedCall", "delay_of", "discard"]

logger = logging.getLogger("django_singletask")

UNIQUE_UNTIL = ("start", "finish")
ON_DUPLICATE = ("return", "raise")

# The life of an entry
#
# The producer adds it before it publishes the call. The message carries its whole value, so
# whoever handles the message can give it back, and nobody else's. In the other order:
#
#   producer A: publish ................................ add -> refused, but it is queued already
#   producer B:           add -> taken   publish
#
# "start": freed once the run has its lock. Earlier, the next call could arrive first:
#
#   run A:       frees the entry ................... lock? held by B -> skipped
#   producer B:                   add    publish     lock taken, runs with newer arguments
#
# "finish": once the run has its lock, the entry becomes a lease of this process, short and
# renewed, so that a dead worker blocks for that long at most. It is freed after the lock; a call
# that comes as soon as it may must find the lock free. In the other order:
#
#   run:       frees the entry .............................. frees the lock
#   producer:                   add   publish -> skipped
#
# A process that is killed between add and publish, or between the broker's acknowledgement and
# its lock, leaves an entry without a call: that ends after unique_for.


class QueuedCall:
    """The entry beside a lock that says: this call is queued, or runs until it is finished."""

    def __init__(self, task: SingletonTask, key: LockKey, options: Mapping[str, Any]) -> None:
        self.task = task
        self.until = task.option("unique_until", options)
        self.unique_for: float = task.option("unique_for", options)
        beside = key.beside(QUEUED, task.name)
        self.entry = Entry(beside, timeout=task.option("lock_timeout", options))
        self.entry._alias = conf.cache
        self.value: bytes | None = None
        """Of the entry while the call is queued; None if the call has no entry."""

    # In the producer

    def enqueue(self, task_id: str, delay: float) -> Holder | None:
        """Add the entry, or return that of the equal call that is queued.

        ``delay`` are the seconds for which the call will not start anyway. Raises the errors of
        the cache's client: whether an equal call is queued is then not known.
        """
        lease = min(self.unique_for + delay, MAX_LEASE)
        name = self.entry.name
        holder = Holder.new(name, lease, task=self.task.name, task_id=task_id, retries=0)
        # The producer may end while its call is queued: that is no proof of anything.
        holder = dataclasses.replace(holder, pid=0, start="")
        self.value = value = holder.encode()
        store = get_store(self.entry._alias)
        try:
            for _ in range(CORPSES):
                entry = store.add(self.entry.key, value, lease)
                if entry is None or entry.value == value:
                    return None
                queued = Holder.decode(entry.value)
                if not self.entry._bury(store, entry, queued):
                    break
        except BaseException:
            self.discard()  # the reply may have been lost
            raise
        self.value = None
        # Without an id it is no call's, or it came and went all the time: the lock will decide.
        return queued if queued.task_id else None

    def holder(self) -> Holder | None:
        """Ask the cache which call is queued."""
        holder = self.entry.holder()
        return None if holder is None or proof_of_death(holder) else holder

    # In the worker

    def start(self, task_id: str, retries: int, token: str | None) -> None:
        """Free the entry, or make it a lease of this run, which has its lock now.

        ``token`` is the one that the worker's main process chose. An error costs the protection
        against duplicates, never the run.
        """
        if self.until != "finish":
            self.give_back()
            return
        self.entry._run = (self.task.name, task_id, retries)
        self.entry._token = token
        try:
            self._make_own()
        except SoftTimeLimitExceeded:
            raise  # it is meant for the task
        except Exception:
            logger.exception("%s: an equal call can be queued beside this one.", self.entry)

    def _make_own(self) -> None:
        assert self.value is not None
        lease = self.entry._lease()
        holder = self.entry._new_holder(lease)
        value = holder.encode()
        sent = clock()
        try:
            if get_store(self.entry._alias).replace(self.entry.key, self.value, value, lease):
                self.entry._begin(holder, value, lease, sent)
                return
        except BaseException:
            renewal.owe(self.entry._alias, self.entry.key, value, lease)
            raise
        # It has ended, or was freed with a killed earlier run. Another call may be queued by now.
        if not self.entry._take():
            logger.warning("%s: an equal call is queued beside this one.", self.entry)

    def queue_again(self, delay: float) -> None:
        """Make the entry that of the queued call again, which starts after ``delay`` seconds.

        Before the run's lock is free: then it can be that of the next run already.
        """
        if not self.entry or self.value is None:
            return
        renewal.drop(self.entry)
        self.entry.token = None
        lease = min(self.unique_for + delay, MAX_LEASE)
        own, queued, self.value = self.entry._value, self.value, None
        try:
            get_store(self.entry._alias).replace(self.entry.key, own, queued, lease)
        except Exception:
            logger.exception("%s: an equal call can be queued beside the next try.", self.entry)
            renewal.owe(self.entry._alias, self.entry.key, own, self.entry._leased)

    # In either

    def give_back(self) -> None:
        """Free the entry, if there is one; what fails is tried again in the background."""
        if self.entry:
            self.entry._give_back("")
        elif self.value is not None:
            try:
                get_store(self.entry._alias).release(self.entry.key, self.value)
            except BaseException as error:
                self.discard()
                if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception):
                    raise
                logger.warning("%s: the entry of a call is not freed yet: %s", self.entry, error)
        self.value = None

    def discard(self) -> None:
        """Free the entry in the background."""
        if self.value is not None:
            lease = Holder.decode(self.value).timeout
            renewal.owe(self.entry._alias, self.entry.key, self.value, lease)


class Entry(TaskLock):
    """Keep the entry while the call runs; what happens to it is no event of the lock."""

    def _send(self, kind: str, holder: Holder | None, **facts: Any) -> None:
        pass

    def _lose(self, outcome: Outcome) -> None:
        if not self._lost:
            self._lost = True
            logger.warning("%s: the entry of a running call is gone from the cache.", self)


def discard(task: str, header: Mapping[str, Any]) -> None:
    """Free the entry of a call that a worker discards, in the background.

    The worker's main process must not wait for a cache that is down.
    """
    key, queued = header.get("key"), header.get("queued")
    if key and queued:
        value = str(queued).encode()
        beside = LockKey(header["name"], key).beside(QUEUED, task)
        lease = Holder.decode(value).timeout
        renewal.owe(conf.cache, beside.key, value, lease)


def delay_of(when: Any) -> float:
    """Return the seconds until a call starts, given its countdown or its ETA (naive: UTC)."""
    if not when:
        return 0.0
    if isinstance(when, (int, float)):
        return max(0.0, when)
    eta = maybe_iso8601(when)
    assert eta is not None
    eta = maybe_make_aware(eta)
    return max(0.0, (eta - datetime.now(timezone.utc)).total_seconds())
