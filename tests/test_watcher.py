"""What the watcher of a worker's main process does with killed runs. See also tests/worker."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from django.db import connections

from django_singletask import TaskLock
from django_singletask.task.header import Header
from django_singletask.worker import watcher
from django_singletask.worker.watcher import Accepted, Killed, Watcher
from tests.testapp.tasks import hold

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_run_whose_arguments_give_no_lock_has_nothing_to_free(monkeypatch):
    request = SimpleNamespace(task=hold, request_dict={}, id="i", _payload=((), {"x": 1}, {}))
    pool = Watcher()
    pool.deliveries[1] = Accepted(Header("i", hold.name, token="token"), request)
    monkeypatch.setattr(watcher, "is_gone", lambda pid, start: "gone")
    pool.look()
    assert pool.deliveries == {}
    assert pool.killed == []


def test_a_store_that_is_down_is_asked_again_until_the_lease_is_over(
    settings, dead_redis, monkeypatch, caplog
):
    settings.SINGLETASK_CACHE = dead_redis
    monkeypatch.setattr(connections, "close_all", lambda: None)
    pool = Watcher()
    now = time.monotonic()
    delivery = Accepted(Header("i", hold.name, token="token"), None)
    killed = Killed(delivery, TaskLock("nightly").address, "gone", now + 100)
    over = killed._replace(until=now - 1)
    pool.killed = [killed, over]
    pool.free()
    assert pool.killed == [killed]
    pool.free()
    assert caplog.text.count("not freed yet") == 1
