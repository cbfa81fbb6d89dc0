"""A process that holds locks in two caches, one of which stops answering.

    python -m tests.two_caches <alias that hangs> <healthy alias> <hold or extend> <seconds>

It prints "held" when it has both locks. After a line on its standard input it goes on for these
seconds. Then it prints as JSON whether it lost the lock in the healthy cache, and the longest time
that an ``extend()`` of that took; without "extend" it calls none. It ends after one more line, or
when its standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import django
from django.conf import settings

LEASE = 3.0
NAME = "healthy"


def main(hanging: str, healthy: str, what: str, seconds: float) -> None:
    from django_singletask import TaskLock

    stuck = TaskLock("hanging", cache=hanging, timeout=LEASE)
    lock = TaskLock(NAME, cache=healthy, timeout=LEASE)
    assert stuck.acquire()
    assert lock.acquire()
    print("held", flush=True)
    sys.stdin.readline()
    until = time.monotonic() + seconds
    began, longest = time.monotonic(), 0.0

    def extend() -> None:
        nonlocal began, longest
        while time.monotonic() < until:
            began = time.monotonic()
            lock.extend()
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.05)

    thread = threading.Thread(target=extend, daemon=True)
    if what == "extend":
        thread.start()
        thread.join(seconds + 0.1)
        if thread.is_alive():
            longest = time.monotonic() - began
    while time.monotonic() < until:
        time.sleep(0.02)
    print(json.dumps({"lost": lock.lost, "longest": longest}), flush=True)
    # Others try to take the lock until they have read that. An ended process would not keep it.
    sys.stdin.readline()
    os._exit(0)  # the end of the interpreter would wait for the cache


if __name__ == "__main__":
    django.setup()
    settings.SINGLETASK_HISTORY = "off"
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
