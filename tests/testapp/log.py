"""An append-only log of what tasks do. Tests judge by it, and so need not trust a lock."""

from __future__ import annotations

import json
import os
import time
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


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def runs(file: Path) -> list[tuple[str, float, float]]:
    """Return key, start and end of each run; a killed run ends with its process."""
    spans = []
    open_runs: dict[str, tuple[str, float, int]] = {}
    for line in read(file):
        if line["event"] == "start":
            open_runs[line["run"]] = (line["key"], line["t"], line["pid"])
        elif line["event"] == "end":
            key, start, _ = open_runs.pop(line["run"])
            spans.append((key, start, line["t"]))
        elif line["event"] == "killed":
            for run, (key, start, pid) in list(open_runs.items()):
                if pid == line["victim"]:
                    del open_runs[run]
                    spans.append((key, start, line["t"]))
    spans += [(key, start, float("inf")) for key, start, _ in open_runs.values()]
    return spans


def overlaps(file: Path) -> int:
    """Count the pairs of runs of one key that went on at the same time."""
    count = 0
    by_key: dict[str, list[tuple[float, float]]] = {}
    for key, start, end in runs(file):
        by_key.setdefault(key, []).append((start, end))
    for spans in by_key.values():
        spans.sort()
        latest = float("-inf")
        for start, end in spans:
            count += start < latest
            latest = max(latest, end)
    return count
