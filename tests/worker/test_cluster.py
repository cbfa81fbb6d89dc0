"""Workers whose locks are in a cluster: kills, and a node that restarts."""

from __future__ import annotations

import os
import signal

import pytest

from tests.deadline import wait_for
from tests.servers import Cluster, Valkey
from tests.stores.test_cluster import node_of, restart
from tests.testapp import log, tasks
from tests.worker.test_killed import (
    ELSEWHERE,
    it_runs_again,
    start_one,
)


@pytest.fixture(autouse=True)
def in_the_cluster(cluster, settings, on_cache):
    on_cache("cluster")


@pytest.mark.parametrize("env", [{}, ELSEWHERE], ids=["here", "elsewhere"])
def test_the_lock_of_a_killed_child_is_free_at_once(start_worker, queue, env):
    worker = start_worker(cache="cluster", env=env, concurrency=1)
    _, pid = start_one(worker, tasks.long, queue)
    os.kill(pid, signal.SIGKILL)
    assert it_runs_again(queue, pid)


@pytest.mark.only_all("it starts a worker")
def test_a_node_that_restarts_empty_is_told_the_lock_again(
    start_worker, queue, settings, monkeypatch, runs_log
):
    with Cluster(Valkey, replicas=0) as both:
        monkeypatch.setenv("SINGLETASK_TEST_CLUSTER", both.url)
        lock = tasks.hold.lock("a")
        number = node_of(lock.key, both)
        worker = start_worker(cache="cluster", concurrency=2)
        result = tasks.hold.apply_async(("a", 7), queue=queue, lock_options={"lock_timeout": 30})
        wait_for(lambda: worker.events("start"), "it runs")
        restart(both, number)
        wait_for(lambda: "taken again" in worker.text(), "the worker reports it")
        assert tasks.hold.apply_async(("a", 0), queue=queue).get(timeout=20) == "skipped"
        assert result.get(timeout=20) == "ran"
    assert log.overlaps(runs_log) == 0
