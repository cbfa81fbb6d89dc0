"""What the command prints for Prometheus."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests import inside
from tests.command_line import ended_process, hold, locks, locks_as_json
from tests.past_rows import row, skipped
from tests.servers import find, require

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history", "whole_second"),
]


def gauges():
    """Return the number in each line, by what stands before it."""
    lines = [line for line in locks("metrics").splitlines() if not line.startswith("#")]
    return {name: int(number) for name, number in (line.rsplit(" ", 1) for line in lines)}


def test_each_state_has_its_number_also_0():
    """An alert on a gauge that is missing would be silent."""
    assert gauges() == {
        **{f'singletask_locks{{state="{state}"}}': 0 for state in inside.states_of_a_lock()},
        "singletask_locks_starving": 0,
    }


def test_a_lock_counts_in_the_state_that_the_list_shows(take):
    take("nightly")
    hold(name="bill", **ended_process())
    for minutes in range(1, 100, 2):
        skipped(minutes * 60, name="refresh", key="singletask:refresh:1")
    row("run", 7200, name="old", timeout=60, host="web-1", pid=7)
    found = {name: number for name, number in gauges().items() if number}
    assert found == {
        'singletask_locks{state="held"}': 1,
        'singletask_locks{state="dead"}': 1,
        'singletask_locks{state="expired"}': 1,
        "singletask_locks_starving": 1,
    }
    shown = locks_as_json("list")["locks"]
    assert sorted(lock["state"] for lock in shown) == ["dead", "expired", "held"]


def test_without_the_history_nobody_says_that_no_lock_starves(settings, take):
    settings.SINGLETASK_HISTORY = "off"
    take("nightly")
    found = gauges()
    assert found['singletask_locks{state="held"}'] == 1
    assert "singletask_locks_starving" not in found
    assert locks_as_json("metrics")["starving"] is None


@pytest.mark.only_all("it needs Prometheus")
def test_prometheus_reads_it():
    require("prometheus")
    command = [find("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=locks("metrics"), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.only_all("it needs Prometheus")
def test_control_prometheus_refuses_what_it_cannot_read():
    require("prometheus")
    text = re.sub("gauge", "gouge", locks("metrics"))
    command = [find("promtool"), "check", "metrics"]
    assert subprocess.run(command, input=text, capture_output=True, text=True).returncode != 0
