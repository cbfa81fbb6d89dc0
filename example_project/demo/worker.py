"""A Celery worker that ends when the demo does: python -m example_project.demo.worker NAME N"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from celery.signals import worker_ready
from django.conf import settings

from example_project.celery import app


def main(name: str, concurrency: str) -> None:
    threading.Thread(target=end_with_the_demo, name="end with the demo", daemon=True).start()

    # By default Celery keeps only a weak reference, and the function would be gone after main().
    @worker_ready.connect(weak=False)
    def mark_ready(**kwargs: Any) -> None:
        Path(settings.HOME, f"{name}.ready").touch()

    # Turn off the messages between workers: the file broker is too slow for them.
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(
        ["worker", f"--hostname={name}@%h", f"--concurrency={concurrency}", "-l", "INFO", *quiet]
    )


def end_with_the_demo() -> None:
    """Wait until the demo has ended, even by SIGKILL, then end this worker and its children.

    Only the demo's process has the other end of the pipe open. Read the pipe without sys.stdin: a
    child that is forked meanwhile would inherit that object's lock, which is never released there.
    """
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
