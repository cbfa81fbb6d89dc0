"""Locks work in a project that forgot the app in INSTALLED_APPS, and say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.settings import REDIS_URL

pytestmark = pytest.mark.needs("redis")

ROOT = Path(__file__).parents[2]
WARNING = "django_singletask is not in INSTALLED_APPS"
PROJECT = """
import os, signal
import django
from celery import Celery
from celery.signals import worker_ready
from django.conf import settings

redis = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": %r}
settings.configure(CACHES={"default": redis}, INSTALLED_APPS=os.environ["APPS"].split())
django.setup()
from django_singletask import SingletonTask, TaskLock

app = Celery("bare", broker="memory://")

@app.task(base=SingletonTask)
def last():
    print(f"The lock is held: {last.lock().locked()}", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

@worker_ready.connect
def send(**kwargs):
    last.delay()
"""
LOCKS = """
from bare import TaskLock

for _ in range(2):
    with TaskLock("bare") as lock:
        print("The lock is held:", lock.locked(), flush=True)
"""
WORKER = [
    *("-m", "celery", "-A", "bare", "worker", "-P", "solo", "-l", "INFO"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
]


@pytest.fixture
def run(tmp_path):
    """Give the function that runs Python in a project with these apps; it returns the output."""
    (tmp_path / "bare.py").write_text(PROJECT % REDIS_URL)

    def run_python(*arguments, apps="django.contrib.contenttypes"):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "APPS": apps},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run_python


def test_the_first_lock_of_a_process_warns_once(run):
    output = run("-c", LOCKS)
    assert output.count(WARNING) == 1
    assert "and run 'manage.py migrate'." in output
    assert output.count("The lock is held: True") == 2


@pytest.mark.only_all("it starts processes")
def test_nothing_warns_where_the_app_is_installed(run):
    output = run("-c", LOCKS, apps="django.contrib.contenttypes django_singletask")
    assert WARNING not in output


@pytest.mark.only_all("it starts a worker")
@pytest.mark.worker
def test_a_worker_warns_once_at_its_start(run):
    output = run(*WORKER)
    assert output.count(WARNING) == 1
    assert output.index(WARNING) < output.index(" ready.") < output.index("The lock is held: True")
