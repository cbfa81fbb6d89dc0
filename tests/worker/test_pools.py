"""Leases are renewed in every pool."""

from __future__ import annotations

import time

import pytest

from tests.deadline import wait_for
from tests.testapp import log, tasks


@pytest.mark.only_all("all other tests use prefork", "prefork")
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_a_task_longer_than_its_lease(start_worker, queue, runs_log, pool):
    worker = start_worker(pool=pool, concurrency=2)
    options = {"lock_timeout": 2}
    result = tasks.hold.apply_async(("a", 60), queue=queue, lock_options=options)
    wait_for(lambda: worker.events("start"), "it runs")
    lock = tasks.hold.lock("a")
    until = time.monotonic() + 3
    while time.monotonic() < until:
        holder = lock.holder()
        assert holder is not None
        assert holder.task_id == result.id
        assert tasks.hold("a") == "skipped"
        time.sleep(0.05)
    worker.end("a")
    assert result.get(timeout=30) == "ran"
    assert not lock.locked()
    assert log.overlaps(runs_log) == 0
    assert "lost" not in worker.text()


@pytest.mark.only_all("a control, which starts a worker")
def test_without_renewal_the_lease_ends_under_the_task(start_worker, queue):
    """Negative control."""
    worker = start_worker(concurrency=2)
    options = {"lock_timeout": 1, "lock_renew": False}
    result = tasks.hold.apply_async(("a", 60), queue=queue, lock_options=options)
    wait_for(lambda: worker.events("start"), "it runs")
    lock = tasks.hold.lock("a")
    wait_for(lambda: not lock.locked(), "the lease ends")
    assert not worker.events("end")
    worker.end("a")
    assert result.get(timeout=30) == "ran"
    assert "its fixed lease of 1 s ended first" in worker.text()
