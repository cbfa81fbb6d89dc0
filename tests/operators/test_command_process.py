"""The command as a process: what it exits with, and what a terminal or a pipe is given."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import hold

pytestmark = [
    pytest.mark.django_db(databases="__all__"),
    pytest.mark.usefixtures("on_redis", "empty_history"),
]

ROOT = Path(__file__).parents[2]


def run(*arguments, cache="redis", **options):
    return subprocess.run(
        [sys.executable, "-m", "django", "locks", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "SINGLETASK_TEST_CACHE": cache,
            "TERM": "xterm-256color",
        },
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def test_list_has_colour_on_a_terminal(take):
    take("nightly")
    parent, child = pty.openpty()
    try:
        assert run(stdout=child).returncode == 0
        assert b"\x1b[36;1mSTATE " in os.read(parent, 4096)
    finally:
        os.close(parent)
        os.close(child)


def test_alarm_exits_with_two():
    hold(since=time.time() - 3665)
    done = run("list", "--fail-if-held-over", "1h")
    assert done.returncode == 2
    assert done.stdout.startswith("1 lock\nSTATE ")
    assert done.stderr == "Alarm: Held for more than 1h: nightly (1h 01m).\n"


@pytest.mark.only_all("another case shows it", "redis")
@pytest.mark.parametrize(
    ("cache", "arguments", "code", "stderr"),
    [
        ("redis", ["clear", "--yes"], 3, "CommandError: Say what to clear"),
        ("redis", ["list", "--fail-if-starving", "1h", "zzz"], 3, "CommandError: No lock or task"),
        ("dummy", [], 3, "CommandError: SINGLETASK_CACHE = 'dummy' cannot hold locks"),
    ],
)
def test_error_is_one_line_and_an_exit_code(cache, arguments, code, stderr):
    done = run(*arguments, cache=cache)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(stderr)
    assert done.stderr.count("\n") == 1


def test_clear_that_nobody_answers_frees_nothing(take):
    lock = take("nightly")
    done = run("clear", "nightly", stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    assert done.returncode == 1
    error = "CommandError: Nothing was freed. To skip the question, add --yes."
    assert done.stdout.endswith(f" [y/N] \n{error}\n")
    assert lock.owned()


@pytest.mark.only_all("it starts processes")
def test_clear_exits_with_zero_and_prints_one_line_in_a_project_without_logging(take):
    lock = take("nightly")
    done = run("clear", "nightly", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nFreed 1 lock.\n")
    assert not lock.locked()


def test_closed_pipe_exits_as_if_by_sigpipe(take):
    take("nightly")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = run(stdout=closed)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.only_all("it starts processes")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--settings", "tests.settings", "list", "nightly"],
        ["list", "nightly", "--settings=tests.settings", "-v", "2", "--traceback", "--no-color"],
        ["--json", "nightly", "--pythonpath", "."],
    ],
)
def test_options_of_django_stand_on_each_side_of_the_action_which_may_be_missing(take, arguments):
    take("nightly")
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nightly" in done.stdout


@pytest.mark.only_all("it starts processes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--fail-if-held-over", "1"], "'1' is not a duration"),
        (["--dead"], "unrecognized arguments: --dead"),
    ],
)
def test_wrong_option_exits_with_three(arguments, message):
    done = run(*arguments)
    assert done.returncode == 3
    assert message in done.stderr


@pytest.mark.only_all("it starts processes")
def test_help_exits_with_zero():
    done = run("history", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--since" in done.stdout
