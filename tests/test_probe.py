from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_singletask import TaskLock
from django_singletask.operators import probe, server
from django_singletask.operators.probe import latency, race, without_secrets
from django_singletask.operators.server import Finding, look_at
from django_singletask.stores import CannotList, Entry, close_stores, get_store
from tests import servers
from tests.entries import private_store

pytestmark = pytest.mark.django_db(databases="__all__")


def levels(findings):
    return {finding.level for finding in findings}


def texts(findings, level=None):
    return "\n".join(f.text for f in findings if level in (None, f.level))


# Every cache


def test_cache_that_can_hold_locks_is_fit(cache_alias):
    told = probe.probe(cache_alias, processes=3, keys=60)
    if cache_alias == "locmem":
        assert not told.fit
        assert texts(told.findings, "unfit").startswith("3 of 3 processes do not see the lock")
        assert "of 60 keys 60 were taken by more than one" in texts(told.findings)
    else:
        assert told.fit
        assert texts(told.findings[:2], "ok").splitlines() == [
            "3 processes see the lock that this one holds",
            "each of 60 keys was taken by exactly one of 3 processes",
        ]
        assert "its clock agrees with that of this host" in texts(told.findings, "ok")
    assert 0 < told.median <= told.slowest < 5


def test_probe_disturbs_no_lock_and_leaves_none(cache_alias):
    lock = TaskLock("nightly")
    lock.acquire()
    try:
        probe.probe(cache_alias, processes=2, keys=20)
        assert lock.owned()
        try:
            found = [key for key, _entry in get_store(cache_alias).entries()]
        except CannotList:
            return
        assert found == [lock.key]
    finally:
        lock.release()


# Negative controls: what the race must see


def test_processes_that_use_other_keys_are_seen():
    findings = race("django_redis", get_store("redis"), 3, 30)
    assert findings[0].level == "unfit"


def test_key_that_two_processes_take_is_unfit():
    finding = probe._atomic(8, 3, [[0], [1, 2], []])
    assert finding.level == "unfit"
    assert "of 3 keys 1 were taken by more than one of 8 processes at once, and 1 by none" in (
        finding.text
    )


def test_lock_that_is_another_s_at_the_end_is_unfit():
    [finding] = probe._kept("name", [[0]], [None], 0)
    assert finding == Finding("unfit", "1 locks were gone, or another's, at the end of the race")


# Failures


def test_refused_cache_is_an_error():
    with pytest.raises(ImproperlyConfigured, match="'dummy' cannot hold locks"):
        probe.probe("dummy")


def test_without_a_settings_module_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    with pytest.raises(ImproperlyConfigured, match="set it, or use manage"):
        probe.probe("redis")


def test_process_that_fails_tells_why(settings):
    settings.CACHES = {**settings.CACHES, "only here": settings.CACHES["redis"]}
    with pytest.raises(RuntimeError, match=r"A process of the race ended: .*'only here' is not in"):
        race("only here", get_store("redis"), 2, 10)
    assert list(get_store("redis").entries()) == []


def test_server_that_goes_while_it_is_asked_is_an_error(settings, dead_redis):
    with pytest.raises(Exception, match="refused"):
        probe.probe(dead_redis)


@pytest.mark.parametrize(
    "location",
    [
        "redis://:s3cret@127.0.0.1:1/0",
        "redis://user:s3%63ret@127.0.0.1:1/0",
        ["redis://user:s3cret@127.0.0.1:1/0"],
    ],
)
def test_passwords_are_struck_out(settings, location):
    settings.CACHES = {"default": {"BACKEND": "x", "LOCATION": location}}
    assert without_secrets("cannot use s3cret for x") == "cannot use *** for x"


def test_passwords_of_options_and_databases_are_struck_out(settings):
    settings.CACHES = {"default": {"OPTIONS": {"PASSWORD": "s3cret", "pool": {"password": "two"}}}}
    assert without_secrets("s3cret or two") == "*** or ***"


# What the server says


@pytest.fixture
def own_redis():
    """Run a Redis of the test's own."""
    own = servers.Redis()
    with servers.running([own]):
        yield own


@pytest.fixture
def own_store(settings, own_redis):
    with private_store(settings, "redis", own_redis.url) as store:
        yield store


def test_replicas_are_a_warning():
    # The server of the tests has one, and a Sentinel beside.
    found = look_at(get_store("redis"))
    assert "a failover can forget the latest locks" in texts(found, "warning")


def test_redis_without_fault_has_no_warning(own_store):
    own_store.client.config_set("appendonly", "yes")
    found = look_at(own_store)
    assert levels(found) == {"ok", "note"}
    assert "locks survive its restart: AOF is on" in texts(found, "ok")
    assert "it evicts nothing: maxmemory-policy is noeviction" in texts(found, "ok")
    own_store.client.config_set("appendonly", "no")  # its end would wait for it


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl"])
def test_policy_that_evicts_locks_is_a_warning(own_store, policy):
    own_store.client.config_set("maxmemory-policy", policy)
    assert f"its policy is {policy}" in texts(look_at(own_store), "note")
    own_store.client.config_set("maxmemory", 10**9)
    assert f"maxmemory-policy {policy} evicts locks too" in texts(look_at(own_store), "warning")


def test_persistence_is_told(own_store):
    own_store.client.config_set("save", "")
    assert "a restart forgets all locks" in texts(look_at(own_store), "note")
    own_store.client.config_set("save", "3600 1")
    assert "since the last RDB snapshot" in texts(look_at(own_store), "note")


def test_replica_is_unfit(settings):
    with private_store(settings, "redis", os.environ["SINGLETASK_TEST_REDIS_REPLICA_URL"]) as store:
        assert "it is a slave, and locks need the primary" in texts(look_at(store), "unfit")


def test_server_that_tells_nothing_is_a_note(own_store):
    own_store.client.execute_command("ACL", "SETUSER", "default", "-info")
    [finding] = look_at(own_store)
    assert finding == Finding("note", "the server tells no more: NoPermissionError")


def test_server_that_forbids_config_still_tells_the_rest(own_store):
    own_store.client.config_set("save", "")
    own_store.client.execute_command("ACL", "SETUSER", "default", "-config")
    found = look_at(own_store)
    assert "a restart forgets all locks: neither AOF nor RDB is on" in texts(found, "note")


@pytest.mark.parametrize("alias", ["pylibmc", "pylibmc_binary", "pymemcache"])
def test_memcached_tells_what_it_evicts(settings, alias):
    own = servers.Memcached()
    with servers.running([own]):
        with private_store(settings, alias, own.address) as store:
            store.add("singletask:x:0", b"x", 60)
            found = look_at(store)
            assert "it has evicted nothing yet" in texts(found, "ok")
            # libmemcached cannot read that.
            assert ("its oldest entry is" in texts(found, "note")) == (alias == "pymemcache")


def test_memcached_that_has_evicted_is_a_warning(monkeypatch):
    stats = {b"version": b"1.6", b"time": b"0", b"evictions": b"7"}
    monkeypatch.setattr(server, "_stats", lambda client: [("a:1", stats), ("b:2", {})])
    found = look_at(get_store("pymemcache"))
    assert "it has evicted 7 entries" in texts(found, "warning")
    assert "2 servers: when one fails its locks are gone" in texts(found, "warning")
    assert "s behind that of this host" in texts(found, "warning")
    assert texts(found, "unfit") == "b:2 does not answer"


@pytest.mark.parametrize(
    ("alias", "words"),
    [
        ("db_postgres", "isolation is read committed"),
        ("db_mariadb", "isolation is read-committed"),
        ("db_sqlite", "the processes of one host only"),
    ],
)
def test_database_tells_its_isolation(django_db_setup, alias, words):
    found = look_at(get_store(alias))
    assert words in texts(found, "note")
    assert "in autocommit, on a connection of their own" in texts(found, "ok")


def test_clock_that_is_ahead_is_a_warning(monkeypatch):
    monkeypatch.setattr(server.time, "time", lambda: 1000.0)
    assert server._clock(1060.0, 999.0).text.startswith("its clock is 60 s ahead of that of this")
    assert server._clock(900.0, 999.0).text.startswith("its clock is 99 s behind that of this")
    assert server._clock(999.5, 999.0).level == "ok"


def test_latency_that_meets_another_holder_is_an_error(monkeypatch):
    store = get_store("redis")
    monkeypatch.setattr(store, "add", lambda key, value, lease: Entry(b"", None))
    with pytest.raises(RuntimeError, match="was held, or gone"):
        latency(store)
    close_stores()


# As a process


def run(*arguments, cache="redis", **variables):
    return subprocess.run(
        [sys.executable, "-m", "django", "locks", "probe", *arguments],
        env={**os.environ, "SINGLETASK_TEST_CACHE": cache, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_processes_that_log_much_hold_nothing_up(tmp_path):
    """More than a pipe takes, which nobody reads during the race."""
    log = "import sys\nsys.stderr.write('x' * 200_000)\n"
    (tmp_path / "loud_settings.py").write_text(f"from tests.settings import *\n{log}")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = run("--json", DJANGO_SETTINGS_MODULE="loud_settings", PYTHONPATH=paths)
    assert done.returncode == 0
    assert json.loads(done.stdout)["fit"]


def test_process_of_a_fit_cache_exits_with_zero():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Cache 'redis': RedisCache, 127.0.0.1:")
    assert lines[1] == "  ok       8 processes see the lock that this one holds"
    assert lines[2] == "  ok       each of 200 keys was taken by exactly one of 8 processes"
    assert lines[-1] == "Fit to hold locks, with 1 warning."
    assert all(len(line) <= 80 for line in lines)


def test_process_of_an_unfit_cache_exits_with_one():
    done = run("--json", cache="locmem")
    assert done.returncode == 1
    assert done.stderr == "CommandError: The cache 'locmem' is unfit to hold locks.\n"
    told = json.loads(done.stdout)
    assert (told["fit"], told["cache"]) == (False, "locmem")
