"""Close the rows of runs that can no longer close them, and delete old rows."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import md5

from django.conf import settings
from django.db import connections, router
from django.db.migrations.recorder import MigrationRecorder
from django.utils.timezone import now

from django_singletask.conf import conf
from django_singletask.forks import undivided
from django_singletask.history.queries import BATCH, ago
from django_singletask.holder import Holder
from django_singletask.locks.address import Address
from django_singletask.locks.keys import LockKey
from django_singletask.locks.liveness import proof_of_death
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store
from django_singletask.stores.base import PREFIX

logger = logging.getLogger("django_singletask")

SWEPT = 50_000
"""The maximum number of rows that one sweep deletes."""
TURN = 50.0
"""Seconds for which no other worker sweeps."""


def takes_turn() -> bool:
    """Return whether this worker is to sweep: one of all workers, about once a minute.

    Each history has its own key, because two projects may share a cache. Two databases can have the
    same address, such as SQLite files on two hosts, so the key contains the time of the migration.
    Two sweeps at a time would do no harm: the rows change in the same way.
    """
    database = ["no history"]
    if conf.history != "off":
        connection = connections[router.db_for_write(TaskLockEvent)]
        migrations = MigrationRecorder(connection).applied_migrations()
        migration = migrations.get(("django_singletask", "0001_initial"))
        address = [str(connection.settings_dict[part]) for part in ("HOST", "PORT", "NAME")]
        database = [str(migration and migration.applied), *address]
    digest = md5(repr(database).encode(), usedforsecurity=False).hexdigest()
    holder = Holder.new("sweep", TURN, task=None, task_id=None, retries=0)
    return get_store(conf.cache).add(f"{PREFIX}@sweep:{digest}", holder.encode(), TURN) is None


# When is a row without a token in the store closed?
#
# Once is not enough: a renewal may take the lock again, or the event of the run's end may not be
# written yet. So the first sweep that misses the token notes the time in the row, and a sweep that
# misses it a lease later closes the row.
#
#   run:      holds ...... the cache forgets ... takes again
#   sweeps:                                  misses, notes       finds, forgets the note


def sweep() -> None:
    """Close the open rows of locks that are no longer held."""
    rows = TaskLockEvent.objects.primary()
    with undivided(connections[rows.db]):
        by_cache = defaultdict(list)
        for row in rows.open().iterator():
            if row.cache in settings.CACHES and ago(row.at) >= row.timeout:
                by_cache[row.cache].append(row)
        for cache, over in by_cache.items():
            try:
                for start in range(0, len(over), BATCH):
                    _look_after(cache, over[start : start + BATCH])
            except Exception as error:  # continue with the rows of other caches
                text = "Open history rows of the cache %r cannot be checked: %s"
                logger.warning(text, cache, error)
        sum(prune(limit=SWEPT))


def _look_after(cache: str, rows: Sequence[TaskLockEvent]) -> None:
    """Check open rows whose first lease is over."""
    entries = get_store(cache).read_many([row.key for row in rows])
    missed, found = [], []
    for row in rows:
        address, entry = Address(cache, LockKey(row.name, row.key)), entries.get(row.key)
        holder = Holder.decode(b"" if entry is None else entry.value)
        if entry and holder.token == row.token:
            found += [row.pk] if row.noticed_at else []
            if holder.kept:  # the process was killed before it could write that it had returned
                address.tell("released", row.holder(), outcome="released", result="returned")
            elif how := proof_of_death(holder):
                address.free_dead(entry, holder, how)
        elif row.noticed_at is None:
            missed.append(row.pk)
        elif ago(row.noticed_at) >= row.timeout:
            text = "%s: the lease of a run on %s, process %s, ended without a release."
            logger.warning(text, row.key, row.host, row.pid)
            address.tell("expired", row.holder(), reason="its lease ended without a release")
    still_open = TaskLockEvent.objects.primary().filter(outcome="")
    for pks, noticed_at in ((missed, now()), (found, None)):
        if pks:
            still_open.filter(pk__in=pks).update(noticed_at=noticed_at)


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
        oldest = list(rest.values_list("pk", "at", "ref")[:batch])
        if not oldest:
            break
        # Delete calls before the runs that they met, since a batch may be the last one.
        tokens = [ref for _pk, _at, ref in oldest]
        first = [row.pk for row in rows.only("pk").blocked_by(tokens)][:batch]
        with undivided(connections[rows.db]):
            gone = rows.filter(pk__in=first or [pk for pk, _at, _ref in oldest]).delete()[0]
        deleted += gone
        yield gone
        # Do not read deleted rows again, which are still in PostgreSQL's index.
        rest = old.filter(at__gte=oldest[0 if first else -1][1])
