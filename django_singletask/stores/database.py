"""Locks in the table of a DatabaseCache, with separate statements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, InterfaceError, OperationalError, connections, router

from django_singletask import clock
from django_singletask.forks import close_before_forks, undivided
from django_singletask.stores.base import FENCE, TRIES, Entry, Outcome, Store

# The methods of Django's DatabaseCache are not atomic. Its add() is a SELECT and then an UPDATE, so
# two processes can both take an expired row; its get() deletes an expired row by the key only:
#
#   A: SELECT -> expired                     B: SELECT -> expired
#   A: UPDATE ... -> "taken"                 B: UPDATE ... -> "taken"
#
# Here the statement that writes contains the condition, and uses the clock of the database.

SHIFT = 14
"""Hours added to naive times, with ``USE_TZ = False``.

Django then compares ``expires`` with the local time of ``TIME_ZONE``, and would cull a live lock
whose time is in UTC. UTC + 14 h is never behind a local time, and it never jumps.
"""

BATCH = 500
"""Keys in one condition; older versions of SQLite allow 999."""
FOREVER = 100 * 365 * 24 * 60 * 60
"""The lease of the last fencing token in seconds."""


class Dialect:
    """The parts of the statements that differ between databases; here for PostgreSQL."""

    now = "clock_timestamp()"
    then = f"{now} + %s * interval '1 second'"
    left = f"extract(epoch FROM expires - {now})"
    microseconds = f"CAST(extract(epoch FROM {now}) * 1000000 AS bigint)"
    greater = "GREATEST(CAST({last} AS bigint) + 1, {microseconds})"
    upsert = True

    def seconds(self, lease: float) -> Any:
        return lease


class SQLite(Dialect):
    microseconds = "CAST((julianday('now') - 2440587.5) * 86400000000 AS integer)"
    greater = "MAX(CAST({last} AS integer) + 1, {microseconds})"

    def __init__(self) -> None:
        time = "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'"
        if not settings.USE_TZ:
            time = f"{time}, '+{SHIFT} hours'"
        self.now, self.then = f"{time})", f"{time}, %s)"
        self.left = f"(julianday(expires) - julianday({self.now})) * 86400.0"

    def seconds(self, lease: float) -> Any:
        return f"{lease:+.3f} seconds"


class MySQL(Dialect):
    microseconds = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    greater = "GREATEST(CAST({last} AS signed) + 1, {microseconds})"
    # The row count of ON DUPLICATE KEY UPDATE is the same for an insert and an unchanged row.
    upsert = False

    def __init__(self) -> None:
        shift = "" if settings.USE_TZ else f" + INTERVAL {SHIFT} HOUR"
        self.now = f"(UTC_TIMESTAMP(6){shift})"
        self.then = f"({self.now} + INTERVAL %s MICROSECOND)"
        self.left = f"TIMESTAMPDIFF(MICROSECOND, {self.now}, expires) / 1000000"

    def seconds(self, lease: float) -> Any:
        return int(lease * 1_000_000)


TIMEOUTS: dict[str, dict[str, int]] = {
    "postgresql": {"connect_timeout": 1, "tcp_user_timeout": 1000},
    "sqlite": {"timeout": 1},
    "mysql": {"connect_timeout": 1, "read_timeout": 1, "write_timeout": 1},
}
"""Options of the clients for the longest time of a request, and their units in a second."""
DIALECTS: dict[str, type[Dialect]] = {"postgresql": Dialect, "sqlite": SQLite, "mysql": MySQL}


class DatabaseStore(Store):
    """Keep locks as rows, on a separate connection in autocommit mode.

    So other processes see at once a lock that is taken inside ``atomic()``, and it is not rolled
    back.
    """

    family = "database"
    client_errors = (Error, OSError)
    _options_before: str | None = None
    was_sent_twice = False
    """Whether the last statement was sent again, because the connection was closed."""

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.alias: str = router.db_for_write(cache.cache_model_class)
        self.connection = self._connection()
        # Another thread may close the store.
        self.connection.inc_thread_sharing()
        close_before_forks(self.connection)
        vendor = self.connection.vendor
        if vendor not in DIALECTS:
            raise ImproperlyConfigured(
                f"DATABASES[{self.alias!r}] is {vendor}: locks need PostgreSQL, MySQL, MariaDB "
                "or SQLite. Route the cache table to one of them, or use another cache."
            )
        self.dialect = DIALECTS[vendor]()
        self.table: str = cache._table  # noqa: SLF001 - LOCATION; Django has no public name for it
        self.place = f"table {self.table} of DATABASES[{self.alias!r}]"
        self._prepare(self.connection.ops.quote_name(self.table), self.dialect)

    def set_timeouts(self, seconds: float) -> None:
        self.close()
        chosen = self.connection.settings_dict
        options: dict[str, Any] = dict(chosen["OPTIONS"])
        for name, unit in TIMEOUTS[self.connection.vendor].items():
            limit = math.ceil(seconds * unit)
            options[name] = min(options.get(name) or limit, limit)
        self.connection.settings_dict = {**chosen, "OPTIONS": options}
        if self.connection.vendor == "postgresql":
            before = options.get("options", "")
            options["options"] = f"{before} -c statement_timeout={math.ceil(seconds * 1000)}"
            self._options_before = before

    def _connection(self) -> Any:
        connection = connections.create_connection(self.alias)
        # Change options that the project chose for its own queries: without autocommit, other
        # processes would not see the locks; and each store would block a connection of the pool.
        chosen = connection.settings_dict
        options = {name: value for name, value in chosen["OPTIONS"].items() if name != "pool"}
        connection.settings_dict = {**chosen, "AUTOCOMMIT": True, "OPTIONS": options}
        return connection

    def _prepare(self, table: str, dialect: Dialect) -> None:
        now, then = dialect.now, dialect.then
        values = f"INTO {table} (cache_key, value, expires) VALUES (%s, %s, {then})"
        self._upsert = (
            f"INSERT {values} ON CONFLICT (cache_key) DO UPDATE SET value = excluded.value, "
            f"expires = excluded.expires WHERE {table}.expires <= {now}"
        )
        self._insert = f"INSERT IGNORE {values}"
        number = dialect.microseconds
        greater = dialect.greater.format(last=f"{table}.value", microseconds=number)
        self._raise = (
            f"INSERT INTO {table} (cache_key, value, expires) VALUES (%s, {number}, {then}) "
            f"ON CONFLICT (cache_key) DO UPDATE SET value = {greater} RETURNING value"
            if dialect.upsert
            else f"INSERT INTO {table} (cache_key, value, expires) "
            f"VALUES (%s, LAST_INSERT_ID({number}), {then}) "
            f"ON DUPLICATE KEY UPDATE value = LAST_INSERT_ID({greater})"
        )
        update = f"UPDATE {table} SET value = %s, expires = {then} WHERE cache_key = %s"
        self._take_over = f"{update} AND expires <= {now}"
        self._update = f"{update} AND value IN (%s, %s)"
        self._delete = f"DELETE FROM {table} WHERE cache_key = %s AND value = %s"
        live = f"value, {dialect.left} FROM {table} WHERE expires > {now}"
        self._select = f"SELECT {live} AND cache_key = %s"
        self._select_many = f"SELECT cache_key, {live} AND cache_key IN "
        self._select_all = f"SELECT cache_key, {live} AND cache_key LIKE %s ESCAPE '!'"
        self._purge = f"DELETE FROM {table} WHERE cache_key LIKE %s ESCAPE '!' AND expires < {then}"

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        cache_key, text = self.make_key(key), value.decode()
        seconds = self.dialect.seconds(lease)
        for _ in range(TRIES):
            if self.dialect.upsert:
                taken = self.execute(self._upsert, [cache_key, text, seconds])
            else:
                taken = self.execute(self._insert, [cache_key, text, seconds]) or self.execute(
                    self._take_over, [text, seconds, cache_key]
                )
            if taken:
                return None
            entry = self.read(key)
            if entry is not None:
                return None if entry.value == value else entry
            # The lock was released, or it expired, between the statements: try again.
        return Entry(b"", None)

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        row = [self.make_key(key), old.decode()]
        sent = clock.now()
        if lease is None:
            statement, params = self._delete, row
        else:
            # The holder still has a row with its value, even an expired one.
            text = new.decode()
            statement, params = self._update, [text, self.dialect.seconds(lease), *row, text]
        for _ in range(TRIES):
            if self.execute(statement, params):
                return Outcome.OK
            was_sent_twice = lease is None and self.was_sent_twice
            entry = self.read(key)
            if entry is None:
                return self.sent_twice(key, old, sent) if was_sent_twice else Outcome.GONE
            if entry.value not in (old, new):
                return Outcome.TAKEN
            # Another thread of the holder took it again between the statements: try again.
        return Outcome.TAKEN

    def read(self, key: str) -> Entry | None:
        rows = self.execute(self._select, [self.make_key(key)])
        return Entry(rows[0][0].encode(), float(rows[0][1])) if rows else None

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        cache_keys = {self.make_key(key): key for key in keys}
        names, entries = list(cache_keys), {}
        for start in range(0, len(names), BATCH):
            batch = names[start : start + BATCH]
            marks = ", ".join(["%s"] * len(batch))
            for name, value, left in self.execute(f"{self._select_many} ({marks})", batch):
                entries[cache_keys[name]] = Entry(value.encode(), float(left))
        return {key: entries[key] for key in cache_keys.values() if key in entries}

    def fence(self, key: str, value: bytes) -> int | None:
        # Two statements without a transaction: a stopped process with an open transaction would
        # block all others.
        number = 0
        while not number:  # MySQL returns 0 if the connection was closed in between
            rows = self.execute(self._raise, [self.make_key(FENCE), self.dialect.seconds(FOREVER)])
            if not self.dialect.upsert:
                rows = self.execute("SELECT LAST_INSERT_ID()")
            number = int(rows[0][0])
        entry = self.read(key)
        return number if entry is not None and entry.value == value else None

    def entries(self) -> Iterator[tuple[str, Entry]]:
        for cache_key, value, left in self.execute(self._select_all, [self._pattern()]):
            key = self.lock_key(cache_key)
            if key is not None:
                yield key, Entry(value.encode(), float(left))

    def purge(self) -> int:
        # Nothing else deletes rows of a dedicated table. A process that sleeps for less than a day
        # finds its row again.
        params = [self._pattern(), self.dialect.seconds(-24 * 60 * 60)]
        return int(self.execute(self._purge, params))

    def _pattern(self) -> str:
        return "".join(f"!{char}" if char in "!%_" else char for char in self.prefix()) + "%"

    def close(self) -> None:
        with undivided(self.connection):
            self.connection.close()

    def execute(self, sql: str, params: Sequence[Any] = ()) -> Any:
        """Return the rows of a query, or the number of rows that a statement changed."""
        self.was_sent_twice = False
        for attempts_left in reversed(range(TRIES)):
            was_open = self.connection.connection is not None
            try:
                with undivided(self.connection), self.connection.cursor() as cursor:
                    cursor.execute(sql, params)
                    return cursor.fetchall() if cursor.description else cursor.rowcount
            except self.client_errors as error:
                self.connection.close()
                if self._options_before is not None and not was_open:
                    # PgBouncer and RDS Proxy refuse this option.
                    self.connection.settings_dict["OPTIONS"]["options"] = self._options_before
                    self._options_before = None
                    continue
                # If the server has closed the connection, try again: every statement here can be
                # sent twice. Only a deletion then has another result.
                was_closed = was_open and isinstance(error, (OperationalError, InterfaceError))
                next_step = self._next_step(error)
                again = not next_step and (was_closed or asks_again(error))
                if not attempts_left or not again:
                    reason = str(error).partition("\n")[0].rstrip(".")
                    told = type(error)(f"{reason}{next_step}") if next_step else error
                    raise self.unavailable(told) from error
                self.was_sent_twice |= was_closed
            except BaseException:
                # A signal, such as a soft time limit: the connection may have an unread reply.
                self.connection.close()
                raise

    def _next_step(self, error: Exception) -> str:
        if is_busy(error):
            return (
                f": DATABASES[{self.alias!r}] is an SQLite file in which this or another "
                "connection has an open transaction, and SQLite allows only one writer. Keep the "
                "locks in a separate SQLite file, with a second entry in DATABASES and a router "
                "for the cache table, as 'Choosing a cache' in the documentation shows"
            )
        if is_missing(error):
            command = f"manage.py createcachetable --database {self.alias}"
            return f". Create the table of the lock cache: {command}"
        return ""


# On MySQL, two takes and a release of one key can cause a deadlock. On PostgreSQL, the loser of a
# race gets an error if the default isolation level is not READ COMMITTED.
RACES = {1205, 1213, "40001", "40P01"}
# A table, or a column, is missing, on MySQL and on PostgreSQL.
MISSING, NO_COLUMN = {1146, "42P01"}, {1054, "42703"}
# SQLite has only texts.
LOCKED = re.compile("database( table| schema)? is locked")
NO_SUCH = re.compile("no such (table|column)|has no column named")


def asks_again(error: Exception) -> bool:
    """Return whether the statement is worth another try: a lost race, or a busy SQLite file."""
    return _code(error) in RACES or is_busy(error)


def is_busy(error: Exception) -> bool:
    """Return whether another connection blocks this one in an SQLite file."""
    return bool(LOCKED.search(str(error)))


def is_missing(error: Exception) -> bool:
    """Return whether a table or a column is missing."""
    return _code(error) in (*MISSING, *NO_COLUMN) or bool(NO_SUCH.search(str(error)))


def lacks_column(error: Exception) -> bool:
    """Return whether a column is missing, so the table is that of another version."""
    match = NO_SUCH.search(str(error))
    return _code(error) in NO_COLUMN or bool(match and "column" in match[0])


def _code(error: Exception) -> Any:
    cause = error.__cause__
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)  # psycopg 3, 2
    return code or next(iter(error.args), None)
