"""Type checkers of users know the types of nearly all public names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
AT_LEAST = 0.95
"""The part of the names. The rest are mostly class attributes in Django's own style, such as
``list_display`` of the admin."""

HALF = """
def complete(number: int) -> int:
    return number

def incomplete(number):
    return number
"""


def verify(package: str, folder: Path) -> tuple[float, list[str]]:
    """Return which part of a package's public names has a known type, and the other names."""
    options = ["--verifytypes", package, "--ignoreexternal", "--outputjson"]
    command = [sys.executable, "-m", "basedpyright", *options]
    # It asks the first "python" of the path where packages are. In an editable installation that is
    # not enough: there a finder says it at the import.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    process = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert process.stdout, process.stderr
    report: dict[str, Any] = json.loads(process.stdout)["typeCompleteness"]
    assert report["moduleRootDirectory"] == str(folder / package)
    exported = [symbol for symbol in report["symbols"] if symbol["isExported"]]
    incomplete = [symbol["name"] for symbol in exported if not symbol["isTypeKnown"]]
    return report["completenessScore"], incomplete


@pytest.mark.only_all("it takes long")
def test_nearly_all_types_are_known() -> None:
    score, incomplete = verify("django_singletask", ROOT)
    assert score >= AT_LEAST, "\n".join(incomplete)


def test_a_name_without_types_is_found(tmp_path: Path) -> None:
    package = tmp_path / "half"
    package.mkdir()
    (package / "py.typed").touch()
    (package / "__init__.py").write_text(HALF)
    assert verify("half", tmp_path) == (0.5, ["half.incomplete"])
