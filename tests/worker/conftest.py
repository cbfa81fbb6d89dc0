from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testapp.celery import app
from tests.worker.harness import Worker

StartWorker = Callable[..., Worker]


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


@pytest.fixture(autouse=True)
def no_lock_of_another_test(on_redis: None) -> None:
    """Keep the locks in Redis, unless the test chooses another cache."""


@pytest.fixture
def queue() -> Iterator[str]:
    """Give the name of a queue for this test alone; delete it with its messages at the end."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    with app.connection_or_acquire() as connection:
        connection.default_channel.queue_delete(name)


@pytest.fixture
def start_worker(tmp_path: Path, queue: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start workers on the test's queue; stop them after it, and show what they printed."""
    monkeypatch.setenv("SINGLETASK_TEST_LOG", str(tmp_path / "runs.log"))
    workers: list[Worker] = []

    def start(**options: Any) -> Worker:
        worker = Worker(tmp_path, queue, **options)
        workers.append(worker)
        return worker.start()

    yield start
    for worker in workers:
        worker.kill_group()
        print(worker.text()[-100_000:])


@pytest.fixture
def runs_log(tmp_path: Path) -> Path:
    return tmp_path / "runs.log"


@pytest.fixture
def on_cache(settings: Any, empty_cache: Callable[[str], None]) -> Callable[[str], None]:
    """Keep the locks in a cache, which holds none at first."""

    def use(alias: str) -> None:
        settings.SINGLETASK_CACHE = alias
        empty_cache(alias)

    return use
