"""Workers whose locks are in a cluster, behind RedisCache: kills, and a node that restarts."""

from __future__ import annotations

import os
import signal

import pytest

from tests.deadline import wait_for
from tests.faults.test_cluster import node_of, restart
from tests.servers import Cluster, Valkey
from tests.testapp import tasks
from tests.worker.harness import get
from tests.worker.test_killed import it_runs_again


@pytest.fixture
def cache(cluster):
    return "redis_cluster"


@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_the_lock_of_a_killed_child_is_free_at_once(worker, key):
    _, pid = worker.run(tasks.long, key)
    os.kill(pid, signal.SIGKILL)
    assert it_runs_again(worker, key, pid)


@pytest.mark.only_all("it starts servers and a worker")
def test_a_node_that_restarts_empty_is_told_the_lock_again(start_worker, key, monkeypatch):
    with Cluster(Valkey, replicas=0) as both:
        monkeypatch.setenv("SINGLETASK_TEST_CLUSTER", both.url)
        number = node_of(tasks.hold.lock(key).key, both)
        worker = start_worker()
        result, _ = worker.run(tasks.hold, key, lock_options={"lock_timeout": 30})
        restart(both, number)
        wait_for(lambda: "taken again" in worker.text(), "the worker reports it")
        assert worker.call(tasks.hold, key) == "skipped"
        worker.end(key)
        assert get(result) == "ran"
    assert worker.overlaps() == 0
