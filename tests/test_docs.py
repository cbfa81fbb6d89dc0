"""The documentation names tests as proof of what it says: they must exist."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["what-happens-when.rst", "evidence.rst"]
PAGE = "\n".join((ROOT / "docs/explanation" / name).read_text() for name in PAGES)
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"(?:def|class) ([Tt]est\w+)", path.read_text())
}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"``([Tt]est_?\w[\w…]+)", PAGE))))
def test_named_test_exists(name):
    assert any(fnmatchcase(test, name.replace("…", "*")) for test in DEFINED)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"``(tests/[\w/.]+)``", PAGE))))
def test_named_file_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("path", "name"), re.findall(r"``(tests/[\w/.]+\.py)``:\n?.*?``([Tt]est_?\w+)``", PAGE)
)
def test_named_test_is_in_the_named_file(path, name):
    assert re.search(rf"(def|class) {name}\b", (ROOT / path).read_text())
