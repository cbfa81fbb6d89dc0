"""A process that takes one lock when it is told to.

    python -m tests.snapshot <alias> <holder or taker> [gevent]

It has used the cache before it prints "ready". After a line on its standard input it takes the
lock. A holder prints "held", and after another line what it knows. A taker asks until the cache
answers, and prints whether it got the lock.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.deadline import wait_for

NAME = "nightly"
LEASE = 60.0


def in_new_greenlet(work: Callable[[], Any]) -> Any:
    import gevent

    return gevent.spawn(work).get()


def try_to_take(alias: str, name: str) -> bool | None:
    """Return whether the lock was free; None without an answer."""
    from django_singletask import LockUnavailable, TaskLock

    lock = TaskLock(name, cache=alias, timeout=LEASE)
    try:
        taken = lock.acquire()
    except LockUnavailable:
        return None
    if taken:
        lock.release()
    return taken


def hold(alias: str) -> dict[str, Any]:
    from django_singletask import TaskLock
    from django_singletask.signals import lock_event

    kinds: list[str] = []

    def note(event: Any, **kwargs: object) -> None:
        kinds.append(event.kind)

    lock_event.connect(note, weak=False)
    lock = TaskLock(NAME, cache=alias, timeout=LEASE)
    assert lock.acquire()
    print("held", flush=True)
    sys.stdin.readline()
    return {"lost": lock.lost, "retaken": kinds.count("retaken")}


def main(alias: str, role: str, pool: str = "") -> None:
    import django
    from django.conf import settings

    django.setup()
    settings.SINGLETASK_HISTORY = "off"
    run = in_new_greenlet if pool else lambda work: work()
    assert run(lambda: try_to_take(alias, f"before {os.getpid()}"))
    print("ready", flush=True)
    sys.stdin.readline()
    if role == "holder":
        result: Any = hold(alias)
    else:
        answers: list[bool | None] = []

        def is_answered() -> bool:
            answers.append(run(lambda: try_to_take(alias, NAME)))
            return answers[-1] is not None

        wait_for(is_answered, "an answer")
        result = answers[-1]
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if "gevent" in sys.argv:
        from gevent import monkey

        monkey.patch_all()
    main(*sys.argv[1:])
