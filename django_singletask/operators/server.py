"""Look at the server of a cache: does it evict, forget or replicate, and is its clock right?"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from itertools import starmap, takewhile
from typing import Any

from django_singletask.operators.words import plural
from django_singletask.stores import Store

__all__ = ["Finding", "ask_memcached", "compare_clocks", "look_at"]

CLOCKS = 2.0
"""Seconds by which two clocks may differ before that is worth a warning."""
TIMEOUT = 5.0
"""Seconds until a server that does not answer is given up."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found out; ``level`` is ok, note, warning or unfit."""

    level: str
    text: str


def look_at(store: Store) -> Iterator[Finding]:
    """Yield what the server of a store says; that it refuses to say more is a note."""
    looks = {"redis": _redis, "memcached": _memcached, "database": _database}
    try:
        if look := looks.get(store.family):
            yield from starmap(Finding, look(store))
    except Exception as error:  # each client has errors of its own
        yield Finding("note", f"the server refused to say more: {type(error).__name__}")


def compare_clocks(there: float, before: float) -> tuple[str, str]:
    """Compare the clock of a server, which was read after ``before``, with that of this host."""
    apart = there - min(max(there, before), time.time())
    if abs(apart) < CLOCKS:
        return "ok", "the server's clock agrees with the clock of this host"
    clock = f"{abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} the clock of this host"
    text = f"the server's clock is {clock}: leases do not depend on it, but times in the history do"
    return "warning", text


def _redis(store: Any) -> Iterator[tuple[str, str]]:
    client = store.client
    info = client.info()
    yield "note", f"{info.get('server_name', 'redis')} {info.get('redis_version')}"
    before = time.time()
    seconds, micros = client.time()
    yield compare_clocks(seconds + micros / 1e6, before)
    policy, evicted = info.get("maxmemory_policy"), info.get("evicted_keys", 0)
    if policy == "noeviction":
        yield "ok", "the server evicts nothing: maxmemory-policy is noeviction"
    elif not info.get("maxmemory"):
        text = f"with a limit it would evict locks too (maxmemory-policy is {policy})"
        yield "note", f"the server evicts nothing, as maxmemory is not set; {text}"
    else:
        so_far = f"{plural(evicted, 'key')} so far"
        text = f"evicts locks too when the memory is full ({so_far}): set noeviction"
        yield "warning", f"maxmemory-policy {policy} {text}, and use a dedicated server for locks"
    if info.get("role") != "master":
        yield "unfit", f"the server is a {info.get('role')}: locks need the primary"
    if replicas := info.get("connected_slaves"):
        text = "a failover can lose the newest locks, and then a second copy of a task can start"
        yield "warning", f"{plural(replicas, 'replica')}: {text}"
    # The last question, since managed servers forbid CONFIG.
    if info.get("aof_enabled"):
        yield "ok", "locks survive a restart: AOF is on"
    elif client.config_get("save").get("save"):
        yield "note", "a restart loses the locks acquired since the last RDB snapshot"
    else:
        yield "note", "a restart loses all locks: neither AOF nor RDB is on"


def _memcached(store: Any) -> Iterator[tuple[str, str]]:
    yield "note", "a restart loses all locks, and memcached cannot list locks"
    servers = [str(server).removeprefix("unix:") for server in store.cache.client_servers]
    if len(servers) > 1:
        text = "if one fails, its locks are lost; all processes need the same list of servers"
        yield "warning", f"{len(servers)} servers: {text}"
    for server in servers:
        before = time.time()
        try:
            stats = ask_memcached(server, "stats")
            settings = ask_memcached(server, "stats settings")
        except ConnectionRefusedError:
            yield "unfit", f"{server} does not answer"
            continue
        yield "note", f"{server}: memcached {stats['version']}"
        yield compare_clocks(int(stats["time"]) + 0.5, before)
        if settings.get("evictions") == "off":
            text = "with full memory, it neither renews nor releases locks: start it without -M"
            yield "unfit", f"{server} was started with -M: {text}"
        elif evictions := int(stats.get("evictions", 0)):
            text = "and evicts locks too: give it more memory (-m), or use a dedicated server"
            yield "warning", f"{server} has evicted {plural(evictions, 'key')}, {text}"
        else:
            yield (
                "note",
                f"{server} evicts locks too when its memory is full; so far it evicted none",
            )


def ask_memcached(server: str, question: str) -> dict[str, str]:
    """Return what a server answers to a question; libmemcached does not know "stats settings"."""
    host, colon, port = server.rpartition(":")
    if "/" in server:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT)
        connection.connect(server)
    else:
        address = (host.strip("[]"), int(port)) if colon else (server, 11211)
        connection = socket.create_connection(address, timeout=TIMEOUT)
    with connection, connection.makefile() as lines:
        connection.sendall(f"{question}\r\n".encode())
        answer = takewhile(lambda line: line.startswith("STAT "), lines)
        return dict(line.split()[1:3] for line in answer)


def _database(store: Any) -> Iterator[tuple[str, str]]:
    connection = store.connection
    version = ".".join(map(str, connection.get_database_version()))
    yield "note", f"{connection.display_name} {version}"
    clocks = {
        "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
        "mysql": "SELECT UNIX_TIMESTAMP(NOW(6))",
        "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
    }
    before = time.time()
    yield compare_clocks(float(store.execute(clocks[connection.vendor])[0][0]), before)
    if connection.vendor == "sqlite":
        yield "note", "only processes on one host can share an SQLite file"
