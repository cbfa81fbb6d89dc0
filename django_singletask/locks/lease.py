"""One acquisition of a lock: take the entry, and release it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from django_singletask import clock
from django_singletask.exceptions import LockUnavailable
from django_singletask.holder import Holder
from django_singletask.locks import liveness, renewal
from django_singletask.locks.debts import Kept, release
from django_singletask.locks.holding import Holding, margin
from django_singletask.locks.keys import LockKey
from django_singletask.locks.steps import do
from django_singletask.stores import Entry, ForgetfulStore, Forgotten, Outcome, Store, get_store

__all__ = ["KEPT", "Lease"]

logger = logging.getLogger("django_singletask")

KEPT = "kept for"
"""The history's reason for a run that keeps its lock begins with this."""
MAX_DEAD = 3
"""How many entries of dead holders one take frees."""
MAX_HELD_BACK = 3
"""How often one take waits because the cache has forgotten its locks."""
MAX_LATE = 3
"""How many leases of one take may end before the reply comes."""


class Lease(Holding):
    """One acquisition of the entry at an address, by the process in ``holder``.

    If the lock has several slots, the take moves ``key`` and ``address`` to the slot that it took,
    or after a conflict to the slot of the blocker.
    """

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
        self.watched = isinstance(store, ForgetfulStore)
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

    def meet(self, lease: Holding) -> None:
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
        renewal.keeper().keep(self)
        return True

    def abandon(self, kept: Kept | None = None) -> None:
        """Release the entry in the background, in each slot where the request may have stored it.

        The server may have handled the request despite the error, or a signal such as a soft time
        limit came between the reply and the next line here:

          here:    add ->                 SIGUSR1 (otherwise the entry would stay)
          server:         added -> reply
        """
        self.held = self.is_waiting = False
        renewal.keeper().drop(self)
        keys = (self.key,) if self.taken_at else self.slots.keys[: self.slots.allowed]
        for key in keys:
            renewal.keeper().owe(self.cache, key, self.value, self.length, kept)

    # Releasing

    def hand_back(self, value: bytes, length: float) -> bool:
        """Replace this lease's bytes by ``value`` for ``length`` seconds; return whether it did.

        If this raises :class:`LockUnavailable`, the entry is deleted in the background.
        """
        renewal.keeper().drop(self)
        self.held = False
        try:
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
            renewal.keeper().drop(self)
            self.held = False
            outcome = release(self.cache, self.key, self.value, kept)
        except BaseException as error:
            self.abandon(kept)
            self.tell_released(result, f"not released at once: {type(error).__name__}: {error}")
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
    # The run's bytes are replaced by bytes without a process, so that the holder never counts as
    # dead. They have the run's token, so that the history counts skips against that run. If the
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
            held_for=clock.now() - self.taken_at,
        )

    def give_back(self, result: str) -> None:
        """Release at the end of a body; errors are logged, and do not change the body's result."""
        try:
            self.release(result)
        except Exception:
            if self.held:  # a signal came before the release began
                self.abandon(self._kept(result) if self.at_least else None)
            logger.exception("%s could not be released; trying again.", self.address)
