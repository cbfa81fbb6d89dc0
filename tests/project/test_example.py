"""The example project: its importer with a real HTTP server, and its demo from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection

from tests.deadline import wait_for
from tests.testapp.celery import app

TOP = Path(__file__).resolve().parents[2]
TIMEOUT = 120  # seconds: far longer than the demo takes


@pytest.fixture
def example(settings: Any) -> Iterator[SimpleNamespace]:
    """Give modules of the example project. The tests' Celery application stays the current one."""
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "example_project.feeds"]
    settings.FEEDS_TIMEOUT = 30.0
    settings.FEEDS_MAX_BYTES = 100_000
    names = ["demo.documents", "demo.measure", "demo.site", "feeds.importer", "feeds.models"]
    names += ["feeds.run_log", "settings"]
    modules = {name.rpartition(".")[2]: import_module(f"example_project.{name}") for name in names}
    app.set_current()
    yield SimpleNamespace(**modules)
    for model in filter(
        admin.site.is_registered, [modules["models"].Feed, modules["models"].Entry]
    ):
        admin.site.unregister(model)
    for task in [task for task in app.tasks if task.startswith("example_project.")]:
        app.tasks.unregister(task)  # other tests name tasks that end alike


@pytest.fixture
def tables(example: SimpleNamespace, db: None) -> None:
    # The test's transaction removes them.
    with connection.schema_editor() as editor:
        editor.create_model(example.models.Feed)
        editor.create_model(example.models.Entry)


@pytest.fixture
def site(example: SimpleNamespace) -> Iterator[Any]:
    with example.site.FeedSite(example.site.feeds()) as site:
        yield site


def address(site: Any, name: str) -> str:
    return next(feed.url for feed in site.feeds if feed.name == name)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("name", "title", "entries"),
    [("planet", "Planet", 12), ("commits", "Commits", 20), ("library", "Library", 8)],
    ids=["RSS 2.0", "Atom", "RSS 1.0"],
)
def test_imports_each_format(
    example: SimpleNamespace, site: Any, name: str, title: str, entries: int
) -> None:
    url = address(site, name)
    result = example.importer.import_feed(url)

    assert result == {"feed": url, "status": "imported", "new": entries}
    feed = example.models.Feed.objects.get()
    assert (feed.url, feed.title, feed.last_error) == (url, title, "")
    assert feed.checked_at
    entry = feed.entries.get(guid=f"urn:{name}:3")
    assert entry.title == f"{name} & friends, no. 3: “Čaj” für <alle>"
    assert entry.link == f"{url}?entry=3&from=feed"
    assert entry.published == datetime(2024, 3, 1, 11, tzinfo=UTC)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("name", ["planet", "weather", "releases"], ids=["both", "ETag", "date"])
def test_asks_only_for_what_changed(example: SimpleNamespace, site: Any, name: str) -> None:
    url = address(site, name)
    example.importer.import_feed(url)

    again = example.importer.import_feed(url)
    assert again["status"] == "not modified"
    assert site.answers == {200: 1, 304: 1}

    site.publish(1)
    assert example.importer.import_feed(url) == {"feed": url, "status": "imported", "new": 1}


@pytest.mark.usefixtures("tables")
def test_stores_an_entry_once_and_its_changes(example: SimpleNamespace, site: Any) -> None:
    url = address(site, "planet")
    example.importer.import_feed(url)
    feed = example.models.Feed.objects.get()
    feed.entries.filter(guid="urn:planet:3").update(title="An old title")
    example.models.Feed.objects.update(etag="", last_modified="")

    assert example.importer.import_feed(url)["new"] == 0
    assert feed.entries.count() == 12
    assert feed.entries.get(guid="urn:planet:3").title.startswith("planet & friends, no. 3")


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("name", "timeout", "reason"),
    [
        ("truncated", 30, "malformed XML: "),
        ("missing", 30, "HTTP 404 Not Found"),
        ("trickling", 1, "no complete answer within 1 s"),  # it would send for a minute
    ],
)
def test_keeps_the_reason_of_a_failure(
    example: SimpleNamespace, site: Any, settings: Any, name: str, timeout: float, reason: str
) -> None:
    settings.FEEDS_TIMEOUT = timeout
    with pytest.raises(example.importer.FeedError, match=reason) as caught:
        example.importer.import_feed(address(site, name))

    feed = example.models.Feed.objects.get()
    assert feed.last_error == str(caught.value)
    assert feed.checked_at
    assert not feed.entries.exists()


@pytest.mark.usefixtures("tables")
def test_a_success_clears_the_last_error(example: SimpleNamespace, site: Any) -> None:
    url = address(site, "planet")
    example.models.Feed.objects.create(url=url, last_error="HTTP 503 Service Unavailable")
    example.importer.import_feed(url)
    assert example.models.Feed.objects.get().last_error == ""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html><body>Please log in</body></html>", r"not a feed \(text/html\)"),
        (b"", r"(not a feed|malformed XML)"),
    ],
    ids=["a page", "nothing"],
)
def test_refuses_what_is_not_a_feed(example: SimpleNamespace, body: bytes, reason: str) -> None:
    with pytest.raises(example.importer.FeedError, match=reason):
        example.importer.parse(example.importer.Answer(body, "text/html"))


def test_reads_no_more_than_the_limit(example: SimpleNamespace, site: Any, settings: Any) -> None:
    settings.FEEDS_MAX_BYTES = 1000
    with pytest.raises(example.importer.FeedError, match="larger than 1,000 bytes"):
        example.importer.fetch(address(site, "archive"))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://127.0.0.1/feed", "planet", ""])
def test_fetches_over_http_only(example: SimpleNamespace, url: str) -> None:
    with pytest.raises(example.importer.FeedError, match="not an http or https address"):
        example.importer.fetch(url)


def test_an_unreachable_server_is_the_reason(example: SimpleNamespace, site: Any) -> None:
    url = address(site, "planet")
    site.__exit__(None, None, None)
    with pytest.raises(example.importer.FeedError, match="cannot fetch: Connection refused"):
        example.importer.fetch(url)


def test_measures_overlaps_from_what_the_runs_wrote(
    example: SimpleNamespace, tmp_path: Path
) -> None:
    spans = {
        "a1": ("a", 1.0, 2.0),
        "a2": ("a", 2.0, 3.0),  # begins when a1 ends: no overlap
        "a3": ("a", 2.9, 3.5),  # overlaps a2
        "b1": ("b", 1.0, 9.0),  # of another feed than a1, a2 and a3: no overlap
        "b2": ("b", 2.0, 3.0),  # within b1
        "b3": ("b", 4.0, 5.0),  # within b1, after b2
        "c1": ("c", 1.0, None),  # never ended
        "c2": ("c", 7.0, 8.0),  # overlaps c1
    }
    lines = []
    for run, (feed, start, end) in spans.items():
        line = {"run": run, "feed": feed, "task_id": run, "pid": 1, "time": 0}
        lines.append(line | {"event": "start", "monotonic": start})
        if end:
            lines.append(line | {"event": "end", "monotonic": end, "outcome": "returned"})
    lines.sort(key=lambda line: line["monotonic"])
    log = tmp_path / "runs.log"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "sta')

    runs = example.measure.RunLog(log).update()
    overlaps = {(o.first.task_id, o.second.task_id) for o in example.measure.find_overlaps(runs)}
    assert len(runs) == len(spans)
    assert overlaps == {("a2", "a3"), ("b1", "b2"), ("b1", "b3"), ("c1", "c2")}
    assert example.measure.most_at_once(runs) == 5


def test_follows_a_log_that_grows(example: SimpleNamespace, tmp_path: Path) -> None:
    log = example.measure.RunLog(tmp_path / "runs.log")
    assert log.update() == []
    block = example.run_log.recorded_run(log.path, "http://a/", "one")
    block.__enter__()
    (run,) = log.update()
    assert (run.feed, run.task_id, run.pid) == ("http://a/", "one", os.getpid())
    assert run.end > time.monotonic() + 1000
    block.__exit__(ValueError, ValueError(), None)
    (run,) = log.update()
    assert run.outcome == "raised"
    assert run.start < run.end < time.monotonic()


class Demo:
    """A process of `manage.py demo`. All its children inherit a variable that identifies them."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.mark = f"EXAMPLE_TEST={folder}"
        name, value = self.mark.split("=", 1)
        environment = os.environ | {
            name: value,
            "TMPDIR": str(folder),
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(TOP / "manage.py"), "demo", *options],
            env=environment,
            # The demo must run from any folder.
            cwd=folder.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, text: str) -> str:
        assert self.process.stdout
        for line in self.process.stdout:
            if text in line:
                return line
        raise AssertionError(f"the demo never wrote {text!r}")

    def left(self) -> list[int]:
        """Return the pids of the demo's processes that still run. Zombies do not count."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
            except OSError:
                continue
        return pids

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Any]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    started: list[Demo] = []

    def start(*options: str) -> Demo:
        started.append(Demo(folder, *options))
        return started[-1]

    yield start
    for process in started:
        process.end()


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds the demo's processes through /proc"
)


def totals(output: str) -> dict[str, int]:
    lines = output.splitlines()
    head = next(line for line in lines if line.startswith("FEED ")).split()[2:]
    numbers = next(line for line in lines if line.startswith("all ")).split()[1:]
    return dict(zip(head, map(int, numbers), strict=True))


@pytest.mark.worker
def test_demo(demo: Any, tmp_path: Path) -> None:
    process = demo()
    output, _ = process.process.communicate(timeout=TIMEOUT)

    assert process.process.returncode == 0, output
    assert max(map(len, output.splitlines())) <= 80
    total = totals(output)
    assert total["CALLS"] == 396 == total["RUNS"] + total["SKIPPED"]
    assert total["SKIPPED"] > 100
    assert total["OVERLAPS"] == 0
    assert total["ENTRIES"] == 110
    assert " locks held: " in output
    assert "missing (" in output
    assert "HTTP 404 Not Found" in output
    assert "malformed XML" in output
    assert "no complete answer within 1.5 s" in output
    assert process.left() == []
    assert list(process.folder.iterdir()) == []


@pytest.mark.only_all("it runs the demo")
@pytest.mark.worker
def test_demo_finds_the_overlaps_of_runs_without_lock(demo: Any) -> None:
    process = demo("--no-lock")
    output, _ = process.process.communicate(timeout=TIMEOUT)

    assert process.process.returncode == 1, output
    total = totals(output)
    assert total["RUNS"] == total["CALLS"]
    assert total["OVERLAPS"] > 50


def locks(environment: dict[str, str], *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(TOP / "manage.py"), "locks", *arguments, "--json"]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    rows: list[dict[str, Any]]
    *_, rows = json.loads(answer.stdout).values()
    return rows


@pytest.mark.only_all("it runs the demo")
@needs_proc
@pytest.mark.worker
def test_demo_serves_a_lock_in_each_state(demo: Any) -> None:
    process = demo("--serve")
    variables = process.read_until("EXAMPLE_HOME=").removesuffix("\\\n").split()
    example = {"DJANGO_SETTINGS_MODULE": "example_project.settings"}
    environment = os.environ | example | dict(each.split("=", 1) for each in variables)
    expected = {"expired", "dead", "handed_over", "queued", "kept", "held"}
    wait_for(
        lambda: {lock["state"] for lock in locks(environment, "list")} >= expected,
        "a lock in each state",
    )

    rows = locks(environment, "history", "--limit", "1000")
    assert {row["kind"] for row in rows} == {"run", "conflict", "duplicate"}
    assert {row["outcome"] for row in rows} >= {"", "released", "cleared"}
    starves = [sys.executable, str(TOP / "manage.py"), "locks", "list", "--fail-if-starving", "7h"]
    assert subprocess.run(starves, env=environment, capture_output=True).returncode
    process.process.send_signal(signal.SIGINT)
    output, _ = process.process.communicate(timeout=TIMEOUT)
    assert process.process.returncode == 0, output
    assert process.left() == []
    assert list(process.folder.iterdir()) == []


@pytest.mark.parametrize("variable", ["Asia/Tokyo", ":Asia/Tokyo"])
def test_takes_the_time_zone_of_the_variable(example: Any, monkeypatch: Any, variable: str) -> None:
    monkeypatch.setenv("TZ", variable)
    assert example.settings.time_zone_of_this_machine() == "Asia/Tokyo"


@pytest.mark.parametrize("variable", ["", "CET-1CEST", "/etc/localtime"])
@pytest.mark.parametrize(
    ("link", "name"), [("/usr/share/zoneinfo/Asia/Tokyo", "Asia/Tokyo"), ("/etc/localtime", "UTC")]
)
def test_takes_the_time_zone_of_the_system(
    example: Any, monkeypatch: Any, variable: str, link: str, name: str
) -> None:
    monkeypatch.setenv("TZ", variable)
    monkeypatch.setattr(os.path, "realpath", lambda path: link)
    assert example.settings.time_zone_of_this_machine() == name


@pytest.mark.only_all("another case shows it", "imports run", "before workers", "calls are sent")
@needs_proc
@pytest.mark.worker
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("Locks:", signal.SIGINT),
        ("Starting", signal.SIGINT),
        ("Sending", signal.SIGTERM),
        ("locks held: ", signal.SIGINT),
    ],
    ids=["before workers", "workers start", "calls are sent", "imports run"],
)
def test_demo_leaves_nothing_when_interrupted(demo: Any, moment: str, number: int) -> None:
    process = demo()
    process.read_until(moment)
    process.process.send_signal(number)
    output, _ = process.process.communicate(timeout=TIMEOUT)

    assert process.process.returncode == 128 + number
    assert "Traceback" not in output
    assert process.left() == []
    assert list(process.folder.iterdir()) == []


@pytest.mark.only_all("it runs the demo")
@needs_proc
@pytest.mark.worker
def test_workers_end_when_the_demo_is_killed(demo: Any) -> None:
    process = demo()
    process.read_until("round 1")
    assert len(process.left()) > 5
    process.process.kill()
    wait_for(lambda: not process.left(), "its workers have ended")


@pytest.mark.only_all("another case shows it", "options1", "options2", "options4", "options5")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cache", "redis://:secret@127.0.0.1:1/0"], "The cache redis://:***@127.0.0.1:1/0 does"),
        (["--cache", "memcached://127.0.0.1:1"], "The cache memcached://127.0.0.1:1 does"),
        (["--broker", "redis://127.0.0.1:1/0"], "The broker redis://127.0.0.1:1/0 does"),
        (["--cache", "ftp://127.0.0.1"], "is not redis://… or memcached://host:port"),
        (["--broker", "127.0.0.1:6379"], "is not an address like redis://host:port/0"),
        (["--serve", "99999"], "'99999' is not a port"),
    ],
)
def test_demo_says_what_is_wrong(demo: Any, options: list[str], message: str) -> None:
    process = demo(*options)
    output, _ = process.process.communicate(timeout=TIMEOUT)

    assert process.process.returncode
    assert message in output
    assert "Traceback" not in output
    assert "Warning" not in output
    assert list(process.folder.iterdir()) == []
