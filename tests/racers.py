"""Processes that use one cache at the same moment.

A program, so that it forks from a process without threads. It prints what happened as JSON:

    python -m tests.racers race <alias> <store or django> <free or expired> <rounds>
    python -m tests.racers turns <alias> <seconds>
    python -m tests.racers moves <alias> <seconds>
    python -m tests.racers slots <alias> <right, one run or broken> <seconds>
    python -m tests.racers fork <alias> <opened or inherited> <reads>
    python -m tests.racers threads <alias> <bytes or str> <cycles>
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import django

PROCESSES = 16
GIVE_UP = 90  # seconds
FEW = 10  # runs

fork = multiprocessing.get_context("fork")


def run(work: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Run ``work(number, barrier, *args)`` in that many processes and return the results."""
    barrier = fork.Barrier(count)
    results = fork.SimpleQueue()

    def body(number: int) -> None:
        try:
            results.put((number, work(number, barrier, *args), None))
        except BaseException:
            barrier.abort()
            results.put((number, None, traceback.format_exc()))

    processes = [fork.Process(target=body, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    ended = sorted((results.get() for _ in processes), key=lambda result: result[0])
    for process in processes:
        process.join()
    errors = [error for _, _, error in ended if error]
    if errors:
        errors.sort(key=lambda error: "BrokenBarrierError" in error)
        sys.exit(errors[0])
    return [result for _, result, _ in ended]


def race(alias: str, way: str, state: str, rounds: int) -> dict[str, Any]:
    """Let all take the same key in each round; return who took it, and who holds it then."""
    from django.core.cache import caches
    from django.db import connections

    from django_singletask.stores import close_stores, get_store
    from tests.entries import holder, key_of

    keys = [key_of(f"round {os.getpid()} {number}") for number in range(rounds)]
    old = holder("old")
    # Redis deletes expired entries itself. So the old one must expire during the round.
    late = way == "store" and state == "expired" and ("redis" in alias or "valkey" in alias)
    if state == "expired" and not late:
        for key in keys:
            if way == "store":
                assert get_store(alias).add(key, old, 0.001) is None
            else:
                caches[alias].set(key, "old", -10)

    def take_from_store(key: str, number: int) -> bool:
        value = holder(str(number))
        while (entry := get_store(alias).add(key, value, 60)) is not None:
            if entry.value != old:
                return entry.value == value
        return True

    def take_from_django(key: str, number: int) -> bool:
        return caches[alias].add(key, number, 60)

    take = take_from_store if way == "store" else take_from_django

    def compete(number: int, barrier: Any) -> list[bool]:
        wins = []
        for key in keys:
            if late and number == 0:
                assert get_store(alias).add(key, old, 0.004) is None
            barrier.wait(GIVE_UP)
            wins.append(take(key, number))
        return wins

    close_stores()
    connections.close_all()
    wins = run(compete, PROCESSES)
    winners = [[n for n in range(PROCESSES) if wins[n][index]] for index in range(rounds)]
    result: dict[str, Any] = {"winners": winners}
    if way == "store":
        names = {holder(str(number)): number for number in range(PROCESSES)}
        entries = [get_store(alias).read(key) for key in keys]
        result["holders"] = [entry and names.get(entry.value) for entry in entries]
    return result


def turns(alias: str, seconds: float) -> dict[str, Any]:
    """Let all take and give back one lock again and again; count the runs, and what went wrong.

    They go on for this time, and until some runs were made: an SQLite file on a busy disk lets few
    of those through that want to write.
    """
    from django_singletask.stores import get_store
    from django_singletask.stores.base import Outcome
    from tests.entries import holder, key_of

    key = key_of(f"turns {os.getpid()}")
    inside, last, total = fork.Value("i", 0), fork.Value("q", 0), fork.Value("i", 0)

    def work(number: int, barrier: Any) -> tuple[int, int, int]:
        store, value = get_store(alias), holder(str(number))
        runs = met = lost = 0
        barrier.wait(GIVE_UP)
        began = time.monotonic()
        while (spent := time.monotonic() - began) < seconds or (
            total.value <= FEW and spent < GIVE_UP / 2
        ):
            if store.add(key, value, 60) is not None:
                continue
            with inside.get_lock():
                inside.value += 1
                met += inside.value != 1
            lost += store.renew(key, value, 60) is not Outcome.OK
            if store.family != "memcached":
                number = store.fence(key, value)
                lost += number is None or number <= last.value
                last.value = number or 0
            with inside.get_lock():
                inside.value -= 1
                total.value += 1
            lost += store.release(key, value) is not Outcome.OK
            runs += 1
        return runs, met, lost

    runs, met, lost = map(sum, zip(*run(work, PROCESSES), strict=True))
    return {"runs": runs, "met": met, "lost": lost}


def moves(alias: str, seconds: float) -> dict[str, Any]:
    """Let all take and give back one lock while its entries move; what is refused counts apart.

    They go on for this time, and until some runs were made.
    """
    from django.conf import settings

    from django_singletask import LockUnavailable, TaskLock

    settings.SINGLETASK_HISTORY = "off"
    inside, total = fork.Value("i", 0), fork.Value("i", 0)

    def work(number: int, barrier: Any) -> tuple[int, int, int, int]:
        runs = met = lost = refused = 0
        barrier.wait(GIVE_UP)
        began = time.monotonic()
        while (spent := time.monotonic() - began) < seconds or (
            total.value <= FEW and spent < GIVE_UP / 2
        ):
            lock = TaskLock("moves", cache=alias, timeout=60)
            try:
                if not lock.acquire():
                    continue
            except LockUnavailable:
                refused += 1
                continue
            with inside.get_lock():
                inside.value += 1
                met += inside.value != 1
            with inside.get_lock():
                inside.value -= 1
                total.value += 1
            try:
                lost += not lock.release()
            except LockUnavailable:
                refused += 1
            runs += 1
        return runs, met, lost, refused

    runs, met, lost, refused = map(sum, zip(*run(work, PROCESSES), strict=True))
    return {"runs": runs, "met": met, "lost": lost, "refused": refused}


def take_slots(alias: str, way: str, seconds: float) -> dict[str, int]:
    """Let all take and give back one of three slots; count the runs, and the most at a time.

    ``one run``: all are deliveries of one message. ``broken``: look and write are two steps.
    """
    from django_singletask.locks.keys import name_key
    from django_singletask.stores import get_store
    from django_singletask.stores.base import Outcome, Slots, Store
    from tests.entries import holder

    mark = b'"name":"tests"' if way == "one run" else b""
    slots = Slots(name_key(f"slots {os.getpid()}").slots(3), 3, mark)
    inside, most = fork.Value("i", 0), fork.Value("i", 0)

    def work(number: int, barrier: Any) -> tuple[int, int]:
        store: Any = get_store(alias)
        take, value = store.take, holder(str(number))
        if way == "broken":
            take = functools.partial(Store.take, store)

            def add(key: str, value: bytes, lease: float) -> None:
                store.client.set(store.make_key(key), value)

            store.add = add
        runs = lost = 0
        barrier.wait(GIVE_UP)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            key = take(slots, value, 60, heeds_epoch=False)
            if not isinstance(key, str):
                continue
            with inside.get_lock():
                inside.value += 1
                most.value = max(most.value, inside.value)
            lost += store.renew(key, value, 60) is not Outcome.OK
            with inside.get_lock():
                inside.value -= 1
            lost += store.release(key, value) is not Outcome.OK
            runs += 1
        return runs, lost

    runs, lost = map(sum, zip(*run(work, PROCESSES), strict=True))
    return {"runs": runs, "most": most.value, "lost": lost}


def fork_and_read(alias: str, way: str, reads: int) -> dict[str, Any]:
    """Read in parent and children at the same time; count replies to another request.

    The children end as a script does: the interpreter deletes every object.
    """
    from django_singletask.stores import get_store
    from tests.entries import holder, key_of

    store = get_store(alias)
    entries = {key_of(f"entry {n}"): holder(str(n)) for n in range(20)}
    for key, value in entries.items():
        assert store.add(key, value, 60) is None

    def read_all() -> int:
        reader = get_store(alias) if way == "opened" else store
        wrong = 0
        until = time.monotonic() + 10
        for number in range(reads):
            key = list(entries)[number % len(entries)]
            try:
                entry = reader.read(key)
            except Exception:
                if way == "opened":
                    raise
                entry = None
            wrong += entry is None or entry.value != entries[key]
            if way == "inherited" and (wrong or time.monotonic() > until):
                break
        return wrong

    connection = connection_id(store)
    children = []
    for _ in range(3):
        pid = os.fork()
        if not pid:
            sys.exit(min(read_all(), 99))
        children.append(pid)
    wrong = read_all()
    for pid in children:
        wrong += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if way == "opened":
        wrong += read_all()
    return {"wrong": wrong, "kept": way == "opened" and connection_id(store) == connection}


def take_in_threads(alias: str, keys: str, cycles: int) -> dict[str, Any]:
    """Take, read and give back in eight threads at the same time, each with its own keys.

    Count the cycles in which a lock looked as if another thread had touched it. ``str`` passes the
    keys to pylibmc as str.
    """
    from django_singletask.stores import get_store
    from django_singletask.stores.base import Outcome
    from tests.entries import holder, key_of

    wrong = []

    def work(number: int) -> None:
        store, value = get_store(alias), holder(f"thread {number}")
        if keys == "str":
            gets = store.client.gets
            store.client.gets = lambda key: gets(key.decode())
        for cycle in range(cycles):
            key = key_of(f"threads {os.getpid()} {number} {cycle}")
            try:
                fine = (
                    store.add(key, value, 60) is None
                    and (entry := store.read(key)) is not None
                    and entry.value == value
                    and store.renew(key, value, 60) is Outcome.OK
                    and store.release(key, value) is Outcome.OK
                )
            except Exception:
                fine = False
            if not fine:
                wrong.append(cycle)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"wrong": len(wrong)}


def connection_id(store: Any) -> Any:
    """Return the server's number of the connection of a store."""
    if store.family == "redis":
        store.read("singletask:none")
        store.connections[-1].send_command("CLIENT", "ID")
        return store.connections[-1].read_response()
    if store.family == "database" and store.connection.vendor != "sqlite":
        is_postgres = store.connection.vendor == "postgresql"
        function = "pg_backend_pid()" if is_postgres else "CONNECTION_ID()"
        return store.execute(f"SELECT {function}")[0][0]
    return None  # memcached gives none


if __name__ == "__main__":
    django.setup()
    command, alias, *rest = sys.argv[1:]
    if command == "race":
        result = race(alias, rest[0], rest[1], int(rest[2]))
    elif command == "turns":
        result = turns(alias, float(rest[0]))
    elif command == "moves":
        result = moves(alias, float(rest[0]))
    elif command == "slots":
        result = take_slots(alias, rest[0], float(rest[1]))
    elif command == "threads":
        result = take_in_threads(alias, rest[0], int(rest[1]))
    else:
        result = fork_and_read(alias, rest[0], int(rest[1]))
    print(json.dumps(result))
