"""System checks of the cache, the settings and the options of each task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from celery import current_app
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from django_singletask.conf import DOCS, HISTORY_MODES, TASK_URL, check_seconds, conf, is_test
from django_singletask.stores import is_a, open_cache, refusal
from django_singletask.stores.database import DIALECTS
from django_singletask.stores.places import backend_is, servers_of
from django_singletask.task.base import SingletonTask, import_tasks, singleton_tasks
from django_singletask.task.options import LockOptions

Found = Iterator[checks.CheckMessage]

MAX_DAYS = 36_500

REFUSALS = {
    "django_singletask.E002": ["django.core.cache.backends.dummy.DummyCache"],
    "django_singletask.E003": ["django.core.cache.backends.filebased.FileBasedCache"],
    "django_singletask.E005": ["django_redis.cache.RedisCache", "django_valkey.cache.ValkeyCache"],
}
"""The refused caches, by the id of the message; all others get E006."""


def register() -> None:
    """Add the checks to those of ``manage.py check``; none of them opens a connection."""
    for check in (check_cache, check_settings, check_tasks):
        checks.register(check, checks.Tags.caches)
    checks.register(check_deployment, checks.Tags.caches, deploy=True)


def run() -> list[checks.CheckMessage]:
    """Return the messages that matter when a worker starts."""
    return [*check_cache(), *check_settings(), *check_tasks()]


def _listed(check: Callable[..., Found]) -> Callable[..., list[checks.CheckMessage]]:
    """Let a check yield its messages, and add to each hint a link to its documentation."""

    @wraps(check)
    def messages(**kwargs: Any) -> list[checks.CheckMessage]:
        found = list(check(**kwargs))
        for message in found:
            row = str(message.id).rpartition(".")[2].lower()
            message.hint = f"{message.hint} See {DOCS}/reference/checks.html#{row}"
        return found

    return messages


@_listed
def check_cache(**kwargs: Any) -> Found:
    """Check that ``SINGLETASK_CACHE`` can hold locks."""
    alias, named = conf.cache, f"SINGLETASK_CACHE = {conf.cache!r}"
    try:
        cache = open_cache(alias)
    except (ImproperlyConfigured, ImportError, TypeError) as error:
        yield _no_cache(alias, named, error)
        return
    backend = settings.CACHES[alias]["BACKEND"]
    hint = (
        f"Set CACHES[{alias!r}]['BACKEND'] to Redis, memcached or Django's DatabaseCache, "
        "or SINGLETASK_CACHE to such a cache."
    )
    reason = refusal(cache)
    if is_a(cache, "django.core.cache.backends.locmem.LocMemCache"):
        message = f"{named} uses {backend}: processes do not share its locks."
        if current_app.conf.task_always_eager or is_test():
            hint = "This is fine for tests in one process, but never for workers."
            yield checks.Warning(message, hint=hint, id="django_singletask.W001")
        else:
            yield checks.Error(message, hint=hint, id="django_singletask.E004")
    elif reason is not None:
        ids = (id for id, names in REFUSALS.items() if any(is_a(cache, name) for name in names))
        number = next(ids, "django_singletask.E006")
        yield checks.Error(f"{named}: {reason}.", hint=hint, id=number)
    elif is_a(cache, "django.core.cache.backends.db.DatabaseCache"):
        table = str(settings.CACHES[alias].get("LOCATION", ""))
        yield from _table(table, alias, named)
        yield from _database(table, router.db_for_write(cache.cache_model_class), named)


def _no_cache(alias: Any, named: str, error: Exception) -> checks.CheckMessage:
    aliases = ", ".join(map(repr, sorted(settings.CACHES)))
    if not isinstance(alias, str):
        message, hint = f"{named} is not a string.", f"Set SINGLETASK_CACHE to one of {aliases}."
    elif alias in settings.CACHES:
        backend = settings.CACHES[alias].get("BACKEND")
        message = f"{named}: its BACKEND {backend!r} cannot be loaded: {error}"
        hint = f"Install the package that it needs, or correct CACHES[{alias!r}]."
    else:
        message = f"{named} is not in CACHES."
        hint = f"Add CACHES[{alias!r}], or set SINGLETASK_CACHE to one of {aliases}."
    return checks.Error(message, hint=hint, id="django_singletask.E001")


def _users(aliases: list[str]) -> str:
    return " and ".join(f"CACHES[{alias!r}]" for alias in aliases) or "the default cache"


def _table(table: str, alias: str, named: str) -> Found:
    others = [
        other
        for other, configuration in settings.CACHES.items()
        if other != alias
        and configuration.get("LOCATION") == table
        and backend_is(other, "databasecache")
    ]
    if alias == "default" or others:
        yield checks.Warning(
            f"{named} keeps the locks in the table {table!r}, which {_users(others)} also uses: "
            "cache.clear() and the culling of a full cache delete locks.",
            hint="Add a CACHES entry with a separate table as its LOCATION, run 'manage.py "
            "createcachetable', and set SINGLETASK_CACHE to that entry.",
            id="django_singletask.W005",
        )


def _database(table: str, alias: str, named: str) -> Found:
    vendor = connections[alias].vendor
    if vendor not in DIALECTS:
        yield checks.Error(
            f"{named} keeps the locks in DATABASES[{alias!r}], which is {vendor}: locks need "
            "PostgreSQL, MySQL, MariaDB or SQLite.",
            hint=f"Route the table {table!r} to such a database, or set SINGLETASK_CACHE to a "
            "cache on Redis or memcached.",
            id="django_singletask.E015",
        )
    if vendor == "sqlite" and alias == "default":
        yield checks.Warning(
            f"{named} keeps the locks in DATABASES['default'], an SQLite file: no lock can be "
            "acquired while a transaction is open there. Without a transaction_mode, "
            "transactions also fail with 'database is locked' when several processes write.",
            hint="Add another SQLite file to DATABASES, and a router that sends the cache table "
            "to it. Set the OPTIONS of both to {'transaction_mode': 'IMMEDIATE', 'timeout': 20, "
            "'init_command': 'PRAGMA journal_mode=WAL'}.",
            id="django_singletask.W006",
        )


@_listed
def check_settings(**kwargs: Any) -> Found:
    """Check the other ``SINGLETASK_…`` settings."""
    try:
        check_seconds("SINGLETASK_LOCK_TIMEOUT", conf.lock_timeout)
    except (TypeError, ValueError) as error:
        hint = "Set SINGLETASK_LOCK_TIMEOUT to seconds, such as 60, or remove it."
        yield checks.Error(str(error), hint=hint, id="django_singletask.E007")
    days: Any = conf.history_days
    if isinstance(days, bool) or not isinstance(days, (int, float)) or not 0 < days <= MAX_DAYS:
        rule = f"a number of days above 0 and up to {MAX_DAYS}"
        yield _must_be("history_days", rule, "a number of days, such as 30", "E016")
    if conf.history not in HISTORY_MODES:
        yield _must_be("history", f"one of {', '.join(HISTORY_MODES)}", "'background'", "E013")
    if not isinstance(conf.record_arguments, bool):
        yield _must_be("record_arguments", "True or False", "False to hide arguments", "E014")
    if conf.task_url and not (isinstance(conf.task_url, str) and TASK_URL.fullmatch(conf.task_url)):
        rule = "an http or https address whose only field is {task_id}"
        yield _must_be("task_url", rule, "'https://flower.example/task/{task_id}'", "E017")


def _must_be(setting: str, rule: str, example: str, number: str) -> checks.Error:
    name = f"SINGLETASK_{setting.upper()}"
    return checks.Error(
        f"{name} must be {rule}, not {getattr(conf, setting)!r}.",
        hint=f"Set {name} to {example}, or remove it.",
        id=f"django_singletask.{number}",
    )


@_listed
def check_tasks(**kwargs: Any) -> Found:
    """Check the lock options of every registered :class:`SingletonTask`."""
    import_tasks()
    tasks = list(singleton_tasks().values())
    for task in tasks:
        yield from _task(task)
    yield from _late(tasks)


def _task(task: SingletonTask) -> Found:
    problems = list(LockOptions.of(task).problems(f"of {task.name}", task.parameters))
    for problem in problems:
        message = checks.Error if problem.error else checks.Warning
        number = f"django_singletask.{problem.check}"
        yield message(problem.text, hint=problem.hint, obj=task.name, id=number)
    limits = {
        name: getattr(task, name) or getattr(task.app.conf, f"task_{name}")
        for name in ("time_limit", "soft_time_limit")
    }
    name, limit = max(limits.items(), key=lambda item: item[1] or -math.inf)
    fixed = not (problems or task.lock_renew) and task.lock_timeout
    if fixed and limit and limit > fixed:
        yield checks.Warning(
            f"lock_timeout={task.lock_timeout!r} of {task.name} is shorter than its {name} of "
            f"{limit} s, and lock_renew=False: the lock can expire while the task runs.",
            hint=f"Set lock_timeout above {limit}, lower {name}, or remove lock_renew=False.",
            obj=task.name,
            id="django_singletask.W003",
        )


def _late(tasks: list[SingletonTask]) -> Found:
    late = [task for task in tasks if task.acks_late and not task.reject_on_worker_lost]
    # A setting for all tasks is reported once, not for each task.
    setting = "task_" if current_app.conf.task_acks_late else ""
    for task in late[:1] if setting else late:
        yield checks.Warning(
            f"{setting or f'{task.name} has '}acks_late without {setting}reject_on_worker_lost: "
            "when a process is killed, Celery acknowledges its message and the run is lost.",
            hint=f"Set {setting}reject_on_worker_lost=True as well, if runs may be repeated.",
            obj=None if setting else task.name,
            id="django_singletask.W004",
        )


@_listed
def check_deployment(**kwargs: Any) -> Found:
    """Check what matters on a production server (``check --deploy``)."""
    alias = conf.cache
    if alias not in list(settings.CACHES):
        return  # check_cache() reports it
    named, servers = f"SINGLETASK_CACHE = {alias!r}", servers_of(alias)
    others = [other for other in settings.CACHES if other != alias and servers & servers_of(other)]
    if servers and (alias == "default" or others):
        yield checks.Warning(
            f"{named} keeps the locks on {', '.join(sorted(servers))}, which {_users(others)} also "
            "uses: its clear() and its evictions delete locks.",
            hint="Give the locks a dedicated Redis database, memcached server or DatabaseCache "
            "table.",
            id="django_singletask.W007",
        )
    if backend_is(alias, "memcached") and len(servers) > 1:
        yield checks.Warning(
            f"{named} lists {len(servers)} memcached servers: when one is down, its locks move to "
            "another, and two runs can hold the same lock.",
            hint="Keep the locks on one memcached server, or in Redis or the database.",
            id="django_singletask.W002",
        )
