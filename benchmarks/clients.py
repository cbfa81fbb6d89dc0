"""Real clients of a private Redis: what one action costs the server, and what many clients ask."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from django_singletask import TaskLock
from django_singletask.stores import close_stores, get_store, look_at_epoch
from tests.deadline import wait_for

CALLS = 500
"""Calls of an action whose cost is measured."""
HERD = 20
"""Processes whose return after a restart is measured."""
REQUESTS = ("evalsha", "hello", "info")
"""What a process that comes back sends; the other commands are parts of scripts."""
ONLY_HERE = {"client|kill", "dbsize", "flushdb", "ping"}
"""Commands that only the measurement sends."""
LEASE = 60
BETWEEN = 0.0013
"""Seconds between two deliveries in a process: 811 no-op tasks a second, as in RESULTS.rst."""

fork = multiprocessing.get_context("fork")


class Cost(NamedTuple):
    """What is asked of the server: commands by name, also those in scripts, and processor time."""

    commands: Counter[str]
    micros: float

    def times(self, factor: float) -> Cost:
        commands = {name: count * factor for name, count in self.commands.items()}
        return Cost(Counter(commands), self.micros * factor)


class Costs(NamedTuple):
    """The cost of each action by its name, and what a process and a lock occupy on the server."""

    actions: dict[str, Cost]
    connections: float
    connection_bytes: float
    lock_bytes: float


class Reading(NamedTuple):
    """What a server has counted since its start."""

    facts: dict[str, Any]
    at: float

    def since(self, earlier: Reading) -> Cost:
        commands = self._commands()
        commands.subtract(earlier._commands())
        commands["info"] -= 1  # this reading's own
        changed = {name: count for name, count in commands.items() if count}
        return Cost(Counter(changed), self.micros() - earlier.micros())

    def _commands(self) -> Counter[str]:
        counts = Counter[str]()
        for name, values in self.facts.items():
            command = name.removeprefix("cmdstat_")
            if command != name and command not in ONLY_HERE:
                counts[command] = values["calls"]
        return counts

    def micros(self) -> float:
        facts = self.facts
        used: float = facts["used_cpu_user_main_thread"] + facts["used_cpu_sys_main_thread"]
        return used * 1e6


def read(server: redis.Redis) -> Reading:
    return Reading(server.info("all"), time.monotonic())


def at_a_rate(actions: Mapping[str, float], costs: Costs) -> Cost:
    """Return what so many actions cost: all that they ask of the server."""
    commands, micros = Counter[str](), 0.0
    for action, count in actions.items():
        cost = costs.actions[action].times(count)
        commands.update(cost.commands)
        micros += cost.micros
    return Cost(commands, micros)


@contextmanager
def running(count: int, body: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Run a body in so many forked processes, which end with the block at the latest."""
    look_at_epoch()  # as the main process of a worker does before it forks
    close_stores()
    gc.collect()
    gc.freeze()
    processes = [fork.Process(target=body, args=(i, *args), daemon=True) for i in range(count)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def work(number: int, runs: Any, seconds: float, lease: float, shared: float) -> None:
    """Run tasks back to back, each under a lock of its own.

    Some calls want the lock that another process has taken last, and are skipped. ``runs`` has the
    number of the latest run of each process, in shared memory.
    """
    chance = random.Random(number)
    time.sleep(chance.uniform(0, seconds))
    parent = os.getppid()
    while os.getppid() == parent:  # and no longer, however the parent ends
        other = number
        if chance.random() < shared:
            other = (number + chance.randrange(1, len(runs))) % len(runs)
        else:
            runs[number] += 1
        with TaskLock(f"fleet-{other}-{runs[other]}", timeout=lease, on_conflict="skip") as lock:
            if lock:
                time.sleep(seconds)
        time.sleep(BETWEEN)


def hold(number: int, seconds: float = 60) -> None:
    with TaskLock(f"fleet-{number}"):
        time.sleep(seconds)


def measure(server: redis.Redis, rounds: int) -> Costs:
    """Measure what each action costs in the best of some rounds.

    It is done in a process of its own, whose threads end with it.
    """
    results = fork.SimpleQueue()
    with running(1, lambda number: results.put(_measure(server, rounds))):
        actions, *occupied = results.get()
    actions["return"] = _measure_return(server, rounds)
    return Costs(actions, *occupied)


def _measure(server: redis.Redis, rounds: int) -> tuple[dict[str, Cost], float, float, float]:
    with TaskLock("first"):  # the server learns its scripts
        get_store("default").look()
    occupied = _occupied(server)
    measured = [_measure_once(server) for _ in range(rounds)]
    actions = {name: cheapest(each[0][name] for each in measured) for name in measured[0][0]}
    return actions, *occupied, measured[0][1]


def _measure_once(server: redis.Redis) -> tuple[dict[str, Cost], float]:
    """Return what each action costs, and the bytes of a lock."""
    locks = [TaskLock(f"cost-{number}", timeout=LEASE) for number in range(CALLS)]
    store = get_store("default")
    empty = read(server)
    actions = {"take": _cost(server, [lock.acquire for lock in locks])}
    per_lock = (read(server).facts["used_memory"] - empty.facts["used_memory"]) / CALLS
    actions["conflict"] = _cost(server, [TaskLock(lock.name).acquire for lock in locks])
    requests = [[(lock._lease.key, lock._lease.value, LEASE)] for lock in locks if lock._lease]
    actions["renewal"] = _cost(server, [lambda r=r: store.renew_many(r) for r in requests])
    actions["release"] = _cost(server, [lock.release for lock in locks])
    actions["look"] = _cost(server, [store.look] * CALLS)
    return actions, per_lock


def cheapest(costs: Iterable[Cost]) -> Cost:
    return min(costs, key=lambda cost: cost.micros)


def _cost(server: redis.Redis, calls: list[Callable[[], Any]]) -> Cost:
    before = read(server)
    for call in calls:
        call()
    cost = read(server).since(before).times(1 / CALLS)
    # The thread that watches the cache has looked once or twice meanwhile.
    commands = {name: round(count, 1) for name, count in cost.commands.items()}
    return Cost(Counter({name: count for name, count in commands.items() if count}), cost.micros)


def _occupied(server: redis.Redis) -> tuple[float, float]:
    """Return the connections of a process whose lock is renewed, and the bytes of each."""
    close_stores()
    with TaskLock("connections", timeout=1.2):
        time.sleep(0.8)
        facts = read(server).facts
    count = facts["connected_clients"] - 1
    return count, facts["mem_clients_normal"] / (count + 1)


def _measure_return(server: redis.Redis, rounds: int) -> Cost:
    """Return the cost of one process that comes back after a restart, and takes its lock again.

    Instead of a restart, the connections are cut and the locks deleted: so the server keeps its
    scripts, which only the first of many processes loads.
    """
    costs = []
    with running(HERD, hold):
        for _ in range(rounds):
            wait_for_locks(server, HERD)
            before = read(server)
            server.flushdb()
            server.client_kill_filter(_type="normal", skipme=True)
            wait_for_locks(server, HERD)
            costs.append(read(server).since(before).times(1 / HERD))
    return cheapest(costs)


def wait_for_locks(server: redis.Redis, count: int) -> None:
    """Wait until the server has so many locks; the epoch is one key more."""
    wait_for(lambda: server.dbsize() > count, f"{count} locks are held", 60)
