"""The history of the locks, in the database."""

from __future__ import annotations

__all__ = ["flush"]


def flush(timeout: float = 5.0) -> bool:
    """Wait until the events of this process are written, at most ``timeout`` seconds.

    Return whether they are. Call it before you read the runs of this process in the history.
    """
    # Imported here, because models can be imported only after Django has started.
    from django_singletask.history.recorder import flush

    return flush(timeout)
