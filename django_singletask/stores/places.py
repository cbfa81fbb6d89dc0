"""Find out from the settings where a cache keeps its entries: two aliases can be one place."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.utils.module_loading import import_string


def backend_is(alias: str, kind: str) -> bool:
    """Return whether the backend of an alias, or one of its bases, has ``kind`` in its name."""
    configuration: Any = settings.CACHES[alias]
    backend = configuration["BACKEND"]
    names: list[str] = [backend]
    with suppress(ImportError):  # a client library that is not installed here
        names += [f"{base.__module__}.{base.__qualname__}" for base in import_string(backend).mro()]
    return any(kind in name.lower() for name in names)


def servers_of(alias: str) -> set[str]:
    """Return the Redis or memcached servers of an alias in a uniform spelling.

    Only the first Redis server counts, since the others are its replicas.
    """
    configuration: Any = settings.CACHES[alias]
    location = configuration.get("LOCATION") or ""
    locations = re.split("[;,]", location) if isinstance(location, str) else location
    servers = [str(server).strip() for server in locations if server]
    if backend_is(alias, "memcached"):
        return {
            server.removeprefix("unix:") if "/" in server else _address(server, "11211")
            for server in servers
        }
    if backend_is(alias, "redis") or backend_is(alias, "valkey"):
        return {_redis(url, configuration.get("OPTIONS") or {}) for url in servers[:1]}
    return set()


def place_of(alias: str) -> str:
    """Return the class and the servers of an alias as text, without user names and passwords."""
    backend = str(settings.CACHES[alias]["BACKEND"]).rpartition(".")[2]
    servers = ", ".join(sorted(servers_of(alias)))
    return f"{backend} on {servers}" if servers else backend


def _redis(url: str, options: dict[str, Any]) -> str:
    # redis-py looks for the database in this order: ?db=1, the path, the options.
    parts = urlsplit(url)
    is_socket = parts.scheme == "unix"
    path = "" if is_socket else parts.path.replace("/", "")
    in_url = parse_qs(parts.query).get("db", [path])[0]
    pool = options.get("CONNECTION_POOL_KWARGS") or {}
    database = in_url if in_url.isdigit() else options.get("db", pool.get("db", 0))
    host = parts.netloc.rpartition("@")[2]
    return f"{f'unix:{parts.path}' if is_socket else _address(host, '6379')} database {database}"


def _address(server: str, default_port: str) -> str:
    host, colon, port = server.lower().rpartition(":")
    if not colon or port.endswith("]"):  # there is no port: this is the end of [::1]
        host, port = server.lower(), default_port
    is_here = host in {"", "localhost", "[::1]"}
    return f"{'127.0.0.1' if is_here else host}:{port or default_port}"
