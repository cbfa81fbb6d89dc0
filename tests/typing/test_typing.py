"""What type checkers say about code that uses the package: they refuse what is marked, no more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [f"tests/typing/{name}.py" for name in ("functions", "tasks")]
MARK = "  # refused"

Line = tuple[str, int]


def run(checker: str, *options: str) -> str:
    command = [sys.executable, "-m", checker, *options, *FILES]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1, process.stdout + process.stderr  # some lines are refused
    return process.stdout


def by_mypy() -> dict[Line, str]:
    errors = re.findall(r"^(.+?):(\d+): error: (.+)$", run("mypy", "--strict"), re.MULTILINE)
    return {(file, int(number)): text for file, number, text in errors}


def by_pyright() -> dict[Line, str]:
    report = json.loads(run("basedpyright", "--outputjson", "--level", "error"))
    refused = {}
    for error in report["generalDiagnostics"]:
        file = Path(error["file"]).relative_to(ROOT).as_posix()
        refused[file, error["range"]["start"]["line"] + 1] = error["message"]
    return refused


@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_a_type_checker_refuses_the_marked_lines_and_no_others(
    check: Callable[[], dict[Line, str]],
) -> None:
    refused = check()
    marked = {
        (file, number)
        for file in FILES
        for number, line in enumerate((ROOT / file).read_text().splitlines(), 1)
        if line.endswith(MARK)
    }
    wrongly = {line: text for line, text in refused.items() if line not in marked}
    assert (wrongly, marked - refused.keys()) == ({}, set())
