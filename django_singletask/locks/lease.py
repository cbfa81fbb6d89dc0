"""One acquisition of a lock: take the entry, and give it back."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from typing import Any

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.holder import Holder
from django_singletask.locks import liveness, renewal
from django_singletask.locks.address import Address
from django_singletask.locks.debts import Kept, release
from django_singletask.locks.holding import Holding, margin
from django_singletask.locks.keys import LockKey
from django_singletask.locks.run import NO_RUN, Run
from django_singletask.locks.steps import do
from django_singletask.stores import (
    Entry,
    ForgetfulStore,
    Forgotten,
    Outcome,
    Slots,
    Store,
    get_store,
)
from django_singletask.stores.base import MAX_SLOTS

__all__ = ["KEPT", "Lease"]

logger = logging.getLogger("django_singletask")

KEPT = "kept for"
"""Beginning of the reason in the history of a run that keeps its lock."""
MAX_DEAD = 3
"""Entries of dead holders that one take frees."""
MAX_HELD_BACK = 3
"""Times that one take waits since the cache has forgotten its locks."""
MAX_LATE = 3
"""Leases that one take gives back because they ended before the reply came."""

# Processes that allow different numbers of slots
#
# A deploy that lowers the number from 5 to 2 leaves runs in the slots 3 to 5. Who allows 2 neither
# takes nor counts those slots, so until the old processes are gone there are 5 runs at most, never
# more than the greatest number that a process allows. A redelivery looks at all slots that there
# can be, and finds its own first run in whichever it is, also if by now there is one slot. With
# several slots a retry does so too: the try before it may still have to give back its slot.


class Lease(Holding):
    """One acquisition of the entry at an address, by the process in ``holder``.

    Use one lease for one acquisition. If the lock has several slots, the take moves ``key`` and
    ``address`` to the slot that it took, or after a conflict to that of the blocker.
    """

    took_over = False
    """Whether the take has freed the entry of a dead run of the same task id."""
    kept = False
    """Whether the release has left the entry there, or will, as ``at_least`` says."""
    others: Sequence[Holder] = ()
    """All that were in the way, if the lock has several slots."""

    def __init__(
        self, address: Address, holder: Holder, *, run: Run = NO_RUN, **options: Any
    ) -> None:
        """``run`` is that of a delivery, which takes nothing beside an earlier run of its own."""
        super().__init__(address, holder, **options)
        if holder.slots == 1 and not run.redelivered:
            self.slots = Slots((self.key,))
        else:
            looks_at = MAX_SLOTS if run.redelivered or run.retries else holder.slots
            # A body may take slots in several threads and asyncio tasks: those have no mark.
            mark = holder.mark() if run.task_id else b""
            self.slots = Slots(address.lock_key.slots(looks_at), holder.slots, mark)

    # Taking

    def take(self) -> tuple[Holder | None, float | None]:
        """Do the :meth:`steps` of a take here, and return their result."""
        return do(self.steps())

    def steps(self) -> Generator[float, None, tuple[Holder | None, float | None]]:
        """Add the entry; return None if it was added, else who is in the way, and for how long.

        The seconds left are None where the store cannot tell. Entries of holders that are proven
        dead are freed first. Raises :class:`LockUnavailable`, and then gives back what the
        request may have taken.
        """
        store = get_store(self.cache)
        self.watched = isinstance(store, ForgetfulStore)
        # The entry of a queued call protects nothing that runs: it need not wait for holders.
        heeds_epoch = self.holder.pid > 0
        freed = late = held_back = 0
        try:
            while True:
                sent = clock.now()
                try:
                    entry = self._ask(store, heeds_epoch)
                except Forgotten as forgotten:
                    yield forgotten.pause
                    # The next step may be done in another thread, which has stores of its own.
                    store = get_store(self.cache)
                    held_back += 1
                    if held_back == MAX_HELD_BACK:
                        # A cache that is emptied all the time protects nothing.
                        heeds_epoch = False
                    continue
                if entry is None:
                    if self.begin(sent):
                        return None, None
                    store.release(self.key, self.value)
                    late += 1
                    if late == MAX_LATE:
                        raise LockUnavailable(self._says_late())
                    continue
                holder = Holder.decode(entry.value)
                how = liveness.proof_of_death(holder)
                if how is None or freed == MAX_DEAD:
                    return holder, entry.remaining
                if self.address.free_dead(entry, holder, how):
                    self.took_over |= holder.is_run_of(self.holder.task_id)
                freed += 1
        except BaseException:
            self.abandon()
            raise

    def _ask(self, store: Store, heeds_epoch: bool) -> Entry | None:
        """Take a slot and move there; return None, or the entry in the way."""
        taken = store.take(self.slots, self.value, self.length, heeds_epoch=heeds_epoch)
        if isinstance(taken, str):
            self.move_to(taken)
            return None
        key = self._nearest(taken) if len(taken) > 1 else next(iter(taken))
        self.move_to(key)
        return taken[key]

    def _nearest(self, entries: dict[str, Entry]) -> str:
        """Return the slot that is the run's own, else of a dead holder, else the first to end."""
        holders = {key: Holder.decode(entry.value) for key, entry in entries.items()}
        self.others = [*holders.values()]

        def rank(key: str) -> tuple[bool, bool, float]:
            lives = liveness.proof_of_death(holders[key]) is None
            return not self.slots.is_own(entries[key]), lives, entries[key].remaining or math.inf

        return min(entries, key=rank)

    def move_to(self, key: str) -> None:
        """Be about the entry of another slot."""
        if key != self.key:
            self.key = key
            lock_key = LockKey(self.address.lock_key.name, key)
            self.address = self.address._replace(lock_key=lock_key)

    def _says_late(self) -> str:
        return (
            f"{self.address}: {MAX_LATE} leases of {self.length:g} s ended before the cache "
            f"{self.cache!r} had answered. Give the lock a longer timeout (lock_timeout of a "
            "task), or see why the cache is slow: manage.py locks probe."
        )

    def replace(self, value: bytes) -> bool:
        """Put the bytes of this lease in the place of ``value``; say whether the store did so.

        Raises :class:`LockUnavailable`, and then gives back what it may have put there.
        """
        sent = clock.now()
        try:
            store = get_store(self.cache)
            self.watched = isinstance(store, ForgetfulStore)
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
        """Trust the entry, which a request of the time ``sent`` has taken, and renew it.

        Say whether the lease still lasts. The server grants it when it handles the request, which
        may be long before the reply arrives here. So the deadline is counted from before the
        request:

          here:    sent --------------------------- reply (late) ---- sent + length: no trust
          server:        granted ------------------------------------------- ends: free
        """
        deadline = sent + self.length - margin(self.length)
        if clock.now() >= deadline:
            return False
        self.renewed_at = self.taken_at = sent
        self.deadline = deadline
        self.held = True
        renewal.keeper().keep(self)
        return True

    def abandon(self, kept: Kept | None = None) -> None:
        """Give the entry back in the background, in whichever slot the request may have put it.

        The request may have been carried out although an error came back, or a signal such as a
        soft time limit struck between the reply and the next line here:

          here:    add ->                 SIGUSR1 (nobody would renew or free the entry)
          server:         added -> reply
        """
        self.held = False
        renewal.keeper().drop(self)
        keys = (self.key,) if self.taken_at else self.slots.keys[: self.slots.allowed]
        for key in keys:
            renewal.keeper().owe(self.cache, key, self.value, self.length, kept)

    # Giving back

    def hand_back(self, value: bytes, length: float) -> bool:
        """Put ``value`` in the place of this lease's bytes, for ``length`` seconds; say if it is.

        Raises :class:`LockUnavailable`; the entry is then deleted in the background.
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

        ``result`` says how the body ended; one that returned keeps the entry for the rest of
        ``at_least``. Raises :class:`LockUnavailable`; the release is then tried again in the
        background until the lease has ended.
        """
        if self.is_inherited():
            self.held = False
            return False
        kept = self._kept(result)
        try:
            renewal.keeper().drop(self)
            self.held = False
            outcome = release(self.cache, self.key, self.value, kept)
        except BaseException as error:
            # The cache is down, or a signal struck.
            self.abandon(kept)
            self.tell_released(result, f"not given back at once: {type(error).__name__}: {error}")
            raise
        if outcome is not Outcome.OK or self._lost:
            self.kept = False
            self.lose()
        elif self.kept:
            kept_for = f"{KEPT} {self.at_least:g} s from its start"
            self.reason = f"{kept_for}; {self.reason}" if self.reason else kept_for
        self.tell_released(result, self.reason)
        return outcome is Outcome.OK

    # A run that returned keeps its lock
    #
    # The bytes of the run are replaced by ones without a process, so that nobody can prove the
    # holder dead, with the run's token, so that the history counts the skips against that run. If
    # the reply is lost, the same replacement is owed; made twice, it leaves the same end:
    #
    #   run:    returns   replace -> (no reply)            replace -> is there already: OK
    #   store:                       replaced, until X                until X

    def _kept(self, result: str) -> Kept | None:
        """Return what stays in the place of this entry; None if it is to be deleted."""
        until = self.taken_at + self.at_least
        if not self.at_least or result != "returned" or self._lost:
            return None
        self.kept = clock.now() < min(until, self.deadline)
        return Kept(self.holder.keep(self.at_least).encode(), until) if self.kept else None

    def tell_released(self, result: str = "", reason: str = "") -> None:
        """Report that this lease has ended: how its body did, or why there is no such result."""
        self.address.tell(
            "released",
            self.holder,
            outcome="lost" if self._lost else "released",
            result=result,
            reason=reason,
            longest_renewal_gap=self.longest_gap or None,
            held_for=clock.now() - self.taken_at,
        )

    def give_back(self, result: str) -> None:
        """Release at the end of a body, whose result or error stands whatever happens here."""
        try:
            self.release(result)
        except Exception:
            if self.held:  # a signal struck before the release could begin
                self.abandon(self._kept(result))
            logger.exception("%s could not be given back; it is tried again.", self.address)
