"""Say what 10, 1,000 and 100,000 worker processes ask of one Redis: a discrete-event model.

    pip install -e . --group bench
    python benchmarks/fleet.py            # some minutes; prints FLEET.txt
    python benchmarks/fleet.py --check    # compares the model with as many real processes
    python benchmarks/fleet.py --nodes 3  # what real processes ask of a cluster

Starts a Redis on a free port, and measures what each action costs it. How often an action happens
follows from the package's own constants and functions. An action is a take, a conflict, a release,
a renewal, a look whether the cache has forgotten its locks, or a return after a restart of it.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import celery
import django
import redis
from django.conf import settings

from benchmarks import clients
from benchmarks.clients import BETWEEN, Costs, at_a_rate
from django_singletask.locks.lease import Lease
from django_singletask.stores.epoch import HOLD_BACK, LOOK
from django_singletask.task.delivery import FIRST_HOP, hop
from tests import servers
from tests.deadline import wait_for

FLEETS = (10, 1000, 100_000)
TASKS = ((0.1, 1.2, 0.3), (10.0, 30.0, 10.0), (600.0, 1200.0, 60.0))
"""Seconds of a task, seconds before the count begins, seconds of the count."""
CONFLICTS = ((0.0, "skip"), (0.1, "skip"), (0.5, "skip"), (0.5, "requeue"))
"""The share of the new calls that want a lock that another process holds, and what those do."""
NODES = (1, 3, 6, 12)
RESTARTED = (10, 100, 1000, 2000, 5000, 10_000, 100_000)
POOL = 8
"""Processes of one worker, which has a main process too."""
TOLERANCE = 0.15


class Workload(NamedTuple):
    """What each process of a fleet does: it runs tasks back to back."""

    processes: int
    seconds: float
    shared: float = 0.0
    policy: str = "skip"
    lease: float = 60.0
    pool: int = POOL
    """Processes of a worker; 0: there are no workers."""


class Demand(NamedTuple):
    """What a fleet does in a second, and how many calls wait at the end."""

    actions: Counter[str]
    waiting: int


def simulate(load: Workload, warm_up: float, seconds: float, seed: int = 14) -> Demand:
    """Count what a fleet does in ``seconds``, after a time in which it reaches its usual state.

    An event is a process that is free for its next delivery. It takes the postponed message that
    is due, or else a new one, which wants a lock of its own or the one that another process holds.
    A lock is a list with the time until which it is held. Looks and renewals follow from that.
    """
    from django_singletask.worker.sweeper import SWEEP
    from django_singletask.worker.watcher import LEARN_EVERY

    chance = random.Random(seed)
    n, begins, ends = load.processes, warm_up, warm_up + seconds
    hops_of = hops_after_conflicts(load.lease)
    renewal = renewed_after(load.lease)
    free = [(chance.uniform(0, load.seconds), process) for process in range(n)]
    heapq.heapify(free)
    latest = [[0.0] for _ in range(n)]  # the lock that each process has taken last
    postponed: list[tuple[float, int, int, list[float]]] = []
    counts: Counter[str] = Counter()
    while free[0][0] < ends:
        now, process = free[0]
        if postponed and postponed[0][0] <= now:
            _due, _number, hops, lock = heapq.heappop(postponed)
        elif chance.random() < load.shared:
            hops, lock = 0, latest[(process + chance.randrange(1, n)) % n]
        else:
            hops, lock = 0, [0.0]
        if lock[0] > now:
            counts["conflict"] += now >= begins
            if load.policy == "requeue":
                due = now + chance.choice(hops_of[min(hops, len(hops_of) - 1)])
                heapq.heappush(postponed, (due, process, hops + 1, lock))
            heapq.heapreplace(free, (now + BETWEEN, process))
            continue
        until = lock[0] = now + load.seconds
        latest[process] = lock
        counts["take"] += now >= begins
        counts["release"] += begins <= until < ends
        renewals = times_before(min(until, ends) - now, renewal)
        counts["renewal"] += max(0, renewals - times_before(begins - now, renewal))
        # The thread looks at a lease at its ticks, from half the time between two of them.
        looked = max(now + LOOK / 2, begins)
        counts["look"] += max(0, min(until, ends) - looked) / LOOK
        heapq.heapreplace(free, (until + BETWEEN, process))
    rates = Counter({action: count / seconds for action, count in counts.items()})
    if load.pool:
        # Of the main processes each looks, and they take turns to sweep the history.
        rates.update({"look": n / load.pool / LEARN_EVERY, "conflict": n / load.pool / SWEEP})
    return Demand(rates, len(postponed))


def times_before(time: float, every: float) -> int:
    """Return how often something happens before a time if it happens ``every`` so many seconds."""
    return max(0, -int(-time // every) - 1)


def renewed_after(lease: float) -> float:
    fresh = SimpleNamespace(renewed_at=0.0, length=lease)
    due: float = Lease.due_at.fget(fresh)  # type: ignore[attr-defined]
    return due


def hops_after_conflicts(lease: float) -> list[list[float]]:
    """Return samples of the seconds of the first hop, of the second, and so on."""
    app = celery.Celery(broker="memory://", set_as_current=False)
    behind: Any = SimpleNamespace(length=lease, blocker=None, free_in=math.inf)
    return [[hop(app, behind, FIRST_HOP, hops, math.inf) for _ in range(200)] for hops in range(12)]


def restart(processes: int, costs: Costs, seed: int = 14) -> tuple[float, float]:
    """Return when the last lock is held again, and the share that is before others may take it.

    Each process holds a lock, and finds the new server at its next look. The server carries out
    requests in the order in which they arrive, and a process waits for each reply.
    """
    chance, cost = random.Random(seed), costs.actions["return"]
    requests = sum(round(cost.commands[name]) for name in clients.REQUESTS)
    events = [(chance.uniform(0, LOOK), requests) for _ in range(processes)]
    heapq.heapify(events)
    idle_at, back = 0.0, []
    while events:
        arrives, left = events[0]
        idle_at = max(arrives, idle_at) + cost.micros / requests / 1e6
        if left > 1:
            heapq.heapreplace(events, (idle_at, left - 1))
        else:
            heapq.heappop(events)
            back.append(idle_at)
    return back[-1], sum(at <= HOLD_BACK for at in back) / processes


def show_costs(costs: Costs) -> None:
    cells = []
    for name, cost in costs.actions.items():
        commands = (f"{count:g} {each}" for each, count in sorted(cost.commands.items()))
        cells.append((name, f"{cost.micros:.0f} µs", ", ".join(commands)))
    show("What one action costs the server", ("Action", "processor", "commands"), cells)
    print(f"\nA process has {costs.connections:g} connections; each of", end=" ")
    print(f"{costs.connection_bytes:,.0f} bytes, and a lock of {costs.lock_bytes:,.0f} bytes.")


def show_fleets(costs: Costs) -> None:
    names = ("take", "conflict", "renewal", "look")
    head = ("Processes", "shared", "policy", *(f"{n}s" for n in names), "waiting", "of a thread")
    full = []
    for seconds, warm_up, counted in TASKS:
        cells = []
        for processes, (shared, policy) in itertools.product(FLEETS, CONFLICTS):
            load = Workload(processes, seconds, shared, policy)
            demand = simulate(load, warm_up, counted)
            used = at_a_rate(demand.actions, costs).micros / 1e6
            rates = [f"{demand.actions[name]:,.0f}" for name in names]
            start = [f"{processes:,}", f"{shared:.0%}", policy if shared else ""]
            cells.append((*start, *rates, f"{demand.waiting:,}", f"{used:.1%}"))
            if processes == FLEETS[1] and not shared:
                takes = demand.actions["take"] / used
                full.append((f"{seconds:g} s", f"{load.processes / used:,.0f}", f"{takes:,.0f}"))
        show(f"Tasks of {seconds:g} s: a second has so many", head, cells)
    show("One Redis thread is full", ("Tasks of", "processes", "takes a second"), full)


def show_restarts(costs: Costs) -> None:
    cells = []
    for processes in RESTARTED:
        last, in_time = restart(processes, costs)
        connections = processes * costs.connections + processes / POOL
        memory = connections * costs.connection_bytes + processes * costs.lock_bytes
        figures = (f"{processes:,}", f"{connections:,.0f}", f"{memory / 1e6:,.0f} MB")
        cells.append((*figures, f"{last:.2f} s", f"{in_time:.0%}"))
    head = ("Processes", "connections", "memory", "all are back after", f"within {HOLD_BACK:g} s")
    show("Every process holds a lock, and the server restarts", head, cells)


def show_clusters(costs: Costs) -> None:
    """Divide what a fleet asks among the nodes of a cluster; tasks of 10 s hold its locks.

    A group of locks is on one node, and each main process looks at each node. The thread of a task
    has a connection to each node in the end, the other two of a process to that of its lock.
    """
    from django_singletask.worker.watcher import LEARN_EVERY

    cells = []
    loads = [Workload(processes, TASKS[1][0], pool=0) for processes in (1000, 10_000, 100_000)]
    demands = [(load.processes, simulate(load, *TASKS[1][1:])) for load in loads]
    for (processes, demand), nodes in itertools.product(demands, NODES):
        mine = Counter({name: rate / nodes for name, rate in demand.actions.items()})
        mine["look"] += processes / POOL / LEARN_EVERY
        used = at_a_rate(mine, costs).micros / 1e6
        connections = processes * (1 + (costs.connections - 1) / nodes) + processes / POOL
        memory = connections * costs.connection_bytes + processes / nodes * costs.lock_bytes
        last, in_time = restart(processes // nodes, costs)
        figures = (f"{sum(mine.values()):,.0f}", f"{used:.1%}", f"{connections:,.0f}")
        back = (f"{memory / 1e6:,.0f} MB", f"{last:.2f} s", f"{in_time:.0%}")
        cells.append((f"{processes:,}", f"{nodes}", *figures, *back))
    asked = ("requests a second", "of a thread", "connections", "memory")
    head = ("Processes", "nodes", *asked, "all are back after", f"within {HOLD_BACK:g} s")
    show("Each node of a cluster, and one of them forgets", head, cells)


def show_nodes(cluster: servers.Cluster, processes: int, seconds: float = 5) -> None:
    """Measure each node under real processes that hold a lock each, and let one node forget."""
    nodes = [redis.Redis.from_url(node.url) for node in cluster.primaries]
    with clients.running(processes, clients.hold):
        wait_for(lambda: sum(n.dbsize() for n in nodes) >= 256 + processes, "all are held", 120)
        before, count = list(map(clients.read, nodes)), nodes[0].dbsize()
        time.sleep(seconds)
        after = list(map(clients.read, nodes))
        nodes[0].flushall()
        began = time.monotonic()
        wait_for(lambda: nodes[0].dbsize() >= count - 256 // len(nodes), "all are back", 60)
        took = time.monotonic() - began
    cells = []
    for number, (old, new) in enumerate(zip(before, after, strict=True), 1):
        asked, memory = new.since(old).times(1 / seconds), new.facts["mem_clients_normal"]
        rate = sum(asked.commands[name] for name in ("evalsha", "get"))
        clients_ = new.facts["connected_clients"] - 1
        figures = (f"{rate:,.0f}", f"{asked.micros / 1e6:.1%}", f"{memory / 1e6:.1f} MB")
        cells.append((str(number), *figures, f"{clients_:,}"))
    head = ("Node", "requests a second", "of a thread", "memory of clients", "connections")
    show(f"{processes:,} processes, each with a lock", head, cells)
    print(f"\nAfter the first node was flushed, all had their locks back in {took:.2f} s.")


def show(title: str, head: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    from benchmarks import report

    print("", title, "", *report.grid(head, cells), sep="\n", flush=True)


def checked(processes: int) -> Iterator[tuple[Workload, float]]:
    """Yield workloads, and the seconds for which real processes do them."""
    # No look and no renewal is near the end of a task: on a busy machine they come a little late.
    if processes <= 100:
        yield Workload(processes, 1.1, lease=2.1, pool=0), 3.3
    if processes >= 100:
        for shared in (0.1, 0.5):
            yield Workload(processes, 10.2, shared, lease=13.2, pool=0), 20.0


def agrees(load: Workload, seconds: float, server: redis.Redis, costs: Costs) -> bool:
    """Compare the model with real processes, print a table, and say whether they agree."""
    server.flushdb()
    runs = RawArray("l", load.processes)
    args = (runs, load.seconds, load.lease, load.shared)
    with clients.running(load.processes, clients.work, *args):
        wait_for(lambda: all(runs), "each process has begun its first task", 120)
        time.sleep(load.seconds)
        began = clients.read(server)
        time.sleep(seconds)
        ended = clients.read(server)
    measured = ended.since(began).times(1 / (ended.at - began.at))
    expected = at_a_rate(simulate(load, load.seconds * 1.5, seconds * 5).actions, costs)
    # A busy machine runs fewer tasks, but each task asks for the same. Looks follow the clock.
    pace = measured.commands["del"] / expected.commands["del"]
    cells, agree = [], True
    least = sum(expected.commands.values()) / 50
    for name in sorted(expected.commands | measured.commands):
        ours, theirs = expected.commands[name], measured.commands[name]
        if max(ours, theirs) > least:
            ratio = theirs / ours / pace if ours else float("inf")
            lowest = min(pace, 1.0) * (1 - TOLERANCE) * ours
            highest = max(pace, 1.0) * (1 + TOLERANCE) * ours
            agree = agree and lowest <= theirs <= highest
            cells.append((name, f"{ours:,.1f}", f"{theirs:,.1f}", f"{ratio:.2f}"))
    ours, theirs = expected.micros / 1e6, measured.micros / 1e6
    ratio = f"{theirs / ours / pace:.2f}"
    cells.append(("one Redis thread", f"{ours:.1%}", f"{theirs:.1%}", ratio))
    title = f"{load.processes:,} processes, tasks of {load.seconds:g} s, {load.shared:.0%} shared"
    show(title, ("Commands a second", "model", "measured", "ratio, for a task"), cells)
    return agree


def show_restart(processes: int, server: servers.Redis, client: redis.Redis, costs: Costs) -> None:
    """Restart the server under real processes that each hold a lock."""
    client.flushdb()
    with clients.running(processes, clients.hold):
        clients.wait_for_locks(client, processes)
        time.sleep(LOOK)
        server.restart_empty()
        began = time.monotonic()
        clients.wait_for_locks(client, processes)
        took, facts = time.monotonic() - began, clients.read(client)
    micros, ours = facts.micros() / processes, costs.actions["return"].micros
    last, _in_time = restart(processes, costs)
    cells = [("all locks are back after", f"{last:.2f} s", f"{took:.2f} s")]
    cells.append(("processor of the server for each", f"{ours:.0f} µs", f"{micros:.0f} µs"))
    show(f"{processes:,} processes, the server restarts", ("", "model", "measured"), cells)


def configure(backend: str, location: str) -> None:
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django_singletask"],
        CACHES={"default": {"BACKEND": backend, "LOCATION": location}},
        SINGLETASK_HISTORY="off",
        USE_TZ=True,
    )
    django.setup()
    logging.disable(logging.CRITICAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with real processes")
    parser.add_argument("--processes", type=int, action="append", help="how many in the check")
    parser.add_argument("--nodes", type=int, help="measure a cluster of so many primaries")
    arguments = parser.parse_args()
    if arguments.nodes:
        with servers.Cluster(servers.Redis, primaries=arguments.nodes, replicas=0) as cluster:
            configure("django_valkey.cluster_cache.cache.ClusterValkeyCache", cluster.url)
            for processes in arguments.processes or [100]:
                show_nodes(cluster, processes)
        return 0
    with servers.Redis() as server:
        configure("django.core.cache.backends.redis.RedisCache", server.url)
        client = redis.Redis.from_url(server.url)
        costs = clients.measure(client, rounds=1 if arguments.check else 15)
        show_costs(costs)
        if not arguments.check:
            show_fleets(costs)
            show_restarts(costs)
            show_clusters(costs)
            return 0
        agree = True
        for processes in arguments.processes or [10, 100, 1000]:
            for load, seconds in checked(processes):
                agree = agrees(load, seconds, client, costs) and agree
            if processes >= 100:
                show_restart(processes, server, client, costs)
        return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
