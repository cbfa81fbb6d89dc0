"""The system checks: what each finds, and how it says so.

The limits of options and settings are in tests/limits.py; tests/task/test_options.py tries them.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import celery
import pytest
from celery import Celery, current_app
from django.core import checks as django_checks
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.db import DatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.cache.backends.memcached import PyLibMCCache, PyMemcacheCache
from django.core.cache.backends.redis import RedisCache
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.db.utils import ConnectionHandler
from django.test import override_settings
from django_redis.cache import RedisCache as DjangoRedisCache

from django_singletask import SingletonTask, checks, hooks, stores
from django_singletask.stores.base import Entry, Outcome, Store
from tests import inside
from tests.settings import cache as configured

ROOT = Path(__file__).parents[2]
DJANGO = "django.core.cache.backends"
REDIS = f"{DJANGO}.redis.RedisCache"
DATABASE = f"{DJANGO}.db.DatabaseCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
DJANGO_VALKEY = "django_valkey.cache.ValkeyCache"
MEMCACHED = f"{DJANGO}.memcached.PyMemcacheCache"
STORES = "django_singletask.stores"


class OwnRedis(RedisCache): ...


class OwnDjangoRedis(DjangoRedisCache): ...


class OwnPyLibMC(PyLibMCCache): ...


class OwnPyMemcache(PyMemcacheCache): ...


class OwnDatabase(DatabaseCache): ...


class OwnLocMem(LocMemCache): ...


class OwnDummy(DummyCache): ...


class OwnFileBased(FileBasedCache): ...


class Unknown(BaseCache):
    def __init__(self, server: str, params: dict[str, Any]) -> None:
        super().__init__(params)


class HalfAStore(Store): ...


class OwnStore(Store):
    def insert(self, key: str, value: bytes, lease: float) -> bool: ...

    def change(self, key: str, old: bytes, new: bytes, lease: float | None) -> Outcome: ...

    def read_many(self, keys: Any) -> dict[str, Entry]: ...


def two(a: Any, b: Any = 2) -> None: ...


def dotted(name: str) -> str:
    return f"{__name__}.{name}"


@pytest.fixture
def use(settings):
    """Give the function that sets CACHES, and SINGLETASK_CACHE to "locks"."""

    def use_caches(locks: dict[str, Any], **others: dict[str, Any]) -> None:
        settings.SINGLETASK_CACHE = "locks"
        settings.CACHES = {"default": configured(f"{DJANGO}.dummy.DummyCache"), "locks": locks}
        settings.CACHES = {**settings.CACHES, **others}

    return use_caches


@pytest.fixture
def app() -> Iterator[Celery]:
    """Give the Celery application whose tasks are checked, and no others."""
    before = current_app._get_current_object()
    app = Celery("checked", set_as_current=False, broker="memory://")
    app.set_current()
    yield app
    before.set_current()


@pytest.fixture
def check_task(app):
    """Give the function that checks a task with these options."""

    def check(**options: Any) -> list[CheckMessage]:
        app.tasks.pop("bad.task", None)
        options.setdefault("base", SingletonTask)
        app.task(two, name="bad.task", shared=False, **options)
        return [message for message in checks.check_tasks() if message.obj == "bad.task"]

    return check


def only(messages: list[CheckMessage], id: str, kind: type | None = None) -> CheckMessage:
    """Return the one message without the link that ends its hint, if id, class and link agree."""
    [message] = messages
    assert message.id == f"django_singletask.{id}"
    assert type(message) is (kind or (Error if id.startswith("E") else Warning))
    message.hint, link = message.hint.split(" See https://")
    assert link.endswith(f"/reference/checks.html#{id.lower()}")
    return message


# Celery


@pytest.fixture
def versions(monkeypatch):
    """Give the function that lets a minor version of Celery be installed."""

    def install(minor: int) -> None:
        monkeypatch.setattr(celery, "VERSION", (5, minor, 0, "rc1", ""))
        monkeypatch.setattr(celery, "__version__", f"5.{minor}.0rc1")

    return install


@pytest.mark.parametrize("minor", [4, 5, 6, 7])
def test_a_tested_celery_is_fine(versions, minor):
    versions(minor)
    assert checks.check_celery() == []


def test_a_newer_celery_gives_a_warning(versions):
    versions(8)
    message = only(checks.check_celery(), "W010")
    assert message.msg == "Celery 5.8.0rc1 is newer than 5.7, the newest that is tested."
    assert message.hint.endswith("or install a tested Celery: pip install 'celery==5.7.*'.")


@pytest.fixture(params=hooks.HOOKS)
def missing(request, monkeypatch):
    """Remove a name from Celery or kombu."""
    module, _, path = request.param.partition(":")
    if request.param == hooks.ORIGINAL_BODY:
        monkeypatch.setattr(hooks, "add_autoretry_behaviour", lambda task: None)
    elif not path:
        monkeypatch.setitem(sys.modules, module, None)
    else:
        owner, _, name = request.param.rpartition(".")
        monkeypatch.delattr(pkgutil.resolve_name(owner), name)
    return request.param


def test_a_private_name_that_is_missing_is_an_error(versions, missing):
    versions(7)
    package = missing.partition(".")[0]
    message = only(checks.run(), "E020")
    version = sys.modules[package].__version__
    assert message.msg == (
        f"{package} {version} has no {missing}, which django_singletask needs to "
        f"{hooks.HOOKS[missing]}."
    )
    assert message.hint.startswith("Update django-singletask.")
    assert message.hint.endswith(f" install an older {package}.")


def test_celery_is_looked_at_once(monkeypatch):
    looks = []
    monkeypatch.setattr(checks, "missing_hooks", lambda: looks.append("a look") or [])
    django_checks.run_checks(tags=["singletask"])
    assert looks == ["a look"]


def test_a_part_of_celery_that_needs_more_than_it_is_given_is_missing(monkeypatch):
    monkeypatch.setattr(hooks, "add_autoretry_behaviour", attrgetter("of_a_new_celery"))
    assert hooks.missing_hooks() == [hooks.ORIGINAL_BODY]


def test_each_private_name_of_a_request_is_looked_for():
    package = Path(checks.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    used = set(re.findall(r"request\.(_\w+)", code))
    assert used == {"_payload", "_protected"}
    assert used <= {name.rpartition(".")[2] for name in hooks.HOOKS}


def test_the_look_at_celery_does_not_import_its_pools():
    code = "import sys; from django_singletask.hooks import missing_hooks; print(missing_hooks(), "
    code += "{'billiard.pool', 'celery.concurrency.prefork'} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] set()\n"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("README.rst", "Celery 5.4 to {}"),
        ("docs/reference/policy.rst", "   * - Celery\n     - 5.4 to {}\n"),
        ("tox.ini", "celery~={}.0"),
        (".github/workflows/test.yml", "celery~={}.0"),
    ],
)
def test_the_tested_celery_is_that_of_the_docs_and_of_the_runs(path, text):
    tested = ".".join(map(str, hooks.TESTED))
    assert text.format(tested) in (ROOT / path).read_text()


# The cache


def test_the_settings_of_the_tests_are_fine():
    assert checks.run() == checks.check_celery()


@pytest.mark.parametrize("value", ["nowhere", None, ["locks"], 7])
def test_an_alias_that_does_not_exist_is_reported_with_those_that_do(settings, value):
    settings.SINGLETASK_CACHE = value
    message = only(checks.check_cache(), "E001")
    assert message.msg == f"SINGLETASK_CACHE = {value!r} is not in CACHES."
    assert message.hint.startswith(f"Add CACHES[{value!r}], or set SINGLETASK_CACHE to one of ")
    assert "'redis'" in message.hint
    assert checks.check_deployment() == []


@pytest.mark.parametrize(
    ("backend", "number", "text"),
    [
        (f"{DJANGO}.dummy.DummyCache", "E002", "stores nothing, so every run gets the lock."),
        (dotted("OwnDummy"), "E002", "stores nothing"),
        (f"{DJANGO}.filebased.FileBasedCache", "E003", "is not atomic"),
        (dotted("OwnFileBased"), "E003", "is not atomic"),
        (
            f"{DJANGO}.locmem.LocMemCache",
            "E004",
            "is in the memory of a process: other processes do not see its locks.",
        ),
        (dotted("OwnLocMem"), "E004", "is in the memory of a process"),
        (dotted("Unknown"), "E006", "Unknown is not one of the supported caches"),
    ],
)
def test_a_cache_that_cannot_hold_locks_is_refused(use, backend, number, text, settings):
    settings.SINGLETASK_TESTING = False
    use(configured(backend, "/nonexistent"))
    message = only(checks.check_cache(), number)
    assert message.msg.startswith("SINGLETASK_CACHE = 'locks'")
    assert text in message.msg
    assert message.hint.startswith("Set CACHES['locks']['BACKEND'] to Redis, memcached or ")


@pytest.mark.parametrize(("eager", "test"), [(True, False), (False, True)])
def test_local_memory_gives_a_warning_in_eager_mode_and_in_tests(app, use, eager, test, settings):
    settings.SINGLETASK_TESTING = test
    app.conf.task_always_eager = eager
    use(configured(f"{DJANGO}.locmem.LocMemCache"))
    message = only(checks.check_cache(), "W001")
    assert "other processes do not see its locks" in message.msg
    assert "for tests in one process" in message.hint


@pytest.mark.parametrize(
    ("backend", "client", "reason"),
    [
        (DJANGO_REDIS, "herd.HerdClient", "HerdClient changes"),
        (DJANGO_REDIS, "sharded.ShardClient", "ShardClient spreads"),
        (DJANGO_VALKEY, "herd.HerdClient", "HerdClient changes"),
        (DJANGO_VALKEY, "sharded.ShardClient", "ShardClient spreads"),
        (DJANGO_VALKEY, "sentinel.SentinelClient", "SentinelClient writes to a"),
    ],
)
def test_unfit_clients_are_refused(use, backend, client, reason):
    client = f"{backend.partition('.')[0]}.client.{client}"
    use(configured(backend, "redis://x/1", CLIENT_CLASS=client))
    message = only(checks.check_cache(), "E005")
    assert "SINGLETASK_CACHE = 'locks'" in message.msg
    assert reason in message.msg
    assert message.hint == (
        "In CACHES['locks'], remove OPTIONS['CLIENT_CLASS'] (or '{' from its keys), "
        "or set SINGLETASK_CACHE to another cache."
    )


@pytest.mark.parametrize(
    "backend", [dotted("Unknown"), dotted("OwnFileBased"), dotted("OwnDatabase"), DJANGO_REDIS]
)
def test_a_cache_with_a_store_of_a_third_party_is_accepted(use, settings, backend, monkeypatch):
    """Whatever is said of the cache, its database and its client without that store."""
    monkeypatch.setattr(stores, "connections", {"default": SimpleNamespace(vendor="oracle")})
    use(configured(backend, "x", CLIENT_CLASS="django_redis.client.ShardClient"))
    assert checks.check_cache() != []
    settings.SINGLETASK_STORES = {backend: dotted("OwnStore")}
    assert checks.check_cache() == []


@pytest.mark.parametrize(
    ("backend", "store"),
    [(dotted("Unknown"), "OwnStore"), (dotted("OwnRedis"), "RedisStore"), (REDIS, "OwnStore")],
)
def test_the_store_of_the_nearest_class_is_chosen(settings, backend, store):
    settings.SINGLETASK_STORES = {
        f"{DJANGO}.base.BaseCache": dotted("OwnStore"),
        dotted("OwnRedis"): f"{STORES}.redis.RedisStore",
        REDIS: dotted("OwnStore"),
    }
    settings.CACHES = {**settings.CACHES, "locks": configured(backend, "redis://x/1")}
    path, reason = stores.choose(stores.open_cache("locks"))
    assert (path.rpartition(".")[2], reason) == (store, "")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "must be a dict from the path of a cache's class"),
        ({"a.Cache": OwnStore}, "must be a dict from the path of a cache's class"),
        ({LocMemCache: "a.Store"}, "must be a dict from the path of a cache's class"),
        ({"a.Cache": "Store"}, "Store: Store doesn't look like a module path"),
        ({"a.Cache": "no.such.Store"}, "no.such.Store: No module named 'no'"),
        ({"a.Cache": dotted("Unknown")}, f"is not a subclass of {STORES}.base.Store"),
        ({"a.Cache": dotted("dotted")}, f"is not a subclass of {STORES}.base.Store"),
        ({"a.Cache": dotted("HalfAStore")}, "with its abstract methods"),
    ],
)
def test_stores_that_cannot_be_are_refused(use, settings, value, reason):
    use(configured(REDIS, "redis://x/1"))
    settings.SINGLETASK_STORES = value
    message = only(checks.check_cache(), "E018")
    assert message.msg.startswith("SINGLETASK_STORES")
    assert reason in message.msg
    assert message.hint == "Correct SINGLETASK_STORES, or remove it."


@pytest.mark.parametrize(
    ("backend", "location", "store", "missing"),
    [
        (REDIS, "redis://x/1", "memcached.PyMemcacheStore", "'client_servers'"),
        (REDIS, "redis://x/1", "locmem.LocMemStore", "'_lock'"),
        (MEMCACHED, "x:1", "redis.RedisStore", "'get_client'"),
        (DATABASE, "t", "cluster.ClusterStore", "'_cache'"),
        (dotted("Unknown"), "", "database.DatabaseStore", "'cache_model_class'"),
    ],
)
def test_a_store_that_does_not_fit_its_cache_is_refused(
    use, settings, backend, location, store, missing
):
    use(configured(backend, location))
    settings.SINGLETASK_STORES = {backend: f"{STORES}.{store}"}
    message = only(checks.check_cache(), "E018")
    caches = backend.rpartition(".")[2]
    begin = f"SINGLETASK_STORES: {store.rpartition('.')[2]} does not fit {caches}: AttributeError: "
    assert message.msg.startswith(begin)
    assert missing in message.msg


@pytest.mark.parametrize("path", ["no.such.Store", dotted("HalfAStore")])
def test_a_wrong_store_is_refused_at_first_use(use, settings, path):
    """A web server runs no system checks."""
    use(configured(dotted("Unknown")))
    settings.SINGLETASK_STORES = {dotted("Unknown"): path}
    with pytest.raises(ImproperlyConfigured, match=f"^SINGLETASK_STORES: {path}"):
        stores.get_store("locks")


def test_a_database_that_cannot_hold_locks_is_refused(use, monkeypatch):
    use(configured(DATABASE, "its_own"))
    monkeypatch.setattr(stores, "connections", {"default": SimpleNamespace(vendor="oracle")})
    message = only(checks.check_cache(), "E015")
    assert "DATABASES['default'] is oracle" in message.msg
    assert "DatabaseCache on a supported database" in message.hint


@pytest.mark.parametrize(
    ("backend", "location"),
    [
        (dotted("OwnRedis"), "redis://x/1"),
        (dotted("OwnDjangoRedis"), "redis://x/1"),
        (DJANGO_VALKEY, "valkey://x/1"),
        pytest.param(dotted("OwnPyLibMC"), "x:11211", marks=pytest.mark.needs("pylibmc")),
        (dotted("OwnPyMemcache"), "x:11211"),
        pytest.param(dotted("OwnDatabase"), "locks_pg", marks=pytest.mark.needs("default")),
    ],
)
def test_subclasses_of_supported_backends_are_accepted(use, backend, location):
    use(configured(backend, location))
    assert checks.check_cache() == []


@pytest.mark.needs("default")
@pytest.mark.parametrize("backend", [DATABASE, dotted("OwnDatabase")])
def test_a_table_that_another_cache_uses_gives_a_warning(use, backend):
    use(configured(DATABASE, "t"), pages=configured(backend, "other"))
    assert checks.check_cache() == []
    use(configured(DATABASE, "t"), pages=configured(backend, "t"))
    message = only(checks.check_cache(), "W005")
    assert message.msg.startswith("The locks in CACHES['locks'] are on table t of DATABASES")
    assert ", also used by CACHES['pages']: " in message.msg
    assert "createcachetable" in message.hint


@pytest.mark.needs("default")
def test_the_table_of_the_default_cache_gives_a_warning(settings):
    settings.SINGLETASK_CACHE = "default"
    settings.CACHES = {"default": configured(DATABASE, "t")}
    assert ", also used by other code: " in only(checks.check_cache(), "W005").msg


def test_locks_in_the_sqlite_file_of_all_data_give_a_warning(use, monkeypatch):
    use(configured(DATABASE, "t"))
    monkeypatch.setattr(checks, "connections", {"default": connections["sqlite"]})
    message = only(checks.check_cache(), "W006")
    assert "DATABASES['default'], an SQLite file" in message.msg
    assert "router" in message.hint
    assert "'manage.py createcachetable --database <its alias>'" in message.hint


def test_locks_in_an_sqlite_file_of_their_own_are_fine(settings):
    settings.SINGLETASK_CACHE = "db_sqlite"
    assert checks.check_cache() == []


# The database of the history

SQLITE = "django.db.backends.sqlite3"
SQLITE_OPTIONS = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL",
}


@pytest.fixture
def history_in(monkeypatch, settings):
    """Give the function that keeps the history in a database with these settings, not in a test."""
    settings.SINGLETASK_TESTING = False

    def keep_in(default: dict[str, Any], **others: dict[str, Any]) -> None:
        databases = ConnectionHandler({"default": default, **others})
        monkeypatch.setattr(checks, "connections", databases)

    return keep_in


def sqlite_file(path: Path, **options: Any) -> dict[str, Any]:
    return {"ENGINE": SQLITE, "NAME": path / "db.sqlite3", "OPTIONS": options}


@pytest.mark.parametrize("missing", [*([name] for name in SQLITE_OPTIONS), [*SQLITE_OPTIONS]])
def test_a_history_in_sqlite_names_the_options_that_are_missing(history_in, tmp_path, missing):
    options = {name: value for name, value in SQLITE_OPTIONS.items() if name not in missing}
    history_in(sqlite_file(tmp_path, **options))
    message = only(checks.check_history(), "W008")
    assert "DATABASES['default'], an SQLite file" in message.msg
    for name, value in SQLITE_OPTIONS.items():
        assert (f"{name!r}: {value!r}" in message.msg) is (name in missing)
    assert "DATABASES['default']['OPTIONS']" in message.hint
    assert [*tmp_path.iterdir()] == []  # it has opened no file


@pytest.mark.parametrize(
    ("options", "is_fine"),
    [
        ({"transaction_mode": "DEFERRED"}, False),
        ({"init_command": "PRAGMA synchronous=NORMAL"}, False),
        ({}, True),
        ({"transaction_mode": "exclusive", "timeout": 5}, True),
        ({"init_command": "PRAGMA synchronous=NORMAL; pragma journal_mode = 'wal';"}, True),
    ],
)
def test_other_values_of_the_sqlite_options_are_read(history_in, tmp_path, options, is_fine):
    history_in(sqlite_file(tmp_path, **{**SQLITE_OPTIONS, **options}))
    assert (checks.check_history() == []) is is_fine


@pytest.mark.parametrize(
    "database",
    [
        {"ENGINE": SQLITE, "NAME": ":memory:"},
        {"ENGINE": SQLITE, "NAME": "file:memorydb_default?mode=memory&cache=shared"},
        {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"},
    ],
)
def test_a_database_that_is_no_sqlite_file_is_fine(history_in, database):
    history_in(database)
    assert checks.check_history() == []


def test_an_sqlite_file_is_fine_in_tests_and_without_a_history(history_in, tmp_path, settings):
    history_in(sqlite_file(tmp_path))
    with override_settings(SINGLETASK_TESTING=True):
        assert checks.check_history() == []
    settings.SINGLETASK_HISTORY = "off"
    assert checks.check_history() == []


def test_the_database_is_that_of_the_router(history_in, tmp_path, settings):
    settings.DATABASE_ROUTERS = [SimpleNamespace(db_for_write=lambda model, **hints: "other")]
    history_in({}, other=sqlite_file(tmp_path))
    assert "DATABASES['other']" in only(checks.check_history(), "W008").msg


PAGES = ["docs/tutorial.rst", "docs/operating/choosing-a-cache.rst"]


@pytest.mark.parametrize("page", PAGES)
def test_who_follows_a_page_gets_no_warning_about_sqlite(history_in, tmp_path, page):
    text = (ROOT / page).read_text()
    [block] = re.findall(
        r"DATABASES\[\"default\"\]\[\"OPTIONS\"\] = (\{.*?\n *\})", text, re.DOTALL
    )
    history_in(sqlite_file(tmp_path, **ast.literal_eval(textwrap.dedent(block))))
    assert checks.check_history() == []


@pytest.mark.skipif(celery.VERSION[:2] > hooks.TESTED, reason="a new Celery gives a warning")
def test_the_demo_gets_no_warning():
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--tag", "caches", "--tag", "singletask"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if "DJANGO" not in name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.stdout == "System check identified no issues (0 silenced).\n"


# The tasks


def test_good_options_are_fine(check_task):
    options = {"lock_timeout": 30, "lock_on": ["a"], "on_conflict": "wait", "lock_wait": 5}
    assert check_task(acks_late=True, reject_on_worker_lost=True, **options) == []
    assert check_task() == []


def test_other_tasks_are_not_checked(app):
    app.task(two, name="other.task", shared=False, acks_late=True)
    assert not any(message.obj == "other.task" for message in checks.check_tasks())


@pytest.mark.parametrize(
    ("options", "kind", "text", "hint"),
    [
        (
            {"lock_renew": False},
            Error,
            "lock_renew=False of bad.task needs lock_timeout, a lease longer than any run.",
            "Set lock_timeout, or remove lock_renew.",
        ),
        (
            {"on_conflict": "wait", "lock_wait": 0},
            Error,
            'on_conflict="wait" of bad.task needs lock_wait, the longest wait in seconds.',
            "Change lock_wait, or remove on_conflict.",
        ),
        (
            {"lock_slots": 2, "unique_until": "finish"},
            Error,
            "lock_slots=2 and unique_until='finish' of bad.task cannot be combined. Change or "
            "remove one of them; see https://",
            "Change unique_until, or remove lock_slots.",
        ),
        (
            {"on_skip": print, "on_conflict": "raise"},
            Warning,
            "on_skip=print of bad.task has no effect with on_conflict='raise'.",
            "Change on_conflict, or remove on_skip.",
        ),
    ],
)
def test_options_that_do_not_work_together_are_reported(app, check_task, options, kind, text, hint):
    app.conf.task_annotations = {"bad.task": options}  # its decorator would refuse some of them
    message = only(check_task(), "E011", kind)
    assert message.msg.startswith(text)
    assert message.hint == hint


def test_modules_that_celery_imports_by_its_settings_are_imported(app, monkeypatch, tmp_path):
    """Not every module of tasks is called tasks.py."""
    for setting in ("imports", "include"):
        (tmp_path / f"jobs_of_{setting}.py").touch()
        app.conf[setting] = (f"jobs_of_{setting}",)
    monkeypatch.syspath_prepend(tmp_path)
    checks.check_tasks()
    modules = [sys.modules.pop(f"jobs_of_{setting}", None) for setting in ("imports", "include")]
    assert None not in modules


def test_packages_that_only_autodiscover_tasks_names_are_imported(app, monkeypatch, tmp_path):
    (tmp_path / "not_installed").mkdir()
    (tmp_path / "not_installed/tasks.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    app.autodiscover_tasks(["not_installed"])
    Celery("another", set_as_current=False).autodiscover_tasks(["does_not_exist"])
    checks.check_tasks()
    assert sys.modules.pop("not_installed.tasks", None)


@pytest.mark.parametrize("limit", ["time_limit", "soft_time_limit"])
def test_a_time_limit_above_a_fixed_lease_gives_a_warning(app, check_task, limit):
    fixed = {"lock_renew": False, "lock_timeout": 30}
    for fine in ({}, {limit: 30}, {limit: 99, "lock_renew": True}):
        assert check_task(**{**fixed, **fine}) == []
    message = only(check_task(**fixed, **{limit: 31}), "W003")
    assert "lock_timeout=30 of bad.task is shorter than its time limit of 31 s" in message.msg
    assert message.hint.startswith("Set lock_timeout above 31")
    app.conf[f"task_{limit}"] = 31  # for all tasks
    only(check_task(**fixed), "W003")


def test_very_many_slots_give_a_warning(check_task):
    assert check_task(lock_slots=200) == []
    message = only(check_task(lock_slots=201), "W007")
    assert "each conflict reads all of them" in message.msg


def test_a_run_that_is_lost_with_its_process_gives_a_warning(check_task):
    message = only(check_task(acks_late=True), "W004")
    assert message.msg.startswith("bad.task has acks_late without reject_on_worker_lost")


def test_acks_late_of_all_tasks_gives_one_warning(app):
    app.conf.task_acks_late = True
    for number in range(3):
        app.task(two, name=f"late{number}", base=SingletonTask, shared=False)
    message = only(checks.check_tasks(), "W004")
    assert message.msg.startswith("task_acks_late without task_reject_on_worker_lost:")


@pytest.mark.parametrize("task", ["bad.task", "*"])
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lock_timout", "did you mean 'lock_timeout'?"),
        ("lock_color", "the options are "),
    ],
)
def test_an_annotation_that_is_no_option_gives_a_warning(app, check_task, task, name, hint):
    app.conf.task_annotations = {task: {name: 7, "rate_limit": "10/m", "lock_slots": 2}}
    message = only(check_task(), "W009")
    assert message.msg == (
        f"Celery's task_annotations set {name!r} of bad.task, which is no option."
    )
    assert message.hint.startswith(f"Correct the name: {hint}")


def test_of_a_whole_project_only_its_own_tasks_are_checked(app):
    app.task_cls = SingletonTask
    app.conf.task_annotations = {"*": {"lock_timout": 7}}
    app.task(two, name="own.task", shared=False)
    checked = {message.obj for message in checks.check_tasks()}
    assert "own.task" in checked
    assert not [name for name in checked if name.startswith("celery.")]


def test_annotations_of_other_tasks_and_of_options_that_a_base_has_are_fine(app, check_task):
    class Own(SingletonTask):
        abstract = True
        lock_color = "red"

    app.conf.task_annotations = {
        "other.task": {"lock_timout": 7},
        "bad.task": {"lock_color": "blue", "lock_timeout": 7, "rate_limit": "10/m"},
    }
    assert check_task(base=Own) == []


def test_the_message_begins_with_the_name_of_the_task(check_task):
    [message] = check_task(on_conflict="explode")
    assert str(message).startswith("bad.task: (django_singletask.E012) on_conflict='explode'")


# Deployment

redis = partial(configured, REDIS)
memcached = partial(configured, MEMCACHED)
SOCKET = "unix:///run/redis.sock"
ON_X = redis("redis://x/1")


@pytest.mark.parametrize(
    ("locks", "pages"),
    [
        (redis("redis://localhost:6379/1"), redis("redis://127.0.0.1/1")),
        (redis("redis://localhost"), redis("redis://127.0.0.1:6379/0")),
        (redis("redis://"), redis("redis://LOCALHOST:6379")),
        (redis("redis://[::1]/1"), redis("redis://localhost/1")),
        (redis("redis://user:secret@cache.example/1"), redis("rediss://cache.example:6379/1")),
        (redis(f"{SOCKET}?db=1"), redis(f"{SOCKET}?db=1")),
        (redis(["redis://x/1", "redis://replica/1"]), ON_X),
        (redis("redis://x/1,redis://replica/1"), redis("redis://x/1;redis://other/1")),
        (configured(DJANGO_REDIS, "redis://x/1"), ON_X),
        (configured(dotted("OwnRedis"), "redis://x/1"), ON_X),
        # The number of the database is in the address, or in the options.
        (redis("redis://x?db=1"), ON_X),
        (redis("redis://x/9?db=1"), ON_X),
        (redis("redis://x", db=1), ON_X),
        (redis("redis://x/text", db="1"), ON_X),
        (redis("redis://x/1", db=5), ON_X),
        (redis("redis://x?db=1", db=5), ON_X),
        (configured(DJANGO_REDIS, "redis://x", CONNECTION_POOL_KWARGS={"db": 1}), ON_X),
        (redis(SOCKET, db=1), redis(f"{SOCKET}?db=1")),
        (memcached("localhost:11211"), memcached("127.0.0.1")),
        (memcached("x:11211"), memcached(["y:1", "x"])),
        (memcached("unix:/run/memcached"), memcached("/run/memcached")),
        pytest.param(
            memcached("x:11211"),
            configured(dotted("OwnPyLibMC"), "x"),
            marks=pytest.mark.needs("pylibmc"),
        ),
    ],
)
def test_one_place_under_two_aliases_gives_a_warning(use, locks, pages):
    use(locks, pages=pages)
    message = only(checks.check_deployment(), "W002")
    assert message.msg.startswith("The locks in CACHES['locks'] are on ")
    assert ", also used by CACHES['pages']: " in message.msg
    assert "secret" not in message.msg
    assert "dedicated Redis database, memcached server or DatabaseCache table" in message.hint


@pytest.mark.parametrize(
    "other",
    [
        "redis://x/2",
        "redis://x",
        "redis://y/1",
        "redis://x:6380/1",
        "redis://x/1?db=2",
        ["redis://y/1", "redis://x/1"],
        "unix:///x?db=1",
        "",
    ],
    ids=str,
)
def test_a_redis_database_for_the_locks_alone_is_fine(use, other):
    use(ON_X, pages=redis(other))
    assert checks.check_deployment() == []


def test_the_default_cache_as_lock_cache_gives_a_warning(settings):
    settings.SINGLETASK_CACHE = "default"
    settings.CACHES = {"default": configured(REDIS, "redis://x/1")}
    message = only(checks.check_deployment(), "W002")
    assert message.msg == (
        "The locks in CACHES['default'] are on x:6379 database 1, also used by other code: "
        "its clear() and its evictions delete locks."
    )
    assert message.hint.endswith(", and set SINGLETASK_CACHE to its alias.")


def test_the_deployment_check_leaves_other_caches_alone(use):
    use(configured(DATABASE, "t"), pages=configured("no.such.Cache"))
    assert checks.check_deployment() == []


# All of them


def test_no_check_opens_a_connection(settings, monkeypatch):
    # Databases are closed to a test without the mark django_db.
    def refuse(*args: Any) -> None:
        raise AssertionError(f"a check connects to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    for alias in settings.CACHES:
        settings.SINGLETASK_CACHE = alias
        checks.run()
        checks.check_deployment()


def test_those_of_the_cache_are_among_the_checks_of_caches(settings):
    settings.SINGLETASK_CACHE = "nowhere"
    settings.SINGLETASK_HISTORY = "sometimes"
    found = {
        tag: {message.id for message in django_checks.run_checks(tags=[tag])}
        for tag in (django_checks.Tags.caches, "singletask")
    }
    assert found[django_checks.Tags.caches] == {"django_singletask.E001"}
    assert "django_singletask.E013" in found["singletask"]
    assert "django_singletask.E001" not in found["singletask"]


def test_the_deployment_is_checked_on_request_only(use):
    use(memcached("x:1"), pages=memcached("x:1"))
    tags = [django_checks.Tags.caches]
    plain = django_checks.run_checks(tags=tags)
    deployed = django_checks.run_checks(tags=tags, include_deployment_checks=True)
    assert {m.id for m in deployed} - {m.id for m in plain} == {"django_singletask.W002"}


def test_an_error_fails_the_check_command_unless_it_is_silenced(settings, capsys):
    settings.SINGLETASK_CACHE = "nowhere"
    with pytest.raises(SystemCheckError, match=r"django_singletask\.E001"):
        call_command("check", tags=["caches"])  # others ask the databases
    settings.SILENCED_SYSTEM_CHECKS = ["django_singletask.E001"]
    call_command("check", tags=["caches"])
    printed = capsys.readouterr()
    # On stderr where another check has something to say.
    assert "1 silenced" in printed.out + printed.err


def test_check_deploy_end_to_end():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "django", "check", "--deploy", "--tag", "caches"],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "SINGLETASK_TEST_CACHE": "redis",
            "SINGLETASK_TEST_REDIS_URL": "redis://127.0.0.1:1/0",
            # The check needs no server.
            "SINGLETASK_TEST_ABSENT": os.environ["SINGLETASK_TEST_ABSENT"].replace("Redis", ""),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "(django_singletask.W002) The locks in CACHES['redis'] are on" in done.stdout
    assert "HINT: Give the locks a CACHES entry with a dedicated Redis database" in done.stdout


def test_each_id_means_one_thing_and_has_a_row_in_the_reference_and_a_test():
    numbers = inside.check_numbers()
    assert len({*numbers}) == len(numbers)
    page = (ROOT / "docs/reference/checks.rst").read_text()
    rows = re.findall(r"\.\. _(\w+):\n\n       ``django_singletask\.\1``", page)
    assert rows == sorted(numbers)
    for letter in "EW":
        counted = [int(id[1:]) for id in rows if id[0] == letter]
        assert counted == [*range(1, len(counted) + 1)]
    files = ("project/test_checks.py", "limits.py")
    tests = "".join((ROOT / "tests" / name).read_text() for name in files)
    assert [id for id in rows if f'"{id}"' not in tests] == []


def test_a_wrong_type_beside_a_time_limit_is_an_error_and_no_crash(app, check_task):
    app.conf.task_annotations = {"bad.task": {"lock_timeout": "60"}}
    only(check_task(lock_renew=False, time_limit=100), "E008")
