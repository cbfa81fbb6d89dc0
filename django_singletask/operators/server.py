"""Look at the server of a cache: does it evict, forget or replicate, and is its clock right?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from django_singletask.stores import Store

__all__ = ["Finding", "look_at"]

CLOCKS = 2.0
"""Seconds that two clocks may be apart before it is worth a warning."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found out; ``level`` is ok, note, warning or unfit."""

    level: str
    text: str


def look_at(store: Store) -> list[Finding]:
    """Look at the server of a store; what it does not tell is a note."""
    kind = type(store).__mro__
    names = {cls.__name__ for cls in kind}
    if "RedisStore" in names:
        look = _redis
    elif "MemcachedStore" in names:
        look = _memcached
    elif "DatabaseStore" in names:
        look = _database
    else:
        return []  # in the memory of a process, as the race has shown
    findings = []
    try:
        for finding in look(store):
            findings.append(finding)
    except Exception as error:  # a managed server may refuse to tell
        findings.append(Finding("note", f"the server tells no more: {type(error).__name__}"))
    return findings


def _clock(there: float, before: float) -> Finding:
    now = time.time()
    # The server looked at its clock between the request and now.
    apart = there - now if there > now else there - before if there < before else 0.0
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
    yield _clock(seconds + micros / 1e6, before)
    yield _eviction(info)
    if info.get("aof_enabled"):
        yield Finding("ok", "locks survive its restart: AOF is on")
    elif _saves(client, info):
        yield Finding("note", "a restart forgets the locks since the last RDB snapshot")
    else:
        yield Finding("note", "a restart forgets all locks: neither AOF nor RDB is on")
    if info.get("role") != "master":
        yield Finding("unfit", f"it is a {info.get('role')}, and locks need the primary")
    replicas = int(info.get("connected_slaves") or 0)
    if replicas:
        yield Finding(
            "warning",
            f"{replicas} replica{'s' if replicas > 1 else ''}, which lag: a failover can forget "
            "the latest locks, and a second run can start beside their holders",
        )


def _eviction(info: dict[str, Any]) -> Finding:
    policy, limit = info.get("maxmemory_policy"), int(info.get("maxmemory") or 0)
    if policy == "noeviction":
        return Finding("ok", "it evicts nothing: maxmemory-policy is noeviction")
    if policy is None:
        return Finding("note", "it does not tell its maxmemory-policy")
    if not limit:
        return Finding(
            "note", f"it evicts nothing as it has no maxmemory, but its policy is {policy}"
        )
    evicted = info.get("evicted_keys", 0)
    return Finding(
        "warning",
        f"maxmemory-policy {policy} evicts locks too when the memory is full ({evicted} keys so "
        "far): use noeviction, and a server for the locks alone",
    )


def _saves(client: Any, info: dict[str, Any]) -> bool:
    try:
        return bool(client.config_get("save").get("save"))
    except Exception:  # managed servers forbid CONFIG
        return bool(info.get("rdb_last_save_time") and info.get("rdb_saves"))


def _memcached(store: Any) -> Iterator[Finding]:
    before = time.time()
    servers = list(_stats(store.client))
    for server, stats in servers:
        if not stats:
            yield Finding("unfit", f"{server} does not answer")
            continue
        yield Finding("note", f"memcached {_text(stats, 'version')}")
        yield _clock(float(int(_text(stats, "time"))) + 0.5, before)
        evictions = int(_text(stats, "evictions") or 0)
        if evictions:
            yield Finding(
                "warning",
                f"it has evicted {evictions} entries as its memory was full, and evicts locks "
                "too: give it more (-m), or the locks a server of their own",
            )
        else:
            yield Finding("ok", "it has evicted nothing yet; if its memory is full it evicts locks")
        yield Finding("note", "a restart forgets all locks, and it cannot list them")
        if "oldest" in stats:
            yield Finding("note", f"its oldest entry is {stats['oldest']} s old")
    if len(servers) > 1:
        yield Finding(
            "warning",
            f"{len(servers)} servers: when one fails its locks are gone, and if processes disagree "
            "on the list they do not see each other's",
        )


def _stats(client: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    if hasattr(client, "get_stats"):  # pylibmc, which cannot read the age of the entries
        for server, found in client.get_stats():
            # Of a server that does not answer it makes a table of zeros.
            yield _str(server).partition(" ")[0], found if found.get("pid") != b"-1" else {}
    else:
        for server, one in client.clients.items():
            yield str(server), _with_age(one.stats(), one.stats("items"))


def _with_age(stats: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    ages = [int(_str(value)) for name, value in items.items() if _str(name).endswith(":age")]
    return {**stats, "oldest": max(ages)} if ages and stats else stats


def _text(stats: dict[Any, Any], name: str) -> str:
    return _str(stats.get(name.encode(), stats.get(name, "")))


def _str(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


CLOCK = {
    "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
    "mysql": "SELECT UNIX_TIMESTAMP(NOW(6))",
    "sqlite": "SELECT (julianday('now') - 2440587.5) * 86400.0",
}
ISOLATION = {
    "postgresql": "SELECT current_setting('transaction_isolation')",
    "mysql": "SELECT @@transaction_isolation",
}


def _database(store: Any) -> Iterator[Finding]:
    connection, vendor = store.connection, store.connection.vendor

    def ask(sql: str) -> Any:
        return store._run(sql, [], fetch=True)[0][0]

    version = ".".join(map(str, connection.get_database_version()))
    yield Finding("note", f"{connection.display_name} {version}")
    before = time.time()
    yield _clock(float(ask(CLOCK[vendor])), before)
    if connection.get_autocommit():
        yield Finding("ok", "locks are written in autocommit, on a connection of their own")
    else:
        yield Finding("unfit", "the connection is not in autocommit: nobody would see a lock")
    if vendor == "sqlite":
        yield Finding("note", "an SQLite file is shared by the processes of one host only")
        return
    maria = getattr(connection, "mysql_is_mariadb", False)
    isolation = ask("SELECT @@tx_isolation" if maria else ISOLATION[vendor])
    yield Finding("note", f"isolation is {str(isolation).lower()}")
