"""A run that holds a lock while its cache forgets it, and processes that want the same lock.

    python -m tests.beside <alias> [<fault>]

It prints "held" when all have met, and in the end, as JSON, how many runs went beside the holder
and what the holder knew. It ends after a run beside the holder, or some time after the holder has
its lock back. With a fault it is broken on purpose: "nobody is held back", "nobody looks",
"nobody asks which server answers" or "nobody sees when it is ready".
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

import django
from django.conf import settings

from tests.racers import GIVE_UP, fork, run

TAKERS = 5
LEASE = 120.0
"""Seconds; a third of it, when a renewal is due, is longer than each test."""
DEADLINE = 30.0  # seconds
AFTER = 2.0
"""Seconds for which others want the lock after its holder has it back: twice their pause."""
RUN = 0.5  # seconds


def hide_that_it_is_not_ready(store: Any) -> None:
    note = store.note_server
    store.note_server = lambda self, line: line == b"not ready" or note(self, line)
    store._ask_whether_ready = lambda self, connection: None


def beside(alias: str, fault: str) -> dict[str, Any]:
    """Let one process hold the lock while others want it."""
    from django_singletask import TaskLock
    from django_singletask.locks.renewal import Renewer
    from django_singletask.stores.cluster import Node
    from django_singletask.stores.epoch import Epoch
    from django_singletask.stores.redis import RedisStore

    if fault == "nobody is held back":
        Epoch.check = lambda epoch: None
    if fault == "nobody looks":
        Renewer.tick = lambda renewer: None
    if fault == "nobody asks which server answers":
        note = Epoch.note
        Epoch.note = lambda epoch, fact, seen: fact == "server" or note(epoch, fact, seen)
        Renewer.interval = DEADLINE  # else the holder may be the first to reach the server
    if fault == "nobody sees when it is ready":
        for store in (RedisStore, Node):
            hide_that_it_is_not_ready(store)
    met, ended = fork.Event(), fork.Event()

    def work(number: int, barrier: Any) -> tuple[Any, ...]:
        if number == 0:
            with TaskLock("nightly", cache=alias, timeout=LEASE) as lock:
                barrier.wait(GIVE_UP)
                barrier.wait(GIVE_UP)
                print("held", flush=True)
                began = time.monotonic()
                until = began + DEADLINE
                while not (met.is_set() or lock._lease.retaken) and time.monotonic() < until:
                    time.sleep(0.05)
                met.wait(AFTER)
                ended.set()
                return "holder", lock._lease.retaken, lock.lost, began, time.monotonic()
        barrier.wait(GIVE_UP)
        runs = []
        with TaskLock("nightly", cache=alias, on_conflict="skip") as lock:
            assert not lock
        barrier.wait(GIVE_UP)
        while not ended.wait(0.05):
            with suppress(Exception):  # the cache is down
                with TaskLock("nightly", cache=alias, on_conflict="skip") as lock:
                    if lock:
                        runs.append(time.monotonic())
                        met.set()
                        ended.wait(RUN)
        return tuple(runs)

    (_, retaken, lost, began, stopped), *takers = run(work, TAKERS + 1)
    runs = [at for taker in takers for at in taker if began < at < stopped]
    return {"beside": len(runs), "retaken": retaken, "lost": lost}


if __name__ == "__main__":
    django.setup()
    settings.SINGLETASK_HISTORY = "off"
    alias, *fault = sys.argv[1:]
    print(json.dumps(beside(alias, *(fault or [""]))))
