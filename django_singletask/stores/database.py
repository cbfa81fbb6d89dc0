"""Locks in the table of a DatabaseCache, with separate statements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from django.conf import settings
from django.db import Error, InterfaceError, OperationalError, connections, router

from django_singletask.forks import close_before_forks, undivided
from django_singletask.stores.base import TIMEOUT, TRIES, Entry, Errors, Outcome, Store

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
whose time is in UTC. UTC + 14 h is never behind a local time, and never jumps.
"""

LIKE = "cache_key LIKE %s ESCAPE '!'"


def like(prefix: str) -> str:
    """Return the pattern of texts that begin with ``prefix``."""
    return re.sub("([!%_])", r"!\1", prefix) + "%"


class Dialect(NamedTuple):
    """The parts of the statements that differ between databases.

    ``now`` is the time of the server, ``then`` the time in so many seconds, ``seconds`` a time in
    seconds since 1970. ``timeouts``: the options of the client for the longest time of a request,
    and their units in a second. ``exact``: a text that is compared with its case and its spaces.
    """

    now: str
    then: str
    seconds: str
    timeouts: dict[str, int]
    exact: str = "%s"

    def limits(self, seconds: float) -> dict[str, Any]:
        """Return the options of the client that limit a request to so many seconds."""
        return {name: math.ceil(seconds * unit) for name, unit in self.timeouts.items()}


POSTGRESQL = Dialect(
    now="clock_timestamp()",
    then="{now} + %s * interval '1 second'",
    seconds="extract(epoch FROM CAST({} AS timestamptz))",
    timeouts={"connect_timeout": 1, "tcp_user_timeout": 1000},
)
SQLITE = Dialect(
    now="strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '{shift} hours')",
    then="strftime('%%Y-%%m-%%d %%H:%%M:%%f', {now}, %s || ' seconds')",
    seconds="(julianday({}) - 2440587.5) * 86400.0",
    timeouts={"timeout": 1},
)
MYSQL = Dialect(
    now="(UTC_TIMESTAMP(6) + INTERVAL {shift} HOUR)",
    then="({now} + INTERVAL %s * 1000000 MICROSECOND)",
    seconds="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {}) / 1000000",
    timeouts={"connect_timeout": 1, "read_timeout": 1, "write_timeout": 1},
    # By default MySQL compares texts without their case and without spaces at their ends.
    exact="CAST(%s AS BINARY)",
)
DIALECTS = {"postgresql": POSTGRESQL, "sqlite": SQLITE, "mysql": MYSQL}
"""The dialects by the vendor of a connection."""


class DatabaseStore(Store):
    """Keep locks as rows, on a separate connection in autocommit mode.

    So other processes see at once a lock that is taken inside ``atomic()``, and the lock is not
    rolled back.
    """

    family = "database"
    client_errors: Errors = (Error, OSError)
    _options_before: str | None = None
    """The project's options of PostgreSQL, while this store has added one to them."""

    def __init__(self, cache: Any, alias: str) -> None:
        super().__init__(cache, alias)
        self.alias: str = router.db_for_write(cache.cache_model_class)
        self.connection: Any = connections.create_connection(self.alias)
        self.vendor: str = self.connection.vendor
        # Change options that the project chose for its own queries: without autocommit, other
        # processes would not see the locks; and each store would block a connection of the pool.
        chosen = self.connection.settings_dict
        options = dict(chosen["OPTIONS"])
        options.pop("pool", None)
        if self.vendor == "postgresql":
            options = POSTGRESQL.limits(TIMEOUT) | options
        self.connection.settings_dict = {**chosen, "AUTOCOMMIT": True, "OPTIONS": options}
        # Another thread may close the store. inc_thread_sharing() would allow that, too, but then
        # each use of the connection takes a lock of Django:
        #
        #   task:  "with" takes Django's lock   SIGUSR1: SoftTimeLimitExceeded   (never unlocked)
        #   task:                                              close(): waits for the lock for ever
        #
        # Python 3.14 calls the handler there: https://github.com/python/cpython/issues/148874
        self.connection.validate_thread_sharing = lambda: None  # type: ignore[method-assign]
        close_before_forks(self.connection)
        self.table: str = cache._table  # noqa: SLF001 - LOCATION; Django has no public name for it
        self.places: frozenset[str] = frozenset(
            {f"table {self.table} of DATABASES[{self.alias!r}]"}
        )
        self.quoted: str = self.connection.ops.quote_name(self.table)
        self.dialect: Dialect = DIALECTS[self.vendor]
        shift = SHIFT
        if settings.USE_TZ:
            shift = 0
        self.now: str = self.dialect.now.format(shift=shift)
        self.then: str = self.dialect.then.format(now=self.now)

    def set_timeouts(self, seconds: float) -> None:
        self.close()
        options = self.connection.settings_dict["OPTIONS"]
        options.update(self.dialect.limits(seconds))
        if self.vendor == "postgresql":
            if self._options_before is None:
                self._options_before = options.get("options", "")
            limit = f"-c statement_timeout={math.ceil(seconds * 1000)}"
            options["options"] = f"{self._options_before} {limit}"

    def insert(self, key: str, value: bytes, lease: float) -> Any:
        cache_key = self.make_key(key)
        text = value.decode()
        # The lease is the parameter of self.then.
        into = f"INTO {self.quoted} (cache_key, value, expires) VALUES (%s, %s, {self.then})"
        params = [cache_key, text, lease]
        if self.vendor != "mysql":
            upsert = (
                f"INSERT {into} ON CONFLICT (cache_key) DO UPDATE SET value = excluded.value, "
                f"expires = excluded.expires WHERE {self.quoted}.expires <= {self.now}"
            )
            return self.execute(upsert, params)
        # The row count of ON DUPLICATE KEY UPDATE is the same for an insert and an unchanged row.
        inserted = self.execute(f"INSERT IGNORE {into}", params)
        if inserted:
            return inserted
        return self._update(cache_key, text, lease, condition=f"expires <= {self.now}")

    def _update(
        self, cache_key: str, text: str, lease: float, *, condition: str, params: Sequence[Any] = ()
    ) -> Any:
        """Write a row if its ``condition`` with these ``params`` is true; return the row count."""
        # ``then`` has the placeholder of the lease.
        update = f"UPDATE {self.quoted} SET value = %s, expires = {self.then} WHERE cache_key = %s"
        return self.execute(f"{update} AND {condition}", [text, lease, cache_key, *params])

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome:
        cache_key = self.make_key(key)
        before = old.decode()
        after = new.decode()
        exact = self.dialect.exact
        for _ in range(TRIES):
            if lease is None:
                delete = f"DELETE FROM {self.quoted} WHERE cache_key = %s AND value = {exact}"
                changed = self.execute(delete, [cache_key, before])
            else:
                # The holder still has a row with its value, even an expired one.
                has_either = f"value IN ({exact}, {exact})"
                changed = self._update(
                    cache_key, after, lease, condition=has_either, params=[before, after]
                )
            if changed:
                return Outcome.OK
            was_sent_twice = self.was_sent_twice  # set by execute(), which read() calls again
            entry = self.read(key)
            if entry is None:
                if lease is None and was_sent_twice:
                    return Outcome.SENT_TWICE
                return Outcome.GONE
            if entry.value not in (old, new):
                return Outcome.TAKEN
            # Another thread of the holder took it again between the statements: try again.
        return Outcome.TAKEN

    def read_many(self, keys: Iterable[str]) -> dict[str, Entry]:
        names = {key: self.make_key(key) for key in keys}
        if not names:
            return {}
        marks = ", ".join(["%s"] * len(names))
        entries = dict(self._live(f"cache_key IN ({marks})", [*names.values()]))
        return {key: entries[name] for key, name in names.items() if name in entries}

    def _live(self, condition: str, params: Sequence[Any]) -> Iterator[tuple[str, Entry]]:
        """Yield the cache key and entry of each row that has not expired."""
        ends = self.dialect.seconds.format("expires")
        now = self.dialect.seconds.format(self.now)
        query = f"SELECT cache_key, value, {ends} - {now} FROM {self.quoted} WHERE {condition}"
        for cache_key, value, left in self.execute(f"{query} AND expires > {self.now}", params):
            yield cache_key, Entry(value.encode(), float(left))

    def microseconds(self) -> int:
        now = self.dialect.seconds.format(self.dialect.now.format(shift=0))
        [(seconds,)] = self.execute(f"SELECT {now}")
        return int(seconds * 1_000_000)

    def scan(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        return self._live(LIKE, [like(prefix)])

    def purge(self) -> int:
        # Nothing else deletes rows of a dedicated table. A process that sleeps for less than a day
        # finds its row again.
        statement = f"DELETE FROM {self.quoted} WHERE {LIKE} AND expires < {self.then}"
        a_day_ago = -24 * 60 * 60
        return int(self.execute(statement, [like(self.prefix()), a_day_ago]))

    def close(self) -> None:
        with undivided(self.connection):
            self.connection.close()

    def execute(self, sql: str, params: Sequence[Any] = ()) -> Any:
        """Return the rows of a query, or the number of rows that a statement changed."""
        self.was_sent_twice: bool = False
        for attempts_left in reversed(range(TRIES)):
            was_open = self.connection.connection is not None
            try:
                # In an SQLite file, a second connection would wait for the end of this statement.
                self.is_asking: bool = self.vendor != "sqlite"
                with undivided(self.connection), self.connection.cursor() as cursor:
                    cursor.execute(sql, params)
                    if cursor.description is None:
                        return cursor.rowcount
                    return cursor.fetchall()
            except BaseException as error:
                # After a signal, such as a soft time limit, there may be an unread reply.
                self.connection.close()
                if not isinstance(error, self.client_errors):
                    raise
                if self._options_before is not None and not was_open:
                    # PgBouncer and RDS Proxy refuse this option.
                    self.connection.settings_dict["OPTIONS"]["options"] = self._options_before
                    self._options_before = None
                    continue
                what = trouble(error)
                if what in CURES:
                    raise self.unavailable(error, CURES[what].format(self.alias)) from error
                # If the server has closed the connection, try again: every statement here can be
                # sent twice. Only a deletion then has another result.
                if was_open and isinstance(error, (OperationalError, InterfaceError)):
                    self.was_sent_twice = True
                elif what != "race":
                    raise self.unavailable(error) from error
                if attempts_left == 0:
                    raise self.unavailable(error) from error
            finally:
                self.is_asking = False


CURES = {
    "busy": (
        ": DATABASES[{!r}] is an SQLite file with an open transaction, and SQLite allows only one "
        "writer. Keep the locks in a separate SQLite file, with a second entry in DATABASES and a "
        "router for the cache table, as 'Choosing a cache' in the documentation shows"
    ),
    "table": ". Create the table of the lock cache: manage.py createcachetable --database {}",
}
"""What to do about a :func:`trouble`."""

# On MySQL, two takes and a release of one key can cause a deadlock. On PostgreSQL, the loser of a
# race gets an error if the default isolation level is not READ COMMITTED.
CODES = {
    1205: "race",
    1213: "race",
    "40001": "race",
    "40P01": "race",
    1146: "table",
    "42P01": "table",
    1054: "column",
    "42703": "column",
}
SQLITE_ERRORS = re.compile(
    "(?P<busy>database (table |schema )?is locked)|(?P<table>no such table)"
    "|(?P<column>no such column|has no column named)"
)
"""SQLite's errors have no codes."""


def trouble(error: Exception) -> str:
    """Return a word for what is wrong, or ``""`` if the error does not show that.

    The words are ``"race"``, which this statement has lost, ``"table"`` and ``"column"``, which are
    missing, and ``"busy"``: another connection blocks this one in an SQLite file.
    """
    cause = error.__cause__
    codes = [
        getattr(cause, "sqlstate", None),  # of psycopg 3
        getattr(cause, "pgcode", None),  # of psycopg2
        *error.args[:1],  # of mysqlclient, whose errors have the code as their first argument
    ]
    for code in codes:
        if code in CODES:
            return CODES[code]
    match = SQLITE_ERRORS.search(str(error))
    if match is None:
        return ""
    return str(match.lastgroup)  # the name of the group that matched
