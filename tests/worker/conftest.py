from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.worker.harness import ELSEWHERE, Worker, new_queue


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of the soak, with a column for each lock store."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    properties = [dict(report.user_properties) for report in reports if report.when == "call"]
    columns = [facts["soak"] for facts in properties if "soak" in facts]
    columns.sort(key=lambda column: column["store"])
    for label in dict.fromkeys(label for column in columns for label in column):
        cells = "".join(f"{column.get(label, '0'):>12}" for column in columns)
        terminalreporter.write_line(f"{label:<46}{cells}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.worker)
            item.add_marker(pytest.mark.django_db(transaction=True, databases="__all__"))


@pytest.fixture
def cache() -> str:
    """Give the alias of the cache of a test's locks; a parameter of this name replaces it."""
    return "redis"


@pytest.fixture(autouse=True)
def locks_in_cache(cache: str, settings: Any, request: pytest.FixtureRequest) -> None:
    """Do not empty the cache: a worker that serves many tests would hold back its next takes."""
    settings.SINGLETASK_CACHE = cache
    if cache == "cluster":
        request.getfixturevalue("cluster")


@pytest.fixture
def key() -> str:
    """Give a key that no other test has, so that neither has its locks."""
    return f"key-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def queue() -> Iterator[str]:
    with new_queue() as name:
        yield name


@pytest.fixture
def start_worker(
    tmp_path: Path, queue: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Worker]]:
    """Start workers on the test's queue; stop them after it, and show what they printed."""
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "runs.log"))
    workers: list[Worker] = []

    def start(**options: Any) -> Worker:
        worker = Worker(tmp_path, queue, **{"cache": cache, **options})
        workers.append(worker)
        return worker.start()

    yield start
    for worker in workers:
        worker.finish()
        print(worker.text()[-100_000:])


@pytest.fixture(scope="session")
def workers(
    tmp_path_factory: pytest.TempPathFactory, django_db_setup: None
) -> Iterator[Callable[..., Worker]]:
    """Give the function that starts a worker for many tests, or returns the one of before."""
    with ExitStack() as stack:

        @lru_cache
        def worker_for(cache: str, place: str) -> Worker:
            queue = stack.enter_context(new_queue())
            env = ELSEWHERE if place == "elsewhere" else {}
            folder = tmp_path_factory.mktemp("worker")
            worker = Worker(folder, queue, cache=cache, concurrency=4, env=env)
            stack.callback(worker.finish)
            return worker.start()

        yield worker_for


@pytest.fixture
def place() -> str:
    """Say where the worker seems to run: "here" or "elsewhere"."""
    return "here"


@pytest.fixture
def worker(
    workers: Callable[..., Worker], cache: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    """Give a worker with four processes, which serves many tests one after the other."""
    worker = workers(cache, place)
    worker.forget()
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(worker.log))
    yield worker
    for line in worker.events("start"):  # a test that failed may have left bodies that run on
        worker.end(line["key"])
    print(worker.text()[-100_000:])
