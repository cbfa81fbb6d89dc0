"""The metrics of a real worker, as the SDK of OpenTelemetry collects them."""

from __future__ import annotations

import json
import os
import signal

from tests.deadline import wait_for
from tests.testapp import tasks


def points(folder):
    """Yield name, attributes and number of each point that the processes of a worker wrote."""
    for path in folder.glob("*.json"):
        for resource in json.loads(path.read_text())["resource_metrics"]:
            for scope in resource["scope_metrics"]:
                for metric in scope["metrics"]:
                    for point in metric["data"]["data_points"]:
                        number = point.get("count", point.get("value"))
                        yield metric["name"], point["attributes"], number, point.get("sum")


def test_a_worker_records_holds_conflicts_and_trouble(start_worker, tmp_path, key):
    folder = tmp_path / "metrics"
    folder.mkdir()
    settings = {"DJANGO_SETTINGS_MODULE": "tests.metrics_settings"}
    worker = start_worker(env={**settings, "SINGLETASK_TEST_METRICS": str(folder)})
    # First, since a killed process takes its own figures with it.
    _, pid = worker.run(tasks.hold, key)
    os.kill(pid, signal.SIGKILL)
    lock = tasks.hold.lock(key)
    wait_for(lambda: not lock.locked(), "its lock is freed")
    assert worker.call(tasks.hold, key, 0.2) == "ran"
    with lock:
        assert worker.call(tasks.hold, key) == "skipped"
    worker.stop()
    task, seen = {"task": tasks.hold.name}, list(points(folder))
    [hold] = [point for point in seen if point[1] == {**task, "outcome": "returned"}]
    assert hold[0] == "singletask.lock.hold"
    assert hold[2] == 1
    assert hold[3] >= 0.2
    numbers = [(name, attributes, number) for name, attributes, number, _sum in seen]
    skipped = {**task, "result": "skipped", "reason": "skip"}
    assert ("singletask.lock.conflicts", skipped, 1) in numbers
    assert ("singletask.lock.trouble", {**task, "kind": "dead"}, 1) in numbers
    assert ("singletask.lock.hold", {**task, "outcome": "dead"}, 1) in numbers
