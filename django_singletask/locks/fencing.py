"""A number that grows with each holder, so that data can refuse an earlier holder's late write."""

from __future__ import annotations

from django_singletask.exceptions import LockLost
from django_singletask.locks import renewal
from django_singletask.locks.lease import Lease
from django_singletask.stores import get_store

__all__ = ["fencing_token"]


def fencing_token(lease: Lease) -> int:
    """Return the fencing token of an acquisition; see :meth:`TaskLock.fencing_token`."""
    if lease.holder.slots > 1:
        raise TypeError(
            f"{lease.address} has {lease.holder.slots} slots: a fencing token refuses the writes "
            "of earlier holders, and here several hold the lock at once. Use a lock of one slot."
        )
    # Not while a renewal is under way. It may have taken a forgotten entry again, and a token that
    # is drawn before this process knows it is greater than that of the run in between:
    #
    #   renewal:    (entry gone)                      taken again ................. retaken = 1
    #   body:                                                       draws 9, writes stale data
    #   other run:               draws 8, writes, ends
    with renewal.keeper().renewing:
        trusted = not (lease.lost or lease.retaken)
        if trusted and lease.fence is None:
            # This raises NotImplementedError on memcached, which forgets counters.
            lease.fence = get_store(lease.cache).fence(lease.key, lease.value)
    if trusted and lease.fence is not None:
        return lease.fence
    if trusted and not lease.is_inherited():
        lease.extend(lease.length)  # this finds out what became of the entry, and reports it
    if lease.retaken and not lease.lost:
        raise LockLost(
            f"The cache forgot {lease.address} meanwhile, and another run may have had it: it has "
            "no fencing token."
        )
    raise LockLost(f"{lease.address} is no longer held by this run, so it has no fencing token.")
