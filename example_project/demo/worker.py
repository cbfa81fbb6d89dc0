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

    # Kept by the closure's name: Celery holds receivers weakly.
    @worker_ready.connect(weak=False)
    def tell(**kwargs: Any) -> None:
        Path(settings.HOME, f"{name}.ready").touch()

    # What these two save is chatter between workers, for which files are a poor broker.
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(
        ["worker", f"--hostname={name}@%h", f"--concurrency={concurrency}", "-l", "INFO", *quiet]
    )


def end_with_the_demo() -> None:
    """Wait until the demo is gone, even by SIGKILL, then end this worker and its children.

    The pipe's other end is open in the demo's process alone. It is read without sys.stdin: a
    child forked meanwhile would find that object's lock held for ever.
    """
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
