"""Hold locks in processes that multiprocessing starts, by the method that is named.

These processes end without exit handlers.
"""

from __future__ import annotations

import multiprocessing
import sys

import django

django.setup()

from django_singletask import TaskLock  # noqa: E402
from django_singletask.history import flush  # noqa: E402


def hold(name: str) -> None:
    with TaskLock(name):
        pass


if __name__ == "__main__":
    hold("before")
    assert flush()
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=hold, args=["in a process"])
    process.start()
    process.join()
    pool = context.Pool(1)
    pool.apply(hold, ["in a pool"])
    pool.close()
    pool.join()
