"""Many locks held in one process: what each costs to take, to keep, to renew and to list."""

from __future__ import annotations

import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from statistics import median

import redis

from benchmarks.locks import FLOOR, bare_redis, ours
from benchmarks.measure import history, in_turns, wait_for_history
from benchmarks.report import Check, Table, figure
from benchmarks.settings import REDIS
from django_singletask import TaskLock, clock
from django_singletask.locks import renewal

ROOT = Path(__file__).resolve().parents[1]
LEASE = 3600
ONE_MORE = "one more"


def held(rounds: int, levels: list[int]) -> Table:
    """Hold more and more locks. The last two of ``levels`` are also renewed, and listed."""
    client = redis.Redis.from_url(f"{REDIS}/0")
    client.flushdb()
    renewed, listed = levels[-2:]
    memory = memory_of(renewed)
    empty = client.info("memory")["used_memory"]
    locks: list[TaskLock] = []
    cells, ratios, renewal_took = [], [], 0.0
    _client, floor = bare_redis()
    for level in levels:
        added = level - len(locks)
        taking = take(locks, level) / added * 1e6
        series = in_turns({FLOOR: floor, ONE_MORE: ours("default")}, rounds)
        ratios.append(series.ratio(ONE_MORE, FLOOR))
        cells.append(
            (
                f"{level:,}",
                f"{figure(taking)} µs",
                f"{figure(series.median(ONE_MORE))} µs",
                f"{ratios[-1]:.2f}",
            )
        )
        if level == renewed:
            renewal_took = tick(locks)
    in_store = (client.info("memory")["used_memory"] - empty) / listed
    listing, size = list_cost(listed)
    looks = requests_of_a_holder(client)
    # Do not free them one by one: nobody renews them any more, and the server forgets them.
    for lock in locks:
        renewal.renewers["default"].drop(lock._lease)
    client.flushdb()
    flat = ratios[-1] / ratios[0]
    checks = [
        Check(
            f"one more with {listed:,} held: ≤ 1.25 × with {levels[0]}", f"{flat:.2f}", flat <= 1.25
        ),
        Check("memory of a held lock: < 1,200 bytes", f"{memory:,.0f} bytes", memory < 1200),
        Check(
            f"one renewal of {renewed:,} leases: < 1 s", f"{renewal_took:.2f} s", renewal_took < 1
        ),
        Check(
            f"requests of the holder of {listed:,}, but for renewals: ≤ 2.5 a second",
            f"{looks:.1f} a second",
            looks <= 2.5,
        ),
        Check(f"locks list of {listed:,}: < 3 s", f"{listing:.2f} s", listing < 3),
        Check(f"locks list of {listed:,}: < 200 MB", f"{size:.0f} MB", size < 200),
    ]
    text = (
        "One process holds all locks, on Redis, with the history. To take: one of the locks that "
        "were added at this level. One more: take and release another lock, in turns with the "
        f"floor. Memory: what Python allocated; Redis uses {in_store:,.0f} bytes for a lock. "
        "Renewal: one tick of the renewal thread. The list: ``manage.py locks list`` as another "
        "process, including its start. The times of the list and of the renewal are medians of "
        "three. Requests of the holder: what the server counted in four seconds, by which the "
        "process looks whether Redis has forgotten the locks."
    )
    head = ("Held", "to take", "one more", "× floor")
    return Table("Many locks held", text, head, cells, checks)


def requests_of_a_holder(client: redis.Redis) -> float:
    """Return the requests a second that reach Redis while this process only holds its locks."""
    seconds = 4

    def requests() -> int:
        count: int = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        return count

    before = requests()
    time.sleep(seconds)
    return (requests() - before) / seconds


def take(locks: list[TaskLock], count: int) -> float:
    """Take locks until there are ``count``. Return the seconds, without the time of the history."""
    took = 0.0
    while len(locks) < count:
        began = time.perf_counter()
        for number in range(len(locks), min(count, len(locks) + 10_000)):
            lock = TaskLock(f"feeds.tasks.import_feed(feed_id={number})", timeout=LEASE)
            if not lock.acquire():
                raise RuntimeError(f"{lock} is held by {lock.blocker}.")
            locks.append(lock)
        took += time.perf_counter() - began
        wait_for_history()  # it drops events when more than 50,000 wait to be written
    return took


def memory_of(count: int) -> float:
    """Return the bytes that a held lock occupies in this process."""
    locks: list[TaskLock] = []
    with history("off"):  # do not count events that wait to be written
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        take(locks, count)
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        for lock in locks:
            lock.release()
    return used / count


def tick(locks: list[TaskLock]) -> float:
    """Return the seconds in which the renewal thread renews all locks once."""
    times = []
    for _ in range(3):
        for lock in locks:
            lock._lease.renewed_at -= LEASE / 2
        renewal.renewers["default"].read_at = 0.0
        began = time.perf_counter()
        renewal.renewers["default"].tick()
        times.append(time.perf_counter() - began)
        late = [lock for lock in locks if lock.lost or lock._lease.due_at < clock.now()]
        if late:
            raise RuntimeError(f"{len(late)} locks were not renewed.")
    return median(times)


# A process starts with the peak of the process that started it, and this one holds all the locks.
LIST = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "django", "locks", "list"], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""


def list_cost(count: int) -> tuple[float, float]:
    """Return the seconds that the command takes as a process, and its megabytes at most."""
    times, sizes = [], []
    command = [sys.executable, "-S", "-c", LIST]
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - began)
        sizes.append(int(done.stderr.split()[-1]) / (1024 if sys.platform == "linux" else 1024**2))
        if done.stdout.count("import_feed") != count:
            raise RuntimeError(f"The list does not have {count} locks:\n{done.stdout[:2000]}")
    return median(times), max(sizes)
