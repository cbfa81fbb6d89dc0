"""What happens at a fork: no child inherits an SQLite file that is in use, or a connection."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any


def at_fork(**functions: Callable[[], object]) -> None:
    """Call functions at each fork, if this system has forks; see ``os.register_at_fork()``."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**functions)


def leak(connections: Iterable[object]) -> None:
    """Never delete the parent's connections in a child, not even at its end.

    Some clients would send "quit" on the socket, and the server would disconnect the parent.
    """
    for connection in connections:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


PATIENCE = 1.0
"""The longest delay of a fork in seconds; after that the fork happens anyway."""

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

_inside: weakref.WeakSet[undivided] = weakref.WeakSet()
"""The blocks that run now."""
_to_close: weakref.WeakSet[Any] = weakref.WeakSet()
"""The connections that each fork closes first."""
_deadlines: list[float] = []
"""Until when other threads wait for a fork, one deadline for each fork that is about to happen."""


def close_before_forks(connection: Any) -> None:
    """Let each fork close a connection to an SQLite file first; Django opens it again.

    Each use of the connection must be in a block of :class:`undivided`: to close a connection in
    the middle of a statement would crash the process.
    """
    if connection.vendor == "sqlite":
        _to_close.add(connection)


# Both sides say what they do before they look at the other side. In the other order:
#
#   thread:  a fork? no                          enters, writes
#   fork:                 anybody inside? no                     forks


class undivided:
    """Delay forks while this block runs, if the connection is to an SQLite file.

    If a signal ends the block without ``__exit__``, this object is deleted with the block's frame:
    the set has only a weak reference to it. There is no lock that such a signal could leave locked.
    """

    def __init__(self, connection: Any) -> None:
        self.is_file: bool = connection.vendor == "sqlite"

    def __enter__(self) -> None:
        if not self.is_file:
            return
        while True:
            _inside.add(self)
            if time.monotonic() >= max(_deadlines, default=0.0):
                return
            _inside.discard(self)
            time.sleep(0.001)

    def __exit__(self, *exc_info: object) -> None:
        _inside.discard(self)


def _before_fork() -> None:
    fork_at = time.monotonic() + PATIENCE
    # If a signal keeps _after_in_parent() from running, other threads wait no longer than this.
    _deadlines.append(fork_at + PATIENCE)
    while _inside and time.monotonic() < fork_at:
        time.sleep(0.001)
    if not _inside:
        for connection in list(_to_close):
            # Otherwise Django lets only the thread that made the connection close it.
            connection.inc_thread_sharing()
            connection.close()
            connection.dec_thread_sharing()


def _after_in_parent() -> None:
    del _deadlines[-1:]


def _after_in_child() -> None:
    _deadlines.clear()
    _inside.clear()


at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
