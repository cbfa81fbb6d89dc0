"""Choose the store of a cache, and keep one for each process, thread and alias."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from django_singletask import threads
from django_singletask.conf import DOCS, check_installed, conf
from django_singletask.stores.base import Store
from django_singletask.stores.epoch import ForgetfulStore, epoch_of, epochs

STORES = {
    "django.core.cache.backends.redis.RedisCache": "redis.RedisStore",
    "django_redis.cache.RedisCache": "redis.DjangoRedisStore",
    "django_valkey.cache.ValkeyCache": "redis.DjangoValkeyStore",
    "django.core.cache.backends.memcached.PyLibMCCache": "memcached.PyLibMCStore",
    "django.core.cache.backends.memcached.PyMemcacheCache": "memcached.PyMemcacheStore",
    "django.core.cache.backends.db.DatabaseCache": "database.DatabaseStore",
    "django.core.cache.backends.locmem.LocMemCache": "locmem.LocMemStore",
}
"""The module and class of the store, by the class of the cache or one of its bases."""

UNSAFE = {
    "django.core.cache.backends.dummy.DummyCache": (
        "stores nothing, so every run would get the lock"
    ),
    "django.core.cache.backends.filebased.FileBasedCache": (
        "is not atomic: two processes that add the same key can both succeed"
    ),
}


def _ancestors(cls: type) -> list[str]:
    # By name, so that client libraries that are not used are not imported.
    return [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]


def is_a(cache: Any, name: str) -> bool:
    return name in _ancestors(type(cache))


def open_cache(alias: str) -> Any:
    """Return a new cache object for the alias, without opening a connection.

    It is not the object ``caches[alias]``, which the project closes, flushes and patches. Raises
    ``ImproperlyConfigured`` if there is no such alias.
    """
    if alias not in caches.settings:
        raise ImproperlyConfigured(
            f"{_named(alias)} is not in CACHES. Add that alias to CACHES, or use another one."
        )
    return caches.create_connection(alias)


def _named(alias: str) -> str:
    """Return how the user set the alias: in the setting, or for one TaskLock."""
    return f"SINGLETASK_CACHE = {alias!r}" if alias == conf.cache else f"TaskLock's cache={alias!r}"


def refusal(cache: Any) -> str | None:
    """Return why a cache cannot hold locks; None if it can."""
    names = _ancestors(type(cache))
    for name in names:
        if name in UNSAFE:
            return f"{name} {UNSAFE[name]}"
    if not any(name in STORES for name in names):
        return f"{names[0]} is not one of the supported caches"
    package = next(name for name in names if name in STORES).partition(".")[0]
    if package in ("django_redis", "django_valkey"):
        client = _ancestors(cache._client_cls)  # noqa: SLF001 - CLIENT_CLASS, loaded
        project = package.replace("_", "-")
        if any(name.endswith((".ShardClient", ".HerdClient")) for name in client):
            return f"{client[0]} of {project} spreads the entries over servers, or changes them"
        if "django_valkey.client.sentinel.SentinelClient" in client:
            return f"{client[0]} of {project} writes to a replica"  # seen with version 0.4.1
        if f"{package}.client.default.DefaultClient" not in client:
            return f"{client[0]} is not one of the supported clients of {project}"
    return None


def _open_store(alias: str) -> Store:
    check_installed()
    cache = open_cache(alias)
    reason = refusal(cache)
    if reason is not None:
        raise ImproperlyConfigured(
            f"{_named(alias)} cannot hold locks: {reason}. "
            "Use Redis, memcached or Django's DatabaseCache: "
            f"{DOCS}/operating/choosing-a-cache.html lists them."
        )
    path = next(STORES[name] for name in _ancestors(type(cache)) if name in STORES)
    module, _, name = path.partition(".")
    store_class = getattr(import_module(f"django_singletask.stores.{module}"), name)
    store: Store = store_class(cache)
    return store


# After a fork, a client shares its socket with the parent. Then two processes read each other's
# replies:
#
#   parent: get a -> socket          child: get b -> the same socket
#   parent: reads "value of b"       child: reads "value of a"
#
# So each process and thread has separate stores. The child must not close the parent's stores
# either: pylibmc and mysqlclient would send "quit" on the shared socket, and the server would
# disconnect the parent. sys.exit() deletes every object, so _after_fork() makes the inherited
# stores immortal in the child.
_open_stores: set[Store] = set()
_generation = 0
"""A number that grows when every thread must open its stores again."""
_opener: Callable[[str], Store] = _open_store


LOOK_WITHIN = 2.0
"""Seconds for which a request waits in a thread that looks at the epoch."""


class _Stores(dict[str, Store]):
    """The stores of one thread, by alias. They are closed when the thread ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.generation = _generation

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # otherwise modules may be gone, and the sockets close anyway
            self.close()

    def close(self) -> None:
        if self.pid == os.getpid():
            for store in self.values():
                _open_stores.discard(store)
                store.close()
        self.clear()
        self.generation = _generation


def get_store(alias: str) -> Store:
    """Return this thread's store for a cache alias.

    Raises ``ImproperlyConfigured`` if there is no such alias, or if it cannot hold locks.
    """
    stores: _Stores
    try:
        stores = threads.variables.stores
    except AttributeError:
        stores = threads.own("stores", _Stores)
    if stores.generation != _generation:
        stores.close()
    store = stores.get(alias)
    if store is None:
        store = stores[alias] = _opener(alias)
        store.cache_alias = alias
        if isinstance(store, ForgetfulStore):
            store.epoch = epoch_of(alias)
        _open_stores.add(store)
    return store


def look_at_epoch(alias: str) -> None:
    """Read the epoch of a cache that can forget its locks, in a background thread."""
    store = get_store(alias)
    if isinstance(store, ForgetfulStore):
        store.limit(LOOK_WITHIN)
        store.look()


def close_stores() -> None:
    """Close the stores of this thread; they are opened again when needed."""
    threads.own("stores", _Stores).close()


def open_with(opener: Callable[[str], Store] | None) -> None:
    """Let every thread open its stores again with ``opener``, a function of the alias.

    None restores the configured caches. For :mod:`django_singletask.testing`.
    """
    global _generation, _opener
    # Set the opener first: otherwise a thread could open a store with the old one for good.
    _opener = opener or _open_store
    # Other threads may be using their stores, and close them at their next get_store(). Until then
    # they see another server, which must not look like a change of the epoch.
    epochs.clear()
    _generation += 1
    close_stores()


def _after_fork() -> None:
    for store in _open_stores:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    _open_stores.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _reopen(*, setting: str, **kwargs: Any) -> None:
    # Only tests change settings.
    if setting in {"CACHES", "DATABASES", "USE_TZ"}:
        open_with(_opener)


setting_changed.connect(_reopen)
