"""A worker does not start if its locks would not work."""

from __future__ import annotations

import os
import subprocess
import sys


def start(queue, **environment):
    """Start a worker that is to end at once."""
    command = [sys.executable, "-m", "celery", "-A", "tests.testapp", "worker", "-Q", queue]
    return subprocess.run(
        [*command, "-P", "solo", "-l", "INFO", "--without-gossip", "--without-mingle"],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def test_a_worker_exits_with_the_message_of_the_check(queue):
    done = start(queue, SINGLETASK_TEST_CACHE="locmem")
    assert done.returncode == 1
    assert "SINGLETASK_CACHE = 'locmem'" in done.stdout
    assert "django_singletask.E0" in done.stdout
    assert "ready." not in done.stdout


def test_a_worker_does_not_start_with_the_settings_of_tests(queue, tmp_path):
    text = "from tests.settings import *\n\nSINGLETASK_TESTING = True\n"
    (tmp_path / "settings_of_tests.py").write_text(text)
    done = start(
        queue,
        DJANGO_SETTINGS_MODULE="settings_of_tests",
        PYTHONPATH=str(tmp_path),
        CELERY_SKIP_CHECKS="1",
    )
    assert done.returncode == 1
    assert "SINGLETASK_TESTING is True, so these are settings of tests." in done.stdout
    assert "ready." not in done.stdout
