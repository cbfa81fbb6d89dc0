"""Start real Celery workers, and wait for what they do."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery.result import AsyncResult

from tests.deadline import wait_for
from tests.testapp import log
from tests.testapp.celery import app

TIMEOUT = 30
"""Seconds: far longer than any call takes."""

ELSEWHERE = {"SINGLETASK_TEST_BOOT_ID": "another machine"}
"""A worker with this environment seems to run on another host: nothing proves its death."""


class Worker:
    """A worker and its children, in a new process group."""

    def __init__(
        self,
        folder: Path,
        queue: str,
        *,
        cache: str = "redis",
        name: str = "one",
        concurrency: int = 2,
        pool: str = "prefork",
        options: tuple[str, ...] = (),
        conf: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.queue, self.name = queue, name
        self.host = f"{name}-{queue}@test"
        self.output = folder / f"worker-{name}.log"
        self.log = folder / "runs.log"
        self.begin = self.printed = 0
        self.env = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "SINGLETASK_TEST_CACHE": cache,
            "SINGLETASK_TEST_QUEUE": queue,
            "SINGLETASK_TEST_LOG": str(self.log),
            "SINGLETASK_TEST_CELERY": json.dumps(conf or {}),
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        self.command = [
            *(sys.executable, "-m", "celery", "-A", "tests.testapp", "worker"),
            *("-P", pool, "-c", str(concurrency), "-n", self.host, "-Q", queue),
            *("-l", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"),
            *options,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, ready: bool = True) -> Worker:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if ready:
            began = self.text().count(" ready.")
            wait_for(
                lambda: self.text().count(" ready.") > began or self.process.poll() is not None,
                f"{self.name} is ready:\n{self.text()[-3000:]}",
                deadline=60,
            )
            assert self.process.poll() is None, self.text()[-3000:]
        return self

    def children(self) -> list[int]:
        """Return the pids of the pool's processes."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def kill_group(self) -> None:
        """End the main process and its children at once, as the OOM killer or a crash would."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self) -> None:
        """Shut down warmly; end the process group if that takes too long."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                self.kill_group()

    def finish(self) -> None:
        """End the process group at once, but warmly while the coverage is measured.

        A process that is killed does not say which lines it has run.
        """
        if "COVERAGE_PROCESS_CONFIG" in os.environ:
            self.stop()
        self.kill_group()

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # Calls

    def send(self, task: Any, *args: Any, **options: Any) -> AsyncResult[Any]:
        return task.apply_async(args, queue=self.queue, **options)

    def call(self, task: Any, *args: Any, **options: Any) -> Any:
        """Send a call and return its result."""
        return get(self.send(task, *args, **options))

    def run(self, task: Any, key: str, *args: Any, **options: Any) -> tuple[AsyncResult[Any], int]:
        """Send a call that runs until the test ends it; return it and its process when it runs."""
        before = len(self.events("start", key=key))
        call = self.send(task, key, TIMEOUT * 2, *args, **options)
        lines = wait_for(lambda: self.events("start", key=key)[before:], "it runs")
        return call, lines[0]["pid"]

    def end(self, key: str) -> None:
        """End the bodies of a key, which run for long otherwise."""
        self.log.with_name(f"enough {key}").touch()

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Leave what is sent in the broker."""
        self.obey("cancel_consumer", self.queue)
        try:
            yield
        finally:
            self.obey("add_consumer", self.queue)

    def obey(self, order: str, *args: str) -> Any:
        """Give an order until there is a reply: a worker that has just started may miss it."""
        give = getattr(app.control, order)
        options = {"destination": [self.host], "reply": True, "limit": 1, "timeout": 5}
        return wait_for(lambda: give(*args, **options), f"a reply to {order}")[0][self.host]

    # What was done

    def forget(self) -> None:
        """Leave out what was logged and printed until now, which is of other tests."""
        self.begin = log.size(self.log)
        self.printed = self.output.stat().st_size

    def text(self) -> str:
        if not self.output.exists():
            return ""
        return self.output.read_bytes()[self.printed :].decode(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        return log.read(self.log, self.begin)

    def events(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        """Return the lines of the log about these events with these facts."""
        facts["event"] = event
        return [line for line in self.lines() if facts.items() <= line.items()]

    def overlaps(self) -> int:
        return log.overlaps(self.lines())


@contextmanager
def new_queue() -> Iterator[str]:
    """Give the name of a new queue; delete it with its messages at the end."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    with app.connection_or_acquire() as connection:
        connection.default_channel.queue_delete(name)


def get(call: AsyncResult[Any], **options: Any) -> Any:
    return call.get(timeout=TIMEOUT, **options)


def burst(worker: Worker, task: Any, *keys: str) -> list[AsyncResult[Any]]:
    """Let 8 processes send the same calls at the same time."""
    fork = multiprocessing.get_context("fork")
    ids = fork.SimpleQueue()

    def send() -> None:
        ids.put([worker.send(task, key).id for key in keys])

    senders = [fork.Process(target=send) for _ in range(8)]
    for sender in senders:
        sender.start()
    sent = [task_id for _ in senders for task_id in ids.get()]
    for sender in senders:
        sender.join()
    return [app.AsyncResult(task_id) for task_id in sent]


def is_gone(pid: int) -> bool:
    """Say whether a process has ended; its parent may not have asked for its exit code."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(") ")[2].startswith("Z")
