from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_singletask.operators import probe
from tests import inside, servers
from tests.command_line import ended_process, hold
from tests.entries import key_of, private_store

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def looks(settings):
    """Give the function that looks at the server of a cache."""

    def look_at(alias, *location):
        with private_store(settings, alias, *location) as store:
            return [*probe.look_at(store)]

    return look_at


def texts(findings, level):
    return "\n".join(finding.text for finding in findings if finding.level == level)


# The cache

SHARED = ["redis", "pylibmc", "pymemcache", "db_postgres", "db_mariadb", "db_sqlite"]


@pytest.mark.only_all("shown on another cache", "pylibmc", "db_sqlite", "db_mariadb")
@pytest.mark.parametrize("cache_alias", SHARED, indirect=True)
def test_cache_that_can_hold_locks_is_fit(cache_alias):
    result = probe.probe(cache_alias)
    assert result.fit
    first, second, *_rest = texts(result.findings, "ok").splitlines()
    assert first == "another process sees the lock that this process holds"
    assert second.startswith("a lock is acquired and released in ")
    assert 0 < result.median <= result.slowest < 5


def test_memory_of_one_process_is_unfit():
    result = probe.probe("locmem")
    assert not result.fit
    assert texts(result.findings, "unfit").startswith("another process does not see the lock")


@pytest.mark.only_all("it starts processes")
def test_process_that_uses_other_keys_is_unfit(settings):
    with private_store(settings, "redis") as store:
        finding = probe.look_from_another_process("django_redis", store)
    assert finding.level == "unfit"
    assert "use different keys (KEY_PREFIX, KEY_FUNCTION)" in finding.text


@pytest.mark.only_all("it starts processes")
def test_probe_disturbs_no_lock_and_leaves_none(on_redis, take):
    lock = take("nightly")
    probe.probe("redis")
    assert lock.owned()
    assert [held.key for held in inside.held_now()] == [lock.key]


# Failures


def test_refused_cache_is_an_error():
    with pytest.raises(ImproperlyConfigured, match="'dummy' cannot hold locks"):
        probe.probe("dummy")


def test_without_a_settings_module_it_says_what_to_set(on_redis, monkeypatch):
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    with pytest.raises(RuntimeError, match="define the environment variable DJANGO_SETTINGS_MOD"):
        probe.probe("redis")


@pytest.mark.only_all("it starts processes")
def test_failure_of_the_other_process_says_why(on_redis, settings):
    settings.CACHES = {**settings.CACHES, "only here": settings.CACHES["redis"]}
    with pytest.raises(RuntimeError, match=r"The other process failed: .*'only here' is not in"):
        probe.probe("only here")
    assert [held for held in inside.held_now() if "probe" in held.key] == []


def test_server_that_is_down_is_an_error(dead_redis):
    with pytest.raises(Exception, match="refused"):
        probe.probe(dead_redis)


# What the server says


@pytest.fixture
def own_redis():
    """Run a Redis of the test's own."""
    redis = servers.Redis()
    with servers.running([redis]):
        yield redis


@pytest.fixture
def own_store(settings, own_redis):
    with private_store(settings, "redis", own_redis.url) as store:
        yield store


def test_replicas_are_a_warning(looks):
    # The server of the tests has one, and a Sentinel beside.
    findings = looks("redis")
    assert "1 replica: a failover can lose the newest locks" in texts(findings, "warning")


def test_redis_without_fault_has_no_warning(own_store):
    own_store.client.config_set("appendonly", "yes")
    findings = [*probe.look_at(own_store)]
    assert {finding.level for finding in findings} == {"ok", "note"}
    assert "locks survive a restart: AOF is on" in texts(findings, "ok")
    assert "the server evicts nothing: maxmemory-policy is noeviction" in texts(findings, "ok")
    own_store.client.config_set("appendonly", "no")  # else the server waits for it at its end


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl"])
def test_policy_that_evicts_locks_is_a_warning(own_store, policy):
    own_store.client.config_set("maxmemory-policy", policy)
    assert f"it would evict locks too (maxmemory-policy is {policy})" in texts(
        probe.look_at(own_store), "note"
    )
    own_store.client.config_set("maxmemory", 10**9)
    assert f"maxmemory-policy {policy} evicts locks too" in texts(
        probe.look_at(own_store), "warning"
    )


@pytest.mark.parametrize(
    ("save", "text"),
    [("", "it loses all locks"), ("3600 1", "it loses what is newer than the last RDB snapshot")],
)
def test_what_a_restart_loses_is_reported(own_store, save, text):
    own_store.client.config_set("save", save)
    assert text in texts(probe.look_at(own_store), "restart")


def test_replica_is_unfit(looks):
    findings = looks("redis", os.environ["SINGLETASK_TEST_REDIS_REPLICA_URL"])
    assert "the server is a slave: locks need the primary" in texts(findings, "unfit")


def test_server_that_refuses_to_answer_is_a_note(own_store):
    own_store.client.execute_command("ACL", "SETUSER", "default", "-info")
    assert [*probe.look_at(own_store)] == [
        probe.Finding("note", "the server refused to say more: NoPermissionError")
    ]


def test_server_that_forbids_config_still_answers_the_rest(own_store):
    own_store.client.execute_command("ACL", "SETUSER", "default", "-config")
    *rest, last = probe.look_at(own_store)
    assert "the server evicts nothing" in texts(rest, "ok")
    assert last == probe.Finding("note", "the server refused to say more: NoPermissionError")


def test_memcached_forgets_and_evicts(looks):
    findings = looks("pymemcache")
    assert {finding.level for finding in findings} == {"note", "restart"}
    assert texts(findings, "restart") == "it loses all locks"
    assert "evicts locks too when its memory is full" in texts(findings, "note")


def test_more_than_one_memcached_server_is_a_warning(looks):
    warning = texts(looks("pymemcache", ["127.0.0.1:1", "127.0.0.1:2"]), "warning")
    assert "2 servers: if one fails, its locks are lost" in warning


@pytest.mark.parametrize(
    ("alias", "text"),
    [
        ("db_postgres", "PostgreSQL "),
        ("db_mariadb", "MariaDB "),
        ("db_sqlite", "only processes on one host can share"),
    ],
)
def test_database_tells_what_it_is(django_db_setup, looks, alias, text):
    assert text in texts(looks(alias), "note")


# Before a restart


def at_stake(alias):
    """Return what the probe says that a restart of this cache would lose now."""
    return texts(probe.probe(alias).findings, "restart").partition("\nnow ")[2]


@pytest.mark.only_all("it starts processes")
def test_what_a_restart_would_lose_is_counted(on_redis, take):
    assert at_stake("redis") == "no lock is held and no call is queued"
    take("nightly")
    held_now = "1 held: taken again by their processes, unless lock_renew=False"
    assert at_stake("redis") == held_now
    hold(token="dead", **ended_process())
    hold(token="kept", pid=0, kept=True)
    hold(token="passed", pid=0)
    for call in ("a", "b"):
        hold(token=call, key=inside.queued_key(key_of(call), "task"), pid=0)
    told = at_stake("redis")
    assert told.startswith(f"{held_now}; gone: ")
    gone = told.rpartition("gone: ")[2].split(", ")
    assert sorted(gone) == ["1 dead", "1 handed over", "1 kept", "2 queued"]


@pytest.mark.only_all("it starts processes")
def test_server_that_keeps_its_data_has_nothing_at_stake(on_redis, take):
    take("nightly")
    client = inside.store_of("redis").client
    client.config_set("appendonly", "yes")
    assert texts(probe.probe("redis").findings, "restart") == ""
    client.config_set("appendonly", "no")


@pytest.mark.only_all("it starts processes")
def test_what_memcached_would_lose_is_what_the_history_knows(settings, empty_cache, take):
    settings.SINGLETASK_CACHE = "pymemcache"
    empty_cache("pymemcache")
    take("nightly")
    assert at_stake("pymemcache").startswith("1 held: ")
    settings.SINGLETASK_HISTORY = "off"
    assert at_stake("pymemcache").startswith("it is not known what is held: ")


# As a process


def run(*arguments, cache):
    return subprocess.run(
        [sys.executable, "-m", "django", "locks", "probe", *arguments],
        env={**os.environ, "SINGLETASK_TEST_CACHE": cache},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.needs("redis")
def test_process_of_a_fit_cache_exits_with_zero():
    done = run(cache="redis")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Cache 'redis': RedisCache, 127.0.0.1:")
    assert lines[1] == "  ok         another process sees the lock that this process holds"
    assert lines[-1] == "Fit to hold locks."


def test_process_of_an_unfit_cache_exits_with_one():
    done = run("--json", cache="locmem")
    assert done.returncode == 1
    assert done.stderr == (
        "CommandError: The cache 'locmem' cannot hold locks: see 'unfit' above.\n"
    )
    result = json.loads(done.stdout)
    assert (result["fit"], result["cache"]) == (False, "locmem")
