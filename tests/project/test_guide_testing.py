"""The tests in guides/testing.rst pass, on the tasks that the guide speaks of."""

from __future__ import annotations

import functools
import logging
import sys
import unittest
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import celery
import pytest
from celery import Celery, current_app

from django_singletask import SingletonTask, only_one
from tests.project.test_doc_code import ROOT, blocks

app = Celery("guide", set_as_current=False, broker="memory://", backend="cache+memory://")
app.conf.worker_hijack_root_logger = False


def feeds_of_the_tutorial() -> dict[str, ModuleType]:
    """Return the module that the tutorial writes, as it is first, and its package."""
    tasks = ModuleType("feeds.tasks")
    [code, *_] = (
        block for block in blocks(ROOT / "docs/tutorial.rst") if "# feeds/tasks.py" in block
    )
    with patch.object(celery, "shared_task", functools.partial(app.task, shared=False)):
        exec(code, vars(tasks))
    package = ModuleType("feeds")
    package.tasks = tasks  # type: ignore[attr-defined]
    return {"feeds": package, "feeds.tasks": tasks}


FEEDS = feeds_of_the_tutorial()


@app.task(
    base=SingletonTask, shared=False, name="guide.export", unique_until="start", unique_for=600
)
def export(user_id: int) -> str:
    return "exported"


@app.task(base=SingletonTask, shared=False, name="guide.digest", lock_at_least=3600)
def digest() -> str:
    return "sent"


@app.task(base=SingletonTask, shared=False, name="guide.rebuild", on_conflict="requeue")
def rebuild() -> str:
    return "rebuilt"


@only_one(key="nightly-report")
def nightly_report() -> str:
    return "reported"


def cases() -> dict[str, type[unittest.TestCase]]:
    tasks = {"export": export, "digest": digest, "rebuild": rebuild}
    names: dict[str, Any] = {"app": app, "nightly_report": nightly_report, **tasks}
    with patch.dict(sys.modules, FEEDS):
        for block in blocks(ROOT / "docs/guides/testing.rst"):
            exec(block, names)
    return {name: each for name, each in names.items() if name.endswith("Tests")}


CASES = cases()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore what Celery's ``start_worker`` changes in the process: the current app, the log."""
    app, level = current_app._get_current_object(), logging.root.level
    yield
    app.set_current()
    app.set_default()
    logging.root.setLevel(level)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("name", CASES)
def test_the_tests_of_the_guide_pass(
    name: str, dead_redis: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SINGLETASK_CACHE = dead_redis
    for module in FEEDS.items():
        monkeypatch.setitem(sys.modules, *module)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(CASES[name])
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun == suite.countTestCases() > 0
    assert [text for _, text in [*result.errors, *result.failures]] == []


def test_the_guide_has_tests() -> None:
    assert len(CASES) == 5
