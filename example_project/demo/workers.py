"""Start Celery workers as processes of their own, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Workers:
    """Real worker processes, each the leader of a process group with its pool inside."""

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
                    # What a killed pool leaves there goes with the demo's folder.
                    env=os.environ | {"TMPDIR": str(self.folder)},
                    # The worker ends when this pipe closes: see demo/worker.py.
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A group of its own: Ctrl-C reaches the demo alone, which then ends the group.
                    start_new_session=True,
                )

    def ready(self) -> bool:
        return all((self.folder / f"{name}.ready").exists() for name in self._processes)

    def trouble(self) -> str:
        """Return what a worker wrote last if it is gone, else nothing."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                text = self._log(name).read_text(errors="replace").strip()
                last = "\n".join(text.splitlines()[-15:])
                return f"{name} ended with code {process.returncode}:\n{last}"
        return ""

    def stop(self, patience: float = 1.0) -> None:
        """Ask the workers to end, and after `patience` seconds end what is left of them.

        Runs that end meanwhile do so in good order. An idle worker on the file broker takes 5 s
        to notice and to end its pool: there is nothing left in it that is worth the wait.
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
