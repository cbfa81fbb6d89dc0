"""Let no child inherit an SQLite file that a thread of this process uses or has open."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["close_before_forks", "undivided"]

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
#
# An idle connection is a hazard as well: the child inherits its note that this process has locked
# the file's write-ahead log against removal, but not that lock. So a fork closes them first:
#
#   history's thread:  writes (idle) .................. closes, as the last one: removes the log
#   main thread:                      fork
#   child:                                 opens the file ...... writes to the log that is removed

_condition = threading.Condition()
_inside: set[object] = set()
_closed: weakref.WeakSet[Any] = weakref.WeakSet()


def close_before_forks(connection: Any) -> None:
    """Let each fork close a connection to an SQLite file first; Django opens it again.

    Each use of the connection must be in a block of :func:`undivided`: to close a connection in the
    middle of a statement would crash the process.
    """
    if connection.vendor == "sqlite":
        with _condition:
            _closed.add(connection)


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
    if _condition.wait_for(lambda: not _inside, PATIENCE):
        for connection in _closed:
            connection.inc_thread_sharing()
            connection.close()
            connection.dec_thread_sharing()


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
