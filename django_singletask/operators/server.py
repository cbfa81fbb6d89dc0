"""Look at the server of a cache: does it evict, forget or replicate, and is its clock right?"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from django_singletask.operators.words import plural
from django_singletask.stores import Store

__all__ = ["Finding", "compare_clocks", "look_at"]

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
            yield from look(store)
    except Exception as error:  # each client has errors of its own
        yield Finding("note", f"the server tells no more: {type(error).__name__}")


def compare_clocks(there: float, before: float) -> Finding:
    """Compare the clock of a server, which was read after ``before``, with that of this host."""
    apart = there - min(max(there, before), time.time())
    if abs(apart) < CLOCKS:
        return Finding("ok", "its clock agrees with that of this host")
    direction = "ahead of" if apart > 0 else "behind"
    return Finding(
        "warning",
        f"its clock is {abs(apart):.0f} s {direction} that of this host: leases do not mind, but "
        "one of the two is wrong, and times in the history with it",
    )


def _redis(store: Any) -> Iterator[Finding]:
    client = store.client
    info = client.info()
    yield Finding("note", f"{info.get('server_name', 'redis')} {info.get('redis_version')}")
    before = time.time()
    seconds, micros = client.time()
    yield compare_clocks(seconds + micros / 1e6, before)
    policy = info.get("maxmemory_policy")
    if policy == "noeviction":
        yield Finding("ok", "it evicts nothing: maxmemory-policy is noeviction")
    elif not info.get("maxmemory"):
        text = f"it evicts nothing as it has no maxmemory, but its policy is {policy}"
        yield Finding("note", text)
    else:
        yield Finding(
            "warning",
            f"maxmemory-policy {policy} evicts locks too when the memory is full "
            f"({info.get('evicted_keys', 0)} keys so far): use noeviction, and a server for the "
            "locks alone",
        )
    if info.get("role") != "master":
        yield Finding("unfit", f"it is a {info.get('role')}, and locks need the primary")
    if replicas := info.get("connected_slaves"):
        yield Finding(
            "warning",
            f"{plural(replicas, 'replica')}, which lag: a failover can forget the latest locks, "
            "and a second run can start beside their holders",
        )
    # The last question, since managed servers forbid CONFIG.
    if info.get("aof_enabled"):
        yield Finding("ok", "locks survive its restart: AOF is on")
    elif client.config_get("save").get("save"):
        yield Finding("note", "a restart forgets the locks since the last RDB snapshot")
    else:
        yield Finding("note", "a restart forgets all locks: neither AOF nor RDB is on")


def _memcached(store: Any) -> Iterator[Finding]:
    before = time.time()
    servers = dict(_stats(store))
    for server, stats in servers.items():
        if not stats:
            yield Finding("unfit", f"{server} does not answer")
            continue
        yield Finding("note", f"memcached {stats['version']}")
        yield compare_clocks(int(stats["time"]) + 0.5, before)
        evictions = int(stats.get("evictions", 0))
        if evictions:
            yield Finding(
                "warning",
                f"it has evicted {evictions} entries as its memory was full, and evicts locks "
                "too: give it more (-m), or the locks a server of their own",
            )
        else:
            yield Finding("ok", "it has evicted nothing yet")
        yield Finding("note", "a restart forgets all locks, and it cannot list them")
    if len(servers) > 1:
        yield Finding(
            "warning",
            f"{len(servers)} servers: when one fails its locks are gone, and if processes disagree "
            "on the list they do not see each other's",
        )
    for server in servers:
        if _settings(store, server).get("evictions") == "off":
            yield Finding(
                "unfit",
                f"{server} was started with -M: when its memory is full, it refuses to renew locks "
                "and to free them, so that their holders lose them. Start it without -M",
            )
        else:
            yield Finding("note", f"when the memory of {server} is full, it evicts locks too")


def _stats(store: Any) -> Iterator[tuple[str, dict[str, str]]]:
    if hasattr(store.client, "get_stats"):  # pylibmc
        for server, stats in store.client.get_stats():
            texts = _texts(stats)
            # libmemcached calls the socket /x "/x:0 (0)", and makes numbers up for a server that
            # does not answer.
            name = _text(server).partition(" ")[0].removesuffix(":0")
            yield name, texts if texts.get("pid") != "-1" else {}
    else:
        for server, each in store.clients.items():
            yield str(server), _texts(each.stats())


def _settings(store: Any, server: str) -> dict[str, str]:
    """Return the answer of a server to ``stats settings``."""
    if not hasattr(store.client, "get_stats"):
        clients = {str(name): each for name, each in store.clients.items()}
        return _texts(clients[server].stats("settings"))
    # libmemcached knows no such question.
    with _connect(server) as connection:
        connection.sendall(b"stats settings\r\n")
        with connection.makefile("r") as lines:
            answer = takewhile(lambda line: line.startswith("STAT "), lines)
            return dict(line.split()[1:3] for line in answer)


def _connect(server: str) -> socket.socket:
    if "/" in server:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT)
        connection.connect(server)
        return connection
    host, _colon, port = server.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT)


def _texts(stats: dict[Any, Any]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in stats.items()}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _database(store: Any) -> Iterator[Finding]:
    connection = store.connection
    version = ".".join(map(str, connection.get_database_version()))
    yield Finding("note", f"{connection.display_name} {version}")
    clocks = {
        "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
        "mysql": "SELECT UNIX_TIMESTAMP(NOW(6))",
        "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
    }
    before = time.time()
    yield compare_clocks(float(store.execute(clocks[connection.vendor])[0][0]), before)
    if connection.vendor == "sqlite":
        yield Finding("note", "an SQLite file is shared by the processes of one host only")
