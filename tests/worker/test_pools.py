"""Leases are renewed in every pool."""

from __future__ import annotations

import time

import pytest

from tests.deadline import wait_for
from tests.testapp import tasks
from tests.worker.harness import get


# tests/worker/test_unique.py has the pool prefork.
@pytest.mark.parametrize("pool", ["solo", "threads", "gevent"])
def test_a_task_longer_than_its_lease(start_worker, key, pool):
    worker = start_worker(pool=pool)
    call, _ = worker.run(tasks.hold, key, lock_options={"lock_timeout": 2})
    lock = tasks.hold.lock(key)
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        assert lock.holder().task_id == call.id
        assert tasks.hold(key) == "skipped"
        time.sleep(0.05)
    worker.end(key)
    assert get(call) == "ran"
    assert not lock.locked()
    assert worker.overlaps() == 0
    assert "lost" not in worker.text()


@pytest.mark.only_all("a control")
def test_without_renewal_the_lease_ends_under_the_task(worker, key):
    """Negative control."""
    options = {"lock_timeout": 1, "lock_renew": False}
    call, _ = worker.run(tasks.hold, key, lock_options=options)
    wait_for(lambda: not tasks.hold.lock(key).locked(), "the lease ends")
    assert not worker.events("end")
    worker.end(key)
    assert get(call) == "ran"
    assert "its fixed lease of 1 s ended first" in worker.text()
