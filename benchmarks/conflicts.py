"""What it costs to find a lock held."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator

import redis_lock
from celery_once import AlreadyQueued
from celery_once.backends import Redis as OnceBackend
from celery_singleton.backends import RedisBackend as SingletonBackend
from django.core.cache import caches

from benchmarks.locks import (
    FLOOR,
    LISTENING,
    RECIPE,
    REDIS_PY,
    SILENT,
    VALUE,
    Memcached,
    bare_memcached,
    bare_redis,
)
from benchmarks.measure import Step, in_turns
from benchmarks.report import Table, at_most, compared, processor_at_most, titled
from benchmarks.settings import REDIS
from django_singletask import TaskLock

# The holder is another process, as in practice: a conflict includes the check whether it is alive.
HOLDER = """
import sys
import django
django.setup()
from django_singletask import TaskLock
locks = [TaskLock("busy", cache=alias) for alias in sys.argv[1:]]
print(*[lock.acquire() for lock in locks], flush=True)
sys.stdin.read()
for lock in locks:
    lock.release()
"""


@contextlib.contextmanager
def held_elsewhere(*aliases: str) -> Iterator[None]:
    command = [sys.executable, "-c", HOLDER, *aliases]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline().split() != ["True"] * len(aliases):
            raise RuntimeError("The holder could not take its locks.")
        yield  # at the end the holder's stdin is closed, and it frees its locks


def meet(alias: str) -> Step:
    def step() -> None:
        if TaskLock("busy", cache=alias).acquire():
            raise RuntimeError("There was no conflict.")

    return step


def conflict_on_redis(rounds: int, busy: bool) -> Table:
    client, _floor = bare_redis()
    singleton = SingletonBackend(f"{REDIS}/2")
    once = OnceBackend({"url": f"{REDIS}/2"})
    client.set("busy", VALUE)
    held = [
        client.lock("busy-redis-py", timeout=3600),
        caches["django_redis"].lock("busy-django-redis", timeout=3600),
        redis_lock.Lock(client, "busy-python-redis-lock", expire=3600),
    ]
    for lock in held:
        lock.acquire()
    # It logs a warning for each conflict. Printing that here would not be part of its cost.
    logging.getLogger("redis_lock.acquire").setLevel(logging.ERROR)
    singleton.lock("busy-singleton", "5d1c", expiry=3600)
    once.clear_lock("busy-once")  # of an earlier measurement
    once.raise_or_lock("busy-once", timeout=3600)
    caches["default"].set("busy-recipe", "oid", 3600)

    def python_redis_lock() -> None:
        redis_lock.Lock(client, "busy-python-redis-lock", expire=60).acquire(blocking=False)

    def celery_singleton() -> None:
        # As its apply_async() does with a duplicate.
        singleton.lock("busy-singleton", "77aa", expiry=60) or singleton.get("busy-singleton")

    def celery_once() -> None:
        with contextlib.suppress(AlreadyQueued):
            once.raise_or_lock("busy-once", timeout=60)

    with held_elsewhere("default"):  # the key is the same through django-redis
        series = in_turns(
            {
                FLOOR: lambda: client.set("busy", VALUE, nx=True, px=60_000),
                LISTENING[0]: meet("default"),
                LISTENING[1]: meet("django_redis"),
                SILENT[0]: meet("default"),
                REDIS_PY: lambda: client.lock("busy-redis-py", timeout=60).acquire(blocking=False),
                "django-redis cache.lock": lambda: (
                    caches["django_redis"]
                    .lock("busy-django-redis", timeout=60)
                    .acquire(blocking=False)
                ),
                "python-redis-lock": python_redis_lock,
                "celery-singleton (2 trips, as at a duplicate)": celery_singleton,
                "celery-once (2 trips)": celery_once,
                RECIPE: lambda: caches["default"].add("busy-recipe", "oid", 60),
                "recipe, django-redis (no owner check)": lambda: caches["django_redis"].add(
                    "busy-recipe", "oid", 60
                ),
            },
            rounds,
            silent=SILENT,
        )
    for lock in held:
        lock.release()
    text = (
        "Floor: a bare SET NX PX that finds that the key exists. django-singletask makes one trip "
        "too: it reads the holder, checks whether the holder's process is alive, and records the "
        "conflict."
    )
    checks = [processor_at_most(series, name, 1, REDIS_PY) for name in LISTENING]
    checks += [at_most(series, name, 1.15, FLOOR) for name in LISTENING]
    checks.append(at_most(series, SILENT[0], 1, FLOOR))
    return compared(titled("Conflict on Redis", busy), text, series, checks)


def conflict_on_memcached(rounds: int, busy: bool) -> list[Table]:
    def compare(client: Memcached) -> Table:
        client.add("busy-floor", 3600)
        caches[client.alias].set("busy-recipe", "oid", 3600)

        def floor() -> None:
            client.add("busy-floor", 61)
            client.gets("busy-floor")

        steps = {
            FLOOR: floor,
            client.ours: meet(client.alias),
            client.recipe: lambda: caches[client.alias].add("busy-recipe", "oid", 60),
        }
        with held_elsewhere(client.alias):
            series = in_turns(steps, rounds)
        title = titled(f"Conflict on memcached, {client.alias}", busy)
        text = (
            "Floor: two trips on the bare client, add and gets. The recipe makes one trip, add. "
            "django-singletask makes two, too."
        )
        return compared(title, text, series, [at_most(series, client.ours, 1.4, FLOOR)])

    return [compare(client) for client in bare_memcached()]
