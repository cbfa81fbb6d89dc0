from __future__ import annotations

from typing import Any

# The lock tables by name: Django's DatabaseCache asks the router where each of them is.
LOCK_TABLES = {"locks_pg": "default", "locks_maria": "mariadb", "locks_sqlite": "sqlite_locks"}


class LockTables:
    """Send each lock table to its database; spare the others the tables of Django's own apps."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return LOCK_TABLES.get(model._meta.db_table)

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        model = hints.get("model")
        if model is not None and model._meta.db_table in LOCK_TABLES:
            return db == LOCK_TABLES[model._meta.db_table]
        if db == "sqlite_locks":
            return False
        return db == "default" or app_label in ("django_singletask", "testapp")
