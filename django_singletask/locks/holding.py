"""An entry that this process holds: until when it can be trusted, and whether it is lost."""

from __future__ import annotations

import logging
import os

from django_singletask import clock
from django_singletask.exceptions import LockError, LockLost
from django_singletask.holder import Holder
from django_singletask.locks import renewal
from django_singletask.locks.address import Address, blocker_facts
from django_singletask.locks.run import NO_RUN, Run
from django_singletask.stores import Outcome, get_store
from django_singletask.stores.base import marker_key

__all__ = ["Holding", "margin"]

logger = logging.getLogger("django_singletask")

CHILD_ASKS = 1.0
"""Seconds between two questions of a forked child whether its parent still has the lock."""


def margin(length: float) -> float:
    """Return the seconds by which a lease is trusted for less than its length.

    The clocks of two machines differ by far less than 1%; the 2 ms cover the store's rounding.
    """
    return length * 0.01 + 0.002


class Holding:
    """The entry at an address for as long as the process in ``holder`` has it.

    ``length`` is in seconds; an entry that ``renews`` is extended at a third of it by the thread in
    :mod:`django_singletask.locks.renewal`. A holder without a process (``pid`` 0) is one that
    nobody renews. A body that returns keeps the entry until ``at_least`` seconds after the take.
    ``held`` is true from the take until the release.

    What is lost stays lost, and the entry is never set again: somebody else may have had the lock
    since. An entry that the cache forgot, and that a renewal finds free before the deadline, is
    *retaken*.
    """

    held = False
    deadline = renewed_at = retry_at = taken_at = 0.0
    longest_gap = 0.0
    watched = False
    """Whether the cache can forget the entry, so that it is asked for its epoch meanwhile."""
    retaken = 0
    """How often the cache forgot the entry and it was set again."""
    fence: int | None = None
    """The fencing token, once it was fetched."""
    reason = ""
    """What the history says of a run that lost its lock or took it again."""
    _lost = _reported = _is_missing = False
    _child_asked_at = 0.0

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
        """``run`` is that of a delivery; ``place`` the thread and asyncio task that takes it."""
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
        self.slots = run.slots(address.lock_key, holder)

    @property
    def due_at(self) -> float:
        return max(self.renewed_at + self.length / 3, self.retry_at)

    def is_inherited(self) -> bool:
        """Say whether this process is a fork of the holder: the lock is the parent's."""
        return self.holder.pid not in (0, os.getpid())

    @property
    def lost(self) -> bool:
        """Whether the entry can no longer be trusted, for good; costs no request.

        Only a forked child of the holder asks the cache, at most once a second, because the parent
        goes on renewing. That raises :class:`LockUnavailable`.
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
            # The parent may be about to take a forgotten entry again.
            self._is_missing = entry is None
            self._lost = was_missing if entry is None else entry.value != self.value

    def has_ended(self) -> bool:
        """Say whether the lease is lost; if it is, end it as :meth:`lose` does."""
        if self.lost:
            self.lose()
        return self.lost

    def extend(self, length: float) -> None:
        """Let the lease end ``length`` seconds from now, unless it is lost.

        A lease that renews has that length from now on. Raises :class:`LockUnavailable`,
        and :class:`LockError` in a forked child of the holder.
        """
        if self.is_inherited():
            raise LockError(f"{self.address} is held by the parent process, which can extend it.")
        keeper = renewal.keeper()
        with keeper.renewing:
            if self.has_ended():
                return
            store, sent = get_store(self.cache), clock.now()
            try:
                if self.renews:
                    outcome = store.renew(self.key, self.value, length)
                else:  # an entry that is gone is not set again
                    outcome = store.change(self.key, self.value, self.value, length)
            except BaseException:
                if self.held and length < self.length:
                    # The request may have been carried out: trust the shorter of the two leases.
                    self.deadline = min(self.deadline, sent + length - margin(length))
                    self.length = length
                    keeper.wake_for(self)
                raise
            self.settle(sent, length, outcome)

    def settle(self, sent: float, length: float, outcome: Outcome) -> None:
        """Note what a renewal found that was sent at ``sent`` for ``length`` seconds."""
        if outcome is Outcome.RETAKEN and not (self.held and clock.now() < self.deadline):
            # The renewal set an entry that nobody may have now. Either the lock was released:
            #
            #   renewal: request on its way                    -> taken again -> given back
            #   body:                          release -> freed
            #
            # Or the lease had ended, so that others were free to run, and may have run:
            #
            #   renewal: request on its way                                -> taken again -> ...
            #   others:            the lease ends   take   run   release
            renewal.keeper().owe(self.cache, self.key, self.value, length)
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
        self.length = length
        self.deadline = sent + length - margin(length)
        renewal.keeper().wake_for(self)

    def fencing_token(self) -> int:
        """Return the fencing token of this acquisition; see :meth:`TaskLock.fencing_token`."""
        if self.holder.slots > 1:
            raise TypeError(
                f"{self.address} has {self.holder.slots} slots: a fencing token refuses the "
                "writes of earlier holders, and here several hold the lock at once. Use a lock of "
                "one slot."
            )
        # Not while a renewal is under way. It may have taken a forgotten entry again, and a token
        # that is drawn before this process knows it is greater than that of the run in between:
        #
        #   renewal:    (entry gone)                      taken again ................. retaken = 1
        #   body:                                                       draws 9, writes stale data
        #   other run:               draws 8, writes, ends
        with renewal.keeper().renewing:
            trusted = not (self.lost or self.retaken)
            if trusted and self.fence is None:
                # This raises NotImplementedError on memcached, which forgets counters.
                self.fence = get_store(self.cache).fence(self.key, self.value)
        if trusted and self.fence is not None:
            return self.fence
        if trusted and not self.is_inherited():
            self.extend(self.length)  # this finds out what became of the entry, and reports it
        if self.retaken and not self.lost:
            raise LockLost(
                f"The cache forgot {self.address} meanwhile, and another run may have had it: it "
                "has no fencing token."
            )
        raise LockLost(f"{self.address} is no longer held by this run, so it has no fencing token.")

    def look(self) -> None:
        """Read the entry of a lease that is not renewed, and find out whether it is lost."""
        entry = self.address.read()
        if self.held and (entry is None or entry.value != self.value):
            self.lose()

    def _tell_retaken(self) -> None:
        self.retaken += 1
        self.reason = "forgotten by the cache and taken again"
        if self.retaken > 1:
            self.reason += f", {self.retaken} times"
        logger.warning(
            "%s was gone from the cache (evicted, flushed or restarted empty) and is taken again; "
            "another run may have started meanwhile.",
            self.address,
        )
        self.address.tell("retaken", self.holder, reason=self.reason)

    def lose(self) -> None:
        """Note for good that the entry is gone or another's: report it once, renew it no more."""
        renewal.keeper().drop(self)
        ended = clock.now() >= self.deadline
        self._lost = True
        if self._reported:
            return
        self._reported = True
        if self.address.silent:
            logger.warning("%s: the entry of a running call is gone from the cache.", self.address)
            return
        self.reason, blocker = self._why_lost(ended)
        if ended and not self.renews:
            # Its length was chosen, and the body took longer.
            logger.info("%s ended under the run that held it: %s.", self.address, self.reason)
            return
        logger.error("%s was lost by the run that held it: %s.", self.address, self.reason)
        self.address.tell("lost", self.holder, reason=self.reason, **blocker_facts(blocker))

    def _why_lost(self, ended: bool) -> tuple[str, Holder | None]:
        """Return the reason of a loss, and who has the lock now if that can be read."""
        try:
            entry = self.address.read()
            if entry is not None and entry.value != self.value:
                blocker = Holder.decode(entry.value)
                return f"taken by {blocker}", blocker
            if get_store(self.cache).read(marker_key(self.key, self.value)) is not None:
                return "cleared", None
        except Exception:
            # The store is down again. The loss itself is known, and must be reported.
            logger.warning("%s: the reason of its loss cannot be read.", self.address)
        if not ended:
            return "gone from the cache (evicted, flushed or restarted empty)", None
        if not self.renews:
            return f"its fixed lease of {self.length:g} s ended first", None
        return f"its lease of {self.length:g} s ended before it could be renewed", None
