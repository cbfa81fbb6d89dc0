"""The parts of a run of the tests end in one summary, whatever happens to a part."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import parts
from tests.conftest import is_for
from tests.report import VARIABLE, Reader
from tests.testapp import log

ROOT = Path(__file__).parents[2]
CONFTEST = f"""
import os
from tests.report import Writer

def pytest_configure(config):
    config.pluginmanager.register(Writer(os.environ["{VARIABLE}"]))
"""
TESTS = """
import os
import pytest

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_passes(): pass
@pytest.mark.parametrize("word", ["it's"])
def test_fails(word): assert False
def test_ends_badly(broken): pass
@pytest.mark.skip(reason="no server")
def test_is_skipped(): pass
@pytest.mark.xfail
def test_fails_as_expected(): assert False
"""
SEED = "--randomly-seed=7"
DIES = "def test_dies(): os._exit(3)\ndef test_never_runs(): pass\n"


def part_of(folder: Path, text: str) -> parts.Part:
    """Run a file of tests; return it as a part that has ended."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(text)
    reader = Reader(folder / "report")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:django", "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: str(folder / "report")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process.wait()
    reader.read()
    return parts.Part("part 1", process, folder / "output", reader)


def test_a_summary_names_what_failed_and_counts_all(tmp_path, capsys) -> None:
    part = part_of(tmp_path, TESTS)
    assert part.is_complete()
    assert parts.summary([part], 1, SEED, "") == 1
    printed = capsys.readouterr().out
    for test in ("test_some.py::test_fails[it's]", "test_some.py::test_ends_badly"):
        assert f"    python runtests.py {SEED} {shlex.quote(test)}\n" in printed
    assert "Skipped: 1, because: no server\n" in printed
    assert "Skipped: 1, because: a known failure\n" in printed
    assert printed.endswith("\n1 passed, 2 failed, 2 skipped\n")


def test_a_part_that_dies_has_failed(tmp_path, capsys) -> None:
    part = part_of(tmp_path, TESTS.replace("assert False", "pass") + DIES)
    assert not part.is_complete()
    assert parts.summary([part], 1, SEED, "") == 1
    printed = capsys.readouterr().out
    assert "Failed: part 1 ended with 3; 2 did not run.\n" in printed
    assert printed.endswith("\n3 passed, 2 failed, 1 skipped\n")


def test_a_part_whose_servers_did_not_start_has_failed(tmp_path, capsys) -> None:
    process = subprocess.Popen([sys.executable, "-c", "exit(1)"])
    process.wait()
    part = parts.Part("part 1", process, tmp_path / "output", Reader(tmp_path / "report"))
    assert parts.summary([part], 1, SEED, "") == 1
    assert capsys.readouterr().out.endswith("\n0 passed, 1 failed, 0 skipped\n")


def test_a_part_that_is_interrupted_has_not_failed(tmp_path, capsys) -> None:
    part = part_of(tmp_path, "def test_first(): pass\ndef test_ctrl_c(): raise KeyboardInterrupt\n")
    assert parts.summary([part], 1, SEED, "") == 130
    printed = capsys.readouterr().out
    assert printed.endswith(
        "\n1 passed, 0 failed, 0 skipped\nInterrupted: the other tests did not run.\n"
    )


def test_a_file_that_cannot_be_imported_has_failed(tmp_path, capsys) -> None:
    part = part_of(tmp_path, "import nothing_of_that_name\n")
    assert not part.was_interrupted()
    assert parts.summary([part], 1, SEED, "") == 1
    assert "test_some.py" in capsys.readouterr().out


def test_a_run_that_tests_nothing_has_failed(capsys) -> None:
    assert parts.summary([], 1, SEED, "") == 1
    assert "no test is selected" in capsys.readouterr().out


def test_a_line_of_a_report_is_read_when_it_is_whole(tmp_path) -> None:
    reader = Reader(tmp_path / "report")
    line = b'{"test": "test_some", "outcome": "failed"}\n'
    reader.path.write_bytes(line[:20])
    assert reader.read() == []
    reader.path.write_bytes(line)
    assert reader.read() == ["test_some"]


def test_a_line_of_the_log_of_tasks_is_counted_when_it_is_whole(tmp_path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b'{"event": "start"}\n{"event": "e')
    end = log.size(file)
    with file.open("ab") as lines:
        lines.write(b'nd"}\n')
    assert log.read(file, end) == [{"event": "end"}]


def test_a_mark_is_for_a_whole_test_or_for_the_parameters_that_it_names() -> None:
    item: Any = SimpleNamespace(callspec=SimpleNamespace(id="late-redis-elsewhere"))
    assert is_for(item, "a reason")
    assert is_for(item, "a reason", "redis", "cluster")
    assert is_for(item, "a reason", "late-redis-elsewhere")
    assert not is_for(item, "a reason", "cluster")
    assert not is_for(SimpleNamespace(), "a reason", "redis")


def test_each_file_is_in_one_part() -> None:
    found: list[Path] = []
    for patterns in parts.PARTS.values():
        for path in map(ROOT.joinpath, parts.paths_of(patterns)):
            found += [path] if path.is_file() else path.rglob("test_*.py")
    assert sorted(found) == sorted((ROOT / "tests").rglob("test_*.py"))
