"""Where locks are kept: choose the store of a cache, and keep one for each thread and alias.

What a store promises

  An entry is a key, the bytes of its holder, and a lease. Whoever adds the entry has the lock.
  The bytes contain a random token. A change names the bytes that it expects, and compares all of
  them in the same step, so nobody changes the entry of another. The lease ends by the clock of the
  server, never early, and then the entry is gone. An outage is an error, neither "held" nor "free".
  The class Store (base.py) has the details, and keys.py the names of the entries.

The epoch

  A cache can forget its locks, by a restart or a flush, while their holders run. So it keeps one
  entry without a lease, the epoch: a random value, which the first process adds. If the epoch is
  another one, the cache has forgotten its locks.

  Who holds a lock looks at the epoch often (LOOK), and takes its lock again after a change. Who
  wants a lock compares the epoch, and waits after a change (HOLD_BACK) until holders have looked:

    holder:  holds .................... looks: another epoch, takes its lock again
    cache:           restarts empty
    taker:                              takes: another epoch     waits 1 s       takes -> held

  A process that starts after the restart knows no epoch, and takes at once.

  Redis compares the epoch in the script that takes. memcached has no scripts: there a taker adds
  its entry, reads the epoch, and gives the entry back if the epoch has changed. Each process does
  this once after a change, and each may be slow. So as long as takers wait after a change, a holder
  that finds the entry of another one is not sure that it has lost its lock (Outcome.UNSURE), and
  looks again soon (LOOK_AGAIN):

    cache:    flushed
    taker 1:          adds           reads the epoch: another one, gives it back
    taker 2:                                                   adds ...            gives it back
    holder:                looks: not its own                        looks again        ...

  A server that restarts with an old snapshot has the old epoch, so a process also notes which
  server of Redis answers on a new connection. In a cluster each group of locks has an epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import isabstract
from typing import Any

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections, router
from django.utils.module_loading import import_string

from django_singletask import threads
from django_singletask.conf import check_installed, conf
from django_singletask.exceptions import LockUnavailable
from django_singletask.forks import at_fork, leak
from django_singletask.stores.base import TIMEOUT, Store
from django_singletask.stores.cluster import ClusterStore
from django_singletask.stores.database import DIALECTS
from django_singletask.stores.epoch import epochs
from django_singletask.stores.keys import LONGEST_KEY
from django_singletask.stores.redis import RedisStore
from django_singletask.version import DOCS

CLUSTER = "valkey_cluster.ValkeyClusterStore"
STORES = {
    "django.core.cache.backends.redis.RedisCache": "redis.RedisStore",
    "django_redis.cache.RedisCache": "redis.RedisStore",
    "django_valkey.cache.ValkeyCache": "redis.RedisStore",
    "django_redis.client.default.DefaultClient": "redis.RedisStore",
    "django_valkey.client.default.DefaultClient": "redis.RedisStore",
    "django_valkey.cluster_cache.cache.ClusterValkeyCache": CLUSTER,
    "django_valkey.cluster_cache.client.default.DefaultClusterClient": CLUSTER,
    "django.core.cache.backends.memcached.PyLibMCCache": "memcached.PyLibMCStore",
    "django.core.cache.backends.memcached.PyMemcacheCache": "memcached.PyMemcacheStore",
    "django.core.cache.backends.db.DatabaseCache": "database.DatabaseStore",
    "django.core.cache.backends.locmem.LocMemCache": "locmem.LocMemStore",
}
"""The class of the store, as seen from here, by the class of the cache, its client, or a base."""

BRACES = 'its KEY_PREFIX or KEY_FUNCTION puts "{" into the keys'
"""A cluster chooses the node by what follows the first "{", not by the tag of the group."""
SOCKET = "its server is a node of a cluster, whose nodes are not reached by a Unix socket"

UNSAFE = {
    "django.core.cache.backends.dummy.DummyCache": "stores nothing, so every run gets the lock",
    "django.core.cache.backends.filebased.FileBasedCache": (
        "is not atomic: two processes that add the same key can both succeed"
    ),
    "django_redis.client.sharded.ShardClient": "spreads the entries over servers",
    "django_redis.client.herd.HerdClient": "changes the entries",
    "django_valkey.client.sharded.ShardClient": "spreads the entries over servers",
    "django_valkey.client.herd.HerdClient": "changes the entries",
    # This was seen with version 0.4.1.
    "django_valkey.client.sentinel.SentinelClient": "writes to a replica",
}
"""Why the cache, or its client, cannot hold locks, unless ``SINGLETASK_STORES`` names it."""


def open_cache(alias: str) -> Any:
    """Return a new cache object for the alias, without opening a connection.

    It is not the object ``caches[alias]``, which the project closes, flushes and patches. Raises
    ``ImproperlyConfigured`` if there is no such alias.
    """
    if alias not in caches.settings:
        raise ImproperlyConfigured(
            f"{_setting_of(alias)} is not in CACHES. Add that alias to CACHES, or use another one."
        )
    return caches.create_connection(alias)


def _setting_of(alias: str) -> str:
    """Return how the user set the alias: in the setting, or for one TaskLock."""
    if alias == conf.cache:
        return f"SINGLETASK_CACHE = {alias!r}"
    return f"TaskLock's cache={alias!r}"


def choose(cache: Any) -> tuple[str, str]:
    """Return the path of a cache's store, and why the cache cannot hold locks ("" if it can).

    Look up the class of the cache, and then the class of its client. The nearest base that
    ``SINGLETASK_STORES``, STORES or UNSAFE names decides; the setting overrides the other two.
    """
    own = _own_stores()
    classes = {"caches": type(cache)}
    if hasattr(cache, "_client_cls"):  # CLIENT_CLASS of django-redis or django-valkey, loaded
        classes["clients"] = cache._client_cls  # noqa: SLF001
    path = ""
    store = ""
    for kind, cls in classes.items():
        name, reason = _look_up(cls, kind)
        if name in own:
            return own[name], ""
        if reason:
            return path, reason
        store = STORES[name]
        path = f"{__name__}.{store}"
    if store == CLUSTER and has_braces(cache):
        return path, BRACES
    if hasattr(cache, "cache_model_class"):  # a DatabaseCache
        alias = router.db_for_write(cache.cache_model_class)
        vendor = connections[alias].vendor
        if vendor not in DIALECTS:
            what = f"DATABASES[{alias!r}] is {vendor}"
            return path, f"{what}, not PostgreSQL, MySQL, MariaDB or SQLite"
    return path, ""


def has_braces(cache: Any) -> bool:
    """Return whether a node would be chosen by the cache's own part of a key."""
    return "{" in cache.make_key(LONGEST_KEY)


def _own_stores() -> dict[str, str]:
    """Return ``SINGLETASK_STORES``; raise ``ImproperlyConfigured`` if no dict of paths."""
    own = conf.stores
    if isinstance(own, dict):
        paths = [*own, *own.values()]
        if {*map(type, paths)} <= {str}:
            return own
    what = "a dict from the path of a cache's class to the path of its store's class"
    raise ImproperlyConfigured(f"SINGLETASK_STORES must be {what}, not {own!r}.")


def _look_up(cls: type, kind: str) -> tuple[str, str]:
    """Return the nearest base that a table names, and why the class cannot hold locks."""
    # Classes are compared by name, so that client libraries that are not used are not imported.
    names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
    for name in names:
        if name in conf.stores or name in STORES:
            return name, ""
        if name in UNSAFE:
            return name, f"{names[0]} {UNSAFE[name]}"
    return "", f"{names[0]} is not one of the supported {kind}"


def load_store(path: str) -> type[Store]:
    """Return the class at a path; raise ``ImproperlyConfigured`` if it is no class of stores."""
    try:
        found = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(f"SINGLETASK_STORES: {path}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Store) or isabstract(found):
        what = "a subclass of django_singletask.stores.base.Store with its abstract methods"
        raise ImproperlyConfigured(f"SINGLETASK_STORES: {path} is not {what}.")
    return found


def open_store(alias: str) -> Store:
    """Return a new store for an alias.

    Raises ``ImproperlyConfigured`` if there is no such alias, or if its cache cannot hold locks.
    The first store of an alias in a process asks its server whether that is a node of a cluster,
    and raises :class:`LockUnavailable` without an answer.
    """
    check_installed()
    cache = open_cache(alias)
    path, reason = choose(cache)
    if reason:
        raise _unfit(alias, reason)
    try:
        store = load_store(path)(cache, alias)
    except ValueError as error:  # for example, the port is no number
        raise ImproperlyConfigured(f"{_setting_of(alias)} cannot be opened: {error}.") from error
    # A subclass of a project is not replaced: it would lose what is its own.
    if type(store) is RedisStore and _is_in_cluster(store, cache):
        if store.options.get("path"):
            raise _unfit(alias, SOCKET)
        if has_braces(cache):
            raise _unfit(alias, BRACES)
        return ClusterStore(cache, alias)
    return store


def _is_in_cluster(store: RedisStore, cache: Any) -> bool:
    """Return whether the server is a node of a cluster, and ask it if that is not known.

    Of several servers in ``LOCATION``, another one can answer if the first one is down. If none
    answers, this raises :class:`LockUnavailable`, and the next use of the cache asks again.
    """
    epoch = store.epoch
    if epoch.in_cluster is None:
        if not store.is_limited():
            # Here there is a limit: a worker asks before it starts.
            store = RedisStore(cache, store.cache_alias)
            store.limit(TIMEOUT)
        try:
            epoch.in_cluster = store.is_node()
        except LockUnavailable:
            if len(store.urls()) == 1 or not _has_map(cache, store.cache_alias):
                raise
            epoch.in_cluster = True
    return epoch.in_cluster


def _has_map(cache: Any, alias: str) -> bool:
    """Return whether one of the servers knows the map of a cluster."""
    store = ClusterStore(cache, alias)
    store.limit(TIMEOUT)
    try:
        store.read_map()
    except LockUnavailable:
        return False
    finally:
        store.close()
    return True


def _unfit(alias: str, reason: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"{_setting_of(alias)} cannot hold locks: {reason}. "
        "Use Redis, memcached or Django's DatabaseCache: "
        f"{DOCS}/operating/choosing-a-cache.html lists them."
    )


def find_store(alias: str) -> Store | None:
    """Return a new store for an alias, also if its cache is not fit; None if none can be made."""
    with suppress(Exception):
        cache = open_cache(alias)
        return load_store(choose(cache)[0])(cache, alias)
    return None


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
_opener: Callable[[str], Store] = open_store
"""What opens stores; if it is another object than before, every thread opens its stores again."""


LOOK_WITHIN = 2.0
"""Seconds for which a request waits in a thread that looks at the epoch."""


class _Stores(dict[str, Store]):
    """The stores of one thread by their aliases; they are closed when the thread ends.

    A second store of an alias has " beside" after the alias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.opener = _opener

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        for store in self.values():  # there are none if a signal came before the pid was set
            # At the end of the process modules may be gone, and the sockets close anyway.
            if not is_finalizing() and self.pid == os.getpid():
                _open_stores.discard(store)
                store.close()


# A signal handler, or a generator that is closed by the garbage collector, can use a lock while the
# same thread waits for a reply. On the same connection it would wait for its own thread, or read a
# reply that is not its own:
#
#   body:      take a -> sent                                             reads "b is yours"
#   handler:                    take b -> sent, reads "a is held"
#
# So the handler gets a second store, with a connection of its own, which the thread keeps.


def get_store(alias: str) -> Store:
    """Return a store of this thread for a cache alias; no request of this thread is using it.

    Raises ``ImproperlyConfigured`` if there is no such alias, or if its cache cannot hold locks.
    """
    stores: _Stores | None = getattr(threads.made.get("variables"), "stores", None)
    if stores is None or stores.opener is not _opener:
        stores = threads.put("stores", _Stores())
    name = alias
    while name in stores and stores[name].is_asking:
        name += " beside"
    if name not in stores:
        # A handler may have opened one meanwhile, and use it.
        _open_stores.add(stores.setdefault(name, _opener(alias)))
    return stores[name]


def look_at_epoch() -> None:
    """Read the epoch of the cache, with a short time limit: for background threads."""
    store = get_store(conf.cache)
    store.limit(LOOK_WITHIN)
    store.look()


def close_stores() -> None:
    """Close the stores of this thread; they are opened again when needed."""
    threads.put("stores", None)


def open_with(opener: Callable[[str], Store] | None) -> None:
    """Let every thread open its stores again with ``opener``, a function of the alias.

    None restores the configured caches. For :mod:`django_singletask.testing`.
    """
    global _opener
    # Other threads may be using their stores, and close them at their next get_store(). Until then
    # those stores keep the epochs that they have. New stores begin with new epochs, since they may
    # ask another server, whose epoch must not look like a change.
    epochs.clear()
    if opener is None:
        opener = open_store
    _opener = partial(opener)  # another object even for the same opener: every thread sees a change
    close_stores()


def _after_fork() -> None:
    leak(_open_stores)
    _open_stores.clear()


at_fork(after_in_child=_after_fork)


def _reopen(*, setting: str, **kwargs: Any) -> None:
    # Only tests change settings.
    if setting in {"CACHES", "DATABASES", "SINGLETASK_STORES", "USE_TZ"}:
        open_with(_opener)


setting_changed.connect(_reopen)
