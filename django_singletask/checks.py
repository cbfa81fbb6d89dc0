"""System checks: is the cache shared and atomic, can each task's options work?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from celery import current_app
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from django_singletask.conf import HISTORY_MODES, check_seconds, conf
from django_singletask.stores import is_a, open_cache, refusal
from django_singletask.stores.database import DIALECTS
from django_singletask.stores.places import backend_is, servers_of
from django_singletask.task.base import SingletonTask
from django_singletask.task.options import LockOptions
from django_singletask.task.registered import import_tasks, singleton_tasks

__all__ = ["check_cache", "check_deployment", "check_settings", "check_tasks", "register", "run"]

BACKENDS = "Redis, memcached or Django's DatabaseCache"


def register() -> None:
    """Add the checks to those of ``manage.py check``; none of them opens a connection."""
    for check in (check_cache, check_settings, check_tasks):
        checks.register(check, checks.Tags.caches)
    checks.register(check_deployment, checks.Tags.caches, deploy=True)


def run() -> list[checks.CheckMessage]:
    """Return what the checks find that a worker must know at its start."""
    return [*check_cache(), *check_settings(), *check_tasks()]


def check_cache(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check that ``SINGLETASK_CACHE`` can hold locks."""
    return list(_cache())


def _cache() -> Iterator[checks.CheckMessage]:
    alias = conf.cache
    named = f"SINGLETASK_CACHE = {alias!r}"
    try:
        cache = open_cache(alias)
    except (ImproperlyConfigured, ImportError, TypeError) as error:
        yield _no_cache(named, alias, error)
        return
    backend = settings.CACHES[alias]["BACKEND"]
    edit = f"Set CACHES[{alias!r}]['BACKEND'] to {BACKENDS}, or SINGLETASK_CACHE to such a cache."
    if is_a(cache, "django.core.cache.backends.locmem.LocMemCache"):
        what = f"{named} uses {backend}: each process has a memory, and so locks, of its own."
        if current_app.conf.task_always_eager:
            hint = "Fine for eager tests in one process; never for workers."
            yield checks.Warning(what, hint=hint, id="django_singletask.W001")
        else:
            yield checks.Error(what, hint=edit, id="django_singletask.E004")
        return
    reason = refusal(cache)
    if reason is not None:
        yield checks.Error(f"{named}: {reason}.", hint=edit, id=_refusal_id(cache))
        return
    if getattr(cache, "_ignore_exceptions", False):
        yield checks.Warning(
            f"{named} has IGNORE_EXCEPTIONS: it does not hold for locks. While the server is "
            "down, a locked task fails with its error; it neither runs unlocked nor is skipped.",
            hint="Give the locks a CACHES entry of their own without IGNORE_EXCEPTIONS.",
            id="django_singletask.W002",
        )
    if is_a(cache, "django.core.cache.backends.db.DatabaseCache"):
        yield from _database(alias, cache)


def _no_cache(named: str, alias: Any, error: Exception) -> checks.CheckMessage:
    aliases = ", ".join(map(repr, sorted(settings.CACHES)))
    if not isinstance(alias, str):
        message, hint = f"{named} is no string.", f"Set SINGLETASK_CACHE to one of {aliases}."
    elif alias in settings.CACHES:
        backend = settings.CACHES[alias].get("BACKEND")
        message = f"{named}: its BACKEND {backend!r} cannot be loaded: {error}"
        hint = f"Install the package that it needs, or mend CACHES[{alias!r}]."
    else:
        message = f"{named} is not in CACHES."
        hint = f"Add CACHES[{alias!r}], or set SINGLETASK_CACHE to one of {aliases}."
    return checks.Error(message, hint=hint, id="django_singletask.E001")


def _refusal_id(cache: Any) -> str:
    if is_a(cache, "django.core.cache.backends.dummy.DummyCache"):
        return "django_singletask.E002"
    if is_a(cache, "django.core.cache.backends.filebased.FileBasedCache"):
        return "django_singletask.E003"
    if is_a(cache, "django_redis.cache.RedisCache"):
        return "django_singletask.E005"
    return "django_singletask.E006"


def _database(alias: str, cache: Any) -> Iterator[checks.CheckMessage]:
    table = settings.CACHES[alias].get("LOCATION", "")
    others = [
        other
        for other, options in settings.CACHES.items()
        if other != alias
        and options.get("LOCATION") == table
        and backend_is(other, "databasecache")
    ]
    if alias == "default" or others:
        users = " and ".join(f"CACHES[{other!r}]" for other in others) or "the default cache"
        yield checks.Warning(
            f"SINGLETASK_CACHE = {alias!r} keeps the locks in the table {table!r}, which "
            f"{users} uses too: clear() and the culling of a full cache delete locks.",
            hint="Add a CACHES entry with a LOCATION of its own, run 'manage.py "
            "createcachetable', and name that entry in SINGLETASK_CACHE.",
            id="django_singletask.W005",
        )
    database = router.db_for_write(cache.cache_model_class)
    vendor = connections[database].vendor
    if vendor not in DIALECTS:
        yield checks.Error(
            f"SINGLETASK_CACHE = {alias!r} keeps the locks in DATABASES[{database!r}], which is "
            f"{vendor}: locks need PostgreSQL, MySQL, MariaDB or SQLite.",
            hint=f"Route the table {table!r} to such a database, or set SINGLETASK_CACHE to a "
            "cache on Redis or memcached.",
            id="django_singletask.E015",
        )
    if vendor == "sqlite" and database == "default":
        yield checks.Warning(
            f"SINGLETASK_CACHE = {alias!r} keeps the locks in DATABASES['default'], an SQLite "
            "file: a lock cannot be taken while a transaction is open there.",
            hint="Add an SQLite file of its own to DATABASES and a router that sends the cache "
            "table to it (see the README).",
            id="django_singletask.W006",
        )


def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check the other ``SINGLETASK_…`` settings."""
    found: list[checks.CheckMessage] = []
    error = _seconds_error("SINGLETASK_LOCK_TIMEOUT", conf.lock_timeout)
    if error:
        hint = "Set SINGLETASK_LOCK_TIMEOUT to seconds, such as 60, or remove it."
        found.append(checks.Error(error, hint=hint, id="django_singletask.E007"))
    error = _seconds_error("SINGLETASK_HISTORY_DAYS", conf.history_days)
    if error:
        hint = "Set SINGLETASK_HISTORY_DAYS to a number of days, such as 30, or remove it."
        error = error.replace("of seconds", "of days")
        found.append(checks.Error(error, hint=hint, id="django_singletask.E016"))
    if conf.history not in HISTORY_MODES:
        found.append(
            checks.Error(
                f"SINGLETASK_HISTORY = {conf.history!r} is none of {', '.join(HISTORY_MODES)}.",
                hint=f"Set SINGLETASK_HISTORY to {HISTORY_MODES[0]!r}, or remove it.",
                id="django_singletask.E013",
            )
        )
    if not isinstance(conf.record_arguments, bool):
        found.append(
            checks.Error(
                f"SINGLETASK_RECORD_ARGUMENTS = {conf.record_arguments!r} is neither True nor "
                "False.",
                hint="Set it to False to hide the arguments: a text such as 'False' is true.",
                id="django_singletask.E014",
            )
        )
    return found


def _seconds_error(option: str, value: Any, *, zero: bool = False) -> str | None:
    try:
        check_seconds(option, value, zero=zero)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def check_tasks(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check the lock options of every registered :class:`SingletonTask`."""
    import_tasks()
    found: list[checks.CheckMessage] = []
    for task in singleton_tasks().values():
        found += _task(task)
    return found


def _task(task: SingletonTask) -> Iterator[checks.CheckMessage]:
    for problem in LockOptions.of(task).problems(f"of {task.name}", task.parameters):
        message = checks.Error if problem.check.startswith("E") else checks.Warning
        number = f"django_singletask.{problem.check}"
        yield message(problem.text, hint=problem.hint, obj=task.name, id=number)
    if not task.lock_renew:
        yield from _fixed_lease(task)
    if task.acks_late and not task.reject_on_worker_lost:
        yield checks.Warning(
            f"{task.name} has acks_late without reject_on_worker_lost: when its process is "
            "killed, Celery acknowledges the message and the run is lost.",
            hint="Set reject_on_worker_lost=True as well (the task must bear to run again).",
            obj=task.name,
            id="django_singletask.W004",
        )


def _fixed_lease(task: SingletonTask) -> Iterator[checks.CheckMessage]:
    limits = {
        name: getattr(task, name) or getattr(task.app.conf, f"task_{name}")
        for name in ("time_limit", "soft_time_limit")
    }
    name, limit = max(limits.items(), key=lambda item: item[1] or -math.inf)
    if limit and task.lock_timeout and limit > task.lock_timeout:
        yield checks.Warning(
            f"lock_timeout={task.lock_timeout!r} of {task.name} is not renewed and shorter than "
            f"its {name} of {limit} s: the lock can end under a running task.",
            hint=f"Set lock_timeout above {limit}, lower {name}, or let it renew.",
            obj=task.name,
            id="django_singletask.W003",
        )


def check_deployment(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check what matters on a production server (``check --deploy``)."""
    alias = conf.cache
    if alias not in settings.CACHES:
        return []
    found: list[checks.CheckMessage] = []
    own = servers_of(alias)
    shared = [name for name in settings.CACHES if name != alias and own & servers_of(name)]
    if own and (alias == "default" or shared):
        users = " and ".join(f"CACHES[{name!r}]" for name in shared) or "the default cache"
        found.append(
            checks.Warning(
                f"SINGLETASK_CACHE = {alias!r} keeps the locks where {users} keeps entries "
                f"({', '.join(sorted(own))}): its clear() and its evictions delete locks.",
                hint="Give the locks a Redis database, or a memcached server, of their own.",
                id="django_singletask.W007",
            )
        )
    if backend_is(alias, "memcached") and len(own) > 1:
        found.append(
            checks.Warning(
                f"SINGLETASK_CACHE = {alias!r} names {len(own)} memcached servers: when one is "
                "away, its locks move to another, and a lock can be taken twice.",
                hint="Keep the locks on one memcached server, or in Redis or the database.",
                id="django_singletask.W008",
            )
        )
    return found
