"""The documented alerts, judged by a real Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import textwrap

import pytest

from tests.deadline import wait_for
from tests.guides import DOCS
from tests.servers import Prometheus, find, free_port, require
from tests.testapp import tasks

pytestmark = pytest.mark.only_all("it needs Prometheus")

PAGE = (DOCS / "operating/monitoring.rst").read_text()
[RULES] = re.findall(r"code-block:: yaml\n\n((?:    .*\n|\n)+)", PAGE)
RULES = textwrap.dedent(RULES)


@pytest.fixture
def start_prometheus(start_worker, tmp_path):
    """Start a worker that serves its metrics as the page says, and Prometheus, which reads them."""
    servers = []

    def start(**env):
        folder = tmp_path / "metrics"
        folder.mkdir()
        port = free_port()
        worker = start_worker(
            concurrency=1,
            env={
                "DJANGO_SETTINGS_MODULE": "tests.prometheus_settings",
                "PROMETHEUS_MULTIPROC_DIR": str(folder),
                "SINGLETASK_TEST_METRICS_PORT": str(port),
                **env,
            },
        )
        server = Prometheus(port, RULES)
        servers.append(server)
        return worker, server.start()

    yield start
    for server in servers:
        server.stop()


LOST = f'singletask_lock_trouble_total{{task="{tasks.hold.name}", kind="lost"}}'
LOST_HOLD = f'singletask_lock_hold_seconds_count{{task="{tasks.hold.name}", outcome="lost"}}'


@pytest.mark.parametrize("begins_with_0", [True, False])
def test_the_first_loss_raises_the_alert(start_prometheus, key, begins_with_0):
    """The process is stopped for longer than its lease; without the 0 nobody would hear of it."""
    env = {} if begins_with_0 else {"SINGLETASK_TEST_NO_ZERO": "1"}
    worker, prometheus = start_prometheus(**env)
    wait_for(lambda: value(prometheus, "up") == 1, "the metrics are read")
    if begins_with_0:
        wait_for(lambda: value(prometheus, LOST) == 0, "the series begins with 0")
    assert prometheus.query("ALERTS") == []
    _, pid = worker.run(tasks.hold, key, lock_options={"lock_timeout": 2})
    lock = tasks.hold.lock(key)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: not lock.locked(), "the lease ends")
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: value(prometheus, LOST) == 1, "the loss is counted")
    if begins_with_0:
        [alert] = wait_for(lambda: prometheus.query("ALERTS"), "the alert is raised")
        labels = alert["metric"]
        assert (labels["alertname"], labels["task"]) == ("TaskLostItsLock", tasks.hold.name)
        assert labels["alertstate"] == "firing"
    else:
        seen = f"count_over_time({LOST}[1m])"
        wait_for(lambda: value(prometheus, seen) > 10, "the rules were judged again and again")
        assert prometheus.query("ALERTS") == []
    worker.end(key)
    wait_for(lambda: value(prometheus, LOST_HOLD) == 1, "its hold is no run that returned")


def value(prometheus, expression):
    """Return the sum of the numbers of an expression; None without any."""
    found = prometheus.query(f"sum({expression})")
    if not found:
        return None
    return float(found[0]["value"][1])


TASK = 'task="feeds.tasks.refresh"'
RUNS = f'singletask_lock_hold_seconds_count{{{TASK}, outcome="%s"}}'
SKIPPED = f'singletask_lock_conflicts_total{{{TASK}, result="skipped", reason="skip"}}'
DUPLICATES = f"singletask_lock_duplicates_total{{{TASK}}}"
DEAD = 'singletask_locks{state="dead", instance="%s"}'
STARVING = "singletask_locks_starving"
FILE = 'node_textfile_mtime_seconds{file="/var/lib/prometheus/singletask.prom"}'


@pytest.mark.parametrize(
    ("series", "raised"),
    [
        # Of a task with unique_until="finish" that hangs, all calls are duplicates.
        ({DUPLICATES: "0+1x62"}, "TaskNeverCompletes"),
        ({SKIPPED: "0+1x62"}, "TaskNeverCompletes"),
        ({DUPLICATES: "0+0.1x62", SKIPPED: "0+0.1x62"}, "TaskNeverCompletes"),
        ({DUPLICATES: "0+1x62", RUNS % "lost": "0+0.1x62"}, "TaskNeverCompletes"),
        ({DUPLICATES: "0+0.1x62"}, ""),
        ({DUPLICATES: "0+1x62", RUNS % "returned": "0+0.1x62"}, ""),
        ({DEAD % "web-1": "0x62", DEAD % "web-3": "2x62"}, "LocksOfDeadProcesses"),
        ({DEAD % "web-1": "0x59 2 2 2"}, ""),
        ({STARVING: "0x60 1 1"}, "LocksStarve"),
        ({FILE: "0+60x30 1800x32"}, "LocksAreNotCounted"),
        ({DEAD % "web-1": "0x62", STARVING: "0x62", FILE: "0+60x62"}, ""),
    ],
)
def test_alert(tmp_path, series, raised):
    """Of these series, a sample a minute, after 61 minutes; no other alert is raised."""
    require("prometheus")
    (tmp_path / "rules.yml").write_text(RULES)
    tests = []
    for name in re.findall(r"alert: (\w+)", RULES):
        alerts = []
        if name == raised:
            labels = {"task": "feeds.tasks.refresh"} if name.startswith("Task") else {}
            if FILE in series:
                labels = {"file": "/var/lib/prometheus/singletask.prom"}
            alerts = [{"exp_labels": labels}]
        tests.append({"eval_time": "61m", "alertname": name, "exp_alerts": alerts})
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": inputs, "alert_rule_test": tests}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": ["rules.yml"], "tests": [test]}))
    command = [find("promtool"), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
