"""A worker does not start on a cache that cannot hold locks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def start(queue, **env):
    command = [sys.executable, "-m", "celery", "-A", "tests.testapp", "worker", "-Q", queue]
    return subprocess.run(
        [*command, "-P", "solo", "-l", "INFO", "--without-gossip", "--without-mingle"],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


@pytest.mark.only_all("another case shows it", "dummy", "nowhere", "filebased")
@pytest.mark.parametrize("alias", ["locmem", "dummy", "filebased", "nowhere"])
def test_a_worker_exits_with_the_message_of_the_check(queue, alias):
    done = start(queue, SINGLETASK_TEST_CACHE=alias)
    assert done.returncode == 1
    assert f"SINGLETASK_CACHE = {alias!r}" in done.stdout
    assert "django_singletask.E0" in done.stdout
    assert "ready." not in done.stdout
