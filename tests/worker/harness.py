"""Start real Celery workers, and wait for what they do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.deadline import wait_for
from tests.testapp import log


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
        self.output = folder / f"worker-{name}.log"
        self.log = folder / "runs.log"
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
            *("-P", pool, "-c", str(concurrency), "-n", f"{name}-{queue}@test", "-Q", queue),
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
                deadline=40,
            )
            assert self.process.poll() is None, self.text()[-3000:]
        return self

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

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

    def stop(self, deadline: float = 15) -> None:
        """Shut down warmly; end the process group if that takes too long."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(deadline)
            except subprocess.TimeoutExpired:
                self.kill_group()

    def end(self, key: str) -> None:
        """End the bodies of a key, which run for long otherwise."""
        self.log.with_name(f"enough {key}").touch()

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.kill_group()

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        return [line for line in log.read(self.log) if event in (None, line["event"])]
