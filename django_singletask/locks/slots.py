"""A lock that several runs may hold at once: each has a slot of it, an entry of its own."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from django_singletask import clock
from django_singletask.holder import Holder
from django_singletask.locks import blocks, liveness, renewal
from django_singletask.locks.address import Address
from django_singletask.locks.debts import Kept
from django_singletask.locks.keys import LockKey
from django_singletask.locks.lease import Adder, Lease
from django_singletask.locks.run import Run
from django_singletask.stores import Entry, Slots, Store
from django_singletask.stores.base import MAX_SLOTS

__all__ = ["SlotLease", "check_slots"]

# Processes that allow different numbers
#
# A deploy that lowers the number from 5 to 2 leaves runs in the slots 3 to 5. Who allows 2 neither
# takes nor counts those slots, so until the old processes are gone there are 5 runs at most, never
# more than the greatest number that a process allows. A redelivery looks at all slots that there
# can be, and finds its own first run in whichever it is.


def check_slots(what: str, slots: Any) -> int:
    """Return a number of slots; raise if it is none. The message begins with ``what``."""
    if type(slots) is int and 1 <= slots <= MAX_SLOTS:
        return slots
    error = ValueError if type(slots) is int else TypeError
    raise error(f"{what} must be a whole number from 1 to {MAX_SLOTS}, not {slots!r}.")


class SlotLease(Lease):
    """One acquisition of one of several slots.

    ``key`` and ``address`` are those of the slot: once the lease has one, all that a lease does is
    about that entry. After a conflict they are those of the blocker's slot.
    """

    def __init__(
        self, slots: int, run: Run, place: blocks.Place, address: Address, holder: Holder, **kw: Any
    ) -> None:
        vars(holder)["slots"] = slots
        super().__init__(address, holder, **kw)
        keys = address.lock_key.slots(MAX_SLOTS if run.redelivered else slots)
        self.slots = Slots(keys, slots, holder.mark())
        self.place = place

    def adder(self, store: Store, *, heeds_epoch: bool) -> Adder:
        """Return what takes a free slot."""
        return partial(self._take_slot, store, heeds_epoch)

    def _take_slot(
        self, store: Store, heeds_epoch: bool, _key: str, value: bytes, length: float
    ) -> Entry | None:
        around = blocks.around(self.cache, self.slots.keys, self.place)
        if around is not None:  # it would wait for itself if the other slots are taken
            self._go_to(around.key)
            return Entry(around.value, max(0.0, around.deadline - clock.now()))
        taken = store.take_slot(self.slots, value, length, heeds_epoch=heeds_epoch)
        if isinstance(taken, str):
            self._go_to(taken)
            return None
        holders = {key: Holder.decode(entry.value) for key, entry in taken.items()}
        self.others = [*holders.values()]
        key = min(holders, key=lambda key: self._rank(taken[key], holders[key]))
        self._go_to(key)
        return taken[key]

    def _rank(self, entry: Entry, holder: Holder) -> tuple[bool, bool, float]:
        """Sort what is in the way: the run's own, the dead, the one that ends soonest, the rest."""
        lives = liveness.proof_of_death(holder) is None
        return not self.slots.is_own(entry), lives, entry.remaining or math.inf

    def _go_to(self, key: str) -> None:
        self.key = key
        self.address = self.address._replace(lock_key=LockKey(self.address.lock_key.name, key))

    def abandon(self, kept: Kept | None = None) -> None:
        """Give the entry back in the background, in whichever slot the request may have put it."""
        super().abandon(kept)
        if not self.taken_at:
            for key in self.slots.keys[: self.slots.allowed]:
                if key != self.key:
                    renewal.keeper().owe(self.cache, key, self.value, self.length)
