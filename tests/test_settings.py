"""In the settings of the tests, each cache alias is a separate cache that works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from django.core.cache import caches
from django.db import connections

from tests.routers import LOCK_TABLES

ROOT = Path(__file__).parent.parent


def test_the_cache_of_each_alias_works(cache_alias: str) -> None:
    cache = caches[cache_alias]
    assert cache.add("name", "first", 60)
    assert not cache.add("name", "second", 60)
    assert cache.get("name") == "first"
    assert cache.delete("name")


@pytest.mark.parametrize("alias", LOCK_TABLES.values())
@pytest.mark.django_db(databases="__all__")
def test_other_connections_are_outside_the_transaction_of_a_test(
    alias: str,
) -> None:
    table = {database: table for table, database in LOCK_TABLES.items()}[alias]
    insert = f"INSERT INTO {table} (cache_key, value, expires) VALUES (%s, %s, '2030-01-01')"
    other = connections.create_connection(alias)
    try:
        with other.cursor() as cursor:
            cursor.execute(f"DELETE FROM {table}")
            cursor.execute(insert, ["name", "value"])
        assert connections[alias].in_atomic_block
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SELECT value FROM {table}")
            assert cursor.fetchone() == ("value",)
    finally:
        other.close()


SCRIPT = """
import django
django.setup()
from django.core.cache import caches
print([caches[alias].get("name") for alias in {aliases}])
"""


@pytest.mark.only_all("it starts processes")
@pytest.mark.django_db(databases="__all__", transaction=True)
def test_processes_that_tests_start_use_the_test_databases() -> None:
    aliases = ["db_postgres", "db_mariadb", "db_sqlite"]
    for alias in aliases:
        caches[alias].set("name", f"seen in {alias}")
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(aliases=aliases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"{[f'seen in {alias}' for alias in aliases]}\n", done.stderr
    for alias in aliases:
        caches[alias].clear()
