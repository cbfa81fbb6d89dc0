"""Close the rows of runs that can no longer close them, and delete old rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from uuid import uuid4

from django.conf import settings
from django.db import connections, router
from django.db.migrations.recorder import MigrationRecorder
from django.utils.timezone import now

from django_singletask.conf import conf
from django_singletask.forks import undivided
from django_singletask.history.queries import BATCH, ago
from django_singletask.holder import Holder
from django_singletask.locks.liveness import proof_of_death
from django_singletask.locks.ref import LockRef
from django_singletask.log import logger
from django_singletask.models import TaskLockEvent
from django_singletask.stores import get_store
from django_singletask.stores.base import Entry
from django_singletask.stores.keys import PREFIX

SWEPT = 50_000
"""The maximum number of rows that one sweep deletes."""
TURN = 50.0
"""Seconds for which no other worker sweeps."""


def take_turn() -> bool:
    """Take the turn to sweep, if no worker has it; return whether this worker is to sweep.

    About once a minute one of all workers gets the turn. Two projects may share a cache, so each
    history has its own key, with the time of its migration. The address of its database would not
    do: SQLite files on two hosts can have the same path. Two sweeps at a time would do no harm,
    since both change the rows in the same way.
    """
    key = f"{PREFIX}@sweep"
    if conf.history != "off":
        migrations = MigrationRecorder.Migration.objects.using(router.db_for_write(TaskLockEvent))
        migration = migrations.filter(app="django_singletask", name="0001_initial").first()
        if migration is not None:
            key += f":{migration.applied.timestamp()}"
    turn_of_another = get_store(conf.cache).add(key, uuid4().hex.encode(), TURN)
    return turn_of_another is None


# When is a row without a token in the store closed?
#
# To miss the token once is not enough: a renewal may take the lock again, or the event of the run's
# end may not be written yet. So the first sweep that misses the token notes the time in the row. A
# sweep that misses the token a lease later closes the row.
#
#   run:      holds ...... the cache forgets ... takes again
#   sweeps:                                  misses, notes       finds, forgets the note


def sweep() -> None:
    """Close the open rows of locks that are no longer held, and delete old rows."""
    rows = TaskLockEvent.objects.primary()
    with undivided(connections[rows.db]):
        overdue = [row for row in rows.open().iterator() if ago(row.at) >= row.timeout]
        for cache in settings.CACHES:
            of_cache = [row for row in overdue if row.cache == cache]
            try:
                for start in range(0, len(of_cache), BATCH):
                    _check(cache, of_cache[start : start + BATCH])
            except Exception as error:  # continue with the rows of other caches
                text = "Open history rows of the cache %r cannot be checked: %s"
                logger.warning(text, cache, error)
        for _deleted in prune(older_than=conf.history_days * 86_400, limit=SWEPT):
            pass  # each step of the iterator deletes a batch


def _check(cache: str, rows: Sequence[TaskLockEvent]) -> None:
    """Check whether the runs of open rows, whose first lease is over, still hold their locks.

    Report the end of a run that is over. Note in the row when the cache is missing its token, and
    forget that when the token is back again.
    """
    entries = get_store(cache).read_many([row.key for row in rows])
    newly_missing = []
    back_again = []
    for row in rows:
        ref = LockRef(cache, row.name, row.key)
        entry = entries.get(row.key)
        if entry is not None and Holder.decode(entry.value).token == row.token:
            # A fixed lease that lasts longer than its row says was extended: its end is not known.
            if row.noticed_at or (row.fixed and not row.was_left):
                back_again.append(row.pk)
            _check_entry(ref, entry, row)
        elif row.was_left:
            end = row.at + timedelta(seconds=row.timeout)
            reason = "nobody received it"
            ref.tell("released", row.holder(), at=end, outcome="released", reason=reason)
        elif row.noticed_at is None:
            newly_missing.append(row.pk)
        elif ago(row.noticed_at) >= row.timeout:
            text = "%s: the lease of a run on %s, process %s, ended without a release."
            logger.warning(text, row.key, row.host, row.pid)
            ref.tell("expired", row.holder(), reason="its lease ended without a release")
    still_open = TaskLockEvent.objects.primary().filter(outcome="")
    still_open.filter(pk__in=newly_missing).update(noticed_at=now())
    still_open.filter(pk__in=back_again).update(noticed_at=None, fixed=False)


def _check_entry(ref: LockRef, entry: Entry, row: TaskLockEvent) -> None:
    """Report the end of a run whose entry is still in the cache, if it has ended."""
    holder = Holder.decode(entry.value)
    if holder.kept:  # its body has ended, but the process was killed before it wrote that
        ref.tell("released", row.holder(), outcome="released", result=holder.result)
        return
    proof = proof_of_death(holder)
    if proof:
        ref.free_dead(entry, holder, proof)


def prune(batch: int = 1000, *, older_than: float, limit: int = sys.maxsize) -> Iterator[int]:
    """Delete rows older than ``older_than`` seconds.

    This deletes at most ``limit`` rows, in small batches, each in a separate transaction. It yields
    the number of rows of each batch.
    """
    rows = TaskLockEvent.objects.primary()
    old = rows.older_than(older_than).order_by("happened_at")
    rest = old
    while True:
        oldest = list(rest.values_list("pk", "happened_at", "ref")[: min(batch, limit)])
        if not oldest:
            return
        # Delete calls before the runs that they met, since a batch may be the last one.
        pks, times, tokens = zip(*oldest, strict=True)
        calls = rows.values_list("pk", flat=True).calls_blocked_by(tokens)  # type: ignore[attr-defined]
        with undivided(connections[rows.db]):
            each_once = dict.fromkeys([*calls, *pks])
            doomed = list(each_once)[: min(batch, limit)]
            gone = rows.filter(pk__in=doomed).delete()[0]
        limit -= gone
        yield gone
        # Do not read again what earlier batches deleted, which is still in PostgreSQL's index.
        rest = old.filter(happened_at__gte=times[0])
