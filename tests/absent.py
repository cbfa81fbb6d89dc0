"""Leave out the tests that need a server, or a client of one, that is not installed.

runtests.py finds out what is absent. A test is skipped if

* one of its parameters, or its mark ``needs``, names a cache or a database of such a server,
* it uses the database, and PostgreSQL is absent, or starts a worker, and Redis is absent,
* it opens a cache whose server is absent (:class:`Cache`), or
* it starts a server that is absent (``Server.prepare``).
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, NoReturn

ABSENT = os.environ.get("SINGLETASK_TEST_ABSENT", "").split(",")

USERS = {
    "Redis": {
        *("redis", "redis_replica", "own_redis", "django_valkey", "redis_cluster"),
        *("django_redis", "django_redis_sentinel", "django_redis_ignore", "django_redis_cluster"),
    },
    "Memcached": {"pymemcache", "own_pymemcache", "pylibmc", "pylibmc_binary", "own_pylibmc"},
    "pylibmc": {"pylibmc", "pylibmc_binary", "own_pylibmc"},
    "PostgreSQL": {"default", "db_postgres"},
    "MariaDB": {"mariadb", "db_mariadb"},
    "mysqlclient": {"mariadb", "db_mariadb"},
}
"""The caches and databases of the tests, by what they need. SQLite is always there."""


def needed_by(*aliases: str) -> str:
    """Return why the tests of these aliases are left out; an empty text if all is installed."""
    needs = (need for need in ABSENT if not USERS.get(need, set()).isdisjoint(aliases))
    return next((f"{need} is not installed" for need in needs), "")


class Cache:
    """Stands in ``CACHES`` for a cache whose server is absent, and skips each test that uses it."""

    def __init__(self, location: object, params: dict[str, Any]) -> None:
        self._alias = params["KEY_PREFIX"]

    def close(self, **kwargs: object) -> None:
        """Do nothing, because Django closes its caches at the end of each request."""

    def __getattr__(self, name: str) -> NoReturn:
        if "pytest" not in sys.modules:
            # In a process that a test starts, a check looks at every cache, not only at its own.
            raise AttributeError(name)
        import pytest

        if threading.current_thread().name.startswith("singletask-"):
            raise SystemExit  # in a thread of the package, which then ends quietly
        pytest.skip(needed_by(vars(self)["_alias"]))
