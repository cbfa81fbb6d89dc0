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


def test_a_worker_records_holds_conflicts_and_trouble(start_worker, queue, tmp_path):
    folder = tmp_path / "metrics"
    folder.mkdir()
    settings = {"DJANGO_SETTINGS_MODULE": "tests.metrics_settings"}
    worker = start_worker(env={**settings, "SINGLETASK_TEST_METRICS": str(folder)})
    # First, since a killed process takes its own figures with it.
    tasks.hold.apply_async(("c", 60), queue=queue)
    wait_for(lambda: tasks.hold.lock("c").locked(), "it runs")
    os.kill(tasks.hold.lock("c").holder().pid, signal.SIGKILL)
    wait_for(lambda: not tasks.hold.lock("c").locked(), "its lock is freed")
    assert tasks.hold.apply_async(("a", 0.2), queue=queue).get(timeout=20) == "ran"
    with tasks.hold.lock("b"):
        assert tasks.hold.apply_async(("b",), queue=queue).get(timeout=20) == "skipped"
    worker.stop()
    task, seen = {"task": tasks.hold.name}, list(points(folder))
    [hold] = [point for point in seen if point[1] == {**task, "outcome": "returned"}]
    assert hold[0] == "singletask.lock.hold"
    assert hold[2] == 1
    assert 0.2 <= hold[3] < 10
    numbers = [(name, attributes, number) for name, attributes, number, _sum in seen]
    skipped = {**task, "result": "skipped", "reason": "skip"}
    assert ("singletask.lock.conflicts", skipped, 1) in numbers
    assert ("singletask.lock.trouble", {**task, "kind": "dead"}, 1) in numbers
    assert ("singletask.lock.hold", {**task, "outcome": "dead"}, 1) in numbers
