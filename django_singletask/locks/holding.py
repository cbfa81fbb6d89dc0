"""An entry that this process holds: until when it is trusted, and whether it is lost."""

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
"""Seconds between two requests of a forked child that check its parent's lock."""


def margin(length: float) -> float:
    """Return how many seconds before its end a lease is no longer trusted.

    The speed of two clocks differs by far less than 1%; 2 ms cover the store's rounding.
    """
    return length * 0.01 + 0.002


class Holding:
    """An entry, while the process in ``holder`` has it.

    ``length`` is the lease in seconds. If ``renews`` is true, the thread in
    :mod:`django_singletask.locks.renewal` extends it at each third of that; a holder without a
    process (``pid`` 0) is not renewed. A body that returns keeps the entry until ``at_least``
    seconds after the take. ``held`` is true from the take until the release.

    A lost entry stays lost and is not set again, because another run may have had the lock since.
    An entry that the cache lost is *retaken* if a renewal finds it free before the deadline.
    """

    held = False
    deadline = renewed_at = retry_at = taken_at = 0.0
    longest_gap = 0.0
    watched = False
    """Whether the cache can forget the entry, so that its epoch is watched."""
    retaken = 0
    """How often the cache forgot the entry and it was set again."""
    fence: int | None = None
    """The fencing token, after the first request."""
    reason = ""
    """Why a run lost its lock or took it again, for the history."""
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
        self.slots = run.slots(address.lock_key, holder)

    @property
    def due_at(self) -> float:
        return max(self.renewed_at + self.length / 3, self.retry_at)

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
        """Let the lease end ``length`` seconds from now, unless it is lost; see HeldLock.extend."""
        if self.is_inherited():
            raise LockError(f"{self.address}: only the parent process, its holder, can extend it.")
        keeper = renewal.keeper()
        with keeper.renewing:
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
                    keeper.wake_for(self)
                raise
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
        with renewal.keeper().renewing:
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
        self.reason = "forgotten by the cache and taken again"
        if self.retaken > 1:
            self.reason += f", {self.retaken} times"
        logger.warning(
            "%s was missing from the cache (evicted, flushed or restarted empty), and was taken "
            "again; another run may have started meanwhile.",
            self.address,
        )
        self.address.tell("retaken", self.holder, reason=self.reason)

    def lose(self) -> None:
        """Note for good that the entry is lost: report it once, and stop renewing it."""
        renewal.keeper().drop(self)
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
        except Exception:
            # The loss itself must be reported, even if the store is down again.
            logger.warning("%s is lost, but the reason cannot be read.", self.address)
        if not ended:
            return "gone from the cache (evicted, flushed or restarted empty)", None
        if not self.renews:
            return f"its fixed lease of {self.length:g} s ended first", None
        return f"its lease of {self.length:g} s ended before it could be renewed", None
