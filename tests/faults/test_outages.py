"""During an outage a store raises an error, and never says "held" or "free".

These tests kill, pause and restart servers that no other test uses.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections
from django.test.utils import override_settings
from pymemcache.exceptions import MemcacheError
from redis.exceptions import RedisError
from valkey.exceptions import ValkeyError

from django_singletask import LockUnavailable, TaskLock
from django_singletask.stores.base import Outcome, Store
from tests import inside
from tests.entries import eventually, holder, key_of, private_store
from tests.proxy import Proxy
from tests.servers import MariaDB, Memcached, PostgreSQL, Redis, Server, Valkey

try:
    from pylibmc import Error as PylibmcError
except ImportError:  # its own tests are left out then
    PylibmcError = MemcacheError

A, B = holder("a"), holder("b")
KEY, OTHER = key_of("nightly"), key_of("other")

KINDS: dict[str, type[Server]] = {
    "redis": Redis,
    "django_redis_ignore": Redis,
    "django_valkey": Valkey,
    "pylibmc": Memcached,
    "pylibmc_binary": Memcached,
    "pymemcache": Memcached,
    "db_postgres": PostgreSQL,
    "db_mariadb": MariaDB,
}
# The errors of the clients during an outage.
CAUSES: dict[type[Server], Any] = {
    Redis: RedisError,
    Valkey: ValkeyError,
    Memcached: (MemcacheError, OSError, PylibmcError),
    PostgreSQL: Error,
    MariaDB: Error,
}
# Commits must survive a SIGKILL, also those of connections that a test opens later; the servers of
# the tests are configured not to wait for the disk.
TABLES = {
    "db_postgres": [
        "ALTER DATABASE postgres SET synchronous_commit = on",
        "SET synchronous_commit = on",
        "CREATE TABLE IF NOT EXISTS locks_pg (cache_key varchar(255) PRIMARY KEY,"
        " value text NOT NULL, expires timestamptz NOT NULL)",
    ],
    "db_mariadb": [
        "SET GLOBAL innodb_flush_log_at_trx_commit = 2",
        "CREATE TABLE IF NOT EXISTS locks_maria (cache_key varchar(255) PRIMARY KEY,"
        " value longtext NOT NULL, expires datetime(6) NOT NULL)",
    ],
}
DATABASES = {"db_postgres": ("default", "postgres"), "db_mariadb": ("mariadb", "mysql")}
on_all_clients = pytest.mark.parametrize("alias", KINDS)
on_each_family = pytest.mark.parametrize("alias", ["redis", "pymemcache", "db_postgres"])
on_databases = pytest.mark.parametrize("alias", DATABASES)


class Servers(dict[type[Server], Server]):
    """The servers of these tests; each starts when it is first used."""

    def __missing__(self, kind: type[Server]) -> Server:
        self[kind] = kind().start()
        return self[kind]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    for server in servers.values():
        server.stop()


OpenStore = Callable[..., Any]


@pytest.fixture
def open_store(settings, monkeypatch, django_db_blocker) -> OpenStore:
    """Give the function that opens a store on a port, with no lock held."""

    @contextmanager
    def open_at(alias: str, port: int) -> Iterator[Store]:
        location: object = None
        if alias in DATABASES:
            database, name = DATABASES[alias]
            configuration = connections.settings[database] | {"PORT": port, "NAME": name}
            monkeypatch.setitem(connections.settings, database, configuration)
        else:
            location = f"127.0.0.1:{port}"
            if issubclass(KINDS[alias], Redis):
                location = f"redis://{location}/0"
        with django_db_blocker.unblock(), private_store(settings, alias, location) as store:
            for statement in TABLES.get(alias, []):
                store.execute(statement)
            for key in (KEY, OTHER):
                eventually(partial(is_freed, store, key))
            yield store

    return open_at


def is_freed(store: Store, key: str) -> bool:
    """Free what another test left there; libmemcached can refuse its first cas by an error."""
    with suppress(LockUnavailable):
        entry = store.read(key)
        return entry is None or store.release(key, entry.value) is Outcome.OK
    return False


@pytest.fixture
def server(alias: str, servers: Servers) -> Iterator[Server]:
    server = servers[KINDS[alias]]
    yield server
    server.resume()
    if not server.answers():
        server.kill()
        server.start()


def hang(server: Server) -> None:
    """Pause a server and return when it has stopped."""
    server.pause()
    os.waitpid(server.process.pid, os.WUNTRACED)


REQUESTS: dict[str, Callable[[Store], object]] = {
    "add": lambda store: store.add(KEY, B, 60),
    "release": lambda store: store.release(KEY, A),
    "renew": lambda store: store.renew(KEY, A, 60),
    "read": lambda store: store.read(KEY),
}


@pytest.mark.parametrize("request_name", REQUESTS)
@on_all_clients
def test_a_dead_server_raises(alias, request_name, server, open_store) -> None:
    with open_store(alias, server.port) as store:
        store.add(KEY, A, 60)
        server.kill()
        for _ in range(3):  # the first uses the open connection, the others cannot open one
            with pytest.raises(LockUnavailable) as raised:
                REQUESTS[request_name](store)
            cause = raised.value.__cause__
            assert isinstance(cause, CAUSES[KINDS[alias]])
            begin = f"The cache {alias!r} cannot be used: {type(cause).__name__}: "
            assert str(raised.value).startswith(begin)


@pytest.mark.parametrize(
    ("backend", "location", "place"),
    [
        (
            "django.core.cache.backends.redis.RedisCache",
            "redis://ada:secret@127.0.0.1:1/3",
            "RedisCache on 127.0.0.1:1 database 3",
        ),
        (
            "django.core.cache.backends.memcached.PyMemcacheCache",
            "localhost:1",
            "PyMemcacheCache on 127.0.0.1:1",
        ),
    ],
)
def test_the_error_names_the_server_and_the_next_step(settings, backend, location, place) -> None:
    settings.CACHES = {**settings.CACHES, "dead": {"BACKEND": backend, "LOCATION": location}}
    settings.SINGLETASK_CACHE = "dead"
    with pytest.raises(LockUnavailable) as raised:
        TaskLock("nightly").acquire()
    assert str(raised.value).endswith(f". It is {place}. 'manage.py locks probe' tests it.")
    assert "secret" not in str(raised.value)
    with pytest.raises(LockUnavailable) as raised, override_settings(SINGLETASK_CACHE="redis"):
        TaskLock("nightly", cache="dead").acquire()
    assert str(raised.value).endswith(f". It is {place}.")  # the command tests another cache


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("alias", ["pylibmc", "pylibmc_binary"])
def test_a_server_that_hangs_raises(alias, request_name, server, open_store) -> None:
    # The other clients wait for ever, or as long as their options say.
    with open_store(alias, server.port) as store:
        store.client.behaviors["_poll_timeout"] = 100
        store.add(KEY, A, 60)
        hang(server)
        for _ in range(3):
            with pytest.raises(LockUnavailable):
                REQUESTS[request_name](store)
        server.resume()
        eventually(lambda: store.read(KEY).value == A)


@on_each_family
def test_a_run_during_an_outage_fails(alias, server, open_store) -> None:
    ran = []
    with open_store(alias, server.port):
        server.kill()
        with pytest.raises(LockUnavailable):
            with TaskLock("nightly", cache=alias, on_conflict="skip"):
                ran.append("the body")
    assert not ran


USES: dict[str, Callable[[TaskLock], object]] = {
    "locked": TaskLock.locked,
    "holder": TaskLock.holder,
    "remaining": TaskLock.remaining,
    "owned": TaskLock.owned,
    "clear": TaskLock.clear,
    "extend": TaskLock.extend,
    "release": TaskLock.release,
    "fencing_token": TaskLock.fencing_token,
    "hand_over": lambda lock: lock.hand_over(for_=60),
    "receive": lambda lock: TaskLock.receive(f"1 {'0' * 32} redis {lock.key} {lock.name}"),
    "check in a fork": lambda lock: in_a_fork(lock.check),
}


def in_a_fork(ask: Callable[[], object]) -> None:
    """Ask in a child process; raise :class:`LockUnavailable` if that is raised there."""
    pid = os.fork()
    if pid == 0:
        try:
            ask()
        except LockUnavailable:
            os._exit(3)
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3:
        raise LockUnavailable


@pytest.mark.usefixtures("no_renewal_thread")  # it would renew on the server of the other tests
@pytest.mark.parametrize("alias", ["redis"])
@pytest.mark.parametrize("use", USES)
def test_whatever_asks_the_cache_raises_lock_unavailable(alias, use, server, open_store) -> None:
    with open_store(alias, server.port):
        lock = TaskLock("nightly", cache=alias)
        lock.acquire()
        server.kill()
        with pytest.raises(LockUnavailable):
            USES[use](lock)
        server.start()


@pytest.mark.parametrize("error", [ImproperlyConfigured, SoftTimeLimitExceeded, TypeError])
def test_what_is_no_error_of_the_client_passes(settings, monkeypatch, error) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with private_store(settings, "redis") as store:
        monkeypatch.setattr(store, "ask", fail)
        with pytest.raises(error):
            store.add(KEY, A, 60)


@on_all_clients
def test_errors_end_with_the_outage(alias, server, open_store) -> None:
    def taken() -> bool:
        try:
            return store.add(KEY, B, 60) is None
        except LockUnavailable:
            return False

    with open_store(alias, server.port) as store:
        store.add(OTHER, A, 60)
        server.kill()
        assert not taken()
        server.start()
        eventually(taken)
        assert store.release(KEY, B) is Outcome.OK


def test_an_sqlite_file_that_cannot_be_opened_raises(
    settings, monkeypatch, tmp_path, django_db_blocker
) -> None:
    nowhere = {"NAME": str(tmp_path / "absent" / "locks.sqlite3")}
    configuration = connections.settings["sqlite_locks"] | nowhere
    monkeypatch.setitem(connections.settings, "sqlite_locks", configuration)
    with django_db_blocker.unblock(), private_store(settings, "db_sqlite") as store:
        with pytest.raises(LockUnavailable, match="unable to open"):
            store.add(KEY, A, 60)


class TimeIsUp(Exception):
    """An error that a signal handler raises, as Celery's soft time limit does."""


def ask_again_and_again(store: Store) -> None:
    # Until the server has stopped, which takes a moment, and the signal comes.
    while True:
        store.read(KEY)
        store.add(KEY, B, 60)


@pytest.mark.parametrize("error", [TimeIsUp, SystemExit])
@on_all_clients
def test_an_interrupted_request_does_not_shift_the_replies(
    alias, error, server, open_store
) -> None:
    def interrupt(*_: object) -> None:
        raise error

    with open_store(alias, server.port) as store:
        store.add(KEY, A, 60)
        store.add(OTHER, B, 60)
        before = signal.signal(signal.SIGALRM, interrupt)
        # Clients written in C handle the signal only after the reply.
        resume = threading.Timer(0.3, server.resume)
        try:
            server.pause()
            resume.start()
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(error):
                ask_again_and_again(store)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            resume.join()
        for _ in range(3):
            assert store.read(OTHER).value == B
            assert store.read(KEY).value == A


TAKES = {"db_postgres": b"INSERT INTO", "db_mariadb": b"INSERT IGNORE"}
TAKES |= dict.fromkeys(["redis", "pymemcache"], KEY.encode())


@on_all_clients
def test_a_server_that_was_away_is_asked_at_once(alias, server, open_store) -> None:
    """libmemcached would ask it for nothing for two seconds, and holders would come too late."""
    with open_store(alias, server.port) as store:
        store.add(OTHER, A, 60)
        server.kill()
        for _ in range(5):
            with pytest.raises(LockUnavailable):
                store.read(KEY)
        server.start()
        assert store.add(KEY, B, 60) is None


@pytest.mark.parametrize("alias", TAKES)
def test_a_take_whose_reply_was_lost_is_an_acquisition(alias, server, open_store) -> None:
    with Proxy(server.port) as proxy, open_store(alias, proxy.port) as store:
        store.add(OTHER, A, 60)  # the connection is open, and Redis knows the scripts
        inside.take(store, A, OTHER)
        proxy.lose_reply_to(TAKES[alias])
        lock = TaskLock("nightly", cache=alias)
        assert lock.acquire()
        assert proxy.lost == 1
        assert lock.owned()
        assert lock.release()


@on_databases
def test_a_takeover_whose_reply_was_lost_is_an_acquisition(alias, server, open_store) -> None:
    with Proxy(server.port) as proxy, open_store(alias, proxy.port) as store:
        store.add(KEY, A, 0.001)
        eventually(lambda: store.read(KEY) is None)
        proxy.lose_reply_to({"db_mariadb": b"UPDATE"}.get(alias, TAKES[alias]))
        assert store.add(KEY, B, 60) is None
        assert proxy.lost == 1
        assert store.read(KEY).value == B


@pytest.mark.parametrize("alias", ["pylibmc", "pylibmc_binary", "pymemcache"])
def test_a_closed_connection_hides_no_entry(alias, server, open_store) -> None:
    """pylibmc says then that there are none; a redelivery would overlook its first run."""
    with Proxy(server.port) as proxy, open_store(alias, proxy.port) as store:
        store.add(KEY, A, 60)
        proxy.hang_up()
        assert list(store.read_many([OTHER, KEY])) == [KEY]


@pytest.mark.parametrize("alias", ["pylibmc_binary"])
def test_a_release_that_the_client_refuses_unsent_is_sent_again(alias, server, open_store) -> None:
    with Proxy(server.port) as proxy, open_store(alias, proxy.port) as store:
        for _ in range(2):
            assert store.add(KEY, A, 60) is None
            assert store.release(KEY, A) is Outcome.OK


@on_all_clients
def test_a_server_that_restarted_causes_no_error(alias, server, open_store) -> None:
    with open_store(alias, server.port) as store:
        store.read(KEY)
        server.kill()
        server.start()
        assert store.add(KEY, B, 60) is None
