"""Locks in the table of a DatabaseCache, by statements of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError, ProgrammingError, connections, router

from django_singletask.stores.base import Entry, Outcome, Store, marker_key

__all__ = ["DatabaseStore"]

# Django's own DatabaseCache cannot hold locks: its add() is a SELECT and then an UPDATE, so two
# takers of an expired row both win, and its get() deletes an expired row by key alone:
#
#   A: SELECT -> expired                     B: SELECT -> expired
#   A: UPDATE ... -> "taken"                 B: UPDATE ... -> "taken"
#
# Here the condition stands in the statement that writes, and the clock is the database's.

SHIFT = 14
"""Hours added to the times on databases that store naive ones, with ``USE_TZ = False``.

Django's cache code then compares ``expires`` with the local time of ``TIME_ZONE`` and would cull
a live lock whose time is UTC. UTC + 14 h is never behind a local time and, unlike the local time,
never jumps.
"""


class Dialect:
    """The parts of the statements in which the databases differ."""

    now = "clock_timestamp()"
    then = "clock_timestamp() + %s * interval '1 second'"
    left = "extract(epoch FROM expires - {now})"
    upsert = True

    def seconds(self, lease: float) -> Any:
        return lease


class SQLite(Dialect):
    upsert = True

    def __init__(self) -> None:
        shift = "" if settings.USE_TZ else f", '+{SHIFT} hours'"
        self.now = f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'{shift})"
        self.then = f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now'{shift}, %s)"
        self.left = "(julianday(expires) - julianday({now})) * 86400.0"

    def seconds(self, lease: float) -> Any:
        return f"{lease:+.3f} seconds"


class MySQL(Dialect):
    # ON DUPLICATE KEY UPDATE does not tell an insert from a row left as it was.
    upsert = False

    def __init__(self) -> None:
        shift = "" if settings.USE_TZ else f" + INTERVAL {SHIFT} HOUR"
        self.now = f"(UTC_TIMESTAMP(6){shift})"
        self.then = f"({self.now} + INTERVAL %s MICROSECOND)"
        self.left = "TIMESTAMPDIFF(MICROSECOND, {now}, expires) / 1000000"

    def seconds(self, lease: float) -> Any:
        return int(lease * 1_000_000)


DIALECTS: dict[str, type[Dialect]] = {"postgresql": Dialect, "sqlite": SQLite, "mysql": MySQL}

# The server asks to try again: two takers and a release of one key make a deadlock on MySQL, and
# the loser of a race gets an error on PostgreSQL whose default isolation is not READ COMMITTED.
DEADLOCK = 1213
SERIALIZATION_FAILURES = {"40001", "40P01"}
TRIES = 5


class DatabaseStore(Store):
    """Keep locks as rows, on a connection of their own in autocommit.

    A lock that is taken inside ``atomic()`` is seen by others at once and does not roll back.
    """

    def __init__(self, cache: Any) -> None:
        super().__init__(cache)
        self.alias: str = router.db_for_write(cache.cache_model_class)
        self.connection = self._connection()
        # A thread's store is closed by whichever thread drops it.
        self.connection.inc_thread_sharing()
        vendor = self.connection.vendor
        if vendor not in DIALECTS:
            raise ImproperlyConfigured(
                f"DATABASES[{self.alias!r}] is {vendor}: locks need PostgreSQL, MySQL, MariaDB "
                "or SQLite. Route the cache table to one of them, or use another cache."
            )
        self.dialect = dialect = DIALECTS[vendor]()
        table = self.connection.ops.quote_name(cache._table)
        left = dialect.left.format(now=dialect.now)
        values = f"INTO {table} (cache_key, value, expires) VALUES (%s, %s, {dialect.then})"
        self._upsert = (
            f"INSERT {values} ON CONFLICT (cache_key) DO UPDATE SET value = excluded.value, "
            f"expires = excluded.expires WHERE {table}.expires <= {dialect.now}"
        )
        self._insert = f"INSERT IGNORE {values}"
        self._take_over = (
            f"UPDATE {table} SET value = %s, expires = {dialect.then} "
            f"WHERE cache_key = %s AND expires <= {dialect.now}"
        )
        self._update = (
            f"UPDATE {table} SET expires = {dialect.then} WHERE cache_key = %s AND value = %s"
        )
        self._change = (
            f"UPDATE {table} SET value = %s, expires = {dialect.then} "
            f"WHERE cache_key = %s AND value IN (%s, %s)"
        )
        self._delete = f"DELETE FROM {table} WHERE cache_key = %s AND value = %s"
        self._select = (
            f"SELECT value, {left} FROM {table} WHERE cache_key = %s AND expires > {dialect.now}"
        )
        self._purge = (
            f"DELETE FROM {table} WHERE cache_key LIKE %s ESCAPE '!' AND expires < {dialect.then}"
        )
        self._select_all = (
            f"SELECT cache_key, value, {left} FROM {table} "
            f"WHERE cache_key LIKE %s ESCAPE '!' AND expires > {dialect.now}"
        )

    def _connection(self) -> Any:
        connection = connections.create_connection(self.alias)
        # What the project set for its own queries: without autocommit nobody else would ever see
        # a lock, and of a pool each thread's store would keep a connection from the requests.
        given = connection.settings_dict
        options = {name: value for name, value in given["OPTIONS"].items() if name != "pool"}
        connection.settings_dict = {**given, "AUTOCOMMIT": True, "OPTIONS": options}
        return connection

    def add(self, key: str, value: bytes, lease: float) -> Entry | None:
        return self._add(self.make_key(key), value.decode(), lease)

    def release(self, key: str, value: bytes) -> Outcome:
        made = self.make_key(key)
        if self._run(self._delete, [made, value.decode()]):
            return Outcome.OK
        return Outcome.GONE if self._read(made) is None else Outcome.TAKEN

    def renew(self, key: str, value: bytes, lease: float) -> Outcome:
        made, text = self.make_key(key), value.decode()
        # A row of ours that has expired while nobody took it is ours still.
        if self._run(self._update, [self.dialect.seconds(lease), made, text]):
            return Outcome.OK
        # clear() writes its marker before it deletes the row, so whoever finds no row because of
        # it finds the marker. In the other order:
        #
        #   clear: DELETE                                            marker
        #   renew:         UPDATE -> no row   marker? none   INSERT -> taken again
        if self._read(self.make_key(marker_key(key, value))) is not None:
            return Outcome.GONE if self._read(made) is None else Outcome.TAKEN
        return Outcome.RETAKEN if self._add(made, text, lease) is None else Outcome.TAKEN

    def replace(self, key: str, old: bytes, new: bytes, lease: float) -> bool:
        made, seconds = self.make_key(key), self.dialect.seconds(lease)
        params = [new.decode(), seconds, made, old.decode(), new.decode()]
        return bool(self._run(self._change, params))

    def read(self, key: str) -> Entry | None:
        return self._read(self.make_key(key))

    def clear(self, key: str, value: bytes, lease: float) -> bool:
        self._add(self.make_key(marker_key(key, value)), "1", lease)
        return bool(self._run(self._delete, [self.make_key(key), value.decode()]))

    def entries(self) -> Iterator[tuple[str, Entry]]:
        for made, value, left in self._run(self._select_all, [self._pattern()], fetch=True):
            key = self.lock_key(made)
            if key is not None:
                yield key, Entry(value.encode(), float(left))

    def purge(self) -> int:
        # Nobody else does it in a table of its own. A day is longer than any process sleeps that
        # may find its row again.
        params = [self._pattern(), self.dialect.seconds(-24 * 60 * 60)]
        deleted: int = self._run(self._purge, params)
        return deleted

    def _pattern(self) -> str:
        prefix = self.prefix()
        for char in "!%_":
            prefix = prefix.replace(char, f"!{char}")
        return f"{prefix}%"

    def close(self) -> None:
        self.connection.close()

    def _add(self, made: str, text: str, lease: float) -> Entry | None:
        seconds = self.dialect.seconds(lease)
        for _ in range(TRIES):
            if self.dialect.upsert:
                taken = self._run(self._upsert, [made, text, seconds])
            else:
                taken = self._run(self._insert, [made, text, seconds]) or self._run(
                    self._take_over, [text, seconds, made]
                )
            if taken:
                return None
            entry = self._read(made)
            if entry is not None:
                return None if entry.value == text.encode() else entry
            # It was released, or it expired, between the statements: once more.
        return Entry(b"", None)

    def _read(self, made: str) -> Entry | None:
        rows = self._run(self._select, [made], fetch=True)
        return Entry(rows[0][0].encode(), float(rows[0][1])) if rows else None

    def _run(self, sql: str, params: list[Any], *, fetch: bool = False) -> Any:
        for last in [False] * (TRIES - 1) + [True]:
            kept = self.connection.connection is not None
            try:
                with self.connection.cursor() as cursor:
                    cursor.execute(sql, params)
                    return cursor.fetchall() if fetch else cursor.rowcount
            except (OperationalError, InterfaceError) as error:
                if self._is_locked(error):
                    raise OperationalError(
                        f"{error}: DATABASES[{self.alias!r}] is an SQLite file in which this or "
                        "another connection has a transaction open, and SQLite knows only one "
                        "writer. Keep the locks in an SQLite file of their own: a second entry "
                        "in DATABASES and a router for the cache table (see the README)."
                    ) from error
                # Every statement here can be sent twice: a take that finds its own row has won.
                # So a kept connection that the server has closed meanwhile costs no error.
                self._name_the_table(error)
                if last or not (kept or asks_again(error)):
                    raise
            except ProgrammingError as error:
                self._name_the_table(error)
                raise
            except BaseException:
                # A signal's too, such as a soft time limit: the reply may be unread, and the
                # next statement would find the connection busy.
                self.connection.close()
                raise

    def _name_the_table(self, error: Exception) -> None:
        self.connection.close()
        text = str(error)
        if any(part in text for part in ("no such table", "does not exist", "doesn't exist")):
            # The same class of error, with the next step.
            raise type(error)(
                f"{error} Make the table of the lock cache: "
                f"manage.py createcachetable --database {self.alias}"
            ) from error

    def _is_locked(self, error: Exception) -> bool:
        return self.connection.vendor == "sqlite" and "is locked" in str(error)


def asks_again(error: Exception) -> bool:
    """Say whether the database asks to try the same again: a deadlock, or a lost race."""
    if error.args and error.args[0] == DEADLOCK:
        return True
    cause = error.__cause__
    code = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)  # psycopg 3, 2
    return code in SERIALIZATION_FAILURES
