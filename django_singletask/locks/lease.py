"""One acquisition: its bytes, until when they can be trusted, and whether they are lost."""

from __future__ import annotations

import logging
import threading

from django_singletask import clock
from django_singletask.holder import Holder, this_process
from django_singletask.locks import liveness, renewal
from django_singletask.locks.address import Address, blocker_facts
from django_singletask.stores import Outcome, get_store
from django_singletask.stores.base import marker_key

__all__ = ["Lease"]

logger = logging.getLogger("django_singletask")

MAX_DEAD = 3
"""Entries of dead holders that one take frees."""


def margin(length: float) -> float:
    """Return the seconds by which a lease is trusted for less than its length.

    The clocks of two machines differ by far less than 1%; the 2 ms cover the store's rounding.
    """
    return length * 0.01 + 0.002


class Lease:
    """One acquisition of the entry at an address, by the process in ``holder``.

    ``length`` is in seconds; a lease that ``renews`` is extended at a third of it by the thread in
    :mod:`django_singletask.locks.renewal`. A holder without a process (``pid`` 0) is one that
    nobody renews. ``held`` is true from the take until the release. Use one lease for one
    acquisition.
    """

    held = False
    took_over = False
    deadline = renewed_at = retry_at = 0.0
    longest_gap = 0.0
    thread = 0
    retaken = 0
    """How often the cache forgot the entry, and a renewal took it again."""
    fence: int | None = None
    """The fencing token, once it was fetched."""
    _lost = False

    def __init__(self, address: Address, holder: Holder, *, renews: bool = True) -> None:
        self.address = address
        self.cache = address.cache
        self.key = address.key
        self.holder = holder
        self.token = holder.token
        self.value = holder.encode()
        self.length = holder.timeout
        self.renews = renews and holder.pid > 0

    # Taking

    def take(self) -> tuple[Holder | None, float | None]:
        """Add the entry; return None if it was added, else who is in the way, and for how long.

        The seconds left are None where the store cannot tell. Entries of holders that are proven
        dead are freed first. Raises the errors of the cache's client, and then gives back what the
        request may have taken.
        """
        store = get_store(self.cache)
        try:
            freed = 0
            while True:
                sent = clock.now()
                entry = store.add(self.key, self.value, self.length)
                if entry is None or entry.value == self.value:
                    self.begin(sent)
                    return None, None
                holder = Holder.decode(entry.value)
                how = liveness.proof_of_death(holder)
                if how is None or freed == MAX_DEAD:
                    return holder, entry.remaining
                self.took_over = self.address.free_dead(entry, holder, how)
                freed += 1
        except BaseException:
            self.abandon()
            raise

    def replace(self, value: bytes) -> bool:
        """Put the bytes of this lease in the place of ``value``; say whether the store did so.

        Raises the errors of the cache's client, and then gives back what it may have put there.
        """
        sent = clock.now()
        try:
            if not get_store(self.cache).replace(self.key, value, self.value, self.length):
                return False
            self.begin(sent)
            return True
        except BaseException:
            self.abandon()
            raise

    def begin(self, sent: float) -> None:
        """Trust the entry, which a request of the time ``sent`` has taken, and renew it.

        The server grants the lease when it handles the request, which may be long before the reply
        arrives here. So the deadline is counted from before the request:

          here:    sent --------------------------- reply (late) ---- sent + length: no trust
          server:        granted ------------------------------------------- ends: free
        """
        self.renewed_at = sent
        self.deadline = sent + self.length - margin(self.length)
        self.held = True
        self.thread = threading.get_ident()
        renewal.keeper().keep(self)

    def abandon(self) -> None:
        """Give the entry back in the background, whether or not the request has taken it.

        The request may have been carried out although an error came back, or a signal such as a
        soft time limit struck between the reply and the next line here:

          here:    add ->                 SIGUSR1 (nobody would renew or free the entry)
          server:         added -> reply
        """
        self.held = False
        renewal.keeper().drop(self)
        renewal.keeper().owe(self.cache, self.key, self.value, self.length)

    # Giving back

    def hand_back(self, value: bytes, length: float) -> bool:
        """Put ``value`` in the place of this lease's bytes, for ``length`` seconds; say if it is.

        Raises the errors of the cache's client; the entry is then deleted in the background.
        """
        renewal.keeper().drop(self)
        self.held = False
        try:
            return get_store(self.cache).replace(self.key, self.value, value, length)
        except BaseException:
            self.abandon()
            raise

    def release(self, result: str) -> bool:
        """Give the entry back; say whether it still was this lease's own.

        ``result`` says how the body ended. Raises the errors of the cache's client; the release is
        then tried again in the background until the lease has ended.
        """
        if self.holder.pid not in (0, this_process().pid):
            self.held = False
            return False  # a fork of the holder: the lock is the parent's
        try:
            renewal.keeper().drop(self)
            self.held = False
            outcome = get_store(self.cache).release(self.key, self.value)
        except BaseException as error:
            # The cache is down, or a signal struck.
            self.abandon()
            self.tell_released(result, f"not given back at once: {type(error).__name__}: {error}")
            raise
        if outcome is not Outcome.OK:
            self.lose(outcome)
        self.tell_released(result)
        return outcome is Outcome.OK

    def tell_released(self, result: str = "", reason: str = "") -> None:
        """Report that this lease has ended: how its body did, or why there is no such result."""
        self.address.tell(
            "released",
            self.holder,
            outcome="lost" if self._lost and not reason else "released",
            result=result,
            reason=reason,
            longest_renewal_gap=self.longest_gap or None,
        )

    def give_back(self, result: str) -> None:
        """Release at the end of a body, whose result or error stands whatever happens here."""
        try:
            self.release(result)
        except Exception:
            if self.held:  # a signal struck before the release could begin
                self.abandon()
            logger.exception("%s could not be given back; it is tried again.", self.address)

    # Holding

    @property
    def due_at(self) -> float:
        """When the next renewal is due."""
        return max(self.renewed_at + self.length / 3, self.retry_at)

    @property
    def lost(self) -> bool:
        """Whether the entry can no longer be trusted; costs no request."""
        return self._lost or (self.held and clock.now() >= self.deadline)

    def extend(self, length: float) -> None:
        """Let the lease end ``length`` seconds from now, or learn that it is lost.

        Raises the errors of the cache's client.
        """
        keeper = renewal.keeper()
        with keeper.renewing:
            sent = clock.now()
            try:
                outcome = get_store(self.cache).renew(self.key, self.value, length)
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
        if not self.held:
            # It was released meanwhile. If the release came to the store first, this renewal found
            # no entry and took it again, for nobody:
            #
            #   renewal: request on its way                    -> taken again -> released here
            #   body:                          release -> freed
            if outcome is Outcome.RETAKEN:
                renewal.keeper().owe(self.cache, self.key, self.value, length)
            return
        self.longest_gap = max(self.longest_gap, sent - self.renewed_at)
        self.renewed_at = sent
        if outcome in {Outcome.GONE, Outcome.TAKEN}:
            renewal.keeper().drop(self)
            self.lose(outcome)
            return
        if outcome is Outcome.RETAKEN:
            self.retaken += 1
            logger.warning(
                "%s was gone from the cache (evicted, flushed or restarted empty) and is taken "
                "again; another run may have started meanwhile.",
                self.key,
            )
            if sent >= self.deadline:
                # The lease ended before this renewal: others were free to run, and may have run.
                self.lose(Outcome.GONE)
        self.length = length
        self.deadline = sent + length - margin(length)
        renewal.keeper().wake_for(self)

    def lose(self, outcome: Outcome) -> None:
        """Note once that the entry is gone, or somebody else's, and tell why."""
        if self._lost:
            return
        self._lost = True
        if self.address.silent:
            logger.warning("%s: the entry of a running call is gone from the cache.", self.address)
            return
        reason, blocker = self._why_lost(outcome)
        logger.error("%s was lost by the run that held it: %s.", self.address, reason)
        self.address.tell("lost", self.holder, reason=reason, **blocker_facts(blocker))

    def _why_lost(self, outcome: Outcome) -> tuple[str, Holder | None]:
        """Return the reason of a loss, and who has the lock now if that can be read."""
        try:
            entry = self.address.read() if outcome is Outcome.TAKEN else None
            if entry is not None:
                blocker = Holder.decode(entry.value)
                return f"taken by {blocker}", blocker
            if get_store(self.cache).read(marker_key(self.key, self.value)) is not None:
                return "cleared", None
        except Exception:
            # The store is down again. The loss itself is known, and must be reported.
            logger.warning("%s: the reason of its loss cannot be read.", self.address)
        return "gone from the cache (evicted, flushed or expired)", None
