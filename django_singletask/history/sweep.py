"""Close the rows of runs that nobody can close any more, and delete old rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from django.conf import settings
from django.db import connections, router
from django.db.migrations.recorder import MigrationRecorder

from django_singletask import clock
from django_singletask.conf import conf
from django_singletask.forks import undivided
from django_singletask.history.queries import SWEEPER, timestamp
from django_singletask.locks.address import Address
from django_singletask.locks.keys import MAX_NAME, LockKey, name_key
from django_singletask.locks.liveness import proof_of_death
from django_singletask.models import TaskLockEvent

__all__ = ["Sweeper", "leader_key", "prune"]

logger = logging.getLogger("django_singletask")

SWEPT = 50_000
"""Rows that one sweep deletes at most: the next sweep is soon."""


def leader_key() -> LockKey:
    """Return the lock of the one worker that sweeps this history; it asks the history for its age.

    Each history has one: if two projects shared a leader because they share a cache, one of the
    two histories would be swept by nobody. Two databases can have the same address, as SQLite
    files on two hosts have, so the time of the migration tells them apart. Without a history, the
    leader only cleans the lock table.
    """
    if conf.history == "off":
        return name_key(SWEEPER)
    connection = connections[router.db_for_write(TaskLockEvent)]
    migrations = MigrationRecorder(connection).applied_migrations()
    migration: Any = migrations.get(("django_singletask", "0001_initial"))
    address = [str(connection.settings_dict[part]) for part in ("HOST", "PORT", "NAME")]
    database = [str(migration and migration.applied), *address]
    return LockKey(SWEEPER, name_key(f"{SWEEPER} of {database}"[:MAX_NAME]).key)


class Sweeper:
    """Close the open rows of locks that nobody holds any more.

    Sweep again and again with one sweeper: a row is closed when its token was not in the store at
    two looks that are at least its lease apart. After a single look the row could be closed too
    early, because a renewal may find the entry gone and take the lock again, and because the end
    of a run may be on its way to the history.
    """

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self.now = now
        self.missed: dict[int, float] = {}  # when the token of an open row was first not found

    def sweep(self) -> None:
        """Close rows, and prune the history."""
        still_open, down = set(), set()
        for row in TaskLockEvent.objects.primary().open().iterator():
            still_open.add(row.pk)
            over = timestamp(row.at) + row.timeout <= time.time()
            if over and row.cache in settings.CACHES and row.cache not in down:
                try:
                    self.look_after(row)
                except Exception as error:
                    # A cache that is down, or can no longer hold locks, must not keep the rows of
                    # other caches from being swept.
                    down.add(row.cache)
                    logger.warning("The rows of the cache %r are not swept: %s", row.cache, error)
        for pk in self.missed.keys() - still_open:
            del self.missed[pk]
        sum(prune(limit=SWEPT))

    def look_after(self, row: TaskLockEvent) -> None:
        """Look at an open row whose lease is over, unless the lease was renewed."""
        address = Address(row.cache, LockKey(row.name, row.key))
        entry, holder = address.look()
        if entry and holder.token == row.token:
            self.missed.pop(row.pk, None)
            if holder.kept:  # the process was killed before it could write that it had returned
                address.tell("released", row.holder(), outcome="released", result="returned")
            elif how := proof_of_death(holder):
                address.free_dead(entry, holder, how)
        elif self.now() - self.missed.setdefault(row.pk, self.now()) >= row.timeout:
            del self.missed[row.pk]
            text = "%s: the lease of a run on %s:%s ended unreleased."
            logger.warning(text, row.key, row.host, row.pid)
            address.tell("expired", row.holder(), reason="its lease ended unreleased")


def prune(
    batch: int = 1000, *, older_than: float | None = None, limit: int | None = None
) -> Iterator[int]:
    """Delete what is older than ``older_than`` seconds (default ``SINGLETASK_HISTORY_DAYS``).

    In small batches, each a transaction of its own; at most ``limit`` rows. Yields the number of
    rows of each batch, and deletes the next one when it is asked to go on.
    """
    rows = TaskLockEvent.objects.primary()
    old, deleted = rows.older_than(older_than).order_by("at"), 0
    rest = old
    while batch := batch if limit is None else min(batch, limit - deleted):
        oldest = list(rest.values_list("pk", "at", "token")[:batch])
        if not oldest:
            break
        # Skips are deleted before the runs that they met: without those, they would look like
        # calls that came to nothing, between two batches or after the last batch of a limit.
        tokens = [token for _pk, _at, token in oldest if token]
        first = [row.pk for row in rows.only("pk").blocked_by(tokens)][:batch]
        with undivided(connections[rows.db]):
            gone = rows.filter(pk__in=first or [pk for pk, _at, _token in oldest]).delete()[0]
        deleted += gone
        yield gone
        # PostgreSQL's index still has the deleted rows: do not pass them again each time.
        rest = old.filter(at__gte=oldest[0 if first else -1][1])
