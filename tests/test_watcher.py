from __future__ import annotations

from types import SimpleNamespace

import pytest

from django_singletask import TaskLock
from django_singletask.worker import watcher as worker
from django_singletask.worker.watcher import Watcher
from tests.testapp.tasks import hold

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_watcher_gives_up_on_what_has_no_lock(monkeypatch):
    request = SimpleNamespace(task=hold, request_dict={}, id="i", _payload=((), {"x": 1}, {}))
    watcher = Watcher()
    watcher.runs[1] = worker.Accepted("token", "", request)
    monkeypatch.setattr(worker, "is_gone", lambda pid, start: "gone")
    watcher.look()
    assert watcher.runs == {}
    assert watcher.corpses == []


def test_a_store_that_is_down_is_asked_again_until_the_lease_is_over(
    settings, dead_redis, monkeypatch, caplog
):
    settings.SINGLETASK_CACHE = dead_redis
    monkeypatch.setattr("django_singletask.worker.watcher.connections.close_all", lambda: None)
    watcher = Watcher()
    now = worker.time.monotonic()
    corpse = worker.Corpse(TaskLock("nightly"), "token", "gone", now + 100, run=None)
    over = corpse._replace(until=now - 1)
    watcher.corpses = [corpse, over]
    watcher.bury()
    assert watcher.corpses == [corpse]
    watcher.bury()
    assert caplog.text.count("not freed yet") == 1
