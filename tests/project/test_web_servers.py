"""Web servers that patch the standard library, before or after they import the package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.deadline import wait_for
from tests.servers import ask, free_port
from tests.testapp import log

ROOT = Path(__file__).parents[2]
# The package is imported before the patch with "preload", and after it without.
WAYS = {"preload": ["--preload"], "no preload": []}
REQUESTS = 20


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skip a test without these modules; imported here they would change this process."""
    absent = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(
        bool(absent),
        reason=f"not installed: {absent}, which the extra test-versions does not have",
    )


@contextmanager
def gunicorn(folder: Path, *options: str) -> Iterator[Callable[[str], int]]:
    """Run the application of tests/web.py; yield the function that returns a page's status."""
    port = free_port()
    output = folder / "gunicorn.log"
    command = [sys.executable, "-m", "gunicorn", "-k", "gevent", "-w", "2"]
    command += ["-t", "30", "-b", f"127.0.0.1:{port}", *options, "tests.web:application"]
    environment = {
        **os.environ,
        "HOME": str(folder),  # for gunicorn's own socket
        "SINGLETASK_TEST_LOG": str(folder / "runs.log"),
        "SINGLETASK_TEST_BROKER": "memory://",
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )

    def status_of(page: str) -> int:
        try:
            with urlopen(f"http://127.0.0.1:{port}/{page}", timeout=60) as response:
                return int(response.status)
        except HTTPError as error:
            return error.code
        except OSError:  # the process hung, and was ended
            return 0

    try:
        wait_for(
            lambda: process.poll() is not None or ask(port, b"GET / HTTP/1.0\r\n\r\n"), "it answers"
        )
        yield status_of
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(output.read_text()[-5000:])


def statuses(status_of: Callable[[str], int], pages: list[str]) -> list[int]:
    with ThreadPoolExecutor(len(pages)) as threads:
        return list(threads.map(status_of, pages))


on_each_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.only_all("another case shows it", "preload")
@needs("gunicorn", "gevent")
@on_each_way
def test_views_that_take_a_lock_exclude_each_other(way, tmp_path, on_redis):
    with gunicorn(tmp_path, *WAYS[way]) as status_of:
        assert statuses(status_of, ["take/page"] * REQUESTS) == [200] * REQUESTS
    lines = log.read(tmp_path / "runs.log")
    assert len(log.runs(lines)) == REQUESTS
    assert log.overlaps(lines) == 0


@pytest.mark.only_all("it starts processes")
@needs("gunicorn", "gevent")
@on_each_way
def test_a_view_that_only_sends_a_unique_task_answers(way, tmp_path, on_redis):
    with gunicorn(tmp_path, *WAYS[way]) as status_of:
        pages = [f"send/{number}" for number in range(REQUESTS)]
        assert statuses(status_of, pages) == [200] * REQUESTS


LATE = """
import sys, threading
import django
django.setup()
from django_singletask import TaskLock
if sys.argv[1] == "gevent":
    from gevent import monkey
    monkey.patch_all()
else:
    import eventlet
    eventlet.monkey_patch()
taken = []
def take():
    with TaskLock("late", wait=30) as lock:
        taken.append(lock.owned())
threads = [threading.Thread(target=take) for _ in range(5)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(taken)
"""


@pytest.mark.only_all("another case shows it", "eventlet")
@pytest.mark.parametrize(
    "library", [pytest.param(name, marks=needs(name)) for name in ("gevent", "eventlet")]
)
def test_a_process_that_is_patched_after_the_import_takes_locks(library, on_redis):
    done = subprocess.run(
        [sys.executable, "-c", LATE, library],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{[True] * 5}\n", done.stderr[-3000:]
