"""The history of the locks, in the database.

Each thing that happens to a lock is an event (signals.py), and each event is what it knows of one
row. A run is one row; the calls that one holder has blocked are one row, which counts them. A row
is found by one key, so events are written in any order, and again after an error (writing.py). A
thread of the process gathers and writes them, so that no task waits for the database (recorder.py).
A run that was killed writes no end: the sweep finds its row open after its lease, and closes it
(sweep.py). What the admin and the command ask is in queries.py.
"""

from __future__ import annotations

__all__ = ["flush"]


def flush(timeout: float = 5.0) -> bool:
    """Wait until the events of this process are written, at most ``timeout`` seconds.

    Return whether they are. Call it before you read the runs of this process in the history.
    """
    # Imported here, because models can be imported only after Django has started.
    from django_singletask.history.recorder import flush

    return flush(timeout)
