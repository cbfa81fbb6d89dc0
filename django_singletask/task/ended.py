"""Note for a moment that a delivery of a message has ended; see task/__init__.py."""

from __future__ import annotations

from contextlib import suppress

from django_singletask.conf import conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.locks.keys import ENDED, LockKey
from django_singletask.stores import get_store
from django_singletask.stores.base import Outcome

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
