"""Do not send a call while an identical one is queued (``unique_until``)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from numbers import Real
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from django_singletask import clock
from django_singletask.arguments import MAX_LEASE
from django_singletask.conf import conf
from django_singletask.exceptions import DuplicateTask, LockUnavailable
from django_singletask.holder import Holder, without_process
from django_singletask.locks.address import Address, Run
from django_singletask.locks.keys import QUEUED, LockKey
from django_singletask.locks.lease import Lease
from django_singletask.log import logger
from django_singletask.stores import get_store
from django_singletask.task.header import Header
from django_singletask.task.latest import Ticket, gives_way, take_ticket
from django_singletask.task.options import LockOptions

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
# frees it: neither the end of the run, nor a worker that discards a revoked retry. It ends
# unique_for seconds after the sending.
#
# A process that is killed between add and publish, or between the broker's acknowledgement and
# its lock, leaves an entry without a call, which ends after unique_for. A call that expires begins
# no later than its "expires", so its entry ends soon after that, until the call has begun:
#
#   producer:  add   publish                        expires   the entry has ended: add, publish
#   worker:                    receives   killed
#
# A body can send a call with the same entry: the next page. The entry of the run passes to that
# call before it is published. At the end of the run, it could be too late:
#
#   body:        publishes the next page .............. ends: its entry to the next page, for good
#   next page:                            is skipped


LATE = 5.0
"""Seconds by which the entry of a call outlasts its ``expires``.

The clock of a worker may be behind. And Celery looks at ``expires`` when it gives the call to its
pool: one that then waits for a thread begins late. After these seconds, it begins without an entry.
"""


class QueuedEntry(Lease):
    """The entry of a queued call, or of a call with ``"finish"`` that runs; it is not a lock."""

    silent = True

    def pass_to(self, other: QueuedEntry) -> None:
        """Let another entry take the place of this one, if this one is there."""
        # A renewal that is on its way would find other bytes, and report a loss.
        with self.renewing:
            self.held = not other.replace(self.value)


class QueuedCall:
    """The entry next to a lock that stops duplicates of a call."""

    ticket: Ticket | None = None
    """The place of the call among the calls that replace each other."""
    lease = object.__new__(QueuedEntry)
    """The entry: of the queued call, or of this process while a call with ``"finish"`` runs.

    It is ``held`` until the call frees the entry or leaves it; without an entry it never was.
    """
    again_until = 0.0
    """When the entry of the next try ends, after the call was sent again."""
    value = b""
    """The bytes of the entry while the call is queued."""
    sender: QueuedCall | None = None
    """The call whose run sends this one, if that run has an entry."""
    taken_from: QueuedEntry | None = None
    """The entry of the ``sender``, if this call has taken it over."""

    def __init__(
        self, key: LockKey, options: LockOptions, run: Run, queued: str | None = None
    ) -> None:
        """``queued`` is the entry in the header of the message."""
        self.lock_key = key
        self.options = options
        self.run = run
        self.task = run.task or ""
        self.key = key.beside(QUEUED, self.task)
        if queued:
            self.lease = queued_entry(self.key, queued)
            self.value = self.lease.value

    @property
    def lock_address(self) -> Address:
        return Address(conf.cache, self.lock_key, quiet=not self.options.lock_history)

    # In the producer

    def send(
        self,
        header: Header,
        seconds: float,
        publish: Callable[[], Any],
        result_of: Callable[[str], Any],
        *,
        awaited: bool,
    ) -> Any:
        """Add the entry, note it in the header, and publish the call; return its result.

        If an identical queued call stops this one, return the ``result_of`` its task id. A call
        that is ``awaited`` by others is sent in any case, without an entry. The entry lasts for so
        many ``seconds``; 0: the call has expired, so no worker begins it, and it stops no other.
        If another base publishes the call later, or never, ``publish`` returns None. Then the entry
        belongs to no call that is published, and is freed.
        """
        if not seconds:
            return publish()
        result = None
        try:
            blocker = self.add(seconds)
            # Without a task id the entry belongs to no call. Send the call; its lock decides.
            if blocker and blocker.task_id and not awaited:
                kind = "kept" if blocker.kept else "queued"
                text = "%s: not sent, duplicate of task %s (%s)."
                logger.info(text, self.lock_address, blocker.task_id, kind)
                caller = Run(self.task)
                self.lock_address.tell("duplicate", caller=caller, blocker=blocker, reason=kind)
                if self.options.on_duplicate == "raise":
                    raise DuplicateTask(self.lock_key.name, blocker.task_id)
                return result_of(blocker.task_id)
            if self.lease.held:
                header.queued = self.lease.value.decode()
            header.ticket = None if awaited else self.ticket
            result = publish()
        finally:
            if result is None:
                self._withdraw()
        if self.ticket and result is not None:
            # Let this call, which is now published, replace the calls before it.
            gives_way(self.lock_address, self.task, self.ticket)
        return result

    def add(self, seconds: float) -> Holder | None:
        """Add the entry, or return the holder of the entry of an identical queued call.

        A call that the body of the holder sends takes over the entry of its run. A call that
        replaces the queued one takes over its entry, and takes a ticket. If the cache
        cannot be used, this raises :class:`LockUnavailable`; if ``on_outage`` is not ``"raise"``,
        the call is sent without an entry.
        """
        # Store no process: the producer may end while its call is queued.
        holder = self.run.holder(self.key.name, seconds, pid=0, start="")
        lease = self.lease = QueuedEntry(conf.cache, self.key, holder)
        try:
            blocker = lease.take()
            if blocker and self.sender and self._take_over(self.sender.lease, blocker):
                blocker = None
            if self.options.on_duplicate != "replace":
                return blocker
            self.ticket = take_ticket(self.lock_address, self.task)
            if blocker:
                entry, holder = lease.read_holder()
                # The entry of a run has a process, and stays until the run is finished.
                if entry and not holder.pid:
                    lease.replace(entry.value)
        except LockUnavailable as error:
            if self.options.on_outage == "raise":
                raise
            text = "%s: the call is sent, but duplicates of it are not stopped: %s"
            logger.error(text, self.lock_address, error)
            lease.abandon()
            self.ticket = None
        return None

    def _take_over(self, of_sender: QueuedEntry, blocker: Holder) -> bool:
        """Replace the entry of the sender, if that is the blocker; return whether it was replaced.

        In a fork of the sender's process, the parent has the entry.
        """
        if of_sender.token != blocker.token or not of_sender.held or of_sender.is_inherited():
            return False
        self.taken_from = of_sender
        of_sender.pass_to(self.lease)
        return self.lease.held

    def _withdraw(self) -> None:
        """Free the entry of a call that is not published, or give it back to its sender."""
        try:
            if self.taken_from and self.lease.held:
                with suppress(LockUnavailable):
                    self.lease.pass_to(self.taken_from)
        finally:
            self.give_back()

    # In the worker

    def start(self) -> None:
        """Free the entry of a call that has its lock now, or keep it as ``unique_until`` says.

        If the cache cannot be used, the protection against duplicates ends, not the run.
        """
        until, queued = self.options.unique_until, self.lease
        try:
            if until == "expiry":
                queued.held = False
                self._let_stay(queued)
            elif until == "finish":
                length = self.options.lock_timeout or conf.lock_timeout
                holder = self.run.holder(self.key.name, length)
                lease = self.lease = QueuedEntry(conf.cache, self.key, holder)
                lease.at_least = self.options.lock_at_least
                lease.in_block = True
                # If the entry has ended, or was freed with a killed earlier run, take it again,
                # unless another call is queued by now.
                if not lease.replace(self.value) and lease.take():
                    logger.warning("%s: an identical call was queued meanwhile.", lease)
            else:
                self.give_back()
        except LockUnavailable:
            logger.exception("%s: duplicates of this call are not stopped.", queued)
        finally:
            if not self.lease.held:
                self.lease = queued

    def _let_stay(self, queued: QueuedEntry) -> None:
        """Note in the entry that the call has begun; it cannot expire any more."""
        length = self.options.unique_for
        begun = without_process(queued.holder, length, kept=True).encode()
        # The clocks of both hosts decide if the entry is gone (freed with a killed run, or lost by
        # the cache), or if the cache does not report its end. A retry adds no entry, because an
        # operator may have cleared it.
        left = max(0.0, queued.holder.since + length - time.time())
        store, entry = get_store(queued.cache), queued.read()
        if not entry:
            if left and not self.run.retries:
                store.add(queued.key, begun, left)
        elif entry.value == self.value:
            if entry.remaining is not None:
                left = entry.remaining + length - queued.length
            store.replace(queued.key, self.value, begun, left)

    def sent_again(self, delay: float, expires: Any) -> None:
        """Note that the call was sent again now, so that its entry is kept for the next try."""
        self.again_until = clock.now() + seconds_to_block(self.options, delay, expires)

    def queue_again(self) -> None:
        """Keep the entry for the next try of the call, if there is one.

        Call this before the run's lock is free: after that the entry can belong to the next run.
        """
        if self.again_until <= clock.now() or not self.lease.held:
            return
        if self.options.unique_until == "expiry":
            self.lease.held = False  # its end never moves
            return
        try:
            self.lease.leave(new=self.value, until=self.again_until)
        except LockUnavailable:
            logger.exception("%s: duplicates of the next try are not stopped.", self.lease)

    # In either

    def give_back(self, *, kept: bool = False) -> None:
        """Free the entry, if there is one; retry in the background if that fails.

        ``kept``: the run keeps its lock, and therefore this entry.
        """
        self.lease.give_back(result="returned" if kept else "raised")


def queued_entry(key: LockKey, queued: str) -> QueuedEntry:
    """Return the entry of a queued call, as the header of its message has it."""
    value = queued.encode(errors="replace")
    entry = QueuedEntry(conf.cache, key, Holder.decode(value))
    entry.value = value
    entry.held = True
    return entry


def discard(headers: Any, task_id: str | None, task: str) -> None:
    """Free the entry of a queued call that a worker discards, in the background.

    The worker's main process must not wait for a cache.
    """
    with suppress(ValueError):  # a malformed header names no entry
        header = Header.of(headers, task_id, task)
        if header and header.lock_key and header.queued:
            queued_entry(header.lock_key.beside(QUEUED, task), header.queued).abandon()


def seconds_to_block(options: LockOptions, delay: float, expires: Any) -> float:
    """Return how long the entry of a call lasts that is sent now; 0 if the call has expired.

    ``delay`` is the number of seconds before which the call will not start; ``expires`` is its
    option for Celery, or None.
    """
    left = math.inf
    if expires is not None:
        left = seconds_until(expires)
    if left <= 0:
        return 0.0
    seconds = options.unique_for
    if options.unique_until != "expiry":
        seconds += delay
    return min(seconds, left + LATE, MAX_LEASE)


def seconds_until(when: Any) -> float:
    """Return the seconds until a time, given as Celery takes it: a number, or a time (naive: UTC).

    Celery's workers read a time without a zone as UTC, whatever its setting ``timezone`` says.
    """
    if isinstance(when, Real):
        return float(when)
    point: Any = maybe_iso8601(when)
    return (maybe_make_aware(point) - datetime.now(UTC)).total_seconds()
