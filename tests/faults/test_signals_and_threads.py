"""A signal, wherever it strikes, leaves no Python lock locked: the threads of a process still work.

Condition, Event, Semaphore and Thread.start() are written in Python. A signal inside them can leave
their lock locked for ever. So what runs in the thread of a task uses none of them.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import django_singletask

ROOT = Path(django_singletask.__file__).parent
# What runs only in commands and in tests.
OTHER_THREADS = {"management", "testing"}
CLASSES = ["Barrier", "BoundedSemaphore", "Condition", "Event", "Semaphore", "Thread", "Timer"]
LEFT_LOCKED = {f"threading.{name}" for name in CLASSES}
# What a monkey patch of gevent replaces: to be looked up in its module when it is used.
PATCHED = {"_thread", "queue", "threading", "time"}
UNPATCHED_NAMES = {"time": {"monotonic", "perf_counter", "time", "time_ns"}}


def modules() -> list[Path]:
    return [
        path
        for path in sorted(ROOT.rglob("*.py"))
        if not any(path.relative_to(ROOT).as_posix().startswith(each) for each in OTHER_THREADS)
    ]


def uses(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.module in PATCHED:
            names = {alias.name for alias in node.names}
            for name in sorted(names - UNPATCHED_NAMES.get(node.module, set())):
                yield f"{place} from {node.module} import {name}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in LEFT_LOCKED:
            yield f"{place} {ast.unparse(node)}"


def test_nothing_in_the_thread_of_a_task_uses_what_a_signal_can_leave_locked():
    found = [use for path in modules() for use in uses(path)]
    assert found == [], "\n".join(found)


def interrupt_threads(alias: str, when: str) -> dict[str, Any]:
    """Run tests/interrupted_threads.py, which explains the result."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.interrupted_threads", alias, when],
        cwd=ROOT.parent,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.only_all("it starts a process for each place")
@pytest.mark.usefixtures("django_db_setup")
@pytest.mark.parametrize(
    ("alias", "when"), [("redis", "first"), ("redis", "later"), ("db_sqlite", "later")]
)
def test_after_a_signal_anywhere_all_threads_of_a_process_work(alias, when):
    result = interrupt_threads(alias, when)
    broken = result["broken"]
    text = f"{len(broken)} of {len(broken) + result['healthy']}:\n"
    assert broken == [], text + "\n".join(broken)
