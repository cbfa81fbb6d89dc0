"""Processes that use one cache at the same moment.

A program, so that it forks from a process without threads. It prints what happened as JSON:

    python -m tests.racers race <alias> <store or django> <free or expired> <rounds>
    python -m tests.racers moves <alias> <seconds>
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
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
    else:
        result = moves(alias, float(rest[0]))
    print(json.dumps(result))
