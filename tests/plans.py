"""How a database goes about the statements that it is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from django.db import connections

from django_singletask.models import TaskLockEvent

__all__ = ["Plan", "plans"]

EXPLAIN = {"sqlite": "EXPLAIN QUERY PLAN"}
LIMIT = 1000
"""Rows that a question asks for, at most."""


class Plan(NamedTuple):
    """A statement, and the steps of the database's plan for it."""

    vendor: str
    sql: str
    steps: list[Any]

    @property
    def text(self) -> str:
        return str(self.steps)

    def reads_the_table(self) -> bool:
        """Say whether all rows of the history's table are read, or all entries of an index.

        MariaDB may read the newest 100 ids for 100 rows of a kind that half of the rows have.
        """
        table = TaskLockEvent._meta.db_table
        if self.vendor == "postgresql":
            return f"Seq Scan on {table}" in self.text
        if self.vendor == "mysql":
            return any(
                step[2] == table
                and (step[3] == "ALL" or (step[3] == "index" and int(step[8]) > LIMIT))
                for step in self.steps
            )
        return f"SCAN {table}'" in self.text


def plans(alias: str, ask: Callable[[], object]) -> list[Plan]:
    """Return the statements that ``ask`` sends to a database to read rows.

    They are explained with their parameters apart, as they are sent: with its values in it SQLite
    would plan a statement differently.
    """
    connection, statements = connections[alias], []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("SELECT"):
            statements.append((sql, params))
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        ask()
    explain = EXPLAIN.get(connection.vendor, "EXPLAIN")
    answers = []
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            # In so small a table an index hardly pays, as if its pages lay apart on a disk.
            cursor.execute("SET random_page_cost = 1.1")
        for sql, params in statements:
            cursor.execute(f"{explain} {sql}", params)
            answers.append(Plan(connection.vendor, sql, list(cursor.fetchall())))
    return answers
