"""Let a lock outlive its process: hand it over to nobody, and receive it in another process."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from typing import NamedTuple

from django_singletask.conf import check_seconds
from django_singletask.exceptions import LockLost
from django_singletask.holder import this_process
from django_singletask.locks import renewal
from django_singletask.locks.keys import MAX_NAME
from django_singletask.locks.lease import Lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.stores.base import MAX_SLOTS, PREFIX, SLOT

__all__ = ["Handle", "hand_over", "receive"]

logger = logging.getLogger("django_singletask")

IS_KEY = re.compile(rf"{PREFIX}[A-Za-z0-9_.:()=-]{{0,100}}:[0-9a-f]{{32}}({SLOT}[0-9]{{1,3}})?")
IS_TOKEN = re.compile("[0-9a-f]{32}")

# Who has the lock
#
# The entry of a lock that was handed over names no process, so nobody can prove that its holder is
# dead, and nobody renews it: it ends after the seconds that hand_over() was given. Each holder has
# a token of its own, and replaces the bytes of the holder before it by one comparison in the store:
#
#   command:   bytes A -> token H, no process     exits
#   receiver:                                             bytes with H -> its own, renewed
#   twice:                                                         bytes with H? gone: LockLost


class Handle(NamedTuple):
    """A lock that was handed over: where it is, and the token that its receiver finds there.

    ``key`` is that of the slot if the lock has several ``slots``.
    """

    name: str
    key: str
    cache: str
    token: str
    slots: int = 1

    @classmethod
    def decode(cls, text: str) -> Handle:
        """Read what :meth:`encode` wrote; raises ``ValueError`` for anything else."""
        try:
            handle = cls(**json.loads(text))
            if (
                isinstance(handle.cache, str)
                and isinstance(handle.name, str)
                and len(handle.name) <= MAX_NAME
                and IS_KEY.fullmatch(handle.key)
                and IS_TOKEN.fullmatch(handle.token)
                and handle.slots in range(1, MAX_SLOTS + 1)
            ):
                return handle
        except (TypeError, ValueError, RecursionError):
            pass
        raise ValueError(f"handle must be what hand_over() returned, not {repr(text)[:200]}.")

    def encode(self) -> str:
        """Return the handle as a string, which any serializer takes."""
        return json.dumps(self._asdict(), separators=(",", ":"))


def hand_over(lease: Lease, seconds: float) -> str:
    """Leave the entry to whoever receives it in time; see :meth:`TaskLock.hand_over`."""
    check_seconds("for_", seconds)
    if lease.lost or lease.holder.pid != this_process().pid:  # in a fork, it is the parent's
        raise LockLost(f"{lease.address} is not held by this process: nothing to hand over.")
    token = os.urandom(16).hex()
    holder = lease.holder.without_process(seconds, token=token, since=time.time())
    value = holder.encode()
    try:
        if lease.hand_back(value, seconds):
            lease.tell_released(reason=f"handed over for {seconds:g} s")
            lease.address.tell("acquired", holder)
            key, slots = lease.address.lock_key, holder.slots
            return Handle(*key, lease.cache, token, slots).encode()
    except BaseException as error:
        # Whether or not the store has handed it over, nobody got the handle.
        renewal.keeper().owe(lease.cache, lease.key, value, seconds)
        lease.tell_released(reason=f"not handed over: {type(error).__name__}: {error}")
        raise
    lease.lose()
    lease.tell_released(reason=lease.reason)
    raise LockLost(f"{lease.address} is no longer held: nothing to hand over.")


def receive(lease: Lease, token: str) -> None:
    """Take the entry that was handed over with this token; see :meth:`TaskLock.receive`."""
    address = lease.address
    entry, holder = address.look()
    how = None
    if entry is not None and holder.token != token:
        # A message that is delivered again finds the bytes of its own first run, which received.
        if holder.is_run_of(lease.holder.task_id):
            how = proof_of_death(holder)
        if how is None:
            raise LockLost(f"{address} was received already, or is another's: {holder} has it.")
    # Also without an entry: no_locks() grants what it does not store.
    if not lease.replace(b"" if entry is None else entry.value):
        raise LockLost(
            f"{address} waits for no receiver any more: the time of its hand_over() is over, it "
            "was received or cleared, or the cache forgot it."
        )
    if how:
        logger.warning("%s was received by %s: received again, since %s.", address, holder, how)
        address.tell("expired", holder, outcome="dead", reason=how)
    elif entry is not None:
        reason = f"received by {lease.holder}"
        address.tell("released", holder, outcome="released", reason=reason)
    address.tell("acquired", lease.holder)
