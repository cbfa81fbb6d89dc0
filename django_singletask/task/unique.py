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
from django_singletask.locks import liveness
from django_singletask.locks.keys import QUEUED
from django_singletask.locks.lease import MAX_RETRIES, Lease
from django_singletask.locks.ref import LockRef
from django_singletask.locks.renewal import renewers
from django_singletask.log import logger
from django_singletask.stores import get_store
from django_singletask.stores.base import Slots
from django_singletask.task.header import Header
from django_singletask.task.latest import Ticket, gives_way, take_number
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


EXPIRY_MARGIN = 5.0
"""Seconds by which the entry of a call outlasts its ``expires``.

The clock of a worker may be behind. And Celery looks at ``expires`` when it gives the call to its
pool: one that then waits for a thread begins late. After these seconds, it begins without an entry.
"""


Publish = Callable[[], Any]


class QueuedCall:
    """The entry next to a lock that stops duplicates of a call.

    While the call is queued, the entry belongs to no process: it needs no renewal, only to be
    added, replaced and deleted. While a call with ``"finish"`` runs, the entry is a lease.
    """

    is_there: bool = False
    """Whether the entry of the queued call is there, as far as this process knows."""
    value: bytes = b""
    """The bytes of that entry."""
    running: Lease | None = None
    """The lease that a run with ``"finish"`` has instead."""
    ticket: Ticket | None = None
    """The place of the call among the calls that replace each other."""
    series_end: float = 0.0
    """When the series of the call ends, as a Unix time; 0: never."""
    again_until: float = 0.0
    """When the entry of the next try ends, after the call was sent again."""
    sender: QueuedCall | None = None
    """The call whose run sends this one, if that run has an entry."""
    taken_from: QueuedCall | None = None
    """The ``sender``, if this call has taken its entry over."""

    def __init__(self, lock: LockRef, options: LockOptions, queued: str | None = None) -> None:
        """``queued`` is the entry in the header of the message."""
        self.lock = lock
        self.options = options
        self.ref: LockRef = lock.beside(QUEUED)
        if queued:
            self.value = queued.encode(errors="replace")
            self.is_there = True

    @property
    def holder(self) -> Holder:
        """The record of the queued call."""
        return Holder.decode(self.value)

    # In the producer

    def send(
        self,
        header: Header,
        message: dict[str, Any],
        seconds: float,
        publish: Publish,
        result_of: Callable[[str], Any],
        *,
        awaited: bool,
    ) -> Any:
        """Add the entry, note it in the header, and publish the call; return its result.

        If an identical queued call stops this one, return the ``result_of`` its task id. A call
        that is ``awaited`` by others is sent in any case, without an entry. The entry lasts for so
        many ``seconds``; 0: the call has expired, so no worker begins it, and it stops no other.
        If another base publishes the call later, or never, ``publish`` returns None. Then the entry
        belongs to no call that is published, and is freed. ``message`` has Celery's options of the
        call, whose time changes if its series ends earlier.
        """
        if not seconds:
            return publish()
        result = None
        try:
            blocker = self.add(header, seconds)
            # Without a task id the entry belongs to no call. Send the call; its lock decides.
            if blocker is not None and blocker.task_id and not awaited:
                self._report_duplicate(blocker)
                if self.options.on_duplicate == "raise":
                    raise DuplicateTask(self.lock.name, blocker.task_id)
                return result_of(blocker.task_id)
            if self.is_there:
                header.queued = self.value.decode()
            header.ticket = None
            if self.ticket and not awaited:
                header.ticket = self.ticket
                self._start_in_time(header, message)
            result = publish()
        finally:
            if result is None:
                self._withdraw()
        # A call that others wait for is not moved. After the end it replaces no call before it.
        is_in_time = not 0 < self.series_end < header.due
        if self.ticket and result is not None and is_in_time:
            # Let this call, which is now published, replace the calls before it. One that others
            # wait for counts as received: no call replaces it, and its worker notes nothing.
            gives_way(self.lock, self.ticket, is_sent=not awaited)
        return result

    def _start_in_time(self, header: Header, message: dict[str, Any]) -> None:
        """Let the call start at the end of its series, if its own time is later."""
        end = self.series_end
        if 0 < end < header.due:
            header.delay -= header.due - end
            header.due = end
            message |= {"countdown": None, "eta": datetime.fromtimestamp(end, UTC)}

    def _report_duplicate(self, blocker: Holder) -> None:
        kind = "queued"
        if blocker.kept:
            kind = "kept"
        text = "%s: not sent, duplicate of task %s (%s)."
        logger.info(text, self.lock, blocker.task_id, kind)
        # The id of a call that is not sent would lead to nothing.
        caller = self.lock._replace(task_id=None).holder(0.0)
        self.lock.tell("duplicate", caller, of_call=True, blocker=blocker, reason=kind)

    def add(self, header: Header, seconds: float) -> Holder | None:
        """Add the entry, or return the holder of the entry of an identical queued call.

        A call that the body of the holder sends takes over the entry of its run. A call that
        replaces the queued one takes over its entry, and takes a ticket. If the cache
        cannot be used, this raises :class:`LockUnavailable`; if ``on_outage`` is not ``"raise"``,
        the call is sent without an entry.
        """
        holder = self.ref.holder(seconds)
        # The producer may end while its call is queued.
        holder.pid = 0
        holder.start = ""
        self.value = holder.encode()
        try:
            blocker = self._insert(seconds)
            if blocker is not None and self._take_over(blocker, seconds):
                blocker = None
            if self.options.on_duplicate != "replace":
                return blocker
            state = take_number(self.lock, header, self.options.unique_for)
            if state is not None:
                self.ticket = [state.epoch, state.taken]
                self.series_end = state.end
            if blocker is not None:
                entry, holder = self.ref.read_holder()
                # The entry of a run has a process, and stays until the run is finished.
                if entry is not None and not holder.pid:
                    self.is_there = self._replace(entry.value, seconds)
        except BaseException as error:
            if not isinstance(error, LockUnavailable) or self.options.on_outage == "raise":
                if not self.is_there:
                    self._owe()
                raise
            self._owe()
            text = "%s: the call is sent, but duplicates of it are not stopped: %s"
            logger.error(text, self.lock, error)
            self.ticket = None
        return None

    def _insert(self, seconds: float) -> Holder | None:
        """Add the entry; return None if it was added, otherwise the living holder."""
        store = get_store(self.ref.cache)
        slots = Slots((self.ref.key,))
        for retries in range(MAX_RETRIES, -1, -1):
            # The entry protects no run, so it need not wait for holders that the cache forgot.
            taken = store.take(slots, self.value, seconds, heeds_epoch=False)
            if isinstance(taken, str):
                self.is_there = True
                return None
            entry = taken[self.ref.key]
            holder = Holder.decode(entry.value)
            proof = liveness.proof_of_death(holder)
            if proof is None or retries == 0:
                break
            self.ref.free_dead(entry, holder, proof)
        return holder

    def _replace(self, value: bytes, seconds: float) -> bool:
        """Replace other bytes by those of this call; return whether they were there."""
        store = get_store(self.ref.cache)
        return store.replace(self.ref.key, value, self.value, seconds)

    def _take_over(self, blocker: Holder, seconds: float) -> bool:
        """Replace the entry of the sender, if that is the blocker; return whether it was replaced.

        In a fork of the sender's process, the parent has the entry.
        """
        sender = self.sender
        if sender is None:
            return False
        running = sender.running
        if running is not None:
            if running.token != blocker.token or not running.held or running.is_inherited():
                return False
            self.taken_from = sender
            # A renewal that is on its way would find other bytes, and report a loss.
            with running.renewing:
                self.is_there = self._replace(running.value, seconds)
                running.held = not self.is_there
        elif sender.is_there and sender.holder.token == blocker.token:
            self.taken_from = sender
            self.is_there = self._replace(sender.value, seconds)
            sender.is_there = not self.is_there
        return self.is_there

    def _withdraw(self) -> None:
        """Free the entry of a call that is not published, or give it back to its sender."""
        try:
            if self.taken_from is not None and self.is_there:
                with suppress(LockUnavailable):
                    self._pass_back(self.taken_from)
        finally:
            self._remove()

    def _pass_back(self, sender: QueuedCall) -> None:
        if sender.running is not None:
            self.is_there = not sender.running.replace(self.value)
        else:
            store = get_store(self.ref.cache)
            length = sender.holder.timeout
            sender.is_there = store.replace(self.ref.key, self.value, sender.value, length)
            self.is_there = not sender.is_there

    # In the worker

    def start(self) -> None:
        """Free the entry of a call that has its lock now, or keep it as ``unique_until`` says.

        If the cache cannot be used, the protection against duplicates ends, not the run.
        """
        try:
            if self.options.unique_until == "expiry":
                self.is_there = False
                self._note_begin()
            elif self.options.unique_until == "finish":
                self._hold()
            else:
                self._remove()
        except LockUnavailable:
            logger.exception("%s: duplicates of this call are not stopped.", self.ref)

    def _hold(self) -> None:
        """Let the entry be a lease of this process until the run has finished."""
        lease = Lease(self.ref, self.options.lock_timeout)
        lease.at_least = self.options.lock_at_least
        lease.in_block = True
        self.running = lease  # before the requests: a signal may come after them
        try:
            # If the entry has ended, or was freed with a killed earlier run, take it again, unless
            # another call is queued by now, such as one of the next series.
            if not lease.replace(self.value) and lease.take() is not None:
                logger.info("%s: an identical call was queued meanwhile.", lease)
        finally:
            if lease.held:
                self.is_there = False
            else:
                self.running = None

    def _note_begin(self) -> None:
        """Note in the entry that the call has begun; it cannot expire any more."""
        queued = self.holder
        length = self.options.blocks_for
        begun = without_process(queued, length, kept=True).encode()
        # The entry may be gone, because a killed run's entry was freed or because the cache lost
        # it. Or the cache may not report when it ends. Then the clocks of both hosts decide how
        # long it lasts. A retry adds no entry, because an operator may have cleared it.
        left = max(0.0, queued.since + length - time.time())
        store = get_store(self.ref.cache)
        entry = self.ref.read()
        if entry is None:
            if left and not self.ref.retries:
                store.add(self.ref.key, begun, left)
        elif entry.value == self.value:
            if entry.remaining is not None:
                left = entry.remaining + length - queued.timeout
            store.replace(self.ref.key, self.value, begun, left)

    def sent_again(self, delay: float, expires: Any) -> None:
        """Note that the call was sent again now, so that its entry is kept for the next try."""
        self.again_until = clock.now() + seconds_to_block(self.options, delay, expires)

    def queue_again(self) -> None:
        """Keep the entry for the next try of the call, if there is one.

        Call this before the run's lock is free: after that the entry can belong to the next run.
        """
        if self.again_until <= clock.now():
            return
        if self.options.unique_until == "expiry":
            self.is_there = False
            return  # its end never moves
        try:
            if self.running is not None and self.running.held:
                self.running.leave_to(self.value, self.again_until)
                self.is_there = False
            elif self.is_there:  # the call has not begun
                self._leave(self.value, self.again_until)
        except LockUnavailable:
            logger.exception("%s: duplicates of the next try are not stopped.", self.ref)

    # In either

    def give_back(self, kept: Lease | None = None, error: BaseException | None = None) -> None:
        """Free the entry, if there is one; retry in the background if that fails.

        ``kept`` is the lease of the run if it keeps its lock: then this entry lives as long.
        ``error`` has ended the run.
        """
        if self.running is not None:
            if kept is not None:
                self.running.began_at = kept.began_at
            self.running.leave_body(error)
        self._remove()

    def _remove(self) -> None:
        try:
            if self.is_there:
                self._leave()
        except LockUnavailable:
            logger.exception("%s could not be released; trying again.", self.ref)

    def _leave(self, new: bytes = b"", until: float = 0.0) -> None:
        """Free the entry, or replace it by ``new`` until then; if this raises, that is owed."""
        try:
            self.is_there = False
            get_store(self.ref.cache).release(self.ref.key, self.value, new, until)
        except BaseException:
            owe(self.ref, self.value, new, until)
            raise

    def _owe(self) -> None:
        """Free the entry in the background, wherever the last request has left it."""
        self.is_there = False
        owe(self.ref, self.value)


def owe(ref: LockRef, value: bytes, new: bytes = b"", until: float = 0.0) -> None:
    """Do in the background what :meth:`QueuedCall._leave` does."""
    renewers[ref.cache].owe((ref.key,), value, Holder.decode(value).timeout, new, until)


def discard(headers: Any, task_id: str | None, task: str) -> None:
    """Free the entry of a queued call that a worker discards, in the background.

    The worker's main process must not wait for a cache.
    """
    with suppress(ValueError):  # a malformed header names no entry
        header = Header.of(headers, task_id, task)
        if header and header.lock_key and header.queued:
            ref = LockRef(conf.cache, *header.lock_key, task=task).beside(QUEUED)
            owe(ref, header.queued.encode(errors="replace"))


def seconds_to_block(options: LockOptions, delay: float, expires: Any) -> float:
    """Return for how many seconds the entry of a call lasts, if the call is sent now.

    0: the call has expired. ``delay`` is the call's delay in seconds: it starts later than that.
    ``expires`` is what the call has as Celery's option of that name, or None.
    """
    left = math.inf
    if expires is not None:
        left = seconds_until(expires)
    if left <= 0:
        return 0.0
    seconds = options.blocks_for
    if options.unique_until != "expiry":
        seconds += delay
    return min(seconds, left + EXPIRY_MARGIN, MAX_LEASE)


def seconds_until(when: Any) -> float:
    """Return the seconds until a time, given as Celery takes it: a number, or a time (naive: UTC).

    Celery's workers read a time without a zone as UTC, whatever its setting ``timezone`` says.
    """
    if isinstance(when, Real):
        return float(when)
    point: Any = maybe_iso8601(when)
    return (maybe_make_aware(point) - datetime.now(UTC)).total_seconds()
