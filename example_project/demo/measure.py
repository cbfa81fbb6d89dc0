"""Read what the runs wrote, and find the runs that overlapped."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Run:
    """One run of a task, in times of the monotonic clock; `end` is infinite until the run ends."""

    feed: str
    task_id: str
    pid: int
    start: float
    end: float = math.inf
    outcome: str = ""


@dataclass(frozen=True)
class Overlap:
    """`second` began before `first` ended, and both are runs of one feed."""

    first: Run
    second: Run

    @property
    def seconds(self) -> float:
        return min(self.first.end, self.second.end) - self.second.start


class RunLog:
    """Follow the file that run_log.py appends to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[str, Run] = {}
        self._read = 0

    @property
    def runs(self) -> list[Run]:
        return list(self._runs.values())

    def update(self) -> list[Run]:
        """Read the lines that were added and return all runs so far."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return []
        # Leave a line that is not complete for the next update.
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for text in whole.splitlines():
            line = json.loads(text)
            if line["event"] == "start":
                self._runs[line["run"]] = Run(
                    line["feed"], line["task_id"], line["pid"], line["monotonic"]
                )
            else:
                run = self._runs[line["run"]]
                run.end = line["monotonic"]
                run.outcome = line["outcome"]
        return self.runs


def find_overlaps(runs: Iterable[Run]) -> list[Overlap]:
    """Return an overlap for each run that began while another of its feed was running."""
    by_feed: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_feed[run.feed].append(run)
    overlaps = []
    for of_feed in by_feed.values():
        of_feed.sort(key=lambda run: run.start)
        latest = of_feed[0]
        for run in of_feed[1:]:
            if run.start < latest.end:
                overlaps.append(Overlap(latest, run))
            if run.end > latest.end:
                latest = run
    return overlaps


def most_at_once(runs: Iterable[Run]) -> int:
    """Return the largest number of runs, of any feeds, that were running at the same moment."""
    changes = [(run.start, 1) for run in runs] + [(run.end, -1) for run in runs]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
