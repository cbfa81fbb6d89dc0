"""Write lock events into rows.

Each event is what it knows of one row, and the row is found by ``ref``. So events can be written
in any order, and again after a failure: only counts may then count twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import md5
from operator import itemgetter
from typing import Any

from django import db
from django.conf import settings
from django.db import connections, models, router, transaction
from django.utils.timezone import get_default_timezone, make_naive

from django_singletask.forks import undivided
from django_singletask.history.queries import COUNTED
from django_singletask.holder import clean, this_process
from django_singletask.models import RETAKEN, TROUBLE, TaskLockEvent
from django_singletask.signals import LockEvent

INCORRECT_STRING = 1366
"""MySQL's code for an invalid text, which Django reports as an operational error."""

fields = [field for field in TaskLockEvent._meta.concrete_fields if not field.primary_key]
TIMES = [field.name for field in fields if isinstance(field, models.DateTimeField)]
LENGTHS = {field.name: field.max_length for field in fields if field.max_length}
"""The maximum number of characters in each text column."""
DEFAULTS = {field.name: field.get_default() for field in fields}
values = itemgetter(*DEFAULTS)
Row = dict[str, Any]

no_copy: set[str] = set()
"""Aliases of databases that refused COPY."""

# What a row keeps of two writes
#
# The holder's record is the same in both. The end is what the run itself reported. Of two outcomes
# the stronger one stays, with who noticed it, when, and why: an operator knows why the lock was
# cleared, a run that ended knows more than another process that found it dead, and a sweep only
# knows that the lease is over.
#
#   run:       ends .............................. writes "released"
#   sweep:            finds no token, writes "expired"

STRENGTH = ["", "expired", "dead", "released", "unguarded", "lost", "cleared"]
RANK = "CASE {} " + "".join(f"WHEN '{o}' THEN {i} " for i, o in enumerate(STRENGTH)) + "END"
LEAST, GREATEST = "LEAST({old}, {new})", "GREATEST({old}, {new})"
KNOWN = "COALESCE({new}, {old})"
EARLIER = "LEAST(COALESCE({new}, {old}), COALESCE({old}, {new}))"
ADDED = "CASE WHEN {old_kind} = 'run' THEN 1 ELSE {old} + {new} END"
STRONGER = (
    "CASE WHEN {new_rank} > {old_rank} THEN {new} "
    "WHEN {new_rank} = {old_rank} THEN COALESCE(NULLIF({old}, ''), {new}) ELSE {old} END"
)
RULES = {
    "at": LEAST,
    "last_at": GREATEST,
    "count": ADDED,
    "pid": "COALESCE(NULLIF({old}, 0), {new})",
    "ended_at": EARLIER,
    "result": "COALESCE(NULLIF({new}, ''), {old})",
    "longest_renewal_gap": KNOWN,
    "retaken": GREATEST,
    "noticed_at": STRONGER.replace("NULLIF({old}, '')", "{old}"),
    **dict.fromkeys(["reason", "actor", "blocked_by", "blocked_by_task_id"], STRONGER),
    "outcome": STRONGER,  # the last one: on MySQL the others would see the new outcome
}
"""How a column is changed if the row is there; the other columns stay."""


def is_outage(error: Exception) -> bool:
    """Return whether a later attempt may succeed: down, read-only, or without the table yet."""
    kinds = (db.OperationalError, db.InterfaceError, db.InternalError, db.ProgrammingError)
    return isinstance(error, kinds) and error.args[:1] != (INCORRECT_STRING,)


def write(events: Iterable[LockEvent], *, again: bool = False) -> None:
    """Write events in transactions, or in savepoints if the caller is in a transaction.

    ``again``: an earlier attempt failed, but may have been committed.
    """
    alias, rows = router.db_for_write(TaskLockEvent), [_row(event) for event in events]
    with undivided(connections[alias]):
        if again or alias in no_copy:
            return _write(alias, rows, copies=False)
        try:
            return _write(alias, rows, copies=True)
        except db.IntegrityError:  # another process has written of such a run already
            refused = set()
        except (db.NotSupportedError, db.ProgrammingError):  # row-level security, or a view
            refused = {alias}
        _write(alias, rows, copies=False)
        no_copy.update(refused)


def _write(alias: str, rows: list[Row], copies: bool) -> None:
    """Write each row at most once a statement: first the runs that have begun and ended."""
    calls: dict[str, Row] = {}
    runs: dict[str, Row] = {}
    whole: dict[str, Row] = {}
    batches = []
    for row in rows:
        ref, known = row["ref"], calls if row["kind"] in COUNTED else runs
        before = known.get(ref)
        if before is None:
            known[ref] = row
        elif known is calls:
            at, last_at = min(before["at"], row["at"]), max(before["last_at"], row["last_at"])
            calls[ref] = {**before, "count": before["count"] + 1, "at": at, "last_at": last_at}
        elif _has_only_begun(before):  # the later event says all that this one says
            # An entry that a returned run keeps has no process, and another lease.
            facts = {"pid": row["pid"] or before["pid"], "timeout": before["timeout"]}
            runs[ref] = {**row, **facts}
            if row["ended_at"]:
                whole[ref] = runs[ref]
        elif not _has_only_begun(row):
            whole.pop(ref, None)
            batches.append(runs)
            runs = {ref: row}
    batches.append(runs)
    connection = connections[alias]
    # A single row is inserted: rows are written one by one after a failure, of which COPY may be
    # the reason. psycopg 2 has no COPY of this kind.
    if copies and connection.vendor == "postgresql" and len(whole) > 1:
        with transaction.atomic(using=alias), connection.cursor() as cursor:
            if hasattr(cursor, "copy"):
                _copy(connection, cursor, sorted(whole.values(), key=_place))
                batches = [{r: row for r, row in b.items() if r not in whole} for b in batches]
    # All processes use the same order in a transaction. With different orders, two could wait for
    # each other:
    #
    #   one:    changes a ...... waits for b
    #   other:         changes b ...... waits for a
    #
    # Calls come last: what is written again after a failure must not have counted them.
    for batch in filter(None, [*batches, calls]):
        with transaction.atomic(using=alias), connection.cursor() as cursor:
            _upsert(connection, cursor, sorted(batch.values(), key=_place))


def _place(row: Row) -> tuple[Any, ...]:
    """Put runs in the order of their begin, as the ids of their rows will be."""
    return (row["ref"],) if row["kind"] in COUNTED else (row["at"], row["ref"])


def _has_only_begun(row: Row) -> bool:
    return not (row["outcome"] or row["retaken"])


def _row(event: LockEvent) -> Row:
    """Return what an event knows of a row, in texts that fit."""
    known, kind, at = vars(event), event.kind, event.at
    facts = {name: known.get(name, default) for name, default in DEFAULTS.items()}
    facts["timeout"] = float(event.timeout)
    if kind in COUNTED:
        facts.update(last_at=at, outcome="")
        ref = event.blocked_by and f"{event.blocked_by}:{event.reason}:{event.result}"
    else:
        facts.update(kind="run", at=event.since or at)
        ref = event.token
        if kind == "released":
            facts["ended_at"] = at
        else:
            facts.update(result="", longest_renewal_gap=None)
        if kind in TROUBLE:
            here = this_process()
            noticed_by = f"{here.host}:{here.pid}" if kind in ("dead", "expired") else event.actor
            facts.update(outcome=kind, noticed_at=at, actor=noticed_by)
        elif kind in ("acquired", RETAKEN):
            facts.update(reason="", outcome="")
    if not ref:  # nobody knows the holder, so the event has a row of its own
        ref = md5(repr(event).encode(errors="replace"), usedforsecurity=False).hexdigest()
    facts["ref"] = ref
    for name, length in LENGTHS.items():
        text = facts[name]
        if len(text) > length or not text.isprintable():
            facts[name] = clean(text, length)
    if not settings.USE_TZ:
        for name in TIMES:
            facts[name] = facts[name] and make_naive(facts[name], get_default_timezone())
    return facts


def _copy(connection: Any, cursor: Any, rows: Iterable[Row]) -> None:
    columns = ", ".join(map(connection.ops.quote_name, DEFAULTS))
    table = connection.ops.quote_name(TaskLockEvent._meta.db_table)
    # Django does not translate the errors of COPY.
    with (
        connection.wrap_database_errors,
        cursor.copy(f"COPY {table} ({columns}) FROM STDIN") as copy,
    ):
        copy.write("".join(["\t".join(map(_copied, values(row))) + "\n" for row in rows]))


def _copied(value: Any) -> str:
    # The texts of an event contain no tab or newline.
    return r"\N" if value is None else str(value).replace("\\", "\\\\")


def _upsert(connection: Any, cursor: Any, rows: list[Row]) -> None:
    adapt = connection.ops.adapt_datetimefield_value
    lines = [values({**row, **{name: adapt(row[name]) for name in TIMES}}) for row in rows]
    statement = _statement(connection)
    if connection.vendor == "postgresql":  # an array for each column
        cursor.execute(statement, [list(column) for column in zip(*lines, strict=True)])
    else:
        cursor.executemany(statement, lines)


def _statement(connection: Any) -> str:
    quote, vendor = connection.ops.quote_name, connection.vendor
    table, columns = quote(TaskLockEvent._meta.db_table), ", ".join(map(quote, DEFAULTS))
    old, new = ("{}", "VALUES({})") if vendor == "mysql" else ("o.{}", "excluded.{}")
    changes = []
    for name, rule in RULES.items():
        names = {"old": old.format(quote(name)), "new": new.format(quote(name))}
        names["old_kind"] = old.format(quote("kind"))
        names["old_rank"] = RANK.format(old.format(quote("outcome")))
        names["new_rank"] = RANK.format(new.format(quote("outcome")))
        changes.append(f"{quote(name)} = {rule.format(**names)}")
    assignments = ", ".join(changes)
    marks = ", ".join(["%s"] * len(DEFAULTS))
    if vendor == "mysql":
        into = f"INSERT INTO {table} ({columns}) VALUES ({marks})"
        return f"{into} ON DUPLICATE KEY UPDATE {assignments}"
    source = f"VALUES ({marks})"
    if vendor == "postgresql":
        arrays = ", ".join(f"%s::{field.db_type(connection)}[]" for field in fields)
        source = f"SELECT * FROM unnest({arrays})"
    else:
        assignments = assignments.replace("LEAST(", "MIN(").replace("GREATEST(", "MAX(")
    into = f"INSERT INTO {table} AS o ({columns}) {source}"
    return f"{into} ON CONFLICT ({quote('ref')}) DO UPDATE SET {assignments}"
