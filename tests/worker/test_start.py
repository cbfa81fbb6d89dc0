"""A worker does not start on a cache that cannot hold locks."""

from __future__ import annotations

import os
import subprocess
import sys


def test_a_worker_exits_with_the_message_of_the_check(queue):
    command = [sys.executable, "-m", "celery", "-A", "tests.testapp", "worker", "-Q", queue]
    environment = {"DJANGO_SETTINGS_MODULE": "tests.settings", "SINGLETASK_TEST_CACHE": "locmem"}
    done = subprocess.run(
        [*command, "-P", "solo", "-l", "INFO", "--without-gossip", "--without-mingle"],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "SINGLETASK_CACHE = 'locmem'" in done.stdout
    assert "django_singletask.E0" in done.stdout
    assert "ready." not in done.stdout
