"""The Python code in the README and the documentation runs: what it defines can be defined.

The bodies of its functions do not run here. Other tests run those of the recipes.
"""

from __future__ import annotations

import builtins
import doctest
import functools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import celery
import pytest
from django.apps import AppConfig
from django.core.cache import caches
from django.core.management import BaseCommand

import django_singletask
from django_singletask.signals import lock_event
from django_singletask.task import decorator
from django_singletask.testing import no_locks
from tests.file_locks import FileStore
from tests.guides import BLOCK
from tests.stores import test_file_locks

ROOT = Path(__file__).parents[2]


def blocks(page: Path) -> list[str]:
    """Return the Python code on a page; of code before and after a change, that after it."""
    texts = [textwrap.dedent(text) for _indent, text in BLOCK.findall(page.read_text())]
    texts = [text.rpartition("# after\n")[2] for text in texts]
    return [doctest.script_from_examples(text) if ">>> " in text else text for text in texts]


PAGES = [
    page for page in (ROOT / "README.rst", *sorted((ROOT / "docs").rglob("*.rst"))) if blocks(page)
]


class Names(dict[str, Any]):
    """The names of a page. What the page leaves to its reader, such as ``Feed``, is a mock."""

    tasks: dict[str, Any]
    """The tasks that the page defines."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self.setdefault(name, MagicMock(name=name))


@pytest.fixture
def names(monkeypatch) -> Iterator[Names]:
    with celery.Celery("docs", set_as_current=False, broker="memory://") as app:
        shared_task = functools.partial(app.task, shared=False, lazy=False)
        monkeypatch.setattr(celery, "shared_task", shared_task)
        new_app = functools.partial(celery.Celery, set_as_current=False)
        monkeypatch.setattr(celery, "Celery", new_app)
        monkeypatch.setattr(decorator, "shared_task", shared_task)
        monkeypatch.setattr(lock_event, "receivers", [])
        for absent in (
            "feeds",
            "prometheus_client",
            "prometheus_client.multiprocess",
            "health_check.exceptions",
            "health_check.views",
        ):
            monkeypatch.setitem(sys.modules, absent, MagicMock())
        monkeypatch.setitem(sys.modules, "health_check.base", SimpleNamespace(HealthCheck=object))
        monkeypatch.setitem(sys.modules, "celery_batches", SimpleNamespace(Batches=celery.Task))
        # Only Django 6.0 has it, and a @task needs a module that can be imported.
        monkeypatch.setitem(sys.modules, "django.tasks", MagicMock())
        monkeypatch.setitem(sys.modules, "feeds.tasks", SimpleNamespace(import_feed=MagicMock()))
        monkeypatch.setitem(sys.modules, "mysite.celery", SimpleNamespace(app=MagicMock()))
        names = Names(vars(django_singletask), shared_task=shared_task, __name__="docs")
        names.tasks = app.tasks
        names |= {
            "app": app,
            "AppConfig": AppConfig,
            "BaseCommand": BaseCommand,
            "TestCase": object,
        }
        with no_locks():
            yield names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, names):
    for block in blocks(page):
        exec(compile(block, page, "exec", dont_inherit=True), names)
        names.tasks.clear()  # a page may define a task anew


@pytest.mark.parametrize("path", ["file_locks.py", "stores/test_file_locks.py"])
def test_the_store_of_the_page_is_the_one_whose_promises_are_tested(path):
    code = (ROOT / "tests" / path).read_text().strip()
    assert code in [each.strip() for each in blocks(ROOT / "docs/contributing/add-a-store.rst")]


@pytest.mark.only_all("it starts processes")
def test_a_store_that_forgets_keeps_its_promises(names):
    [block] = [
        each for each in blocks(ROOT / "docs/contributing/add-a-store.rst") if "forgets" in each
    ]
    exec(block, names)
    store = type("ForgetfulFileStore", (names["ForgetfulStore"], FileStore), {})
    contract, files = test_file_locks.TestFileStore(), caches.create_connection("files")
    contract.forgets, contract.open_store = True, lambda: store(files, "files")
    for test in (
        contract.test_no_lock_is_taken_at_once_in_a_cache_that_has_forgotten_its_locks,
        contract.test_all_that_look_agree_on_the_epoch,
        contract.test_take_returns_the_key_or_the_entry,
        contract.test_a_cache_that_cannot_be_used_is_neither_held_nor_free,
    ):
        with contract.prepared():
            test()


def test_control_code_with_an_option_that_does_not_exist_fails(names, tmp_path):
    page = tmp_path / "page.rst"
    code = "@shared_task(base=SingletonTask, lock_wiat=5)\ndef import_feed(feed_id):\n    ...\n"
    page.write_text(".. code-block:: python\n\n" + textwrap.indent(code, "    "))
    with pytest.raises(TypeError, match="lock_wiat"):
        test_the_code_of_a_page_runs(page, names)
