"""Record when each run began and ended, in a file to which every process appends.

The file does not depend on the locks, so it can show whether runs overlapped.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def recorded_run(path: Path, feed_url: str, task_id: str | None) -> Iterator[None]:
    """Append a line when the block begins and one when it ends, however it ends."""
    # Do not use the task id: a redelivered message runs twice with one id.
    run = uuid.uuid4().hex
    outcome = "raised"
    _append(path, event="start", run=run, feed=feed_url, task_id=task_id)
    try:
        yield
        outcome = "returned"
    finally:
        _append(path, event="end", run=run, feed=feed_url, task_id=task_id, outcome=outcome)


def _append(path: Path, **line: Any) -> None:
    # All processes of a machine have the same monotonic clock.
    line |= {"pid": os.getpid(), "monotonic": time.monotonic(), "time": time.time()}
    # With O_APPEND and one write for each line, the lines of several processes never mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)
