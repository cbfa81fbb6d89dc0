"""Measure locks beside what else could be picked, and beside the floor.

    pip install -e ".[test,bench]"
    python benchmarks/run.py [--quick]

It starts its own servers, runs all candidates in turns, so that drift hits them alike, prints
medians and ratios, and writes benchmarks/RESULTS.rst (not with --quick).
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import servers

Step = Callable[[], object]
QUICK = "--quick" in sys.argv
ROUNDS = 40 if QUICK else 300
PER_ROUND = 10


class Row(NamedTuple):
    """A candidate with its median in microseconds; of ratios, the first row is the floor."""

    name: str
    median: float
    ratio: float


def measure(candidates: dict[str, Step]) -> list[Row]:
    """Run the candidates in turns and return their medians; the first is the floor."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for step in candidates.values():
        for _ in range(20):
            step()
    for _ in range(ROUNDS):
        for name, step in candidates.items():
            began = time.perf_counter()
            for _ in range(PER_ROUND):
                step()
            times[name].append((time.perf_counter() - began) / PER_ROUND * 1e6)
    medians = {name: statistics.median(found) for name, found in times.items()}
    floor = next(iter(medians.values()))
    return [Row(name, median, median / floor) for name, median in medians.items()]


@contextmanager
def settings() -> Iterator[dict[str, str]]:
    """Start the servers and configure Django for them."""
    redis, memcached, postgres = servers.Redis(), servers.Memcached(), servers.PostgreSQL()
    with servers.running([redis, memcached, postgres]):
        import django
        from django.conf import settings
        from django.core.management import call_command

        host, port = postgres.url.rpartition("@")[2].split(":")
        backends = "django.core.cache.backends"
        settings.configure(
            INSTALLED_APPS=["django.contrib.contenttypes", "django_singletask"],
            DATABASES={
                "default": {
                    "ENGINE": "django.db.backends.postgresql",
                    "NAME": "postgres",
                    "USER": "singletask",
                    "HOST": host,
                    "PORT": port,
                }
            },
            CACHES={
                "default": {"BACKEND": f"{backends}.redis.RedisCache", "LOCATION": redis.url},
                "django_redis": {
                    "BACKEND": "django_redis.cache.RedisCache",
                    "LOCATION": redis.url,
                },
                "pymemcache": {
                    "BACKEND": f"{backends}.memcached.PyMemcacheCache",
                    "LOCATION": memcached.address,
                },
                "pylibmc": {
                    "BACKEND": f"{backends}.memcached.PyLibMCCache",
                    "LOCATION": memcached.address,
                },
                "database": {"BACKEND": f"{backends}.db.DatabaseCache", "LOCATION": "locks"},
                "pages": {"BACKEND": f"{backends}.db.DatabaseCache", "LOCATION": "pages"},
            },
            USE_TZ=True,
        )
        django.setup()
        call_command("migrate", verbosity=0)
        call_command("createcachetable", verbosity=0)
        yield {"redis": redis.url, "memcached": memcached.address}


def recipe(alias: str) -> Step:
    """The Celery cookbook's recipe."""
    from django.core.cache import caches

    cache = caches[alias]

    def step() -> None:
        timeout_at = time.monotonic() + 57
        status = cache.add("recipe-lock", "oid", 60)
        if time.monotonic() < timeout_at and status:
            cache.delete("recipe-lock")

    return step


def ours(alias: str) -> Step:
    from django_singletask import TaskLock

    def step() -> None:
        with TaskLock("nightly", cache=alias):
            pass

    return step


def on_redis(url: str) -> dict[str, Step]:
    import redis
    import redis_lock
    from django.core.cache import caches

    client = redis.Redis.from_url(url)
    release = client.register_script(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"
    )
    value = b"x" * 300

    def floor() -> None:
        client.set("floor", value, nx=True, px=60_000)
        release(["floor"], [value])

    def redis_py() -> None:
        with client.lock("redis-py", timeout=60):
            pass

    def through_django_redis() -> None:
        with caches["django_redis"].lock("django-redis", timeout=60):
            pass

    def python_redis_lock() -> None:
        with redis_lock.Lock(client, "python-redis-lock", expire=60):
            pass

    return {
        "floor: SET NX PX, EVALSHA": floor,
        "django-singletask, RedisCache": ours("default"),
        "django-singletask, django-redis": ours("django_redis"),
        "redis-py Lock": redis_py,
        "django-redis cache.lock": through_django_redis,
        "python-redis-lock": python_redis_lock,
        "recipe, RedisCache (no owner check)": recipe("default"),
        "recipe, django-redis (no owner check)": recipe("django_redis"),
    }


def on_memcached(address: str) -> dict[str, Step]:
    import pylibmc
    from pymemcache import Client

    host, port = address.split(":")
    bare = Client((host, int(port)), default_noreply=False, no_delay=True)
    compiled = pylibmc.Client([address], behaviors={"cas": True})
    value = b"x" * 300

    def floor(client: object, time_name: str) -> Step:
        def step() -> None:
            client.add("floor", value, **{time_name: 61})  # type: ignore[attr-defined]
            _found, cas = client.gets("floor")  # type: ignore[attr-defined]
            client.cas("floor", value, cas, **{time_name: 2_592_001})  # type: ignore[attr-defined]

        return step

    return {
        "floor, pymemcache: add, gets, cas": floor(bare, "expire"),
        "django-singletask, PyMemcacheCache": ours("pymemcache"),
        "recipe, PyMemcacheCache (no owner check)": recipe("pymemcache"),
        "floor, pylibmc: add, gets, cas": floor(compiled, "time"),
        "django-singletask, PyLibMCCache": ours("pylibmc"),
        "recipe, PyLibMCCache (no owner check)": recipe("pylibmc"),
    }


def on_database() -> dict[str, Step]:
    import pglock

    def advisory() -> None:
        with pglock.advisory("nightly"):
            pass

    return {
        "recipe, DatabaseCache (no owner check)": recipe("pages"),
        "django-singletask, DatabaseCache": ours("database"),
        "advisory lock, django-pglock": advisory,
    }


def conflict(url: str) -> dict[str, Step]:
    import redis
    from django.core.cache import caches

    from django_singletask import TaskLock

    client = redis.Redis.from_url(url)
    client.set("busy", b"x" * 300)
    blocker = client.lock("busy-redis-py", timeout=3600)
    blocker.acquire()
    caches["default"].set("busy-recipe", "oid", 3600)
    held = {alias: TaskLock("busy", cache=alias) for alias in ("default", "pymemcache")}
    for lock in held.values():
        lock.acquire()
    keep.extend([blocker, *held.values()])

    def meet(alias: str) -> Step:
        def step() -> None:
            TaskLock("busy", cache=alias).acquire()

        return step

    return {
        "floor: one trip": lambda: client.set("busy", b"x" * 300, nx=True, px=60_000),
        "django-singletask, RedisCache": meet("default"),
        "redis-py Lock": lambda: client.lock("busy-redis-py", timeout=60).acquire(blocking=False),
        "recipe, RedisCache (no owner check)": lambda: caches["default"].add("busy-recipe", "x"),
        "django-singletask, PyMemcacheCache": meet("pymemcache"),
    }


keep: list[object] = []


def keys() -> dict[str, Step]:
    import inspect

    from celery_once.helpers import queue_once_key

    from django_singletask.keys import call_key

    def import_feed(feed_id: int, force: bool = False) -> None: ...

    signature = inspect.signature(import_feed)

    def celery_once() -> None:
        queue_once_key("feeds.tasks.import_feed", {"feed_id": 7, "force": False})

    return {
        "celery-once": celery_once,
        "django-singletask": lambda: call_key("feeds.tasks.import_feed", signature, (7, False), {}),
    }


def held(count: int) -> str:
    """Hold many locks: memory and renewal."""
    import tracemalloc

    from django_singletask import TaskLock, renewal

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    locks = [TaskLock(f"held {number}", timeout=3600) for number in range(count)]
    for lock in locks:
        lock.acquire()
    used = (tracemalloc.get_traced_memory()[0] - before) / count
    tracemalloc.stop()
    began = time.perf_counter()
    renewal._keeper.renew_all("default", locks)
    took = time.perf_counter() - began
    for lock in locks:
        lock.release()
    return f"{count} held: {used:.0f} bytes each, one renewal of all takes {took * 1000:.0f} ms"


def table(title: str, rows: list[Row]) -> str:
    head = ("Candidate", "median", "ratio")
    cells = [(row.name, f"{row.median:.0f} µs", f"{row.ratio:.2f}") for row in rows]
    widths = [max(len(line[i]) for line in (head, *cells)) for i in range(3)]
    rule = "  ".join("=" * width for width in widths)
    lines = [rule, "  ".join(c.ljust(w) for c, w in zip(head, widths, strict=True)).rstrip(), rule]
    lines += ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in cells]
    return "\n".join([title, "-" * len(title), "", *lines, rule, ""])


def versions() -> str:
    names = ["Django", "celery", "redis", "django-redis", "pymemcache", "pylibmc"]
    names += ["python-redis-lock", "celery-once", "django-pglock"]
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    cores = os.cpu_count()
    return f"Python {platform.python_version()}, {', '.join(found)}; {cores} cores, servers local."


def main() -> None:
    with settings() as urls:
        from django.conf import settings as django_settings

        parts = []
        for mode in ("background", "off"):
            django_settings.SINGLETASK_HISTORY = mode
            title = f"Take and give back on Redis, history {mode}"
            parts.append(table(title, measure(on_redis(urls["redis"]))))
        django_settings.SINGLETASK_HISTORY = "background"
        for title, candidates in (
            ("Take and give back on memcached", on_memcached(urls["memcached"])),
            ("Take and give back in PostgreSQL", on_database()),
            ("Conflict", conflict(urls["redis"])),
            ("Key of two arguments", keys()),
        ):
            parts.append(table(title, measure(candidates)))
        django_settings.SINGLETASK_HISTORY = "off"
        counts = (10, 1000) if QUICK else (10, 1000, 10_000, 100_000)
        lines = [f"* {held(count)}" for count in counts]
        parts.append("\n".join(["Many locks held", "---------------", "", *lines, ""]))
        from django_singletask import writer

        writer.stop()
    text = "\n".join(["Benchmarks", "==========", "", versions(), "", *parts])
    print(text)
    if not QUICK:
        (Path(__file__).parent / "RESULTS.rst").write_text(text)


if __name__ == "__main__":
    main()
