"""Find out whether a cache can hold locks: is it shared, how quick is it, what says its server?"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import timeit
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import Any

from django.utils.translation import gettext as _

from django_singletask.locks.keys import name_key
from django_singletask.locks.ref import LockRef
from django_singletask.operators.held import HeldLock, count_states, list_held
from django_singletask.operators.words import STATES, plural
from django_singletask.stores import get_store
from django_singletask.stores.base import CannotList, Store

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
    """One thing that was found out.

    ``level`` is ok, note, restart (what a restart of the server loses), warning or unfit.
    """

    level: str
    text: str


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was found out about a cache.

    ``fit`` says whether it can hold locks. ``median`` and ``slowest`` (99%) are the seconds in
    which a lock is acquired and released.
    """

    cache: str
    backend: str
    server: str
    findings: list[Finding]
    median: float
    slowest: float
    fit: bool


def probe(alias: str) -> Probe:
    """Look at a cache from this process and from another one, and at its server.

    This releases the locks that it acquires, and touches no other. Raises ``ImproperlyConfigured``
    for a cache that cannot hold locks, and :class:`LockUnavailable`.
    """
    store = get_store(alias)
    findings = [look_from_another_process(alias, store)]

    def acquire_and_release() -> None:
        with _held(store):
            pass

    spans = timeit.repeat(acquire_and_release, repeat=TURNS, number=1)
    median = statistics.median(spans)
    slowest = statistics.quantiles(spans, n=100)[98]
    times = f"{median * 1000:.2f} ms (median), {slowest * 1000:.2f} ms (99%)"
    findings.append(Finding("ok", f"a lock is acquired and released in {times}"))
    findings += look_at(store)
    levels = {finding.level for finding in findings}
    if "restart" in levels:
        cost = cost_of_restart()
        findings.append(Finding("restart", f"now {cost}"))
    backend = type(store.cache)
    name = f"{backend.__module__}.{backend.__qualname__}"
    fit = "unfit" not in levels
    return Probe(alias, name, store.place, findings, median, slowest, fit)


def cost_of_restart() -> str:
    """Say what a restart now would cost, as far as the cache or the history know it."""
    try:
        locks = list_held()
    except CannotList as error:
        return f"it is not known what is held: {error}"
    return at_stake(locks)


TAKEN_AGAIN = frozenset({"held", "slow", "starving"})
"""States of a lock that its process takes again after the cache has lost it."""


def at_stake(locks: Iterable[HeldLock]) -> str:
    """Say in one sentence what becomes of these locks if the cache restarts without its data."""
    counts = count_states(locks)
    taken_again = sum(counts.pop(state) for state in TAKEN_AGAIN)
    counts.pop("expired")  # the cache has lost it already
    parts = []
    if taken_again:
        text = _("{} held: taken again by their processes, unless lock_renew=False")
        parts.append(text.format(taken_again))
    gone = [f"{count} {STATES[state]}" for state, count in counts.items() if count]
    if gone:
        parts.append(_("gone: {}").format(", ".join(gone)))
    if not parts:
        return _("no lock is held and no call is queued")
    return "; ".join(parts)


@contextmanager
def _held(store: Store) -> Iterator[str]:
    """Hold a lock of a name that nobody else uses; yield its key."""
    name = f"django_singletask.probe {uuid.uuid4()}"
    ref = LockRef(store.cache_alias, *name_key(name))
    value = ref.holder(LEASE).encode()
    store.add(ref.key, value, LEASE)
    try:
        yield ref.key
    finally:
        store.release(ref.key, value)


def look_from_another_process(alias: str, store: Store) -> Finding:
    """Hold a lock and let another process, with the same settings, read it."""
    # The same modules are found there, wherever manage.py is.
    paths = [os.path.abspath(path) for path in sys.path]  # an empty path is this folder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with _held(store) as key:
        program = [sys.executable, "-c", READER, alias, key]
        done = subprocess.run(
            program, env=environment, capture_output=True, text=True, errors="replace"
        )
    if done.returncode == 0:
        return Finding("ok", "another process sees the lock that this process holds")
    if done.returncode == 3:
        return Finding(
            "unfit",
            "another process does not see the lock that this process holds: the processes do not "
            "share the cache, or use different keys (KEY_PREFIX, KEY_FUNCTION)",
        )
    why = done.stderr.strip().rpartition("\n")[2]
    if not why:
        why = f"exit {done.returncode}"
    raise RuntimeError(f"The other process failed: {why}")


def look_at(store: Store) -> Iterator[Finding]:
    """Yield what the server of a store says, with a note if it refuses to say more."""
    try:
        yield from starmap(Finding, _answers(store))
    except Exception as error:  # each client has errors of its own
        yield Finding("note", f"the server refused to say more: {type(error).__name__}")


def _answers(store: Any) -> Iterator[tuple[str, str]]:
    if store.family == "memcached":
        yield "restart", "it loses all locks"
        yield "note", "memcached cannot list locks"
        yield "note", "memcached evicts locks too when its memory is full: use a dedicated server"
        servers = len(store.cache.client_servers)
        if servers > 1:
            text = "if one fails, its locks are lost; all processes need the same list of servers"
            yield "warning", f"{servers} servers: {text}"
    if store.family == "database":
        connection = store.connection
        version = ".".join(map(str, connection.get_database_version()))
        yield "note", f"{connection.display_name} {version}"
        if connection.vendor == "sqlite":
            yield "note", "only processes on one host can share an SQLite file"
    if store.family == "redis":
        if store.redirects:
            yield "note", "the server is a node of a cluster, whose nodes keep the locks"
            calls = f"calls of caches[{store.cache_alias!r}]"
            yield "note", f"{calls} would meet redirects (MOVED): use this cache for locks only"
        for server, client in store.clients().items():
            for level, text in _of_redis(client):
                found = text
                if server:
                    found = f"{server}: {text}"
                yield level, found


def _of_redis(client: Any) -> Iterator[tuple[str, str]]:
    info = client.info()
    yield "note", f"{info.get('server_name', 'redis')} {info.get('redis_version')}"
    policy = info.get("maxmemory_policy")
    if policy == "noeviction":
        yield "ok", "the server evicts nothing: maxmemory-policy is noeviction"
    elif not info.get("maxmemory"):
        text = f"with a limit it would evict locks too (maxmemory-policy is {policy})"
        yield "note", f"the server evicts nothing, as maxmemory is not set; {text}"
    else:
        evicted = plural(info.get("evicted_keys", 0), "key")
        text = f"evicts locks too when the memory is full ({evicted} so far)"
        cure = "set noeviction, and use a dedicated server for locks"
        yield "warning", f"maxmemory-policy {policy} {text}: {cure}"
    if info.get("role") != "master":
        yield "unfit", f"the server is a {info.get('role')}: locks need the primary"
    replicas = info.get("connected_slaves")
    if replicas:
        text = "a failover can lose the newest locks, and then a second copy of a task can start"
        yield "warning", f"{plural(replicas, 'replica')}: {text}"
    # The last question, since managed servers forbid CONFIG.
    if info.get("aof_enabled"):
        yield "ok", "locks survive a restart: AOF is on"
    elif client.config_get("save").get("save"):
        yield "restart", "it loses what is newer than the last RDB snapshot"
    else:
        yield "restart", "it loses all locks: neither AOF nor RDB is on"
