"""Do not send a call while an identical one is queued (``unique_until``)."""

from __future__ import annotations

import logging
import time
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware

from django_singletask.conf import MAX_LEASE, conf
from django_singletask.exceptions import DuplicateTask, LockUnavailable
from django_singletask.holder import Holder
from django_singletask.locks.address import Address, lease_length
from django_singletask.locks.keys import QUEUED, LockKey
from django_singletask.locks.lease import Lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.renewal import renewers
from django_singletask.locks.run import Run
from django_singletask.stores import get_store
from django_singletask.task.header import Header
from django_singletask.task.options import LockOptions
from django_singletask.task.rerun import Ticket, gives_way, take_ticket

logger = logging.getLogger("django_singletask")

# The life of an entry
#
# The producer adds the entry before it publishes the call. The message carries the bytes of the
# entry, so the process that handles the message can free this entry and no other. In the other
# order:
#
#   producer A: publish ................................ add -> refused, but A is already queued
#   producer B:           add -> taken   publish
#
# "start": the entry is freed once the run has its lock. Earlier, the next call could be faster:
#
#   run A:       frees the entry ................... lock? held by B -> skipped
#   producer B:                   add    publish     lock taken, runs with newer arguments
#
# "finish": once the run has its lock, the entry becomes a lease of this process, short and
# renewed, so that a dead worker does not block for longer than that. The entry is freed after the
# lock, because the next call must find the lock free. In the other order:
#
#   run:       frees the entry .............................. frees the lock
#   producer:                   add   publish -> skipped
#
# "expiry": once the run has its lock, the entry says that the call has begun. From then on nothing
# frees it: neither the end of the run, nor a worker that discards a revoked retry. Its end does
# not change.
#
# A process that is killed between add and publish, or between the broker's acknowledgement and
# its lock, leaves an entry without a call, which ends after unique_for.


class QueuedCall:
    """The entry next to a lock that stops duplicates of a call.

    ``value`` is the bytes of the entry while the call is queued; None if the call has no entry.
    """

    def __init__(
        self, key: LockKey, options: LockOptions, run: Run, value: bytes | None = None
    ) -> None:
        cache = conf.cache
        self.lock_address = Address(cache, key, quiet=not options.lock_history)
        self.address = Address(cache, key.beside(QUEUED, run.task or ""), silent=True)
        self.options = options
        self.run = run
        self.value = value
        self.ticket: Ticket | None = None
        """The place of the call among the calls that replace each other."""
        self.lease: Lease | None = None
        """The entry as a lease of this process, while a call with ``"finish"`` runs."""

    # In the producer

    def enqueue(self, delay: float) -> Holder | None:
        """Add the entry, or return the holder of the entry of an identical queued call.

        A call that replaces the queued one takes over its entry, and takes a ticket. ``delay`` is
        the number of seconds before which the call will not start. If the cache cannot be used,
        this raises :class:`LockUnavailable`; if ``on_outage`` is not ``"raise"``, the call is sent
        without an entry.
        """
        # Store no process: the producer may end while its call is queued.
        name, length = self.address.lock_key.name, self._queued_for(delay)
        lease = Lease(self.address, self.run.holder(name, length, pid=0, start=""))
        self.value = lease.value  # before the take, so that give_back() can free it after any error
        replaces = self.options.on_duplicate == "replace"
        try:
            queued_call = lease.take()
            if replaces:
                self.ticket = take_ticket(self.lock_address, self.run.task or "")
            if queued_call is None or (replaces and self._take_over(lease)):
                return None
        except LockUnavailable as error:
            if self.options.on_outage not in {"run", "skip"}:
                raise
            text = "%s: the call is sent, but duplicates of it are not stopped: %s"
            logger.error(text, self.lock_address, error)
            self.discard()
            queued_call = self.ticket = None
        self.value = None
        # Without a task id the entry belongs to no call. Send the call; its lock decides.
        return queued_call if queued_call and queued_call.task_id and not replaces else None

    def _take_over(self, lease: Lease) -> bool:
        """Replace the entry of a queued call by the entry of this one; return whether it did."""
        entry, holder = self.address.look()
        # The entry of a run has a process, and stays until the run is finished.
        return entry is not None and not holder.pid and lease.replace(entry.value)

    def note(self) -> None:
        """Let this call, which is now published, replace the calls before it."""
        if self.ticket is not None:
            gives_way(self.lock_address, self.run.task or "", self.ticket)

    def duplicate_of(self, holder: Holder) -> str:
        """Report a duplicate, and return the task id of the queued call or raise."""
        task_id = holder.task_id or ""
        reason = "kept" if holder.kept else "queued"
        logger.info("%s: not sent, duplicate of task %s (%s).", self.lock_address, task_id, reason)
        self.lock_address.tell_of_conflict(reason, "", Run(self.run.task), holder)
        if self.options.on_duplicate == "raise":
            raise DuplicateTask(self.lock_address.lock_key.name, task_id)
        return task_id

    def holder(self) -> Holder | None:
        """Ask the cache which call stops duplicates now."""
        entry, holder = self.address.look()
        return None if entry is None or holder.kept or proof_of_death(holder) else holder

    def _queued_for(self, delay: float) -> float:
        from_sending = self.options.unique_until == "expiry"
        return float(min(self.options.unique_for + (0 if from_sending else delay), MAX_LEASE))

    # In the worker

    def start(self) -> None:
        """Free the entry of a call that has its lock now, or keep it as ``unique_until`` says.

        An error ends the protection against duplicates, not the run.
        """
        if self.options.unique_until not in ("finish", "expiry"):
            self.give_back()
            return
        assert self.value is not None
        try:
            if self.options.unique_until == "expiry":
                queued_value, self.value = self.value, None
                self._let_stay(queued_value)
                return
            length = lease_length(self.options.lock_timeout)
            holder = self.run.holder(self.address.lock_key.name, length)
            self.lease = Lease(self.address, holder, at_least=self.options.lock_at_least)
            # If the entry has ended, or was freed with a killed earlier run, take it again, unless
            # another call is queued by now.
            if not self.lease.replace(self.value) and self.lease.take() is not None:
                logger.warning("%s: an identical call was queued meanwhile.", self.address)
        except SoftTimeLimitExceeded:
            raise  # it is meant for the task
        except Exception:
            logger.exception("%s: duplicates of this call are not stopped.", self.address)

    def _let_stay(self, queued_value: bytes) -> None:
        """Note in the entry that the call has begun, without changing its end."""
        queued_call = Holder.decode(queued_value)
        begun = queued_call.without_process(queued_call.timeout, kept=True).encode()
        # The clocks of both hosts decide if the entry is gone (freed with a killed run, or lost by
        # the cache), or if the cache does not report its end. A retry adds no entry, because an
        # operator may have cleared it.
        left = max(0.0, queued_call.since + queued_call.timeout - time.time())
        key, store, entry = self.address.key, get_store(self.address.cache), self.address.read()
        if entry is None and left and not self.run.retries:
            store.add(key, begun, left)
        elif entry is not None and entry.value == queued_value:
            left = left if entry.remaining is None else entry.remaining
            store.replace(key, queued_value, begun, left)

    def queue_again(self, delay: float) -> None:
        """Keep the entry for the next try of the call, which starts after ``delay`` seconds.

        Call this before the run's lock is free: after that the entry can belong to the next run. A
        call that was skipped has no lease, and only the length of its entry changes.
        """
        if self.value is None or (self.lease is not None and not self.lease.held):
            return
        queued_value, self.value = self.value, None
        length = self._queued_for(delay)
        try:
            if self.lease is not None:
                self.lease.hand_back(queued_value, length)
            elif self.options.unique_until != "expiry":  # whose end never moves
                store, key = get_store(self.address.cache), self.address.key
                store.replace(key, queued_value, queued_value, length)
        except SoftTimeLimitExceeded:
            raise  # it is meant for the task
        except Exception:
            logger.exception("%s: duplicates of the next try are not stopped.", self.address)

    # In either

    def give_back(self, *, kept: bool = False) -> None:
        """Free the entry, if there is one; retry in the background if that fails.

        ``kept``: the run keeps its lock, and therefore this entry.
        """
        if self.lease is not None and self.lease.held:
            self.lease.give_back("returned" if kept else "")
        elif self.value is not None:
            try:
                get_store(self.address.cache).release(self.address.key, self.value)
            except BaseException as error:
                self.discard()
                if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception):
                    raise
                text = "%s: the entry of a queued call could not be deleted; trying again: %s"
                logger.warning(text, self.address, error)
        self.value = None

    def discard(self) -> None:
        """Free the entry in the background: the worker's main process must not wait for a cache."""
        if self.value is not None:
            length = Holder.decode(self.value).timeout
            renewers[self.address.cache].owe(self.address.key, self.value, length)


def discard(header: Header | None) -> None:
    """Free the entry of a queued call that a worker discards, in the background."""
    if header and header.lock_key and header.queued:
        QueuedCall(header.lock_key, LockOptions(), Run(header.task), header.queued).discard()


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
