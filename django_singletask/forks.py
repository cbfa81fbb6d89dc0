"""Let no child inherit an SQLite file that a thread of this process uses or has open."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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

_inside: weakref.WeakSet[Block] = weakref.WeakSet()
_closed: weakref.WeakSet[Any] = weakref.WeakSet()
_forks: dict[int, float] = {}
"""Until when other threads wait for a fork, by the thread that forks."""


class Block:
    """A use of an SQLite file; if a signal ends it without its ``finally``, it ends with its frame.

    There is no lock that such a signal could leave locked.
    """


def close_before_forks(connection: Any) -> None:
    """Let each fork close a connection to an SQLite file first; Django opens it again.

    Each use of the connection must be in a block of :func:`undivided`: to close a connection in the
    middle of a statement would crash the process.
    """
    if connection.vendor == "sqlite":
        _closed.add(connection)


# Both sides say what they do before they look at the other side. In the other order:
#
#   thread:  a fork? no                          enters, writes
#   fork:                 anybody inside? no                     forks


@contextmanager
def undivided(connection: Any) -> Iterator[None]:
    """Delay forks while this block runs, if the connection is to an SQLite file."""
    if connection.vendor != "sqlite":
        yield
        return
    block = Block()
    try:
        _inside.add(block)
        while any(time.monotonic() < until for until in list(_forks.values())):
            _inside.discard(block)
            time.sleep(0.001)
            _inside.add(block)
        yield
    finally:
        _inside.discard(block)


def _before_fork() -> None:
    until = time.monotonic() + PATIENCE
    # If a signal keeps _after_in_parent() from running, the others wait no longer than this.
    _forks[threading.get_ident()] = until + PATIENCE
    while _inside and time.monotonic() < until:
        time.sleep(0.001)
    if not _inside:
        for connection in list(_closed):
            connection.inc_thread_sharing()
            connection.close()
            connection.dec_thread_sharing()


def _after_in_parent() -> None:
    _forks.pop(threading.get_ident(), None)


def _after_in_child() -> None:
    _forks.clear()
    _inside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
