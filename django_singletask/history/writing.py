"""Write lock events into rows.

Each event is what it knows of one row, and the row is found by ``ref``. So events can be written
in any order, and again after a failure: only counts may then count twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import md5
from typing import Any, Final

from django import db
from django.conf import settings
from django.db import connections, models, router, transaction
from django.utils.timezone import get_default_timezone, make_naive

from django_singletask.conf import conf
from django_singletask.forks import undivided
from django_singletask.history.queries import BATCH
from django_singletask.holder import clean
from django_singletask.models import COUNTED, RETAKEN, TROUBLE, WAS_WAITING, TaskLockEvent
from django_singletask.process import this_process
from django_singletask.signals import LockEvent

INCORRECT_STRING = 1366
"""MySQL's code for an invalid text, which Django reports as an operational error."""

fields: Final = [field for field in TaskLockEvent._meta.concrete_fields if not field.primary_key]
TIMES = [field.name for field in fields if isinstance(field, models.DateTimeField)]
LENGTHS = {field.name: field.max_length for field in fields if field.max_length}
"""The maximum number of characters in each text column."""
DEFAULTS = {field.name: field.get_default() for field in fields}
Row = dict[str, Any]

# What a row keeps of two writes
#
# The holder's record is the same in both. The end is what the run itself reported. Of two outcomes
# the stronger one stays, with who noticed it, when, and why: an operator knows why the lock was
# cleared, a run that ended knows more than another process that found it dead, and a sweep only
# knows that the lease is over.
#
#   run:       ends .............................. writes "released"
#   sweep:            finds no token, writes "expired"

WEAKER = ("", "expired", "dead", "released")  # as in SQL
STRENGTH = [*WEAKER, "unguarded", "lost", "cleared"]
RANKS = " ".join(f"WHEN '{outcome}' THEN {rank}" for rank, outcome in enumerate(STRENGTH))
NEW = f"CASE excluded.outcome {RANKS} END"
OLD = f"CASE old.outcome {RANKS} END"
STRONGER = (
    f"CASE WHEN {NEW} > {OLD} THEN excluded.{{0}} WHEN {NEW} < {OLD} THEN old.{{0}} "
    "ELSE COALESCE(NULLIF(old.{0}, ''), excluded.{0}) END"
)
LEAST = "LEAST(old.{0}, excluded.{0})"
GREATEST = "GREATEST(old.{0}, excluded.{0})"
# A database may take nothing for the least, or the greatest, of two times of which one is NULL.
KNOWN = "COALESCE(excluded.{0}, old.{0}), COALESCE(old.{0}, excluded.{0})"
RULES = {
    "at": LEAST,
    "happened_at": GREATEST,
    "last_at": GREATEST,
    "count": "CASE WHEN old.kind = 'run' THEN 1 ELSE old.{0} + excluded.{0} END",
    "waited": f"CASE WHEN old.kind = 'run' THEN {GREATEST} ELSE old.{{0}} + excluded.{{0}} END",
    "pid": "COALESCE(NULLIF(old.{0}, 0), excluded.{0})",
    "ended_at": f"LEAST({KNOWN})",
    "result": "COALESCE(NULLIF(excluded.{0}, ''), old.{0})",
    "longest_renewal_gap": "COALESCE(excluded.{0}, old.{0})",
    "retaken": GREATEST,
    "retaken_at": f"GREATEST({KNOWN})",
    "fixed": GREATEST,
    "noticed_at": STRONGER.replace("NULLIF(old.{0}, '')", "old.{0}"),
    **dict.fromkeys(["reason", "actor", "blocked_by", "blocked_by_task_id"], STRONGER),
    "outcome": STRONGER,  # the last rule: on MySQL later rules would see the new outcome
}
"""How each column is changed if the row is there; the other columns stay."""


def is_outage(error: Exception) -> bool:
    """Return whether a later attempt to write may succeed.

    Then the database is down or read-only, or does not have the table yet.
    """
    kinds = (db.OperationalError, db.InterfaceError, db.InternalError, db.ProgrammingError)
    if not isinstance(error, kinds):
        return False
    return error.args[:1] != (INCORRECT_STRING,)


def write(events: Iterable[LockEvent]) -> None:
    """Write events in one transaction, or in a savepoint if the caller is in a transaction."""
    connection = connections[router.db_for_write(TaskLockEvent)]
    rows: dict[str, Row] = {}
    more = []  # second facts of a run, since a statement can change a row only once
    adapt = _times_of(connection)
    for event in events:
        row = _row(event, adapt)
        earlier = rows.get(row["ref"])
        if earlier is None:
            rows[row["ref"]] = row
        elif row["kind"] in COUNTED:
            earlier["count"] += 1
            earlier["waited"] += row["waited"]
            earlier["at"] = min(earlier["at"], row["at"])
            earlier["last_at"] = max(earlier["last_at"], row["last_at"])
            earlier["happened_at"] = earlier["last_at"]
        elif not (earlier["outcome"] or earlier["retaken"]):  # the run has only begun
            row["happened_at"] = max(earlier["happened_at"], row["happened_at"])
            earlier.update({name: row[name] for name in RULES if row[name]})
        else:
            more.append([row])
    # All processes use the same order in a transaction. With different orders, two processes could
    # wait for each other:
    #
    #   one:    changes a ...... waits for b
    #   other:         changes b ...... waits for a
    #
    # What is in ``more`` changes the same rows again.
    in_order = [rows[ref] for ref in sorted(rows)]
    with undivided(connection), transaction.atomic(connection.alias), connection.cursor() as cursor:
        for batch in [in_order, *more]:
            kept = batch
            if conf.history_keeps == "trouble":
                kept = _without_good(connection, cursor, batch)
            if kept:
                _upsert(connection, cursor, kept)


def _without_good(connection: Any, cursor: Any, rows: list[Row]) -> list[Row]:
    """Return the rows to write: all but those of runs that ended without trouble.

    If an earlier batch wrote that a run began, the table already has a row of this run. The row is
    deleted if the run ended without trouble. If the row in the table shows trouble, it stays, and
    the end of the run is written into it.

    The DELETE comes before the SELECT. SQLite refuses to write in a transaction that began with a
    read, if another process has written since that read.

    Two processes may change and delete the same rows in different orders. Then the database ends
    one of the two transactions, and the events of that transaction are written again later.
    """
    ended = [row["ref"] for row in rows if row["outcome"] == "released" and not row["retaken"]]
    good = set(ended)
    table = connection.ops.quote_name(TaskLockEvent._meta.db_table)
    for start in range(0, len(ended), BATCH):
        refs = ended[start : start + BATCH]
        marks = ", ".join(["%s"] * len(refs))
        those = f"FROM {table} WHERE ref IN ({marks})"
        cursor.execute(f"DELETE {those} AND outcome IN {WEAKER} AND retaken = 0", refs)
        cursor.execute(f"SELECT ref {those}", refs)
        good.difference_update(ref for (ref,) in cursor.fetchall())
    return [row for row in rows if row["ref"] not in good]


def _row(event: LockEvent, adapt: Callable[[datetime], Any]) -> Row:
    """Return what an event knows of a row, with texts that fit and with times of the database."""
    kind = event.kind
    at = event.at
    facts = {name: getattr(event, name, default) for name, default in DEFAULTS.items()}
    ref = event.token
    if kind in COUNTED:
        facts["last_at"] = at
        if event.blocked_by:
            ref = f"{event.blocked_by}:{event.reason}:{event.result}"
            if event.was_waiting:
                ref += WAS_WAITING
    else:
        facts["kind"] = "run"
        if event.since:
            facts["at"] = event.since
        if kind == "released":
            facts["ended_at"] = at
        elif kind == RETAKEN:
            facts["retaken_at"] = at
        elif kind in TROUBLE:
            facts.update(outcome=kind, noticed_at=at)
        if kind in ("dead", "expired"):
            here = this_process()
            facts["actor"] = f"{here.host}:{here.pid}"
    if not ref:  # the holder is unknown, so the event gets a row of its own
        ref = md5(repr(event).encode(errors="replace"), usedforsecurity=False).hexdigest()
    facts["ref"] = ref
    # The clock of who notices something may be behind that of the holder.
    facts["happened_at"] = max(facts["at"], at)
    for name, length in LENGTHS.items():
        if facts[name]:
            facts[name] = clean(facts[name], length)
    for name in TIMES:
        if facts[name] is not None:
            facts[name] = adapt(facts[name])
    return facts


def _times_of(connection: Any) -> Callable[[datetime], Any]:
    """Return the function that turns a time into what the database stores."""
    adapt = connection.ops.adapt_datetimefield_value
    if settings.USE_TZ:
        return adapt  # type: ignore[no-any-return]
    zone = get_default_timezone()
    return lambda time: adapt(make_naive(time, zone))


def _upsert(connection: Any, cursor: Any, rows: list[Row]) -> None:
    quote = connection.ops.quote_name
    vendor = connection.vendor
    table = quote(TaskLockEvent._meta.db_table)
    columns = ", ".join(map(quote, DEFAULTS))
    insert = f"INSERT INTO {table} AS old ({columns})"
    changes = ", ".join(f"{name} = {rule.format(name)}" for name, rule in RULES.items())
    conflict = "ON CONFLICT (ref) DO UPDATE SET"
    lines = [list(row.values()) for row in rows]  # in the order of DEFAULTS
    if vendor == "postgresql":
        # An array for each column, in one text: psycopg needs 6 to 13 times as long for a list,
        # since it converts each value separately. But for the brackets the text is that of JSON:
        # clean() leaves no control characters, so JSON escapes only quotes and backslashes, as
        # PostgreSQL reads them.
        arrays = ", ".join(f"%s::{field.db_type(connection)}[]" for field in fields)
        arguments = []
        for values in zip(*lines, strict=True):
            text = json.dumps(values, ensure_ascii=False, default=str)
            arguments.append(f"{{{text[1:-1]}}}")
        cursor.execute(f"{insert} SELECT * FROM unnest({arrays}) {conflict} {changes}", arguments)
        return
    marks = ", ".join(["%s"] * len(DEFAULTS))
    if vendor == "mysql":
        insert = f"INSERT INTO {table} ({columns})"
        conflict = "ON DUPLICATE KEY UPDATE"
        changes = re.sub(r"excluded\.(\w+)", r"VALUES(\1)", changes).replace("old.", "")
    else:
        changes = changes.replace("LEAST(", "MIN(").replace("GREATEST(", "MAX(")
    cursor.executemany(f"{insert} VALUES ({marks}) {conflict} {changes}", lines)
