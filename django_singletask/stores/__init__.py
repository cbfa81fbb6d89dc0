"""Choose the store of a cache, and keep one for each process, thread and alias."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from django_singletask.conf import DOCS, check_installed, conf
from django_singletask.stores.base import CannotList, Entry, Outcome, Slots, Store
from django_singletask.stores.epoch import CONNECT_WITHIN, ForgetfulStore, Forgotten, epoch_of

__all__ = [
    "CannotList",
    "Entry",
    "ForgetfulStore",
    "Forgotten",
    "Outcome",
    "Slots",
    "Store",
    "close_stores",
    "get_store",
    "is_a",
    "look_at_epoch",
    "open_cache",
    "open_with",
    "refusal",
]

STORES = {
    "django.core.cache.backends.redis.RedisCache": "redis.RedisStore",
    "django_redis.cache.RedisCache": "redis.DjangoRedisStore",
    "django_valkey.cache.ValkeyCache": "redis.DjangoValkeyStore",
    "django.core.cache.backends.memcached.PyLibMCCache": "memcached.PyLibMCStore",
    "django.core.cache.backends.memcached.PyMemcacheCache": "memcached.PyMemcacheStore",
    "django.core.cache.backends.db.DatabaseCache": "database.DatabaseStore",
    "django.core.cache.backends.locmem.LocMemCache": "locmem.LocMemStore",
}
"""The module and class of the store, by the class of the cache or a class that it extends."""

UNSAFE = {
    "django.core.cache.backends.dummy.DummyCache": (
        "stores nothing, so every run would get the lock"
    ),
    "django.core.cache.backends.filebased.FileBasedCache": (
        "is not atomic: two processes that add the same key can both succeed"
    ),
}


def _ancestors(cls: type) -> list[str]:
    # By name, so that no client library is imported for a cache that is not configured.
    return [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]


def is_a(cache: Any, name: str) -> bool:
    """Say whether a cache is of the class of this dotted name, or of a subclass."""
    return name in _ancestors(type(cache))


def open_cache(alias: str) -> Any:
    """Return a new cache object for the alias; this opens no connection.

    It is never the object of ``caches[alias]``, which the application closes, flushes and
    patches. Raises ``ImproperlyConfigured`` if there is no such alias.
    """
    if alias not in caches.settings:
        raise ImproperlyConfigured(
            f"{_named(alias)} is not in CACHES. Add that alias to CACHES, or name another one."
        )
    return caches.create_connection(alias)


def _named(alias: str) -> str:
    """Write an alias as it was given: in the setting, or to the one lock that names its cache."""
    return f"SINGLETASK_CACHE = {alias!r}" if alias == conf.cache else f"TaskLock's cache={alias!r}"


def refusal(cache: Any) -> str | None:
    """Say why locks cannot live in a cache; None if they can."""
    names = _ancestors(type(cache))
    for name in names:
        if name in UNSAFE:
            return f"{name} {UNSAFE[name]}"
    if not any(name in STORES for name in names):
        return f"{names[0]} is not a cache that django-singletask knows to be shared and atomic"
    package = next(name for name in names if name in STORES).partition(".")[0]
    if package in ("django_redis", "django_valkey"):
        client = _ancestors(cache._client_cls)  # noqa: SLF001 - CLIENT_CLASS, loaded
        project = package.replace("_", "-")
        if any(name.endswith((".ShardClient", ".HerdClient")) for name in client):
            return f"{client[0]} of {project} spreads or rewrites the entries"
        if "django_valkey.client.sentinel.SentinelClient" in client:
            return f"{client[0]} of {project} writes to a replica"  # seen with version 0.4.1
        if f"{package}.client.default.DefaultClient" not in client:
            return f"{client[0]} is not a {project} client that django-singletask knows"
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


# A client that is inherited through fork shares its socket with the parent. Then two processes
# read each other's replies:
#
#   parent: get a -> socket          child: get b -> the same socket
#   parent: reads "value of b"       child: reads "value of a"
#
# So each process and thread has stores of its own. The child may not close the parent's stores
# either: pylibmc and mysqlclient would say "quit" on the shared socket, and the server would hang
# up on the parent. A child that ends by sys.exit() deletes every object on its way out, so
# _after_fork() makes the inherited stores immortal there.
_open_stores: set[Store] = set()
_generation = 0
"""A number that grows when every thread must open its stores anew."""
_opener: Callable[[str], Store] = _open_store


class _Stores(dict[str, Store]):
    """The stores of one thread, by alias; they are closed when the thread ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.generation = _generation

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self.pid == os.getpid():
            for store in self.values():
                _open_stores.discard(store)
                store.close()
        self.clear()
        self.generation = _generation


class _Local(threading.local):
    def __init__(self) -> None:
        self.stores = _Stores()


_local = _Local()


def get_store(alias: str) -> Store:
    """Return the store of a cache alias for the running process and thread.

    Raises ``ImproperlyConfigured`` if there is no such alias or it cannot hold locks.
    """
    stores = _local.stores
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
    """Ask a cache that can forget its locks for its epoch, in a thread of the background."""
    store = get_store(alias)
    if isinstance(store, ForgetfulStore):
        store.connect_within(CONNECT_WITHIN)
        store.look()


def close_stores() -> None:
    """Close the stores of the running thread; they are opened anew when needed."""
    _local.stores.close()


def open_with(opener: Callable[[str], Store] | None) -> None:
    """Let every thread open its stores anew, with ``opener``: a function of the alias.

    None brings the stores of the configured caches back. For :mod:`django_singletask.testing`.
    """
    global _generation, _opener
    # The opener first: a thread that opens a store between the two lines opens it once more than
    # necessary, and not with the old opener for good.
    _opener = opener or _open_store
    # Another thread may be using its stores now: it closes them itself at its next get_store().
    _generation += 1
    close_stores()


def _after_fork() -> None:
    global _local
    for store in _open_stores:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    _open_stores.clear()
    _local = _Local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _reopen(*, setting: str, **kwargs: Any) -> None:
    # Only tests change settings.
    if setting in {"CACHES", "DATABASES", "USE_TZ"}:
        open_with(_opener)


setting_changed.connect(_reopen)
