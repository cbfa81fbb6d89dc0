"""One acquisition of a lock: take the entry, trust it, notice its loss, and release it."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Sequence

from django_singletask import clock
from django_singletask.exceptions import LockError, LockLost, LockUnavailable
from django_singletask.holder import Holder
from django_singletask.locks import liveness
from django_singletask.locks.address import Address, blocker_facts
from django_singletask.locks.keys import LockKey
from django_singletask.locks.renewal import Kept, Owed, renewers
from django_singletask.locks.run import NO_RUN, Run
from django_singletask.locks.steps import do
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry, Outcome, Store, marker_key
from django_singletask.stores.epoch import Forgotten

logger = logging.getLogger("django_singletask")

KEPT = "kept for"
"""The history's reason for a run that keeps its lock begins with this."""
MAX_DEAD = 3
"""How many entries of dead holders one take frees."""
MAX_HELD_BACK = 3
"""How often one take waits because the cache has forgotten its locks."""
MAX_LATE = 3
"""How many leases of one take may end before the reply comes."""
CHILD_ASKS = 1.0
"""Seconds between two requests of a forked child that check its parent's lock."""


def margin(length: float) -> float:
    """Return how many seconds before its end a lease is no longer trusted.

    The speed of two clocks differs by far less than 1%; 2 ms cover the store's rounding.
    """
    return length * 0.01 + 0.002


class Lease:
    """One acquisition of the entry at an address, by the process in ``holder``.

    ``length`` is the lease in seconds. If ``renews`` is true, the thread in
    :mod:`django_singletask.locks.renewal` extends it at about each third of that; a holder without
    a process (``pid`` 0) is not renewed. A body that returns keeps the entry until ``at_least``
    seconds after the take. ``held`` is true from the take until the release. If the lock has
    several slots, the take moves ``key`` and ``address`` to the slot that it took, or after a
    conflict to the slot of the blocker.

    A lost entry stays lost and is not set again, because another run may have had the lock since.
    An entry that the cache lost is *retaken* if a renewal finds it free before the deadline.
    """

    held = False
    deadline = renewed_at = taken_at = 0.0
    longest_gap = 0.0
    retaken = 0
    """How often the cache forgot the entry and it was set again."""
    fence: int | None = None
    """The fencing token, after the first request."""
    reason = ""
    """Why a run lost its lock or took it again, for the history."""
    _lost = _reported = _is_missing = False
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
    """All other holders, if the lock has several slots."""
    is_waiting = False
    """Whether the take makes another attempt after a pause."""
    _freed = _late = _held_back = 0

    def __init__(
        self,
        address: Address,
        holder: Holder,
        *,
        renews: bool = True,
        at_least: float = 0,
        run: Run = NO_RUN,
        place: object = None,
    ) -> None:
        """``run`` is the run of a delivery, ``place`` the thread and asyncio task of the take."""
        self.address = address
        self.cache = address.cache
        self.key = address.lock_key.key
        self.holder = holder
        self.token = holder.token
        self.value = holder.encode()
        self.length = holder.timeout
        self.renews = renews and holder.pid > 0
        self.at_least = at_least
        self.place = place
        # Two simultaneous renewals could settle in another order than in the store:
        #
        #   thread: asks for 9 s -> granted second                      settles first: trusts 9 s
        #   extend: asks for 600 s -> granted first, cut to 9 s          settles last: trusts 600 s
        # Re-entrant, because a receiver of an event of a renewal may extend the lock.
        self.renewing = threading.RLock()
        self.slots = run.slots(address.lock_key, holder)

    # Taking

    def take(self) -> Holder | None:
        """Add the entry; return None if it was added, otherwise the other holder."""
        try:
            do(self.attempt)
        except BaseException:
            if self.is_waiting:
                self.abandon()
            raise
        return self.blocker

    def attempt(self) -> float | None:
        """Try to add the entry; return the seconds until the next attempt if one is necessary.

        Otherwise the entry is ``held``, or ``blocker`` has it. Entries of dead holders are freed
        first. If this raises :class:`LockUnavailable`, it releases what the request may have taken.
        The next attempt may run in another thread.
        """
        store = get_store(self.cache)
        # The entry of a queued call (pid 0) protects no run, so it need not wait for holders.
        heeds_epoch = self.holder.pid > 0 and self._held_back < MAX_HELD_BACK
        self.is_waiting = False
        try:
            while True:
                sent = clock.now()
                taken = store.take(self.slots, self.value, self.length, heeds_epoch=heeds_epoch)
                if isinstance(taken, str):
                    self.move_to(taken)
                    if self.begin(sent):
                        return None
                    self._give_back_late(store)
                elif not self._free_dead(taken):
                    return None
        except Forgotten as forgotten:
            self.is_waiting, self._held_back = True, self._held_back + 1
            return forgotten.pause
        except BaseException:
            self.abandon()
            raise

    def _give_back_late(self, store: Store) -> None:
        store.release(self.key, self.value)
        self._late += 1
        if self._late == MAX_LATE:
            raise LockUnavailable(
                f"{self.address}: {MAX_LATE} leases of {self.length:g} s ended before the cache "
                f"{self.cache!r} answered. Give the lock a longer timeout (lock_timeout of a "
                "task), or find out why the cache is slow: manage.py locks probe."
            )

    def _free_dead(self, entries: dict[str, Entry]) -> bool:
        """Free the other entry if its holder is dead; else note the holder as ``blocker``."""
        key = self._nearest(entries) if len(entries) > 1 else next(iter(entries))
        self.move_to(key)
        entry = entries[key]
        holder = Holder.decode(entry.value)
        how = liveness.proof_of_death(holder)
        if how is None or self._freed == MAX_DEAD:
            self.blocker, self.blocker_remaining = holder, entry.remaining
            return False
        if self.address.free_dead(entry, holder, how):
            self.took_over |= holder.is_run_of(self.holder.task_id)
        self._freed += 1
        return True

    def meet(self, lease: Lease) -> None:
        """Note a conflict with a lease of this process, without a request."""
        self.move_to(lease.key)
        self.blocker = lease.holder
        self.blocker_remaining = max(0.0, lease.deadline - clock.now())

    def _nearest(self, entries: dict[str, Entry]) -> str:
        """Return the slot of the run itself, else of a dead holder, else the first to end."""
        holders = {key: Holder.decode(entry.value) for key, entry in entries.items()}
        self.others = [*holders.values()]

        def rank(key: str) -> tuple[bool, bool, float]:
            lives = liveness.proof_of_death(holders[key]) is None
            return not self.slots.is_own(entries[key]), lives, entries[key].remaining or math.inf

        return min(entries, key=rank)

    def move_to(self, key: str) -> None:
        if key != self.key:
            self.key = key
            lock_key = LockKey(self.address.lock_key.name, key)
            self.address = self.address._replace(lock_key=lock_key)

    def replace(self, value: bytes) -> bool:
        """Replace the bytes ``value`` by those of this lease; return whether the store did so.

        If this raises :class:`LockUnavailable`, it releases what it may have stored.
        """
        sent = clock.now()
        try:
            store = get_store(self.cache)
            if not store.replace(self.key, value, self.value, self.length):
                return False
            if self.begin(sent):
                return True
            store.release(self.key, self.value)
            return False
        except BaseException:
            self.abandon()
            raise

    def begin(self, sent: float) -> bool:
        """Trust and renew the entry, which a request at the time ``sent`` has taken.

        Return whether the lease still lasts. The reply can arrive long after the server granted the
        lease, so the deadline is counted from before the request:

          here:    sent --------------------------- reply (late) ---- sent + length: no trust
          server:        granted ------------------------------------------- ends: free
        """
        deadline = sent + self.length - margin(self.length)
        if clock.now() >= deadline:
            return False
        self.renewed_at = self.taken_at = sent
        self.deadline = deadline
        self.held = True
        if self.holder.pid:
            renewers[self.cache].keep(self)
        return True

    def abandon(self, kept: Kept | None = None) -> None:
        """Release the entry in the background, in each slot where the request may have stored it.

        The server may have handled the request despite the error, or a signal such as a soft time
        limit came between the reply and the next line here:

          here:    add ->                 SIGUSR1 (otherwise the entry would stay)
          server:         added -> reply
        """
        self.held = self.is_waiting = False
        renewers[self.cache].drop(self)
        keys = (self.key,) if self.taken_at else self.slots.keys[: self.slots.allowed]
        for key in keys:
            renewers[self.cache].owe(key, self.value, self.length, kept)

    # Releasing

    def hand_back(self, value: bytes, length: float) -> bool:
        """Replace this lease's bytes by ``value`` for ``length`` seconds; return whether it did.

        If this raises :class:`LockUnavailable`, the entry is deleted in the background.
        """
        try:
            renewers[self.cache].drop(self)
            self.held = False
            return get_store(self.cache).replace(self.key, self.value, value, length)
        except BaseException:
            self.abandon()
            raise

    def release(self, result: str) -> bool:
        """Release the entry; return whether this lease still had it.

        ``result`` is the end of the body; one that ``"returned"`` keeps the entry for the rest of
        ``at_least``. If this raises :class:`LockUnavailable`, the release is tried again in the
        background until the lease has ended.
        """
        if self.is_inherited():
            self.held = False
            return False
        kept = self._kept(result) if self.at_least else None
        try:
            renewers[self.cache].drop(self)
            self.held, sent = False, clock.now()
            outcome = Owed(self.key, self.value, sent, kept).release(get_store(self.cache))
            if outcome is Outcome.SENT_TWICE:
                outcome = Outcome.OK if sent < self.deadline else Outcome.GONE
            if outcome is not Outcome.OK or self._lost:
                self.kept = False
                self.lose()
            elif self.kept:
                self.reason = f"{KEPT} {self.at_least:g} s from its start"
        except BaseException as error:
            self.abandon(kept)
            self.tell_released(result, f"not released at once: {type(error).__name__}: {error}")
            raise
        self.tell_released(result, self.reason)
        return outcome is Outcome.OK

    # A run that returned keeps its lock
    #
    # The run's bytes are replaced by bytes without a process, so that the holder never counts as
    # dead. They have the run's token, so that the history counts conflicts against that run. If the
    # reply is lost, the replacement is made again, and the end stays the same:
    #
    #   run:    returns   replace -> (no reply)            replace -> is there already: OK
    #   store:                       replaced, until X                until X

    def _kept(self, result: str) -> Kept | None:
        """Return what replaces this entry; None to delete it."""
        until = self.taken_at + self.at_least
        if result != "returned" or self._lost:
            return None
        self.kept = clock.now() < min(until, self.deadline)
        if not self.kept:
            return None
        return Kept(self.holder.without_process(self.at_least, kept=True).encode(), until)

    def tell_released(self, result: str = "", reason: str = "") -> None:
        """Report that this lease has ended, with the result of its body."""
        self.address.tell(
            "released",
            self.holder,
            outcome="lost" if self._lost else "released",
            result=result,
            reason=reason,
            longest_renewal_gap=self.longest_gap or None,
            retaken=self.retaken,
            held_for=clock.now() - self.taken_at,
        )

    def give_back(self, result: str) -> None:
        """Release at the end of a body; log that the cache cannot be asked."""
        try:
            self.release(result)
        except LockUnavailable:
            logger.exception("%s could not be released; trying again.", self.address)
        except BaseException:
            if self.held:  # a signal came before the release began
                self.release(result)
            raise

    # Holding

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
            entry, was_missing = self.address.read(), self._is_missing
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
            raise LockError(f"{self.address}: only the parent process, its holder, can extend it.")
        with self.renewing:
            if self.has_ended():
                return
            store, sent = get_store(self.cache), clock.now()
            try:
                if self.renews:
                    outcome = store.renew(self.key, self.value, length)
                else:  # do not set a missing entry again
                    outcome = store.change(self.key, self.value, self.value, length)
            except BaseException:
                if self.held and length < self.length:
                    # The server may have handled the request: trust the shorter lease.
                    self.deadline = min(self.deadline, sent + length - margin(length))
                    self.length = length
                    renewers[self.cache].keep(self)
                raise
            self.settle(sent, length, outcome)

    def begin_renewal(self) -> bool:
        """Return whether the renewal thread may renew the lease now, and has its lock."""
        return self.held and self.renewing.acquire(blocking=False)

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
            renewers[self.cache].owe(self.key, self.value, length)
            outcome = Outcome.GONE
        if not self.held:
            return
        self.longest_gap = max(self.longest_gap, sent - self.renewed_at)
        self.renewed_at = sent
        if self._lost or outcome in {Outcome.GONE, Outcome.TAKEN}:
            self.lose()
            return
        if outcome is Outcome.RETAKEN:
            self._tell_retaken()
        if length < self.length:
            self.length = length
            renewers[self.cache].keep(self)
        self.length = length
        self.deadline = sent + length - margin(length)

    def fencing_token(self) -> int:
        if self.holder.slots > 1:
            raise TypeError(
                f"{self.address} has {self.holder.slots} slots, so several runs hold it at once, "
                "and a fencing token cannot order their writes. Use a lock with one slot."
            )
        # Not during a renewal, which may take a forgotten entry again. A token that is drawn before
        # this process knows about that is greater than the token of the run in between:
        #
        #   renewal:    (entry gone)                      taken again ................. retaken = 1
        #   body:                                                       draws 9, writes stale data
        #   other run:               draws 8, writes, ends
        with self.renewing:
            trusted = not (self.lost or self.retaken)
            if trusted and self.fence is None:
                self.fence = get_store(self.cache).fence(self.key, self.value)
        if trusted and self.fence is not None:
            return self.fence
        if trusted and not self.is_inherited():
            self.extend(self.length)  # find out what happened to the entry, and report it
        if self.retaken and not self.lost:
            raise LockLost(
                f"The cache lost {self.address} meanwhile, and another run may have held it: there "
                "is no fencing token."
            )
        raise LockLost(f"{self.address} is no longer held by this run: there is no fencing token.")

    def look(self) -> None:
        """Read the entry of a lease that is not renewed, to see whether it is lost."""
        entry = self.address.read()
        if self.held and (entry is None or entry.value != self.value):
            self.lose()

    def _tell_retaken(self) -> None:
        self.retaken += 1
        logger.warning(
            "%s was missing from the cache (evicted, flushed or restarted empty), and was taken "
            "again; another run may have started meanwhile.",
            self.address,
        )
        self.address.tell("retaken", self.holder, retaken=self.retaken)

    def lose(self) -> None:
        """Note for good that the entry is lost: report it once, and stop renewing it."""
        renewers[self.cache].drop(self)
        ended = clock.now() >= self.deadline
        self._lost = True
        if self._reported:
            return
        self._reported = True
        if self.address.silent:
            text = "%s: the cache lost this entry, so duplicates of the running call are possible."
            logger.warning(text, self.address)
            return
        self.reason, blocker = self._why_lost(ended)
        if ended and not self.renews:
            # The user chose a fixed length.
            logger.info("%s expired before its run ended: %s.", self.address, self.reason)
            return
        logger.error("%s was lost while its run continued: %s.", self.address, self.reason)
        self.address.tell("lost", self.holder, reason=self.reason, **blocker_facts(blocker))

    def _why_lost(self, ended: bool) -> tuple[str, Holder | None]:
        """Return the reason for a loss, and the new holder if it can be read."""
        try:
            entry = self.address.read()
            if entry is not None and entry.value != self.value:
                blocker = Holder.decode(entry.value)
                return f"taken by {blocker}", blocker
            if get_store(self.cache).read(marker_key(self.key, self.value)) is not None:
                return "cleared", None
        except LockUnavailable:
            # The loss itself must be reported, even if the store is down again.
            logger.warning("%s is lost, but the reason cannot be read.", self.address)
        if not ended:
            return "gone from the cache (evicted, flushed or restarted empty)", None
        if not self.renews:
            return f"its fixed lease of {self.length:g} s ended first", None
        return f"its lease of {self.length:g} s ended before it could be renewed", None
