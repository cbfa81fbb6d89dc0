"""Let a lock outlive its process: hand it over, and receive it in another process."""

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
from django_singletask.locks.keys import MAX_NAME
from django_singletask.locks.lease import Lease
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.renewal import renewers
from django_singletask.stores.base import MAX_SLOTS, PREFIX, SLOT

logger = logging.getLogger("django_singletask")

IS_KEY = re.compile(rf"{PREFIX}[A-Za-z0-9_.:()=-]{{0,100}}:[0-9a-f]{{32}}({SLOT}[0-9]{{1,3}})?")
IS_TOKEN = re.compile("[0-9a-f]{32}")

# Who has the lock
#
# The entry of a lock that was handed over has no process. So it never counts as dead, it is not
# renewed, and it ends after the seconds passed to hand_over(). Each holder has a separate token,
# and replaces the bytes of the holder before it atomically:
#
#   command:   bytes A -> token H, no process     exits
#   receiver:                                             bytes with H -> its own, renewed
#   twice:                                                         bytes with H? gone: LockLost


class Handle(NamedTuple):
    """The place and the token of a lock that was handed over; ``key`` is the key of its slot."""

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
        return json.dumps(self._asdict(), separators=(",", ":"))


def hand_over(lease: Lease, seconds: float) -> str:
    check_seconds("for_", seconds)
    if lease.lost or lease.holder.pid != this_process().pid:  # in a fork, the parent has it
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
        # The caller does not get the handle, so free the entry even if it was handed over.
        renewers[lease.cache].owe(lease.key, value, seconds)
        lease.tell_released(reason=f"not handed over: {type(error).__name__}: {error}")
        raise
    lease.lose()
    lease.tell_released(reason=lease.reason)
    raise LockLost(f"{lease.address} is no longer held: nothing to hand over.")


def receive(lease: Lease, token: str) -> None:
    address = lease.address
    entry, holder = address.look()
    how = None
    if entry is not None and holder.token != token:
        # A redelivered message finds the bytes of its own first run, which received the lock.
        if holder.is_run_of(lease.holder.task_id):
            how = proof_of_death(holder)
        if how is None:
            raise LockLost(
                f"{address} was already received, or the handle is for an earlier hold: {holder} "
                "has the lock."
            )
    # Also without an entry, because no_locks() stores none.
    if not lease.replace(b"" if entry is None else entry.value):
        raise LockLost(
            f"{address} can no longer be received: the time that hand_over() gave is over, or the "
            "lock was already received, was cleared, or was lost by the cache."
        )
    if how:
        text = "%s was received by %s, but %s: this process receives the lock again."
        logger.warning(text, address, holder, how)
        address.tell("dead", holder, reason=how)
    elif entry is not None:
        reason = f"received by {lease.holder}"
        address.tell("released", holder, outcome="released", reason=reason)
    address.tell("acquired", lease.holder)
