"""The user of Redis that the documentation shows may do what locks need, and nothing more."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from django_singletask import LockError, TaskLock
from tests import inside, servers
from tests.command_line import locks_as_json
from tests.entries import private_store

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("no_renewal_thread"),
]

PAGE = Path(__file__).parents[2] / "docs/operating/security.rst"
LINE = " ".join(re.search(r"ACL SETUSER .+\n +\+.+", PAGE.read_text())[0].split())
COMMANDS = re.findall(r"\+(\S+)", LINE)
CLIENTS = ["redis", "django_redis", "django_valkey"]


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Redis]:
    own = servers.Redis()
    with servers.running([own]):
        yield own


def allow(server: servers.Redis, alias: str, *more: str) -> redis.Redis:
    """Create the user, for the keys of an alias; return a client of the administrator."""
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.execute_command("ACL", "SETUSER", "locks", "reset")
    client.execute_command(*LINE.replace("~shop:", f"~{alias}:").split(), *more)
    client.execute_command("ACL", "LOG", "RESET")
    client.script_flush()
    return client


def refused(client: redis.Redis) -> set[str]:
    """Return what the server refused to the user, by its log.

    The clients ignore that Redis 7.2 refuses to note their name.
    """
    return {str(entry["object"]).lower() for entry in client.acl_log()} - {"client|setinfo"}


def url_of(server: servers.Redis) -> str:
    return f"redis://locks:secret@127.0.0.1:{server.port}/1"


def use_locks(settings: Any, server: servers.Redis, alias: str) -> None:
    """Send every request of a lock, a queued call, a fencing token and the list."""
    settings.SINGLETASK_CACHE = alias
    with private_store(settings, alias, url_of(server)) as store:
        with suppress(LockError), TaskLock("nightly", slots=2) as lock:
            lock.extend(30)
            store.renew(lock.key, store.read(lock.key).value, 60)
        with suppress(LockError), TaskLock("nightly") as lock:
            assert not TaskLock("nightly").acquire()
            lock.fencing_token()
            handle = lock.hand_over(for_=30)
            with TaskLock.receive(handle) as received:
                assert received.owned()
                assert [key for key, _entry in store.entries()] == [received.key]
                received.clear(actor="tests")
        with suppress(LockError):  # the second one as after a lost reply
            for _ in range(2):
                assert inside.take(store, b"mine", "singletask:a")
        with suppress(LockError):
            store.look()


@pytest.mark.parametrize("alias", CLIENTS)
def test_the_user_of_the_documentation_may_do_all_that_locks_need(settings, server, alias):
    client = allow(server, alias)
    use_locks(settings, server, alias)
    assert refused(client) == set()


def test_the_probe_needs_one_more(settings, server, monkeypatch):
    client = allow(server, "redis", "+config|get")
    settings.SINGLETASK_CACHE = "redis"
    monkeypatch.setenv("SINGLETASK_TEST_REDIS_URL", url_of(server))  # of the other process
    with private_store(settings, "redis", url_of(server)):
        findings = locks_as_json("probe")["findings"]
    assert not [finding for finding in findings if "refused" in finding["text"]]
    assert refused(client) == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_control_each_command_is_needed(settings, server, command):
    client = allow(server, "redis", f"-{command}")
    with suppress(Exception):
        use_locks(settings, server, "redis")
    assert command in refused(client)


def test_a_refused_script_says_why(settings, server):
    allow(server, "redis", "-script|load")
    settings.SINGLETASK_CACHE = "redis"
    with (
        pytest.raises(LockError, match=r"permissions to run the 'script\|load' command"),
        private_store(settings, "redis", url_of(server)),
    ):
        TaskLock("nightly").acquire()


def test_control_other_keys_are_refused(settings, server):
    client = allow(server, "another")
    with suppress(Exception):
        use_locks(settings, server, "redis")
    assert any(":singletask:" in each for each in refused(client))
