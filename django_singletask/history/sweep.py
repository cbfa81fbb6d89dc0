"""Close the rows of runs that can no longer close them, and delete old rows."""

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

logger = logging.getLogger("django_singletask")

SWEPT = 50_000
"""The maximum number of rows that one sweep deletes."""


def leader_key() -> LockKey:
    """Return the key of the lock of the one worker that sweeps this history.

    Each history has its own lock, because two projects may share a cache. Two databases can have
    the same address, such as SQLite files on two hosts, so the key contains the time of the
    migration. Without a history, the worker only cleans the lock table.
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
    """Close the open rows of locks that are no longer held.

    Use one sweeper for all sweeps. It closes a row when its token was missing in the store twice,
    at least one lease apart. Once is not enough: a renewal may take the lock again, or the event of
    the run's end may not be written yet.
    """

    def __init__(self, now: Callable[[], float] = clock.now) -> None:
        self.now = now
        self.missed: dict[int, float] = {}  # when the token of an open row was first missing

    def sweep(self) -> None:
        with undivided(connections[TaskLockEvent.objects.primary().db]):
            self._sweep()

    def _sweep(self) -> None:
        still_open, down = set(), set()
        for row in TaskLockEvent.objects.primary().open().iterator():
            still_open.add(row.pk)
            over = timestamp(row.at) + row.timeout <= time.time()
            if over and row.cache in settings.CACHES and row.cache not in down:
                try:
                    self.look_after(row)
                except Exception as error:
                    # Continue with the rows of other caches.
                    down.add(row.cache)
                    text = "Open history rows of the cache %r cannot be checked: %s"
                    logger.warning(text, row.cache, error)
        for pk in self.missed.keys() - still_open:
            del self.missed[pk]
        sum(prune(limit=SWEPT))

    def look_after(self, row: TaskLockEvent) -> None:
        """Check an open row whose first lease is over."""
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
            text = "%s: the lease of a run on %s, process %s, ended without a release."
            logger.warning(text, row.key, row.host, row.pid)
            address.tell("expired", row.holder(), reason="its lease ended without a release")


def prune(
    batch: int = 1000, *, older_than: float | None = None, limit: int | None = None
) -> Iterator[int]:
    """Delete rows older than ``older_than`` seconds (default ``SINGLETASK_HISTORY_DAYS``).

    This deletes at most ``limit`` rows, in small batches, each in a separate transaction. It yields
    the number of rows of each batch.
    """
    rows = TaskLockEvent.objects.primary()
    old, deleted = rows.older_than(older_than).order_by("at"), 0
    rest = old
    while batch := batch if limit is None else min(batch, limit - deleted):
        oldest = list(rest.values_list("pk", "at", "token")[:batch])
        if not oldest:
            break
        # Delete skips before the runs that they met, since a batch may be the last one.
        tokens = [token for _pk, _at, token in oldest if token]
        first = [row.pk for row in rows.only("pk").blocked_by(tokens)][:batch]
        with undivided(connections[rows.db]):
            gone = rows.filter(pk__in=first or [pk for pk, _at, _token in oldest]).delete()[0]
        deleted += gone
        yield gone
        # Do not read deleted rows again, which are still in PostgreSQL's index.
        rest = old.filter(at__gte=oldest[0 if first else -1][1])
