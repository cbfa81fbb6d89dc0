"""What can go wrong only with locks in a database. The contract is in test_stores.py."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import request_finished
from django.db import connection, connections, transaction
from django.test import override_settings

from django_singletask import LockUnavailable, TaskLock
from django_singletask.stores import database
from django_singletask.stores.base import Entry, Outcome
from django_singletask.testing.stores import StoreContract
from tests import inside, servers
from tests.conftest import empty
from tests.entries import eventually, holder, key_of, private_store

A, B = holder("a"), holder("b")
KEY = key_of("nightly")
FENCE = "singletask:@fence"
"""The key of the last fencing token."""
TABLES = {"db_postgres": "locks_pg", "db_mariadb": "locks_maria", "db_sqlite": "locks_sqlite"}
DATABASES = {"db_postgres": "default", "db_mariadb": "mariadb", "db_sqlite": "sqlite_locks"}


def on(*aliases: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cache_alias", aliases, indirect=True)


@pytest.fixture
def store(cache_alias: str) -> Iterator[Any]:
    yield inside.store_of(cache_alias)
    connections[DATABASES[cache_alias]].close()


def statements(store: Any, work: Callable[[], object]) -> list[str]:
    """Return the first words of the statements that a store sent meanwhile."""
    first_words = []

    def record(execute: Any, sql: str, *args: Any) -> Any:
        first_words.append(sql.split()[0])
        return execute(sql, *args)

    with store.connection.execute_wrapper(record):
        work()
    return first_words


# Trips


@on(*TABLES)
def test_take_and_give_back_are_two_statements(store: Any) -> None:
    def take_and_give_back() -> None:
        assert store.add(KEY, A, 60) is None
        assert store.release(KEY, A) is Outcome.OK

    store.read(KEY)  # on a new connection to MySQL, Django asks for the server's version
    assert statements(store, take_and_give_back) == ["INSERT", "DELETE"]


@on(*TABLES)
def test_a_conflict_is_two_statements_and_three_on_mysql(store: Any, cache_alias: str) -> None:
    store.add(KEY, A, 60)
    take_over = ["UPDATE"] if cache_alias == "db_mariadb" else []
    assert statements(store, lambda: store.add(KEY, B, 60)) == ["INSERT", *take_over, "SELECT"]


@on(*TABLES)
def test_a_renewal_is_one_statement(store: Any) -> None:
    store.add(KEY, A, 60)
    assert statements(store, lambda: store.renew(KEY, A, 60)) == ["UPDATE"]


# Fencing tokens


@pytest.fixture
def held_counter(store: Any, cache_alias: str) -> Iterator[Callable[[], None]]:
    """Let another transaction lock the row of the last token; give the function that ends it."""
    store.add(KEY, A, 60)
    assert store.fence(KEY, A)
    other = connections.create_connection(DATABASES[cache_alias])
    other.inc_thread_sharing()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        query = f"SELECT value FROM {store.table} WHERE cache_key = %s FOR UPDATE"
        cursor.execute(query, [store.make_key(FENCE)])
    yield other.rollback
    other.close()


def taken_over_meanwhile(store: Any, draw: Callable[[], Any], end_other: Callable[[], None]) -> Any:
    """Return what A draws if B takes the lock over while A waits for the row of the last token."""
    drawn = []
    thread = threading.Thread(target=lambda: drawn.append(draw()))
    thread.start()
    waits = (
        "SELECT 1 FROM pg_locks WHERE NOT granted"
        if store.vendor == "postgresql"
        else "SELECT 1 FROM information_schema.global_status "
        "WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS' AND variable_value > 0"
    )
    eventually(lambda: store.execute(waits))
    assert store.release(KEY, A) is Outcome.OK
    assert store.add(KEY, B, 60) is None
    end_other()
    thread.join()
    return drawn[0]


@on("db_postgres", "db_mariadb")
def test_a_holder_whose_lock_is_taken_over_while_it_waits_gets_no_fencing_token(
    store: Any, cache_alias: str, held_counter: Callable[[], None]
) -> None:
    def draw() -> int | None:
        return inside.store_of(cache_alias).fence(KEY, A)

    assert taken_over_meanwhile(store, draw, held_counter) is None
    assert store.fence(KEY, B)


@on("db_postgres")
def test_control_one_statement_that_looks_at_the_owner_first_gives_it_a_fencing_token(
    store: Any, cache_alias: str, held_counter: Callable[[], None]
) -> None:
    table = store.table
    statement = (
        f"UPDATE {table} SET value = CAST(value AS bigint) + 1 WHERE cache_key = %s "
        f"AND EXISTS (SELECT 1 FROM {table} WHERE cache_key = %s AND value = %s)"
    )
    params = [store.make_key(FENCE), store.make_key(KEY), A.decode()]

    def draw() -> int:
        rows: int = inside.store_of(cache_alias).execute(statement, params)
        return rows

    assert taken_over_meanwhile(store, draw, held_counter) == 1


# Rows


@on("db_postgres", "db_mariadb")
def test_a_take_that_is_spoiled_each_time_is_a_conflict(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(KEY, A, 60)
    # As if the lock were released before each look, and taken before each insert.
    monkeypatch.setattr(store, "read", lambda key: None)
    assert store.add(KEY, B, 60) == Entry(b"", None)


@on(*TABLES)
def test_values_are_plain_json(store: Any, cache_alias: str) -> None:
    with TaskLock("nightly", cache=cache_alias) as lock:
        query = f"SELECT value FROM {TABLES[cache_alias]} WHERE cache_key = %s"
        ((raw,),) = store.execute(query, [store.make_key(lock.key)])
        assert json.loads(raw)["token"] == lock.token


@on(*TABLES)
def test_leases_have_fractions_of_a_second(store: Any) -> None:
    store.add(KEY, A, 0.5)
    entry = store.read(KEY)
    assert entry is not None
    assert 0 < entry.remaining < 0.51
    assert store.renew(KEY, A, 1.75) is Outcome.OK
    assert 1 < store.read(KEY).remaining < 1.76


# Local times, and the culling of a full cache


def culled(settings: Any, cache_alias: str, zone: str) -> tuple[bytes | None, bool]:
    """Let Django's own set() cull the table, in a project that stores local times.

    Return the value of a live lock afterwards, and whether an expired row was culled.
    """
    key, expired = key_of("live"), key_of("expired")
    with override_settings(USE_TZ=False, TIME_ZONE=zone):
        with private_store(settings, cache_alias, options={"MAX_ENTRIES": 2}) as store:
            empty(cache_alias)
            store.add(key, A, 60)
            cache = caches[cache_alias]
            cache.set("expired", "value", -24 * 60 * 60)
            cache.set("other", "value", 60)
            cache.set("culls", "value", 60)  # the table has three rows, one more than it may
            entry = store.read(key)
            assert store.read(expired) is None
            rows = store.execute(f"SELECT cache_key FROM {TABLES[cache_alias]}")
            connections[DATABASES[cache_alias]].close()
    return entry and entry.value, not any("expired" in cache_key for (cache_key,) in rows)


ZONES = ["Asia/Tokyo", "America/Chicago", "UTC", "Pacific/Kiritimati"]


@on(*TABLES)
@pytest.mark.parametrize("zone", ZONES)
def test_culling_in_local_time_leaves_a_live_lock(cache_alias: str, zone: str, settings) -> None:
    assert culled(settings, cache_alias, zone) == (A, True)


@on("db_mariadb", "db_sqlite")
def test_control_culling_in_local_time_deletes_a_lock_in_utc(
    cache_alias: str, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "SHIFT", 0)
    assert culled(settings, cache_alias, "Asia/Tokyo") == (None, True)


@on(*TABLES)
@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Chicago"])
def test_a_lock_in_local_time_ends_with_its_lease(cache_alias: str, zone: str, settings) -> None:
    with override_settings(USE_TZ=False, TIME_ZONE=zone):
        with private_store(settings, cache_alias) as store:
            store.add(KEY, A, 0.3)
            blocker = store.add(KEY, B, 60)
            assert blocker is not None
            assert 0 < blocker.remaining < 0.31
            assert eventually(lambda: store.add(KEY, B, 60) is None)
            assert 50 < store.read(KEY).remaining < 60.01
            assert [key for key, _ in store.entries()] == [KEY]


# Transactions of the application


class Rollback(Exception):
    pass


@on("db_postgres", "db_mariadb")
@pytest.mark.django_db(databases="__all__", transaction=True)
def test_a_lock_taken_in_a_transaction_is_seen_at_once_and_survives_its_rollback(
    store: Any, cache_alias: str
) -> None:
    using = DATABASES[cache_alias]
    table = TABLES[cache_alias]
    seen = []

    def look() -> None:
        seen.append(inside.store_of(cache_alias).read(KEY))

    with suppress(Rollback), transaction.atomic(using=using):
        with connections[using].cursor() as cursor:
            cursor.execute(f"SELECT COUNT(*) FROM {table}")
        store.add(KEY, A, 60)
        other = threading.Thread(target=look)
        other.start()
        other.join()
        raise Rollback
    assert seen[0].value == A
    assert store.read(KEY).value == A


@on("db_postgres", "db_mariadb")
@pytest.mark.django_db(databases="__all__", transaction=True)
def test_control_an_entry_that_the_cache_adds_in_a_transaction_rolls_back(
    store: Any, cache_alias: str
) -> None:
    with suppress(Rollback), transaction.atomic(using=DATABASES[cache_alias]):
        assert caches[cache_alias].add("nightly", "mine")
        assert store.read("nightly") is None
        raise Rollback
    assert caches[cache_alias].get("nightly") is None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SQLite wait only for a moment."""
    configuration = connections.settings["sqlite_locks"] | {"OPTIONS": {"timeout": 0.1}}
    monkeypatch.setitem(connections.settings, "sqlite_locks", configuration)


@on("db_sqlite")
@pytest.mark.parametrize(
    "before", ["SELECT COUNT(*) FROM locks_sqlite", "DELETE FROM locks_sqlite"]
)
@pytest.mark.django_db(databases="__all__", transaction=True)
def test_a_lock_in_the_sqlite_file_of_the_transaction_raises_with_the_remedy(
    impatient: None, store: Any, before: str
) -> None:
    lock = TaskLock("nightly", cache="db_sqlite")
    with transaction.atomic(using="sqlite_locks"):
        with connections["sqlite_locks"].cursor() as cursor:
            cursor.execute(before)
            cursor.fetchall()
            with pytest.raises(LockUnavailable, match="separate SQLite file"):
                lock.acquire()
    assert not lock.locked()
    assert lock.acquire()
    assert lock.release()


@on("db_sqlite")
@pytest.mark.django_db(databases="__all__", transaction=True)
def test_locks_in_an_sqlite_file_of_their_own_are_taken_in_transactions(
    store: Any,
) -> None:
    with transaction.atomic(using="sqlite"), connections["sqlite"].cursor() as cursor:
        cursor.execute("DELETE FROM django_singletask_tasklockevent")
        assert store.add(KEY, A, 60) is None


# Connections


def kill_connection_of(store: Any, cache_alias: str) -> None:
    other = connections.create_connection(DATABASES[cache_alias])
    if cache_alias == "db_postgres":
        ((pid,),) = store.execute("SELECT pg_backend_pid()")
        kill, is_there = (
            "SELECT pg_terminate_backend(%s)",
            "SELECT 1 FROM pg_stat_activity WHERE pid = %s",
        )
    else:
        ((pid,),) = store.execute("SELECT CONNECTION_ID()")
        kill = "KILL %s"
        is_there = "SELECT 1 FROM information_schema.processlist WHERE id = %s"

    def gone() -> bool:
        cursor.execute(is_there, [pid])
        return not cursor.fetchall()

    with other.cursor() as cursor:
        cursor.execute(kill, [pid])
        eventually(gone)
    other.close()


@on("db_postgres", "db_mariadb")
def test_a_connection_that_the_server_closed_raises_no_error(store: Any, cache_alias: str) -> None:
    for succeeds in (
        lambda: store.add(KEY, A, 60) is None,
        lambda: store.renew(KEY, A, 60) is Outcome.OK,
        lambda: store.read(KEY) is not None,
        lambda: store.release(KEY, A) is Outcome.OK,
    ):
        kill_connection_of(store, cache_alias)
        assert succeeds()


@on("db_postgres", "db_mariadb")
def test_the_connection_of_a_thread_ends_with_the_thread(store: Any, cache_alias: str) -> None:
    wrappers = []

    def work() -> None:
        thread_store = inside.store_of(cache_alias)
        thread_store.read(KEY)
        wrappers.append(thread_store.connection)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert wrappers[0].connection is None


@on("db_postgres")
def test_the_end_of_a_request_does_not_close_the_connection(store: Any) -> None:
    store.read(KEY)
    before = store.connection.connection
    request_finished.send(sender=None)
    assert store.connection.connection is before
    assert store.connection is not connection


@on("db_postgres", "db_mariadb")
def test_locks_work_in_a_project_without_autocommit(
    cache_alias: str, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    using = DATABASES[cache_alias]
    configuration = connections.settings[using] | {"AUTOCOMMIT": False}
    monkeypatch.setitem(connections.settings, using, configuration)
    with private_store(settings, cache_alias) as store:
        store.add(KEY, A, 60)
        other = database.DatabaseStore(store.cache, cache_alias)
        assert other.read(KEY).value == A
        other.close()


@on("db_postgres")
def test_locks_take_no_connection_from_the_pool(
    cache_alias: str, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = connections.settings["default"] | {"OPTIONS": {"pool": {"max_size": 1}}}
    monkeypatch.setitem(connections.settings, "default", configuration)
    with private_store(settings, cache_alias) as store:
        assert store.add(KEY, A, 60) is None
        assert store.connection.pool is None


@pytest.mark.only_all("it starts processes")
@on("db_postgres")
def test_a_race_under_serializable_isolation_has_one_winner_and_no_error(
    cache_alias: str, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"options": "-c default_transaction_isolation=serializable"}
    configuration = connections.settings["default"] | {"OPTIONS": options}
    monkeypatch.setitem(connections.settings, "default", configuration)
    contract = StoreContract()
    contract.alias = cache_alias
    with private_store(settings, cache_alias), contract.prepared():
        contract.test_of_several_that_take_an_expired_lock_one_gets_it()


@on("db_postgres")
@pytest.mark.skipif(
    not servers.find("pgbouncer"), reason="PgBouncer, which is optional, is not installed"
)
def test_a_limit_that_grows_is_left_out_where_a_pool_refuses_it(
    cache_alias: str, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"options": ""}
    with servers.PgBouncer(connections.settings["default"]["PORT"]) as bouncer:
        changes = {"PORT": bouncer.port, "OPTIONS": options}
        monkeypatch.setitem(
            connections.settings, "default", connections.settings["default"] | changes
        )
        with private_store(settings, cache_alias) as store:
            for seconds in (0.5, 2):
                store.limit(seconds)
            store.read(KEY)  # no error
            store.limit(5)
            store.read(KEY)


@on("db_postgres")
def test_a_limit_that_grows_keeps_the_options_of_the_project(
    cache_alias: str, settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"options": "-c application_name=shop"}
    configuration = connections.settings["default"] | {"OPTIONS": options}
    monkeypatch.setitem(connections.settings, "default", configuration)
    with private_store(settings, cache_alias) as store:
        for seconds in (0.5, 2):
            store.limit(seconds)
            facts = "SELECT current_setting('application_name'), current_setting('{}')"
            found = store.execute(facts.format("statement_timeout"))
            assert found == [("shop", {0.5: "500ms", 2: "2s"}[seconds])]


@on("db_sqlite")
def test_another_database_is_refused(cache_alias: str, settings, monkeypatch) -> None:
    monkeypatch.delitem(database.DIALECTS, "sqlite")
    with pytest.raises(ImproperlyConfigured, match=r"DATABASES\['sqlite_locks'\] is sqlite"):
        with private_store(settings, cache_alias):
            pass


@on(*TABLES)
def test_a_missing_table_raises_with_the_next_step(cache_alias: str, settings) -> None:
    with private_store(settings, cache_alias, f"no_{TABLES[cache_alias]}") as store:
        steps = r"[^.]\. Create the table of .*: manage\.py createc"
        with pytest.raises(LockUnavailable, match=steps):
            store.read(KEY)


# Old rows


@on(*TABLES)
def test_rows_that_ended_a_day_ago_are_purged(store: Any) -> None:
    day = 24 * 60 * 60
    # Holders may look for their row until a day after its lease.
    for name, lease in (("old", -day - 60), ("young", -60), ("live", 60)):
        store.add(key_of(name), A, 1)
        store.renew(key_of(name), A, lease)
    assert store.purge() == 1
    assert store.execute(f"SELECT COUNT(*) FROM {store.table}") in ([(2,)], ((2,),))


@on(*TABLES)
def test_purge_leaves_rows_that_are_not_locks(store: Any, cache_alias: str) -> None:
    caches[cache_alias].set("page", "cached", -90_000)
    assert store.purge() == 0
