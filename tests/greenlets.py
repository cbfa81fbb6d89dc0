"""Many greenlets, as tasks of a worker with gevent, that hold a lock each at the same moment.

    python -m tests.greenlets <alias> <number>

It prints "held" when all have tried to take theirs. After a line on its standard input it prints
how many have held and released theirs.
"""

from __future__ import annotations

from gevent import monkey

if __name__ == "__main__":
    monkey.patch_all()

import sys

import django
import gevent
from django.conf import settings
from gevent.event import Event

GIVE_UP = 60


def main(alias: str, number: int) -> None:
    from django_singletask import TaskLock

    begun: list[int] = []
    all_begun, go_on = Event(), Event()

    def body(own: int) -> bool:
        lock = TaskLock(f"greenlet {own}", cache=alias, timeout=30)
        try:
            lock.acquire()
        finally:
            begun.append(own)
            if len(begun) == number:
                all_begun.set()
        go_on.wait(GIVE_UP)
        return lock.owned() and lock.release()

    greenlets = [gevent.spawn(body, own) for own in range(number)]
    assert all_begun.wait(GIVE_UP)
    print("held", flush=True)
    sys.stdin.readline()
    go_on.set()
    gevent.joinall(greenlets)
    print(sum(bool(greenlet.value) for greenlet in greenlets), flush=True)


if __name__ == "__main__":
    django.setup()
    settings.SINGLETASK_HISTORY = "off"
    main(sys.argv[1], int(sys.argv[2]))
