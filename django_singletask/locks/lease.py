"""One acquisition of a lock: take the entry, trust it, notice its loss, and leave it.

The life of a lease
-------------------

::

           attempts()                      leave()
    new ----------------> held -------------------------> left
     |                    |  ^  |                          ^
     |                    |  |  | settle(): gone or taken, |
     | blocker            |  |  | or the deadline passed   | leave()
     v                    +--+  v                          |
    not taken       settle()    lost ----------------------+

A new lease is tried in the store. It is *held* from the reply on, or another holder is its
``blocker``. A held lease is trusted until its ``deadline``, which each renewal moves. It is *lost*
if that has passed when somebody asks, or if a renewal finds the entry gone or taken. What is lost
stays lost, and is not set again, because another run may have had the lock since. It still counts
as ``held`` until it is left. Only an entry that the cache lost is *retaken*, if a renewal finds it
free before the deadline.

To leave an entry is to delete it, or to put other bytes in its place for a while. Whatever
interrupts a request (an error, a signal, a lost reply), the server may have handled it. Then the
entry is owed: the thread in :mod:`django_singletask.locks.renewal` leaves it later.
"""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from django_singletask import clock
from django_singletask.arguments import check_seconds
from django_singletask.exceptions import LockError, LockLost, LockUnavailable
from django_singletask.holder import Holder, without_process
from django_singletask.locks import liveness
from django_singletask.locks.address import KEPT, Address
from django_singletask.locks.keys import LockKey
from django_singletask.locks.renewal import renewers
from django_singletask.log import in_words, logger
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry, Outcome, Slots
from django_singletask.stores.epoch import Forgotten
from django_singletask.stores.keys import marker_key

MAX_RETRIES = 3
"""How often a take tries again: it has freed the entry of a dead holder, it has waited since the
cache has forgotten its locks, or its lease ended before the reply came."""
TRUST = 0.99
"""The part of a lease that is trusted: the speed of two clocks differs by far less than 1 %."""
ROUNDING = 0.002
"""Seconds by which the store may round a lease."""
CHILD_ASKS = 1.0
"""Seconds between two requests of a forked child that check its parent's lock."""


class Postponed(Ignore):
    """End this delivery of a message: the message was published again, with a delay."""


def result_of(error: BaseException) -> str:
    """Return the history's word for the end of a body, given the error that ended it."""
    if isinstance(error, Retry):
        return "retried"
    if isinstance(error, Postponed):
        return "postponed"
    if isinstance(error, (Ignore, Reject)):
        return "ignored"
    # SystemExit, for example: Celery's terminate ended the process under the body.
    return "raised" if isinstance(error, Exception) else "terminated"


class Lease(Address):
    """One acquisition of the entry at an address, by the process in ``holder``.

    ``length`` is the lease in seconds. If ``renews`` is true, the thread in
    :mod:`django_singletask.locks.renewal` extends it at about each third of that; a holder without
    a process (``pid`` 0) is not renewed. A body that returns keeps the entry until ``at_least``
    seconds after the take. ``held`` is true from the take until the release. If the lock has
    several slots, the take moves ``key`` to the slot that it took, or after a conflict to the slot
    of the blocker. Without ``slots`` it has one.
    """

    held = False
    at_least: float = 0
    origin: object = None
    """The thread and asyncio task of the take."""
    deadline = renewed_at = taken_at = 0.0
    longest_gap = 0.0
    retaken = 0
    """How often the cache forgot the entry and it was set again."""
    fence: int | None = None
    """The fencing token, after the first request."""
    reason = ""
    """Why the entry was lost, once that was reported."""
    _lost = _is_missing = False
    _child_asked_at = 0.0
    took_over = False
    """Whether the take has freed the entry of a dead run of the same task id."""
    kept = False
    """Whether the release leaves the entry there because of ``at_least``."""
    blocker: Holder | None = None
    """The other holder, after a conflict."""
    blocker_remaining: float | None = None
    """The rest of its lease in seconds; None where the cache does not report it."""
    others: Sequence[Holder] = ()
    """The holders of all slots, after a conflict."""
    in_block = False
    """Whether it is for a ``with`` block of this origin, or a delivery; set before it is taken.

    Then the thread leaves the entry if nothing refers to this object any more.
    """

    def __init__(
        self, cache: str, lock_key: LockKey, holder: Holder, slots: Slots | None = None
    ) -> None:
        super().__init__(cache, lock_key)
        self.holder = holder
        self.token = holder.token
        self.value = holder.encode()
        self.length = holder.timeout
        self.renews = holder.pid > 0
        self.slots = slots or Slots((self.key,))

    # Taking

    def take(self) -> Holder | None:
        """Add the entry; return None if it was added, otherwise the other holder."""
        for pause in self.attempts():
            time.sleep(pause)
        return self.blocker

    def attempts(self) -> Iterator[float]:
        """Try to add the entry; yield the seconds until each further attempt.

        In the end the entry is ``held``, or ``blocker`` has it. Entries of dead holders are freed
        first. If this fails or is closed, it releases what the request may have taken. Each
        attempt may run in another thread.
        """
        # The entry of a queued call (pid 0) protects no run: it need not wait for holders.
        heeds_epoch = self.holder.pid > 0
        try:
            for retries in reversed(range(MAX_RETRIES + 1)):
                store, sent = get_store(self.cache), clock.now()
                try:
                    taken = store.take(self.slots, self.value, self.length, heeds_epoch=heeds_epoch)
                except Forgotten as forgotten:
                    heeds_epoch = retries > 1  # the last attempt does not wait
                    yield forgotten.args[0]
                    continue
                if not isinstance(taken, str):
                    if not self._meet_dead(taken, may_free=retries > 0):
                        return
                else:
                    self.key = taken
                    if self.begin(sent):
                        return
            raise LockUnavailable(
                f"{self}: its lease of {self.length:g} s ended again and again before the cache "
                f"{self.cache!r} answered. Give the lock a longer timeout (lock_timeout of a "
                "task), or find out why the cache is slow: manage.py locks probe."
            )
        except BaseException:
            self.abandon()
            raise

    def _meet_dead(self, entries: dict[str, Entry], *, may_free: bool) -> bool:
        """Free the other entry if its holder is dead; else note the holder as ``blocker``.

        Of several slots it is the one of the run itself, else of a dead holder, else the first to
        end.
        """
        ranked = []
        for key, entry in entries.items():
            holder = Holder.decode(entry.value)
            how = liveness.proof_of_death(holder)
            # Each record contains the empty mark.
            rank = self.slots.mark not in entry.value, how is None, entry.remaining or math.inf
            ranked.append((rank, key, entry, holder, how))
        self.others = [holder for *_, holder, _ in ranked]
        _, self.key, entry, holder, how = min(ranked, key=operator.itemgetter(0))
        if how is None or not may_free:
            self.blocker, self.blocker_remaining = holder, entry.remaining
            return False
        if self.free_dead(entry, holder, how):
            self.took_over |= holder.is_run_of(self.holder.task_id)
        return True

    def replace(self, value: bytes) -> bool:
        """Replace the bytes ``value`` by those of this lease; return whether the store did so.

        If this raises :class:`LockUnavailable`, it releases what it may have stored.
        """
        try:
            store, sent = get_store(self.cache), clock.now()
            replaced = store.replace(self.key, value, self.value, self.length)
            return replaced and self.begin(sent)
        except BaseException:
            self.abandon()
            raise

    def begin(self, sent: float) -> bool:
        """Trust and renew the entry, which a request at the time ``sent`` has taken.

        Return whether the lease still lasts; if not, the entry is released. The reply can arrive
        long after the server granted the lease, so the deadline is counted from before the request:

          here:    sent --------------------------- reply (late) ---- sent + length: no trust
          server:        granted ------------------------------------------- ends: free
        """
        deadline = sent + self.length * TRUST - ROUNDING
        if clock.now() >= deadline:
            get_store(self.cache).release(self.key, self.value)
            return False
        self.renewed_at = self.taken_at = sent
        self.deadline = deadline
        self.held = True
        if self.holder.pid:
            renewers[self.cache].keep(self)
        return True

    # Leaving

    def abandon(self, new: bytes = b"", until: float = 0.0) -> None:
        """Leave the entry in the background, in each slot where the request may have stored it.

        The server may have handled the request despite the error, or a signal such as a soft time
        limit came between the reply and the next line here:

          here:    add ->                 SIGUSR1 (otherwise the entry would stay)
          server:         added -> reply
        """
        self.held = False
        renewers[self.cache].drop(self)
        keys = (self.key,) if self.taken_at else self.slots.keys[: self.slots.allowed]
        renewers[self.cache].owe(keys, self.value, self.length, new, until)

    # A run that returned keeps its lock
    #
    # The run's bytes are replaced by bytes without a process, so that the holder never counts as
    # dead. They have the run's token, so that the history counts conflicts against that run. If the
    # reply is lost, the replacement is made again, and the end stays the same:
    #
    #   run:    returns   replace -> (no reply)            replace -> is there already: OK
    #   store:                       replaced, until X                until X

    def leave(
        self, result: str = "", *, new: bytes = b"", until: float = 0.0, reason: str = ""
    ) -> bool:
        """Delete the entry, or replace it by ``new`` until then; and report the end of the lease.

        Return whether this lease still had the entry. ``result`` is the end of the body; one that
        ``"returned"`` keeps the entry for the rest of ``at_least``. ``reason`` is for the history.
        If this raises, the entry is left in the background: replaced if it is ``kept``, and
        otherwise deleted, because nobody learns that ``new`` is there. The entry of a call that is
        queued again is replaced, too, if it has no process.
        """
        if self.is_inherited():
            self.held = False
            return False
        ends = min(self.taken_at + self.at_least, self.deadline)
        if result == "returned" and clock.now() < ends and not self._lost:
            self.kept, until = True, self.taken_at + self.at_least
            new = without_process(self.holder, self.at_least, kept=True).encode()
            reason = f"{KEPT} {self.at_least:g} s from its start"
        sent = clock.now()
        try:
            renewers[self.cache].drop(self)
            self.held = False
            store = get_store(self.cache)
            try:
                outcome = store.release(self.key, self.value, new, until)
            except LockUnavailable as error:
                if not (self.kept and isinstance(error.__cause__, store.refusals)):
                    raise
                # A full server refuses other bytes, but not a longer lease for these.
                reason = f"{reason}, if its process lives so long: {in_words(error)}"
                text = "%s is kept only while its process lives: the cache refuses other bytes: %s"
                logger.warning(text, self, in_words(error))
                outcome = store.change(self.key, self.value, self.value, until - clock.now())
            if outcome is Outcome.SENT_TWICE:
                outcome = Outcome.OK if sent < self.deadline else Outcome.GONE
            if outcome is not Outcome.OK or self._lost:
                self.kept = False
                self.lose()
                reason = self.reason
            return outcome is Outcome.OK
        except BaseException as error:
            self.abandon(*((new, until) if self.kept or not self.holder.pid else ()))
            reason = f"not released at once: {in_words(error)}"
            raise
        finally:
            self.tell(
                "released",
                self.holder,
                outcome="lost" if self._lost else "released",
                result=result,
                reason=reason,
                longest_renewal_gap=self.longest_gap or None,
                retaken=self.retaken,
                held_for=clock.now() - self.taken_at,
            )

    def give_back(self, error: BaseException | None = None, result: str = "") -> None:
        """Release at the end of a body, if the lock is held; log that the cache cannot be asked.

        ``error`` has ended the body; ``result`` replaces its word for the history.
        """
        if self.held:
            try:
                self.leave(result or ("returned" if error is None else result_of(error)))
            except LockUnavailable:
                logger.exception("%s could not be released; trying again.", self)

    # Who has a lock that is handed over
    #
    # Its entry has no process. So it never counts as dead, it is not renewed, and it ends after the
    # seconds passed to hand_over(). Each holder has a separate token, and replaces the bytes of the
    # holder before it atomically:
    #
    #   command:   bytes A -> token H, no process     exits
    #   receiver:                                             bytes with H -> its own, renewed
    #   twice:                                                         bytes with H? gone: LockLost

    def hand_over(self, seconds: float) -> str:
        """Leave the entry to a receiver for so many seconds; return the handle that it needs."""
        check_seconds("for_", seconds)
        token = os.urandom(16).hex()
        holder = without_process(self.holder, seconds, token=token, since=time.time())
        value, until = holder.encode(), clock.now() + seconds
        try:
            # In a fork, the parent has it.
            is_mine = not self.is_inherited() and not self.lost
            reason = f"handed over for {seconds:g} s"
            if is_mine and self.leave(new=value, until=until, reason=reason):
                self.tell("acquired", holder)
                return f"{holder.slots} {token} {self.cache} {self.key} {self.name}"
        except BaseException:
            # The caller does not get the handle, so free the entry even if it was handed over.
            renewers[self.cache].owe((self.key,), value, seconds)
            raise
        raise LockLost(f"{self} is not held by this process: nothing to hand over.")

    def receive(self, token: str) -> None:
        """Take the entry that was handed over with this token."""
        entry, holder = self.read_holder()
        how = None
        # A redelivered message finds the bytes of its own first run, which received the lock.
        if holder.token != token and holder.is_run_of(self.holder.task_id):
            how = liveness.proof_of_death(holder)
        if not (entry and (holder.token == token or how) and self.replace(entry.value)):
            raise LockLost(
                f"{self} can no longer be received: it was already received, was cleared, or was "
                "lost by the cache, or the time that hand_over() gave is over."
            )
        if how:
            text = "%s was received by %s, but %s: this process receives the lock again."
            logger.warning(text, self, holder, how)
            self.tell("dead", holder, reason=how)
        else:
            reason = f"received by {self.holder}"
            self.tell("released", holder, outcome="released", reason=reason)
        self.tell("acquired", self.holder)

    # Holding

    # Two simultaneous renewals could settle in another order than in the store:
    #
    #   thread: asks for 9 s -> granted second                      settles first: trusts 9 s
    #   extend: asks for 600 s -> granted first, cut to 9 s          settles last: trusts 600 s
    #
    # Re-entrant, because a receiver of an event of a renewal may extend the lock. A short run has
    # no renewal. setdefault() is atomic between threads.

    @property
    def renewing(self) -> Any:
        return vars(self).setdefault("_renewing", threading.RLock())

    @property
    def due_at(self) -> float:
        return self.renewed_at + self.length / 3

    def is_inherited(self) -> bool:
        """Return whether this process is a fork of the holder, so that its parent has the lock."""
        return self.holder.pid not in (0, os.getpid())

    @property
    def lost(self) -> bool:
        """Whether the entry is lost for good.

        This sends no request, except in a forked child of the holder: at most once a second, since
        the parent keeps renewing the lock. That can raise :class:`LockUnavailable`.
        """
        if self.held and not self._lost:
            if self.is_inherited():
                self._ask_for_parent()
            elif clock.now() >= self.deadline:
                self._lost = True
        return self._lost

    def _ask_for_parent(self) -> None:
        now = clock.now()
        if now - self._child_asked_at >= CHILD_ASKS:
            self._child_asked_at = now
            entry, was_missing = self.read(), self._is_missing
            # The parent may take a forgotten entry again, so look twice.
            self._is_missing = entry is None
            self._lost = was_missing if entry is None else entry.value != self.value

    def has_ended(self) -> bool:
        """Return whether the lease is lost; if it is, call :meth:`lose`."""
        if self.lost:
            self.lose()
        return self.lost

    def extend(self, length: float) -> None:
        """Let the lease end ``length`` seconds from now, unless it is lost; see TaskLock.extend."""
        if self.is_inherited():
            raise LockError(f"{self}: only the parent process, its holder, can extend it.")
        with self.renewing:
            if self.has_ended():
                return
            store, sent = get_store(self.cache), clock.now()
            if self.held and length < self.length:
                # Trust only the shorter lease from now on: the request may fail, although the
                # server has handled it.
                self.deadline = min(self.deadline, sent + length * TRUST - ROUNDING)
                self.length = length
                renewers[self.cache].keep(self)
            if self.renews:
                outcome = store.renew(self.key, self.value, length)
            else:  # do not set a missing entry again
                outcome = store.change(self.key, self.value, self.value, length)
            self.settle(sent, length, outcome)

    def settle(self, sent: float, length: float, outcome: Outcome) -> None:
        """Note the outcome of a renewal that was sent at ``sent`` for ``length`` seconds."""
        if outcome is Outcome.RETAKEN and not (self.held and clock.now() < self.deadline):
            # The renewal set an entry that must be released. Either the body released the lock:
            #
            #   renewal: request on its way                    -> taken again -> released again
            #   body:                          release -> freed
            #
            # Or the lease had ended, so that another run may have run:
            #
            #   renewal: request on its way                                -> taken again -> ...
            #   others:            the lease ends   take   run   release
            renewers[self.cache].owe((self.key,), self.value, length)
            outcome = Outcome.GONE
        if not self.held:
            return
        self.longest_gap = max(self.longest_gap, sent - self.renewed_at)
        self.renewed_at = max(self.renewed_at, sent)
        if self._lost or outcome in {Outcome.GONE, Outcome.TAKEN}:
            self.lose()
            return
        if outcome is Outcome.RETAKEN:
            self.retaken += 1
            logger.warning(
                "%s was missing from the cache (evicted, flushed or restarted empty), and was "
                "taken again; another run may have started meanwhile.",
                self,
            )
            self.tell("retaken", self.holder, retaken=self.retaken)
        # A signal handler, or a receiver of this event, may have extended the lock meanwhile.
        # Nobody knows which of the two requests the server handled last:
        #
        #   extend:    asks for 600 s -> granted first                  settles last: trusts 600 s
        #   handler:                       extend: 5 s -> granted second, settles first
        deadline = sent + length * TRUST - ROUNDING
        if self.renewed_at > sent:
            deadline = min(deadline, self.deadline)
            length = min(length, self.length)
        self.length = length
        self.deadline = deadline

    def fencing_token(self) -> int:
        if self.holder.slots > 1:
            raise TypeError(
                f"{self} has {self.holder.slots} slots, so several runs hold it at once, "
                "and a fencing token cannot order their writes. Use a lock with one slot."
            )
        # Not during a renewal, which may take a forgotten entry again. A token that is drawn before
        # this process knows about that is greater than the token of the run in between:
        #
        #   renewal:    (entry gone)                      taken again ................. retaken = 1
        #   body:                                                       draws 9, writes stale data
        #   other run:               draws 8, writes, ends
        with self.renewing:
            if self.fence is None and not self.lost and not self.retaken:
                self.fence = get_store(self.cache).fence(self.key, self.value)
                if self.fence is None and not self.is_inherited():
                    self.extend(self.length)  # find out what happened to the entry, and report it
            if self.retaken and not self.lost:
                what = "was lost by the cache meanwhile, and another run may have held it"
            elif self.fence is None or self.lost:
                what = "is no longer held by this run"
            else:
                return self.fence
        raise LockLost(f"{self} {what}: there is no fencing token.")

    def is_there(self) -> bool:
        """Ask the cache whether this lease has the entry."""
        entry = self.read()
        return entry is not None and entry.value == self.value

    def lose(self) -> None:
        """Note for good that the entry is lost: report it once, and stop renewing it."""
        renewers[self.cache].drop(self)
        ended = clock.now() >= self.deadline
        self._lost = True
        if self.reason:
            return
        self.reason = f"its lease of {self.length:g} s ended before it could be renewed"
        if self.silent:
            text = "%s: the cache lost this entry, so duplicates of the running call are possible."
            if self.holder.pid:  # otherwise the call is not running
                logger.warning(text, self)
            return
        blocker = None
        if not ended:
            self.reason = "gone from the cache (evicted, flushed or restarted empty)"
        elif not self.renews:
            self.reason = f"its fixed lease of {self.length:g} s ended first"
        try:
            entry = self.read()
            if entry and entry.value != self.value:
                blocker = Holder.decode(entry.value)
                self.reason = f"taken by {blocker}"
            elif get_store(self.cache).read(marker_key(self.key, self.value)):
                self.reason = "cleared"
        except LockUnavailable:
            # The loss itself must be reported, even if the store is down again.
            logger.warning("%s is lost, but the reason cannot be read.", self)
        if ended and not self.renews:
            # The user chose a fixed length.
            logger.info("%s expired before its run ended: %s.", self, self.reason)
            return
        logger.error("%s was lost while its run continued: %s.", self, self.reason)
        self.tell("lost", self.holder, reason=self.reason, blocker=blocker)
