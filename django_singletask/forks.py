"""Delay a fork while a thread of this process uses an SQLite file."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["undivided"]

PATIENCE = 1.0
"""The longest delay of a fork in seconds; after that it happens anyway."""

# SQLite keeps a list of its file locks in the memory of the process. A child that is forked
# meanwhile inherits the list, but neither the lock nor the thread that would release it:
#
#   history's thread:  BEGIN IMMEDIATE .............. COMMIT
#   main thread:                         fork
#   child:                               "this process is writing" -> "database is locked", for ever
#
# The main process of a worker writes at the same moment as it replaces a killed child.

_condition = threading.Condition()
_inside: set[object] = set()


@contextmanager
def undivided(connection: Any) -> Iterator[None]:
    """Delay forks while this block runs, if the connection is to an SQLite file."""
    if connection.vendor != "sqlite":
        yield
        return
    block = object()
    try:
        with _condition:
            _inside.add(block)
        yield
    finally:
        with _condition:
            _inside.discard(block)
            _condition.notify_all()


def _before_fork() -> None:
    _condition.acquire()
    _condition.wait_for(lambda: not _inside, PATIENCE)


def _after_in_parent() -> None:
    _condition.release()


def _after_in_child() -> None:
    global _condition
    _condition = threading.Condition()
    _inside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
