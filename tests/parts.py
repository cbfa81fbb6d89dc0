"""Run the tests in parts at the same time, each with servers of its own; say what happened."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.report import VARIABLE, Reader

ROOT = Path(__file__).resolve().parent.parent
EVERY = 30  # seconds between two lines of the progress, where it is no terminal

PARTS = {
    "workers a to n": ["worker/test_[a-n]*.py"],
    "workers o to z": ["worker/test_[o-z]*.py"],
    "locks and tasks": ["locks", "task", "browser"],
    "history and faults": ["history", "faults/test_[a-i]*.py"],
    "stores and faults": ["stores", "faults/test_[j-z]*.py"],
    "the others": ["operators", "project", "typing"],
}
"""The files of each part, by patterns; no part takes much longer than the others.

Some tests compute and some wait, so there are more parts than a small machine has cores.
"""
INTERRUPTED = {2, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP}
"""Exit codes of a part that Ctrl-C has ended, or a signal before pytest began."""
REFUSED = 4
"""The exit code of pytest if it does not understand its arguments."""


@dataclass
class Part:
    """A process that runs some files of tests."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    report: Reader

    def runs(self) -> bool:
        return self.process.poll() is None

    def progress(self) -> str:
        report = self.report
        if report.collected:
            text = f"{self.name} {report.ended()}/{report.collected}"
        elif self.runs():
            text = f"{self.name} starts"
        else:
            text = f"{self.name} 0"
        if report.failed:
            text += f" ({len(report.failed)} failed)"
        return text

    def was_interrupted(self) -> bool:
        # pytest exits with 2 after an error in the collection, too, which is a failure.
        return self.process.returncode in INTERRUPTED and not self.report.failed

    def is_complete(self) -> bool:
        """Say whether it ended by itself, with a result for each of its tests."""
        if self.report.ended() < self.report.collected:
            return False
        if self.report.failed:
            return self.process.returncode == 1
        return self.process.returncode in (0, 5)  # 5: nothing was selected in its files


def paths_of(patterns: list[str]) -> list[str]:
    """Return the files and folders of a part."""
    paths = [path for pattern in patterns for path in (ROOT / "tests").glob(pattern)]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def start(folder: Path, name: str, arguments: list[str]) -> Part:
    output, report = folder / f"{name}.txt", folder / f"{name}.jsonl"
    reader = Reader(report)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "runtests.py"), *arguments],
            env={**os.environ, VARIABLE: str(report)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return Part(name, process, output, reader)


def run(which: str, arguments: list[str], notice: str) -> int:
    """Run the parts; show how far they are, then one summary. Return the exit code."""
    began = time.monotonic()
    seed = f"--randomly-seed={random.SystemRandom().randrange(2**32)}"
    for argument in arguments:
        if argument.startswith("--randomly-seed="):
            seed = argument
    options = [f"--run={which}", "-q", *arguments, seed]
    with tempfile.TemporaryDirectory(prefix="singletask-") as path:
        folder = Path(path)
        parts = [start(folder, name, [*paths_of(PARTS[name]), *options]) for name in PARTS]

        def terminate(*signal_and_frame: object) -> None:
            for part in parts:
                part.process.terminate()

        # A terminal sends Ctrl-C to the parts as well, but nothing else passes SIGTERM on to them.
        signal.signal(signal.SIGTERM, terminate)
        with suppress(KeyboardInterrupt):
            follow(parts, began)
        for part in parts:
            # After Ctrl-C each part still has to stop its servers.
            part.process.wait()
            part.report.read()
        for part in parts:
            if part.process.returncode == REFUSED:
                print(f"\n{part.output.read_text(errors='replace')}")
                return REFUSED
        for part in parts:
            if part.process.returncode not in (0, 5) and not part.was_interrupted():
                print(f"\n== {part.name}\n{part.output.read_text(errors='replace')}")
    return summary(parts, time.monotonic() - began, seed, notice)


def follow(parts: list[Part], began: float) -> None:
    """Show the progress until all parts have ended, or one does not understand its arguments."""
    is_terminal = sys.stdout.isatty()
    next_line = began + EVERY
    while any(part.runs() for part in parts):
        time.sleep(0.5)
        if any(part.process.returncode == REFUSED for part in parts):
            for part in parts:
                part.process.terminate()
            return
        for part in parts:
            for test in part.report.read():
                print(f"\nFAILED {test}", flush=True)
        progress = ", ".join(part.progress() for part in parts)
        line = f"{time.monotonic() - began:.0f} s: {progress}"
        if is_terminal:
            # A line that is wrapped could not be written over.
            short = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{short}", end="", flush=True)
        elif time.monotonic() > next_line:
            print(line, flush=True)
            next_line += EVERY


def summary(parts: list[Part], seconds: float, seed: str, notice: str) -> int:
    """Say what became of all tests; return the exit code."""
    print("\n== Summary of all parts")
    failed = [test for part in parts for test in part.report.failed]
    passed = sum(len(part.report.passed) for part in parts)
    reasons = Counter(reason for part in parts for reason in part.report.skipped.values())
    interrupted = any(part.was_interrupted() for part in parts)
    broken = [part for part in parts if not part.is_complete() and not interrupted]
    if failed:
        print("Failed, and how to run each again:")
    for test in failed:
        print(f"    python runtests.py {seed} {shlex.quote(test)}")
    for part in broken:
        missing = max(part.report.collected - part.report.ended(), 0)
        print(f"Failed: {part.name} ended with {part.process.returncode}; {missing} did not run.")
    for reason, count in reasons.most_common():
        print(f"Skipped: {count}, because: {reason}")
    times = os.times()
    processor = times.children_user + times.children_system
    print(f"In {seconds:.0f} s, with {processor:.0f} s of processor time, with {seed}.")
    if notice:
        print(notice)
    failures = len(failed) + len(broken)
    print(f"\n{passed} passed, {failures} failed, {reasons.total()} skipped", flush=True)
    if interrupted:
        print("Interrupted: the other tests did not run.")
        return 130
    if not (passed or failures or reasons):
        print("Nothing was tested: no test is selected.")
        return 1
    return min(failures, 1)
