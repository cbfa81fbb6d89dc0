"""What became of each test, as lines of JSON: a process writes them, and runtests.py reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "SINGLETASK_TEST_REPORT"


class Writer:
    """A plugin of pytest that writes a line for each test, which a killed process leaves behind."""

    def __init__(self, path: str) -> None:
        self.file = Path(path).open("a")  # noqa: SIM115

    def note(self, **facts: Any) -> None:
        self.file.write(f"{json.dumps(facts)}\n")
        self.file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.note(collected=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.note(test=report.nodeid, outcome="failed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts = {"test": report.nodeid, "outcome": report.outcome}
        if report.skipped:
            reason = "a known failure"  # the mark xfail
            if isinstance(report.longrepr, tuple):
                _file, _line, reason = report.longrepr
            self.note(**facts, reason=reason.removeprefix("Skipped: "))
        elif report.failed or report.when == "call":
            self.note(**facts)


class Reader:
    """What a process has written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self.position = 0
        self.collected = 0
        self.passed: set[str] = set()
        self.failed: list[str] = []
        self.skipped: dict[str, str] = {}
        """The reasons by the tests."""

    def read(self) -> list[str]:
        """Read what is new, and return the tests that have failed since the last time."""
        known = len(self.failed)
        with self.path.open("rb") as file:
            file.seek(self.position)
            lines = file.readlines()
        for line in lines:
            if not line.endswith(b"\n"):  # its second half is not there yet
                break
            self.position += len(line)
            facts = json.loads(line)
            if "collected" in facts:
                self.collected = facts["collected"]
                continue
            test, outcome = facts["test"], facts["outcome"]
            if outcome == "passed":
                self.passed.add(test)
            elif outcome == "skipped":
                self.skipped[test] = facts["reason"]
            elif test not in self.failed:  # it can fail again in the end of its fixtures
                self.failed.append(test)
        self.passed.difference_update(self.failed)
        return self.failed[known:]

    def ended(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.skipped)
