"""What is public is in tests/surface.txt: its changes are lines there, and in CHANGELOG.rst.

``SURFACE=write python runtests.py tests/project/test_surface.py`` writes the file.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

import pytest
from celery import Celery

from django_singletask import SingletonTask, TaskLock, current_lock
from django_singletask.testing import no_locks
from tests import surface
from tests.command_line import locks_as_json
from tests.testapp import tasks

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def outputs(on_redis: None, settings: Any) -> dict[str, Any]:
    """Return what each action of the command prints as JSON, while a lock is held and asked for."""

    found = {}
    with tasks.hold.lock("a") as lock:
        assert not tasks.hold.lock("a").acquire()
        found["list"] = locks_as_json("list")
        found["why"] = locks_as_json("why", lock.name)
        found["clear"] = locks_as_json("clear", lock.name, "--yes")
        found["history"] = locks_as_json("history")
    found["metrics"] = locks_as_json("metrics")
    found["probe"] = locks_as_json("probe")
    found["prune"] = locks_as_json("prune")
    return found


def keys(value: Any, path: str = "") -> set[str]:
    """Return the paths of all keys; those in a list have "[]" before them."""
    if isinstance(value, list):
        return set().union(*(keys(item, f"{path}[]") for item in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    inner = (keys(item, f"{path}.{name}") for name, item in value.items())
    return {f"{path}.{name}" for name in value}.union(*inner)


def test_the_lock_of_a_body_shows_what_any_other_lock_shows() -> None:
    @Celery(set_as_current=False).task(base=SingletonTask, shared=False)
    def body() -> set[str]:
        return {name for name in dir(current_lock()) if not name.startswith("_")}

    with no_locks():
        assert body() == {name for name in dir(TaskLock("another")) if not name.startswith("_")}


@pytest.mark.only_all("it starts processes")
def test_the_public_surface_is_as_written_down(outputs: dict[str, Any]) -> None:
    lines = surface.text().splitlines() + surface.heading("JSON of the command")
    for action, output in outputs.items():
        lines += [f"{action}{key}" for key in sorted(keys(output))]
    if os.environ.get("SURFACE") == "write":
        surface.FILE.write_text("\n".join(lines) + "\n")
    written = surface.FILE.read_text().splitlines()
    changes = difflib.unified_diff(
        written, lines, "tests/surface.txt", "the code", lineterm="", n=0
    )
    assert "\n".join(changes) == ""
