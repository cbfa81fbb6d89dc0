"""How a database goes about the statements that it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_singletask.models import TaskLockEvent

__all__ = ["Plan", "plans"]

EXPLAIN = {"sqlite": "EXPLAIN QUERY PLAN"}


class Plan(NamedTuple):
    """A statement, and the plan of the database for it, as text."""

    vendor: str
    sql: str
    text: str

    def reads_the_table(self) -> bool:
        """Say whether all rows of the history's table are read."""
        table = TaskLockEvent._meta.db_table
        if self.vendor == "postgresql":
            return f"Seq Scan on {table}" in self.text
        if self.vendor == "mysql":
            return f"'{table}', 'ALL'" in self.text
        return f"SCAN {table}'" in self.text


def plans(alias: str, ask: Callable[[], object]) -> list[Plan]:
    """Return the statements that ``ask`` sends to a database to read or to change rows."""
    connection = connections[alias]
    with CaptureQueriesContext(connection) as captured:
        ask()
    answers = []
    with connection.cursor() as cursor:
        for query in captured.captured_queries:
            if query["sql"].startswith(("SELECT", "UPDATE")):
                explain = EXPLAIN.get(connection.vendor, "EXPLAIN")
                cursor.execute(f"{explain} {query['sql'].replace('%', '%%')}", ())
                answers.append(Plan(connection.vendor, query["sql"], str(cursor.fetchall())))
    return answers
