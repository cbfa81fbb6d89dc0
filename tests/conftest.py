"""The fixtures that several files of tests use."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django.db import connections
from django.test.utils import setup_databases

from django_singletask import TaskLock
from django_singletask.admin import tasks_of_history
from django_singletask.locks.renewal import Renewer, renewers
from django_singletask.models import TaskLockEvent
from django_singletask.stores import close_stores, get_store
from django_singletask.stores.epoch import Epoch, Forgotten, epoch_of
from tests import deadline, report, servers
from tests.absent import needed_by
from tests.routers import LOCK_TABLES

LOCK_CACHES = [
    "redis",
    "redis_replica",
    "django_redis",
    "django_redis_sentinel",
    "valkey",
    "django_valkey",
    "cluster",
    "redis_cluster",
    "django_redis_cluster",
    "pylibmc",
    "pylibmc_binary",
    "pymemcache",
    "db_postgres",
    "db_mariadb",
    "db_sqlite",
    "locmem",
]
"""Every cache that can hold locks, each on its real server."""
CLUSTERS = ["cluster", "redis_cluster", "django_redis_cluster"]
"""Those that are in one cluster: only the client of the first one knows all its nodes."""
FAMILIES = ["redis", "cluster", "pymemcache", "db_postgres", "locmem"]
"""One cache of each family. What is above the stores is shown on these; the stores on all."""


# The extra test-versions has no selenium.
collect_ignore = [] if find_spec("selenium") else ["browser"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run", choices=["default", "rest", "all"], default="all")
    parser.addoption("--soak", type=int, default=12, help="seconds of random load (12)")


def pytest_configure(config: pytest.Config) -> None:
    if "SINGLETASK_TEST_FOLDER" not in os.environ and not config.option.collectonly:
        command = shlex.join(["python", "runtests.py", *config.invocation_params.args])
        raise pytest.UsageError(
            "The tests need servers of their own, which runtests.py starts. It takes the arguments "
            f"of pytest: {command}"
        )
    # Not for pytest processes that tests start.
    if file := os.environ.pop(report.VARIABLE, ""):
        config.pluginmanager.register(report.Writer(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the run does not want: the tests with the mark ``only_all``, or all others."""
    if config.option.run == "all":
        return
    wanted, others = [], []
    for item in items:
        is_rest = any(is_for(item, *mark.args) for mark in item.iter_markers("only_all"))
        if is_rest == (config.option.run == "rest"):
            wanted.append(item)
        else:
            others.append(item)
    items[:] = wanted
    config.hook.pytest_deselected(items=others)


def is_for(item: pytest.Item, reason: str, *parameters: str) -> bool:
    """Say whether a mark ``only_all`` is for these parameters: for the id, or a part of it."""
    if not parameters:
        return True
    if not hasattr(item, "callspec"):
        return False
    name = item.callspec.id
    return not {name, *name.split("-")}.isdisjoint(parameters)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose parameters, marks or fixtures name what is not installed."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    used = [value for value in parameters if isinstance(value, str)]
    used += [alias for mark in item.iter_markers("needs") for alias in mark.args]
    if item.get_closest_marker("worker"):
        used.append("redis")  # the broker
    if item.get_closest_marker("django_db") or "db" in getattr(item, "fixturenames", ()):
        used.append("default")
    if reason := needed_by(*used):
        pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were left out, because of what, and how to install that."""
    reasons = [str(report.longrepr[2]) for report in terminalreporter.getreports("skipped")]
    for need in [*servers.NEEDS, *servers.NEEDS_OF_THE_REST]:
        reason = f"{need.name} is not installed"
        if count := reasons.count(f"Skipped: {reason}"):
            terminalreporter.write_line(f"Left out: {count} tests, because {reason}. {need.how}")


@pytest.fixture(scope="session")
def django_db_setup(django_test_environment: None, django_db_blocker: Any) -> None:
    """Create all databases, with the tables of the lock caches.

    Nothing deletes them but the end of their servers. So a thread that still has a connection
    cannot make the end of the tests fail.
    """
    with django_db_blocker.unblock():
        setup_databases(verbosity=0, interactive=False, keepdb=True)


@pytest.fixture(autouse=True)
def no_store_outlives_its_test() -> Iterator[None]:
    yield
    close_stores()
    tasks_of_history.cache_clear()  # it knows the tasks of a test for a minute


@pytest.fixture
def no_renewal_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no thread renew the locks of this test.

    It would take again what the test takes away, at a tick that can come at any time: a cache that
    was emptied before the test has another epoch, and then the next tick renews all locks.
    """
    monkeypatch.setattr(Renewer, "begin", lambda renewer: None)
    before = dict(renewers)
    renewers.clear()
    yield
    renewers.clear()
    renewers.update(before)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collect the seconds for which takes are held back, because a cache forgot its locks."""
    seen = []
    check = Epoch.check

    def note(epoch: Epoch) -> None:
        try:
            check(epoch)
        except Forgotten as forgotten:
            seen.append(forgotten.args[0])
            raise

    monkeypatch.setattr(Epoch, "check", note)
    return seen


@pytest.fixture
def wait_for() -> Any:
    return deadline.wait_for


@pytest.fixture
def on_redis(settings: Any, empty_cache: Callable[[str], None]) -> None:
    """Keep the locks in Redis, with none held at first."""
    settings.SINGLETASK_CACHE = "redis"
    empty_cache("redis")


@pytest.fixture
def empty_history(db: None) -> None:
    """Delete what threads of other tests wrote outside the transactions of those tests."""
    TaskLockEvent.objects.all().delete()


@pytest.fixture
def take() -> Iterator[Callable[..., TaskLock]]:
    """Give the function that takes a lock and gives it back after the test."""
    taken = []

    def take_one(name: str = "nightly", **options: Any) -> TaskLock:
        lock = TaskLock(name, **options)
        assert lock.acquire()
        taken.append(lock)
        return lock

    yield take_one
    for lock in taken:
        if lock.token is not None:
            lock.release()


@pytest.fixture
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as on a terminal of this width."""
    monkeypatch.setattr("django_singletask.management.output.width", lambda: 80)


@pytest.fixture
def whole_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock at a whole second, so that durations are exact."""
    now = float(int(time.time()))
    monkeypatch.setattr("time.time", lambda: now)


@pytest.fixture
def dead_redis(settings: Any) -> str:
    """Give the alias of a Redis cache whose server does not answer."""
    url = f"redis://127.0.0.1:{servers.free_port()}/0"
    backend = "django.core.cache.backends.redis.RedisCache"
    settings.CACHES = {**settings.CACHES, "dead": {"BACKEND": backend, "LOCATION": url}}
    return "dead"


@pytest.fixture
def empty_cache(django_db_setup: None, django_db_blocker: Any) -> Callable[[str], None]:
    """Give the function that removes all locks of a cache."""

    def empty_one(alias: str) -> None:
        with django_db_blocker.unblock():
            empty(alias)

    return empty_one


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with each cache, unless its own mark names some."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "cache_alias" in metafunc.fixturenames and not any(
        "cache_alias" in mark.args[0] for mark in marks
    ):
        is_about_stores = metafunc.module.__name__.startswith("tests.stores.test_stores")
        caches = LOCK_CACHES if is_about_stores else FAMILIES
        metafunc.parametrize("cache_alias", caches, indirect=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[servers.Cluster]:
    """Run the Valkey cluster of three caches, for these tests and their processes.

    Replicas would only compute: what needs them has a cluster of its own.
    """
    with servers.Cluster(replicas=0) as cluster:
        os.environ["SINGLETASK_TEST_CLUSTER"] = cluster.url
        for alias in CLUSTERS:
            caches.settings[alias]["LOCATION"] = cluster.url
        yield cluster


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give the files of a key and of its certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key, file = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return key, file


@pytest.fixture
def cache_alias(
    request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any, settings: Any
) -> Iterator[str]:
    """Give the alias of a lock cache, empty and set as SINGLETASK_CACHE.

    The test may use databases on connections that it opens. For those of django.db.connections it
    needs the mark django_db, as always.
    """
    settings.SINGLETASK_CACHE = request.param
    if request.param in CLUSTERS:
        request.getfixturevalue("cluster")
    with django_db_blocker.unblock():
        empty(request.param)
        yield request.param


def empty(alias: str) -> None:
    """Remove all locks of a cache; its thread learns that, unless locks are held.

    Otherwise its next tick, in the middle of the test, would find another epoch and renew all
    locks: it would take again what the test takes away.
    """
    remove_all(alias)
    if alias in renewers and not renewers[alias].held():
        get_store(alias).look()
        renewers[alias].changes = epoch_of(alias).changes


def remove_all(alias: str) -> None:
    if alias in CLUSTERS:
        alias = CLUSTERS[0]
    table = caches.settings[alias]["LOCATION"]
    if not isinstance(table, str) or table not in LOCK_TABLES:
        try:
            caches[alias].clear()
        except Exception:  # the server may have closed a connection that was idle
            del caches[alias]
            caches[alias].clear()
        return
    # Not inside the transaction of the test, because others would not see the deletion.
    connection = connections.create_connection(LOCK_TABLES[table])
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"DELETE FROM {table}")
    finally:
        connection.close()
