"""Stop a call at enqueue while an equal one is queued (``unique_until``)."""

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
from django_singletask.locks import renewal
from django_singletask.locks.address import Address, lease_length
from django_singletask.locks.keys import QUEUED, LockKey
from django_singletask.locks.lease import Lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.run import Run
from django_singletask.stores import get_store
from django_singletask.task.header import Header
from django_singletask.task.options import LockOptions
from django_singletask.task.rerun import Ticket, gives_way, take_ticket

__all__ = ["QueuedCall", "delay_of", "discard"]

logger = logging.getLogger("django_singletask")

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
# "expiry": once the run has its lock, the entry says that the call has begun, so that nothing frees
# it: not the end of the run, and not the worker that discards a retry which was revoked. It ends
# when it would have ended.
#
# A process that is killed between add and publish, or between the broker's acknowledgement and
# its lock, leaves an entry without a call: that ends after unique_for.


class QueuedCall:
    """The entry beside a lock that says: this call is queued, or runs until it is finished.

    ``value`` is the entry's bytes while the call is queued; None if the call has no entry.
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
        """The place of the call among those that replace each other."""
        self.lease: Lease | None = None
        """The entry as a lease of this process, while the call runs until it is finished."""

    # In the producer

    def enqueue(self, delay: float) -> Holder | None:
        """Add the entry, or return that of the equal call that is queued.

        A call that replaces the queued one takes over its entry, and takes a ticket.
        ``delay`` is the number of seconds for which the call will not start anyway. Raises
        :class:`LockUnavailable`: then it is not known whether an equal call is queued. With
        another ``on_outage`` than ``"raise"`` the call has no entry then.
        """
        # The producer may end while its call is queued, so its death proves nothing: store no
        # process.
        name, length = self.address.lock_key.name, self._queued_for(delay)
        lease = Lease(self.address, self.run.holder(name, length, pid=0, start=""))
        # Known here before it is added: whatever strikes after that, give_back() can free it.
        self.value = lease.value
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
            logger.error(
                "%s: the call is sent without its entry, so equal calls can be sent beside it: %s",
                *(self.lock_address, error),
            )
            self.discard()
            queued_call = self.ticket = None
        self.value = None
        # Without a task id the entry belongs to no call, or other entries came and went. Send the
        # call; its lock decides.
        return queued_call if queued_call and queued_call.task_id and not replaces else None

    def _take_over(self, lease: Lease) -> bool:
        """Put the entry of this call in the place of that of a queued one; say if it is there."""
        entry, holder = self.address.look()
        # That of a run is renewed, and stays until the run is finished.
        return entry is not None and not holder.pid and lease.replace(entry.value)

    def note(self) -> None:
        """Let the calls before this one, which is published now, give way to it."""
        if self.ticket is not None:
            gives_way(self.lock_address, self.run.task or "", self.ticket)

    def duplicate_of(self, holder: Holder) -> str:
        """Report that an equal call is queued, and return its task id.

        Raises :class:`DuplicateTask` instead if ``on_duplicate`` says so.
        """
        task_id = holder.task_id or ""
        reason = "kept" if holder.kept else "queued"
        logger.info("%s: task %s stops this call (%s).", self.lock_address, task_id, reason)
        self.lock_address.tell_of_conflict("duplicate", reason, Run(self.run.task), holder)
        if self.options.on_duplicate == "raise":
            raise DuplicateTask(self.lock_address.lock_key.name, task_id)
        return task_id

    def holder(self) -> Holder | None:
        """Ask the cache which call is queued, or runs until it is finished."""
        entry, holder = self.address.look()
        return None if entry is None or holder.kept or proof_of_death(holder) else holder

    def _queued_for(self, delay: float) -> float:
        from_sending = self.options.unique_until == "expiry"
        return float(min(self.options.unique_for + (0 if from_sending else delay), MAX_LEASE))

    # In the worker

    def start(self) -> None:
        """Free the entry, make it a lease of this run, which has its lock now, or let it stay.

        An error costs the protection against duplicates, never the run.
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
            # The entry may have ended, or have been freed with a killed earlier run: then it is
            # taken again, unless another call is queued by now.
            if not self.lease.replace(self.value) and self.lease.take() is not None:
                logger.warning("%s: an equal call is queued beside this one.", self.address)
        except SoftTimeLimitExceeded:
            raise  # it is meant for the task
        except Exception:
            logger.exception("%s: an equal call can be queued beside this one.", self.address)

    def _let_stay(self, queued_value: bytes) -> None:
        """Say in the entry that the call has begun, without moving its end."""
        queued_call = Holder.decode(queued_value)
        begun = queued_call.without_process(queued_call.timeout, kept=True).encode()
        # By the clocks of two hosts, where the store cannot tell, or where the entry is gone: it
        # was freed with a run that was killed before it began, or the cache forgot it. A retry
        # adds none: an operator may have cleared the entry since the call has begun.
        left = max(0.0, queued_call.since + queued_call.timeout - time.time())
        key, store, entry = self.address.key, get_store(self.address.cache), self.address.read()
        if entry is None and left and not self.run.retries:
            store.add(key, begun, left)
        elif entry is not None and entry.value == queued_value:
            left = left if entry.remaining is None else entry.remaining
            store.replace(key, queued_value, begun, left)

    def queue_again(self, delay: float) -> None:
        """Make the entry that of the queued call again, which starts after ``delay`` seconds.

        To be called before the run's lock is free: after that the entry can be the next run's. A
        call that was skipped has no lease, and its entry has only to last until then.
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
            logger.exception("%s: an equal call can be queued beside the next try.", self.address)

    # In either

    def give_back(self, *, kept: bool = False) -> None:
        """Free the entry, if there is one; what fails is tried again in the background.

        ``kept``: the run keeps its lock, and so this entry.
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
                text = "%s: the entry of a queued call could not be deleted; it is tried again: %s"
                logger.warning(text, self.address, error)
        self.value = None

    def discard(self) -> None:
        """Free the entry in the background.

        The worker's main process must not wait for a cache that is down.
        """
        if self.value is not None:
            length = Holder.decode(self.value).timeout
            renewal.keeper().owe(self.address.cache, self.address.key, self.value, length)


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
