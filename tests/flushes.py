"""A memcached that forgets its locks again and again, one holder, and processes that want its lock.

    python -m tests.flushes <own_pymemcache or own_pylibmc> <flush or restart> <rounds>

It prints as JSON in how many rounds another process got the lock, and how often the holder lost its
lock and took it again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

import django

from tests.deadline import wait_for
from tests.racers import fork
from tests.servers import Memcached, ask, find

TAKERS = 4
LEASE = 12.0
PAUSE = 0.01  # seconds between two attempts of a taker
HELD_BACK = 1.1  # a little longer than processes wait that have noticed it


class QuickMemcached(Memcached):
    """A server that is back within milliseconds, as it is when a supervisor restarts it."""

    def _spawn(self) -> None:
        program, *arguments = self.command(self.folder)
        launcher = []
        if shutil.which("setpriv"):  # it ends the server with this process
            account = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"]
            launcher = ["setpriv", *(account if os.geteuid() == 0 else []), "--pdeathsig=KILL"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*launcher, find(program) or program, *arguments], stdout=log, stderr=log
            )


class Shared:
    """What the processes tell each other."""

    def __init__(self) -> None:
        self.ended = fork.Event()
        self.ready = fork.Barrier(TAKERS + 2)
        self.begun = fork.Array("d", TAKERS)
        """When the last attempt of each taker began to which the cache has answered."""
        self.inside = fork.Value("i", 0)
        self.lost = fork.Value("i", 0)
        self.retaken = fork.Value("i", 0)


def take_again_and_again(shared: Shared, alias: str, number: int) -> None:
    from django_singletask import LockUnavailable, TaskLock

    with TaskLock(f"taker {number}", cache=alias):  # it knows the cache before it forgets
        shared.ready.wait()
    shared.ready.wait()
    while not shared.ended.wait(PAUSE):
        began = time.monotonic()
        lock = TaskLock("nightly", cache=alias, timeout=LEASE)
        try:
            if lock.acquire():
                with shared.inside.get_lock():
                    shared.inside.value += 1
                lock.release()
            shared.begun[number] = began
        except LockUnavailable:
            pass  # it restarts


def hold(shared: Shared, alias: str) -> None:
    from django_singletask import TaskLock
    from django_singletask.signals import lock_event

    def note(event: Any, **kwargs: object) -> None:
        shared.retaken.value += event.kind == "retaken"

    lock_event.connect(note, weak=False)
    shared.ready.wait()
    while not shared.ended.is_set():
        lock = TaskLock("nightly", cache=alias, timeout=LEASE)
        assert lock.acquire(wait=LEASE)
        if not shared.lost.value:
            shared.ready.wait()
        while not lock.lost and not shared.ended.wait(PAUSE):
            pass
        shared.lost.value += lock.lost
        lock.release()


def forget(server: Memcached, way: str) -> None:
    if way == "flush":
        assert ask(server.port, b"flush_all\r\n") == b"OK\r\n"
    else:
        server.kill()
        server.start()  # memcached keeps nothing


def forget_once(server: Memcached, shared: Shared, way: str) -> bool:
    """Return whether a taker got the lock, when all know again what holds."""
    inside, known = shared.inside.value, shared.lost.value + shared.retaken.value
    forget(server, way)
    forgotten_at = time.monotonic()
    wait_for(lambda: shared.lost.value + shared.retaken.value > known, "the holder has noticed it")
    wait_for(lambda: min(shared.begun) > forgotten_at + HELD_BACK, "nobody is held back any more")
    return bool(shared.inside.value > inside)


def main(alias: str, way: str, rounds: int) -> dict[str, int]:
    shared = Shared()
    with QuickMemcached() as server:
        os.environ["SINGLETASK_TEST_OWN_MEMCACHED"] = server.address
        django.setup()
        from django.conf import settings

        settings.SINGLETASK_HISTORY = "off"
        arguments = [(hold, (shared, alias))]
        arguments += [(take_again_and_again, (shared, alias, taker)) for taker in range(TAKERS)]
        processes = [fork.Process(target=work, args=args, daemon=True) for work, args in arguments]
        for process in processes:
            process.start()
        shared.ready.wait()
        shared.ready.wait()
        second = sum(forget_once(server, shared, way) for _ in range(rounds))
        shared.ended.set()
        for process in processes:
            process.join()
    return {"second": second, "lost": shared.lost.value, "retaken": shared.retaken.value}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
