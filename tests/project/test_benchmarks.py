from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.measure import Series, in_turns

pytestmark = pytest.mark.only_all("the benchmarks are no part of the package")

SLOWER_MACHINE_LATER = Series(
    {
        "floor": [100.0, 100.0, 400.0],
        "django-singletask": [110.0, 120.0, 440.0],
    }
)


def test_a_ratio_is_taken_within_a_round() -> None:
    assert SLOWER_MACHINE_LATER.ratio("django-singletask", "floor") == 1.1


def test_processor_time_does_not_include_what_a_call_waits() -> None:
    series = in_turns({"waits": lambda: time.sleep(0.01)}, 3, calls=2)
    assert series.processor is not None
    assert series.median("waits") > 10_000
    assert series.processor.median("waits") < 5000


def test_ten_processes_send_the_commands_that_the_model_of_a_fleet_says() -> None:
    script = Path(fleet.__file__)
    command = [sys.executable, str(script), "--check", "--processes", "10"]
    done = subprocess.run(command, cwd=script.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 processes, tasks of 1.1 s" in done.stdout


def test_calls_that_are_postponed_wait_for_their_lock_and_then_run() -> None:
    load = fleet.Workload(100, 1.0, shared=0.5, policy="requeue", pool=0)
    demand = fleet.simulate(load, 10, 50)
    assert demand.actions["take"] == pytest.approx(100, rel=0.02)
    assert demand.actions["conflict"] > 20
    assert 10 < demand.waiting < 400
