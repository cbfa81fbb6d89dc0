"""Find out whether a cache can hold locks: is it shared, how quick is it, what says its server?"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from itertools import starmap
from typing import Any

from django_singletask.holder import Holder
from django_singletask.locks.keys import name_key
from django_singletask.operators.words import plural
from django_singletask.stores import get_store
from django_singletask.stores.base import Store
from django_singletask.stores.places import servers_of

LEASE = 60.0
"""Seconds after which the entry of a probe that was killed ends."""
TURNS = 200
"""Locks that are acquired and released to measure how long that takes."""
READER = """
import sys

import django

django.setup()
from django_singletask.stores import get_store

alias, key = sys.argv[1:]
sys.exit(0 if get_store(alias).read(key) else 3)
"""
"""Program of the other process, which exits with 3 if it does not see the lock."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found out; ``level`` is ok, note, warning or unfit."""

    level: str
    text: str


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was found out about a cache; ``median`` and ``slowest`` (99%) are seconds."""

    cache: str
    backend: str
    server: str
    findings: list[Finding]
    median: float
    slowest: float

    @property
    def fit(self) -> bool:
        """Whether the cache can hold locks."""
        return not any(finding.level == "unfit" for finding in self.findings)


def probe(alias: str) -> Probe:
    """Look at a cache from this process and from another one, and at its server.

    It releases the locks that it acquires, and touches no other. Raises ``ImproperlyConfigured``
    for a cache that cannot hold locks, and :class:`LockUnavailable`.
    """
    store = get_store(alias)
    seen = look_from_another_process(alias, store)
    spans = [*_spans(store)]
    median, slowest = statistics.median(spans), statistics.quantiles(spans, n=100)[98]
    times = f"{median * 1000:.2f} ms (median), {slowest * 1000:.2f} ms (99%)"
    speed = Finding("ok", f"a lock is acquired and released in {times}")
    backend = f"{type(store.cache).__module__}.{type(store.cache).__qualname__}"
    server = ", ".join(sorted(servers_of(alias))) or store.place
    return Probe(alias, backend, server, [seen, speed, *look_at(store)], median, slowest)


def look_from_another_process(alias: str, store: Store) -> Finding:
    """Hold a lock and let another process, with the same settings, read it."""
    key, value = _entry()
    # The same modules are found there, wherever manage.py is.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    store.add(key, value, LEASE)
    try:
        done = subprocess.run(
            [sys.executable, "-c", READER, alias, key],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            errors="replace",
        )
    finally:
        store.release(key, value)
    if done.returncode == 0:
        return Finding("ok", "another process sees the lock that this process holds")
    if done.returncode == 3:
        return Finding(
            "unfit",
            "another process does not see the lock that this process holds: the processes do not "
            "share the cache, or use different keys (KEY_PREFIX, KEY_FUNCTION)",
        )
    last_line = done.stderr.strip().rpartition("\n")[2]
    raise RuntimeError(f"The other process failed: {last_line or f'exit {done.returncode}'}")


def _spans(store: Store) -> Iterator[float]:
    """Yield the seconds in which a lock is acquired and released, each time."""
    key, value = _entry()
    for _ in range(TURNS):
        began = time.perf_counter()
        store.add(key, value, LEASE)
        store.release(key, value)
        yield time.perf_counter() - began


def _entry() -> tuple[str, bytes]:
    """Return key and value of a lock of a name that nobody else uses.

    The holder names no process, so that nobody can take it for dead.
    """
    token = uuid.uuid4().hex
    name = f"django_singletask.probe {token}"
    holder = Holder.from_dict({"name": name, "token": token, "timeout": LEASE})
    return name_key(name).key, holder.encode()


def look_at(store: Store) -> Iterator[Finding]:
    """Yield what the server of a store says; that it refuses to say more is a note."""
    looks = {"redis": _redis, "memcached": _memcached, "database": _database}
    try:
        if look := looks.get(store.family):
            yield from starmap(Finding, look(store))
    except Exception as error:  # each client has errors of its own
        yield Finding("note", f"the server refused to say more: {type(error).__name__}")


def _redis(store: Any) -> Iterator[tuple[str, str]]:
    client = store.client
    info = client.info()
    yield "note", f"{info.get('server_name', 'redis')} {info.get('redis_version')}"
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
    yield "note", "memcached evicts locks too when its memory is full: use a dedicated server"
    if (servers := len(store.cache.client_servers)) > 1:
        text = "if one fails, its locks are lost; all processes need the same list of servers"
        yield "warning", f"{servers} servers: {text}"


def _database(store: Any) -> Iterator[tuple[str, str]]:
    connection = store.connection
    version = ".".join(map(str, connection.get_database_version()))
    yield "note", f"{connection.display_name} {version}"
    if connection.vendor == "sqlite":
        yield "note", "only processes on one host can share an SQLite file"
