"""Start Celery workers as processes, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Workers:
    """Worker processes. Each is the leader of a process group that contains its pool."""

    def __init__(self, folder: Path, *, count: int, concurrency: int) -> None:
        self.folder = folder
        self.count = count
        self.concurrency = concurrency
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for number in range(1, self.count + 1):
            name = f"worker{number}"
            with self._log(name).open("wb") as log:
                self._processes[name] = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "example_project.demo.worker",
                        name,
                        str(self.concurrency),
                    ],
                    cwd=Path(__file__).resolve().parents[2],
                    # A killed pool leaves files here, which are removed with the demo's folder.
                    env=os.environ | {"TMPDIR": str(self.folder)},
                    # The worker ends when this pipe is closed: see demo/worker.py.
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A separate group: Ctrl-C reaches only the demo, which then ends the group.
                    start_new_session=True,
                )

    def ready(self) -> bool:
        return all((self.folder / f"{name}.ready").exists() for name in self._processes)

    def trouble(self) -> str:
        """Return the last lines that a worker wrote if it has ended, else an empty string."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                text = self._log(name).read_text(errors="replace").strip()
                last = "\n".join(text.splitlines()[-15:])
                return f"{name} ended with code {process.returncode}:\n{last}"
        return ""

    def stop(self, patience: float = 1.0) -> None:
        """Ask the workers to end, and kill those that are left after `patience` seconds.

        Runs can end normally in this time. An idle worker on the file broker needs 5 s to end its
        pool, and nothing in it is worth the wait.
        """
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin:
                process.stdin.close()
        self._processes.clear()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
