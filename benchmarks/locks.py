"""Take and release a lock. Each alternative is used as its README says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pglock
import pylibmc
import redis
import redis_lock
from celery_once.backends import Redis as OnceBackend
from celery_singleton.backends import RedisBackend as SingletonBackend
from django.core.cache import caches
from pymemcache import Client

from benchmarks.measure import CALLS, WARM_UP, Step, in_turns
from benchmarks.report import Table, at_most, compared, faster, processor_at_most, titled
from benchmarks.settings import MEMCACHED, REDIS
from django_singletask import TaskLock
from django_singletask.models import TaskLockEvent

VALUE = b"x" * 300
"""It is as long as the record of a holder."""

RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"

FLOOR = "floor"
LISTENING = ("django-singletask, RedisCache", "django-singletask, django-redis")
SILENT = tuple(f"{name}, history off" for name in LISTENING)
RECIPE = "recipe, RedisCache (no owner check)"
REDIS_PY = "redis-py Lock"
OWNERS = (REDIS_PY, "django-redis cache.lock", "python-redis-lock")
"""The alternatives that check the owner of a lock before they give it back."""


def ours(alias: str) -> Step:
    def step() -> None:
        with TaskLock("nightly", cache=alias):
            pass

    return step


def recipe(alias: str) -> Step:
    """The Celery cookbook's recipe."""
    cache = caches[alias]

    def step() -> None:
        timeout_at = time.monotonic() + 57
        status = cache.add("recipe-lock", "oid", 60)
        if time.monotonic() < timeout_at and status:
            cache.delete("recipe-lock")

    return step


def bare_redis() -> tuple[redis.Redis, Step]:
    client = redis.Redis.from_url(f"{REDIS}/0")
    release = client.register_script(RELEASE)

    def floor() -> None:
        client.set("floor", VALUE, nx=True, px=60_000)
        release(["floor"], [VALUE])

    return client, floor


def bare_connection() -> Step:
    """Return the floor without the client: no pool, and no check of the connection."""
    client, _floor = bare_redis()
    connection = client.connection_pool.make_connection()
    sha = client.script_load(RELEASE)

    def step() -> None:
        connection.send_command("SET", "bare", VALUE, "NX", "PX", 60_000)
        connection.read_response()
        connection.send_command("EVALSHA", sha, 1, "bare", VALUE)
        connection.read_response()

    return step


def on_redis(rounds: int, busy: bool) -> Table:
    client, floor = bare_redis()
    singleton = SingletonBackend(f"{REDIS}/2")
    once = OnceBackend({"url": f"{REDIS}/2"})

    def redis_py() -> None:
        with client.lock("redis-py", timeout=60):
            pass

    def django_redis() -> None:
        with caches["django_redis"].lock("django-redis", timeout=60):
            pass

    def python_redis_lock() -> None:
        with redis_lock.Lock(client, "python-redis-lock", expire=60):
            pass

    def celery_singleton() -> None:
        singleton.lock("singleton", "5d1c", expiry=60)
        singleton.unlock("singleton")

    def celery_once() -> None:
        once.raise_or_lock("once", timeout=60)
        once.clear_lock("once")

    rows = TaskLockEvent.objects.count()
    series = in_turns(
        {
            FLOOR: floor,
            "the floor on a bare connection": bare_connection(),
            LISTENING[0]: ours("default"),
            LISTENING[1]: ours("django_redis"),
            SILENT[0]: ours("default"),
            SILENT[1]: ours("django_redis"),
            REDIS_PY: redis_py,
            "django-redis cache.lock": django_redis,
            "python-redis-lock": python_redis_lock,
            "celery-singleton (no owner check)": celery_singleton,
            "celery-once (no owner check)": celery_once,
            RECIPE: recipe("default"),
            "recipe, django-redis (no owner check)": recipe("django_redis"),
        },
        rounds,
        silent=SILENT,
    )
    written = TaskLockEvent.objects.count() - rows
    if written != (rounds + WARM_UP) * CALLS * len(LISTENING):
        raise RuntimeError(f"The history has {written} new rows, which is not what it should have.")
    checks = []
    for name in LISTENING:
        checks.append(processor_at_most(series, name, 0.8, REDIS_PY))
        checks.append(at_most(series, name, 0.8, FLOOR))
        checks += [faster(series, name, other) for other in OWNERS]
        checks.append(at_most(series, name, 0.5, RECIPE))
    checks += [at_most(series, name, 0.7, FLOOR) for name in SILENT]
    text = (
        "Floor: two trips on one redis-py client, SET NX PX and EVALSHA. The client takes a "
        "connection from its pool for each trip; on a bare connection the floor is lower. The "
        "history is on, and a thread writes it to PostgreSQL. The time to write what is left after "
        "a turn is not included."
    )
    return compared(titled("Take and release on Redis", busy), text, series, checks)


def in_a_loop(rounds: int) -> Table:
    _client, floor = bare_redis()
    series = in_turns(
        {FLOOR: floor, LISTENING[0]: ours("default"), SILENT[0]: ours("default")},
        max(3, rounds // 15),
        calls=500,
        silent=SILENT,
        until_written=True,
    )
    text = (
        "500 locks without a pause, until the last row of the history is in PostgreSQL: the whole "
        "cost of a row, in all threads. The processor time is without the thread that writes. "
        "There is no target."
    )
    return compared("Take and release in a loop, with the writing", text, series, [])


class Memcached(NamedTuple):
    """A client of memcached: Django's backend for it, and the steps of a lock without Django."""

    alias: str
    backend: str
    add: Callable[[str, int], object]
    gets: Callable[[str], Any]
    cas: Callable[[str, Any, int], object]
    bound: float  # of a take and release, in floors

    @property
    def ours(self) -> str:
        return f"django-singletask, {self.backend}"

    @property
    def recipe(self) -> str:
        return f"recipe, {self.backend} (no owner check)"


def bare_memcached() -> list[Memcached]:
    host, port = MEMCACHED.split(":")
    pure = Client((host, int(port)), no_delay=True)
    compiled = pylibmc.Client([MEMCACHED], behaviors={"cas": True})
    return [
        Memcached(
            "pymemcache",
            "PyMemcacheCache",
            lambda key, expiry: pure.add(key, VALUE, expire=expiry, noreply=False),
            pure.gets,
            lambda key, cas, expiry: pure.cas(key, VALUE, cas, expire=expiry, noreply=False),
            1.25,
        ),
        Memcached(
            "pylibmc",
            "PyLibMCCache",
            lambda key, expiry: compiled.add(key, VALUE, time=expiry),
            compiled.gets,
            lambda key, cas, expiry: compiled.cas(key, VALUE, cas, time=expiry),
            1.55,
        ),
    ]


def on_memcached(rounds: int, busy: bool) -> list[Table]:
    def compare(client: Memcached) -> Table:
        def floor() -> None:
            client.add("floor", 61)
            _value, cas = client.gets("floor")
            client.cas(
                "floor", cas, 2_592_001
            )  # all clients read this as a past time: the entry ends at once

        steps = {
            FLOOR: floor,
            client.ours: ours(client.alias),
            client.recipe: recipe(client.alias),
        }
        series = in_turns(steps, rounds)
        title = titled(f"Take and release on memcached, {client.alias}", busy)
        text = (
            "Floor: three trips on the bare client, add, gets and cas. The recipe makes two trips. "
            "django-singletask makes three with pymemcache, whose gets also reads the epoch, and "
            "four with pylibmc."
        )
        return compared(title, text, series, [at_most(series, client.ours, client.bound, FLOOR)])

    return [compare(client) for client in bare_memcached()]


def in_database(rounds: int) -> Table:
    def advisory() -> None:
        with pglock.advisory("nightly"):
            pass

    name, django = "django-singletask, DatabaseCache", "recipe, DatabaseCache (no owner check)"
    series = in_turns(
        {django: recipe("pages"), name: ours("database"), "advisory lock, django-pglock": advisory},
        rounds,
    )
    text = (
        "An advisory lock belongs to a connection. It has no lease, and nobody can read who holds "
        "it."
    )
    checks = [faster(series, name, django)]
    return compared("Take and release in PostgreSQL", text, series, checks)
