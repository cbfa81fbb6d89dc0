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

from django_singletask.holder import Holder
from django_singletask.locks.keys import name_key
from django_singletask.operators.errors import without_secrets
from django_singletask.operators.server import Finding, look_at
from django_singletask.stores import Store, get_store
from django_singletask.stores.places import servers_of

__all__ = ["Probe", "look_from_another_process", "probe"]

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
    last_line = without_secrets(done.stderr.strip().rpartition("\n")[2])
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
