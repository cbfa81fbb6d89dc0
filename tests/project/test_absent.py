"""Tests of what is not installed are left out, and the end of a run says so; CI refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import runtests
from tests import servers

ROOT = Path(__file__).parents[2]
NEEDING_MEMCACHED = [
    # by its parameter
    "tests/stores/test_stores.py::TestStores::test_add_takes_a_free_lock[pymemcache]",
    "tests/operators/test_command.py::test_clear_works_on_memcached",  # it opens the cache
]
OTHER = "tests/stores/test_stores.py::TestStores::test_add_takes_a_free_lock[redis]"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.only_all("it starts processes")
def test_tests_of_an_absent_server_are_left_out() -> None:
    done = run(*NEEDING_MEMCACHED, OTHER, SINGLETASK_TEST_ABSENT="Memcached")
    assert done.returncode == 0, done.stdout
    assert "Left out: 2 tests, because Memcached is not installed. Debian" in done.stdout


def test_ci_refuses_to_leave_out_tests(monkeypatch, capsys) -> None:
    needs = [need for need in servers.NEEDS if need.name == "Memcached"]
    monkeypatch.setattr(servers, "missing", lambda **kwargs: needs)
    monkeypatch.setenv("CI", "true")
    assert runtests.main([]) == 1
    printed = capsys.readouterr().out
    assert "In CI no test may be left out" in printed
    assert "Memcached. Debian, Ubuntu: apt install memcached. macOS: brew" in printed
