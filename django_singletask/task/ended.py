"""Note for a moment that a delivery of a message has ended, for its other deliveries."""

from __future__ import annotations

from contextlib import suppress

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.locks.keys import ENDED, LockKey
from django_singletask.stores import get_store
from django_singletask.stores.base import Outcome

# The result of a run is stored after its lock is free. So a delivery that has the lock, and finds
# no result, cannot know whether another delivery of its message has just ended. It hops for about a
# second, and looks again. Of several deliveries that hop, one runs, and another one can take the
# lock before the result of the first is stored. So the first one notes its end:
#
#   B: hops, takes the lock, runs      notes its end, releases             result SUCCESS
#   C: hops                                                     takes: the note -> hops -> SUCCESS
#
# Only a message that may be delivered several times has notes, so the others pay nothing.
#
# A dead process stores nothing any more. The main process notes the death before it frees the lock,
# and one delivery uses that note up, and does not hop:
#
#   child:    body    SIGKILL
#   main:                    notes the death, frees the lock, returns the message to the broker
#   message:                                                    takes: the note -> runs at once
#
# The death may be noted while another delivery runs: it has met the dead process itself and freed
# the lock, or the process died before it had the lock. Then the end of the body replaces that note.

SECONDS = 5.0
"""How long a note lasts. Meanwhile the result of a run is stored, and the message of a killed run
comes again."""
DONE, DIED = b"done", b"died"


def note(lock: LockKey, task_id: str, end: bytes) -> None:
    """Note the end of a body (``DONE``) or of its process (``DIED``), while it has its lock."""
    store = get_store(conf.cache)
    key = lock.beside(ENDED, task_id).key
    with suppress(LockUnavailable):  # the release that follows reports it
        if store.add(key, end, SECONDS):
            store.replace(key, DIED, end, SECONDS)


def may_store(lock: LockKey, task_id: str, *, has_hopped: bool) -> bool:
    """Return whether an earlier delivery may have ended whose result is not stored yet.

    Only the delivery that has the lock may ask.
    """
    with suppress(LockUnavailable):
        outcome = get_store(conf.cache).release(lock.beside(ENDED, task_id).key, DIED)
        if outcome is Outcome.GONE:
            return not has_hopped
        return outcome is not Outcome.OK
    return True
