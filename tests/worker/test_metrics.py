"""The metrics of a real worker, as the SDK of OpenTelemetry collects them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.deadline import wait_for
from tests.testapp import tasks


def points(path):
    """Yield name, attributes and number of each point that a process of a worker wrote."""
    for resource in json.loads(path.read_text())["resource_metrics"]:
        for scope in resource["scope_metrics"]:
            for metric in scope["metrics"]:
                for point in metric["data"]["data_points"]:
                    number = point.get("count", point.get("value"))
                    yield metric["name"], point["attributes"], number, point.get("sum")


@pytest.fixture
def folder(tmp_path):
    """Give the folder where each process of a worker writes its metrics when it ends."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    return folder


@pytest.fixture
def start(start_worker, folder):
    env = {"DJANGO_SETTINGS_MODULE": "tests.metrics_settings"}
    return lambda **options: start_worker(
        env={**env, "SINGLETASK_TEST_METRICS": str(folder)}, **options
    )


TROUBLE = ["cleared", "dead", "expired", "lost", "retaken", "unguarded"]
FIRST = [
    (tasks.hold, "skipped", "skip"),
    (tasks.insist, "failed", "raise"),
    (tasks.wait, "waiting", "wait"),
    (tasks.requeue, "waiting", "requeue"),
]


def test_each_process_of_a_worker_begins_with_0(start, folder):
    """Otherwise the first loss, or conflict, would be no increase for Prometheus."""
    worker = start(concurrency=2)
    worker.stop()
    files = list(folder.glob("*.json"))
    assert len(files) == 3
    for file in files:
        seen = list(points(file))
        assert {number for _name, _attributes, number, _sum in seen} == {0}
        found = [(name.rpartition(".")[2], attributes) for name, attributes, _, _ in seen]
        for task, result, reason in FIRST:
            name = {"task": task.name}
            for kind in TROUBLE:
                assert ("trouble", {**name, "kind": kind}) in found
            assert ("conflicts", {**name, "result": result, "reason": reason}) in found
        assert ("duplicates", {"task": tasks.unique.name}) in found
        assert ("duplicates", {"task": tasks.hold.name}) not in found


def test_a_worker_records_holds_conflicts_and_trouble(start, folder, key):
    worker = start()
    # First, since a killed process takes its own figures with it.
    _, pid = worker.run(tasks.hold, key)
    os.kill(pid, signal.SIGKILL)
    lock = tasks.hold.lock(key)
    wait_for(lambda: not lock.locked(), "its lock is freed")
    assert worker.call(tasks.hold, key, 0.2) == "ran"
    with lock:
        assert worker.call(tasks.hold, key) == "skipped"
    worker.stop()
    task = {"task": tasks.hold.name}
    seen = [point for path in folder.glob("*.json") for point in points(path)]
    [hold] = [point for point in seen if point[1] == {**task, "outcome": "returned"}]
    assert hold[0] == "singletask.lock.hold"
    assert hold[2] == 1
    assert hold[3] >= 0.2
    numbers = [(name, attributes, number) for name, attributes, number, _sum in seen]
    skipped = {**task, "result": "skipped", "reason": "skip"}
    assert ("singletask.lock.conflicts", skipped, 1) in numbers
    assert ("singletask.lock.trouble", {**task, "kind": "dead"}, 1) in numbers
    assert ("singletask.lock.hold", {**task, "outcome": "dead"}, 1) in numbers


def test_a_fixed_lease_that_ends_first_is_lost_however_its_body_ends(start, folder, key):
    worker = start(concurrency=1)
    fixed = {"lock_timeout": 1, "lock_renew": False}
    assert worker.call(tasks.hold, key, 1.5, lock_options=fixed) == "ran"
    assert worker.call(tasks.hold, key) == "ran"
    worker.stop()
    seen = [point for path in folder.glob("*.json") for point in points(path)]
    holds = [point[1]["outcome"] for point in seen if point[0] == "singletask.lock.hold"]
    assert sorted(holds) == ["lost", "returned"]


SCRIPT = """
import django
django.setup()
from django_singletask import TaskLock
with TaskLock("nightly", cache="locmem"):
    pass
from tests import metrics_settings
metrics_settings.write()
"""


def test_code_outside_tasks_begins_with_0_when_it_takes_a_lock(folder):
    """And a second can be told from nine."""
    env = {"DJANGO_SETTINGS_MODULE": "tests.metrics_settings"}
    env |= {"SINGLETASK_TEST_METRICS": str(folder), "SINGLETASK_HISTORY": "off"}
    subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, **env}, check=True)
    [path] = folder.glob("*.json")
    seen = [point[:3] for point in points(path)]
    assert ("singletask.lock.trouble", {"task": "", "kind": "lost"}, 0) in seen
    assert ("singletask.lock.hold", {"task": "", "outcome": "returned"}, 1) in seen
    [bounds] = re.findall(r'"explicit_bounds": \[(.*?)\]', path.read_text(), re.DOTALL)
    assert {1, 2, 5, 10} <= {float(bound) for bound in bounds.split(",")}
