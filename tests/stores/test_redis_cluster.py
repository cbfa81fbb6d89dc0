"""Redis Cluster behind an ordinary client is refused by its name: its scripts cannot run there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_singletask import TaskLock
from tests.deadline import wait_for
from tests.entries import private_store
from tests.servers import Redis, ask, free_port


@pytest.fixture(scope="module")
def cluster() -> Iterator[Redis]:
    """Run a cluster of one server, which has all slots."""
    with Redis(cluster_enabled="yes", cluster_port=free_port()) as server:
        assert ask(server.port, b"CLUSTER ADDSLOTSRANGE 0 16383\r\n") == b"+OK\r\n"
        wait_for(
            lambda: b"cluster_state:ok" in ask(server.port, b"CLUSTER INFO\r\n"), "it is complete"
        )
        yield server


@pytest.mark.parametrize("alias", ["redis", "django_redis", "django_valkey"])
def test_each_use_of_a_cluster_names_it(alias, cluster, settings):
    with private_store(settings, alias, cluster.url):
        for _ in range(2):
            with pytest.raises(ImproperlyConfigured, match="Redis Cluster"):
                TaskLock("nightly", cache=alias).acquire()


@pytest.mark.only_all("it starts processes")
def test_the_probe_of_a_cluster_names_it(cluster):
    done = subprocess.run(
        [sys.executable, "-m", "django", "locks", "probe"],
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "SINGLETASK_TEST_REDIS_URL": cluster.url,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "Redis Cluster" in done.stdout + done.stderr
    assert "CROSSSLOT" not in done.stdout + done.stderr


def test_control_a_server_that_is_no_cluster_is_used(on_redis):
    with TaskLock("nightly") as lock:
        assert lock.owned()
