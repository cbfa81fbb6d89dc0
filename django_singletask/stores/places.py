"""Say where a cache keeps its entries, from its settings alone: two aliases can be one place."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.utils.module_loading import import_string

__all__ = ["backend_is", "servers_of"]


def backend_is(alias: str, kind: str) -> bool:
    """Say whether the backend of an alias, or a class that it extends, has ``kind`` in its name."""
    configuration: Any = settings.CACHES[alias]
    backend = configuration["BACKEND"]
    names: list[str] = [backend]
    with suppress(ImportError):  # a client library that is not installed here
        names += [f"{base.__module__}.{base.__qualname__}" for base in import_string(backend).mro()]
    return any(kind in name.lower() for name in names)


def servers_of(alias: str) -> set[str]:
    """Return where an alias keeps its entries, in one spelling, for Redis and memcached."""
    configuration: Any = settings.CACHES[alias]
    location = configuration.get("LOCATION") or ""
    locations = re.split("[;,]", location) if isinstance(location, str) else location
    servers = [str(server).strip() for server in locations if server]
    if backend_is(alias, "memcached"):
        return {_memcached(server) for server in servers}
    if backend_is(alias, "redis"):
        # The others are replicas: what is on the primary is on them.
        return {_redis(url, configuration.get("OPTIONS") or {}) for url in servers[:1]}
    return set()


def _memcached(server: str) -> str:
    if "/" in server:
        return server.removeprefix("unix:")
    return _address(server, "11211")


def _redis(url: str, options: dict[str, Any]) -> str:
    # The order of redis-py: ?db=1, then the path, then the options.
    parts = urlsplit(url)
    unix = parts.scheme == "unix"
    path = "" if unix else parts.path.replace("/", "")
    named = parse_qs(parts.query).get("db", [path])[0]
    pool = options.get("CONNECTION_POOL_KWARGS") or {}
    database = named if named.isdigit() else options.get("db", pool.get("db", 0))
    server = f"unix:{parts.path}" if unix else _address(parts.netloc.rpartition("@")[2], "6379")
    return f"{server} database {database}"


def _address(server: str, port: str) -> str:
    host, colon, given = server.lower().rpartition(":")
    if not colon or given.endswith("]"):  # the last part of [::1]
        host, given = server.lower(), port
    return f"{'127.0.0.1' if host in {'', 'localhost', '[::1]'} else host}:{given or port}"
