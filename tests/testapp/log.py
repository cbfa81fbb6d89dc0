"""An append-only log of what tasks do. Tests judge by it, and so need not trust a lock."""

from __future__ import annotations

import json
import os
import time
from math import inf
from pathlib import Path
from typing import Any


def path() -> Path:
    return Path(os.environ["SINGLETASK_TEST_LOG"])


def enough(key: str) -> Path:
    """Return the file by which a test ends the bodies of a key."""
    return path().with_name(f"enough {key}")


def write(event: str, **facts: Any) -> None:
    """Append one line, in one write, so that the lines of many processes never mix."""
    line = json.dumps({"event": event, "t": time.monotonic(), "pid": os.getpid(), **facts})
    fd = os.open(path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)


def read(file: Path, begin: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a log that are complete, from this byte on."""
    if not file.exists():
        return []
    with file.open("rb") as lines:
        lines.seek(begin)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def size(file: Path) -> int:
    """Return how many bytes the complete lines of a log have.

    A reader can see the first half of a line that crosses a page of memory.
    """
    return file.read_bytes().rfind(b"\n") + 1 if file.exists() else 0


def runs(lines: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return key, start and end of each run; one that has not ended goes on for ever."""
    ends = {line["run"]: line["t"] for line in lines if line["event"] == "end"}
    return [
        (line["key"], line["t"], ends.get(line["run"], inf))
        for line in lines
        if line["event"] == "start"
    ]


def overlaps(lines: list[dict[str, Any]]) -> int:
    """Count the runs that began while an earlier one of their key went on."""
    count = 0
    latest: dict[str, float] = {}
    for key, start, end in sorted(runs(lines)):
        count += start < latest.get(key, 0)
        latest[key] = max(end, latest.get(key, 0))
    return count
