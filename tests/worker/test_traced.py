"""Messages that other tools give inner headers: Sentry, and what sets them by a signal."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.worker.harness import ELSEWHERE


def sentry(requirement: str, folder: Path) -> str:
    """Return a folder with this sentry-sdk, installed now; an empty text if it is here already."""
    try:
        installed = importlib.metadata.version("sentry-sdk")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    if requirement.endswith(".*") and installed.startswith(requirement.partition("==")[2][:-1]):
        return ""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), requirement]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode and "CI" in os.environ:
        raise AssertionError(done.stderr)
    if done.returncode:
        pytest.skip(f"{requirement} is not installed, and cannot be: {done.stderr[-200:]}")
    return str(folder)


@pytest.mark.only_all("the tool that hides most shows it", "signal", "sentry-sdk")
@pytest.mark.usefixtures("on_redis")  # its keys are always the same
@pytest.mark.parametrize("tool", ["signal", "sentry-sdk==2.54.*", "sentry-sdk"])
def test_no_header_is_lost(start_worker: Any, queue: str, tool: str, tmp_path: Path) -> None:
    path = [str(Path(__file__).parents[2])]
    # Elsewhere only the token of the main process frees a killed run's lock.
    env = {"SINGLETASK_TEST_TRACE": "signal", **ELSEWHERE}
    if tool != "signal":
        path.append(sentry(tool, tmp_path / "sentry"))
        env["SINGLETASK_TEST_TRACE"] = "sentry"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    worker = start_worker(env=env, concurrency=2)
    command = [sys.executable, "-m", "tests.send_traced", queue]
    done = subprocess.run(command, env=worker.env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "nothing is lost\n", done.stderr
