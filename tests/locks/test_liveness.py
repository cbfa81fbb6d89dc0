"""Is it proven that the process of a holder is gone?"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from django_singletask import TaskLock
from django_singletask import process as processes
from django_singletask.holder import Holder
from django_singletask.locks import liveness
from tests import inside
from tests.entries import in_child

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, which only Linux has"
)
WAIT_FOR_INPUT = [sys.executable, "-c", "input()"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Give a process that lives until it is told to end."""
    with subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def dead_child(child: subprocess.Popen[bytes]) -> Holder:
    """Give the holder of a process that is gone."""
    holder = held_by(child.pid)
    child.kill()
    child.wait()
    return holder


def held_by(pid: int, **changes: Any) -> Holder:
    holder = inside.holder_of(TaskLock("nightly"))
    facts = {"pid": pid, "start": processes.start_time(pid), **changes}
    return dataclasses.replace(holder, **facts)


def test_a_living_process_is_not_dead(child: subprocess.Popen[bytes]) -> None:
    assert liveness.proof_of_death(held_by(child.pid)) is None


def test_a_process_that_is_gone_is_dead(dead_child: Holder) -> None:
    assert liveness.proof_of_death(dead_child) == f"process {dead_child.pid} is gone"


def test_a_process_that_stands_still_is_stopped_and_not_dead(
    child: subprocess.Popen[bytes], wait_for: Any
) -> None:
    holder = held_by(child.pid)
    assert not liveness.is_stopped(holder)
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: liveness.is_stopped(holder), "it is stopped")
    assert liveness.proof_of_death(holder) is None
    assert not liveness.is_stopped(dataclasses.replace(holder, pid_ns="another container"))
    child.send_signal(signal.SIGCONT)
    wait_for(lambda: not liveness.is_stopped(holder), "it runs again")


def test_a_zombie_is_dead(child: subprocess.Popen[bytes], wait_for: Any) -> None:
    holder = held_by(child.pid)
    child.kill()
    wait_for(lambda: liveness.proof_of_death(holder), "it is a zombie")
    assert liveness.proof_of_death(holder) == f"process {child.pid} has ended"


LOSE_MAIN_THREAD = """
import ctypes, threading
threading.Thread(target=input).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_has_ended_is_alive_while_it_has_other_threads(
    wait_for: Any,
) -> None:
    command = [sys.executable, "-c", LOSE_MAIN_THREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        holder = held_by(process.pid)
        wait_for(lambda: processes.read_stat(process.pid)[0] == "Z", "its main thread has ended")
        assert liveness.proof_of_death(holder) is None
        assert liveness.is_alive(holder)
        process.kill()
        wait_for(lambda: liveness.proof_of_death(holder), "it is a zombie")
        assert liveness.proof_of_death(holder) == f"process {process.pid} has ended"


def test_a_process_whose_pid_another_has_now_is_dead(child: subprocess.Popen[bytes]) -> None:
    """Also if that one was just seen alive."""
    assert liveness.proof_of_death(held_by(child.pid)) is None
    holder = held_by(child.pid, start="1")
    assert (
        liveness.proof_of_death(holder) == f"process id {child.pid} now belongs to another process"
    )


def test_a_process_that_was_just_seen_alive_is_found_dead_however_often_it_is_asked_for(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, wait_for: Any
) -> None:
    monkeypatch.setattr(liveness, "ALIVE_FOR", 0.1)
    holder = held_by(child.pid)
    assert liveness.proof_of_death(holder) is None
    child.kill()
    wait_for(lambda: liveness.proof_of_death(holder), "it is a zombie")


@pytest.mark.parametrize(
    ("function", "error"),
    [("kill", PermissionError), ("open", FileNotFoundError)],
    ids=["a process of another user", "hidden by the mount option hidepid"],
)
def test_what_cannot_be_seen_is_no_proof(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, function: str, error: Any
) -> None:
    start = processes.start_time(child.pid)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, mock.Mock(side_effect=error))
        assert liveness.proof_that_gone(child.pid, start) is None


@pytest.mark.parametrize(
    "changes",
    [{"boot_id": "another"}, {"pid_ns": "pid:[1]"}, {"time_ns": "time:[1]"}, {"boot_id": ""}],
    ids=["another boot or host", "another container", "another time namespace", "unknown"],
)
def test_there_is_no_proof_about_a_process_elsewhere(
    dead_child: Holder, changes: dict[str, str]
) -> None:
    elsewhere = dataclasses.replace(dead_child, **changes)
    assert liveness.proof_of_death(elsewhere) is None
    assert liveness.is_alive(elsewhere) is None


def test_a_record_without_a_time_namespace_is_judged(dead_child: Holder) -> None:
    """Older versions wrote such records."""
    record = json.loads(dead_child.encode())
    del record["time_ns"]
    assert liveness.proof_of_death(Holder.from_dict(record)) == f"process {dead_child.pid} is gone"


IN_ANOTHER_TIME = ["unshare", "--map-root-user", "--time", "--boottime", "1000", "--fork"]
JUDGE = """
import sys
from django_singletask import holder as holders
from django_singletask import process as processes
from django_singletask.locks import liveness
holder = holders.Holder.decode(sys.argv[1].encode())
print(holder.start != processes.start_time(holder.pid), liveness.proof_of_death(holder))
"""


def test_another_time_namespace_proves_nothing(child: subprocess.Popen[bytes]) -> None:
    """There, the start times of all processes differ by its offset."""
    try:
        subprocess.run([*IN_ANOTHER_TIME, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system does not let the tests make a time namespace")
    record = held_by(child.pid).encode().decode()
    command = [*IN_ANOTHER_TIME, sys.executable, "-c", JUDGE, record]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True None\n"


@pytest.mark.parametrize("pid", [0, -1])
def test_a_process_group_is_never_asked(pid: int) -> None:
    assert liveness.proof_of_death(dataclasses.replace(held_by(os.getpid()), pid=pid)) is None


def test_there_is_no_proof_on_windows(dead_child: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    processes.this_process()
    monkeypatch.setattr(os, "name", "nt")
    assert liveness.proof_that_gone(dead_child.pid, dead_child.start) is None


def test_a_program_name_may_have_parentheses_and_spaces(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b 1"
    program.symlink_to(sys.executable)
    command = [str(program), *WAIT_FOR_INPUT[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        start = processes.start_time(process.pid)
        gone = liveness.proof_that_gone(process.pid, start)
        process.kill()
    assert start.isdigit()
    assert gone is None


def test_a_fork_is_another_process() -> None:
    processes.this_process()
    assert in_child(lambda: processes.this_process().pid == os.getpid())


TAKE = """
import django
django.setup()
from django_singletask import TaskLock
lock = TaskLock("nightly")
assert lock.acquire()
print(lock.token, flush=True)
input()
"""


@pytest.fixture
def holder(cache_alias: str) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock "nightly" in another process."""
    with subprocess.Popen(
        [sys.executable, "-c", TAKE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "SINGLETASK_TEST_CACHE": cache_alias},
    ) as process:
        yield process
        process.kill()


on_each_family = pytest.mark.parametrize(
    "cache_alias", ["redis", "pymemcache", "db_sqlite"], indirect=True
)


@on_each_family
@pytest.mark.django_db
def test_the_lock_of_a_killed_process_is_taken_over(holder: subprocess.Popen[str]) -> None:
    assert holder.stdout is not None
    token = holder.stdout.readline().strip()
    lock = TaskLock("nightly")
    assert not lock.acquire()
    assert lock.blocker is not None
    assert lock.blocker.token == token
    holder.kill()
    holder.wait()
    assert lock.acquire()
    assert lock.owned()
    lock.release()


@pytest.mark.parametrize("cache_alias", ["redis"], indirect=True)
@pytest.mark.django_db
def test_control_without_proof_the_lock_is_not_taken_over(
    holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same death, on what looks like another host."""
    assert holder.stdout is not None
    assert holder.stdout.readline()
    monkeypatch.setattr(processes, "boot_id", lambda: "another machine")
    processes.this_process.cache_clear()
    try:
        holder.kill()
        holder.wait()
        assert not TaskLock("nightly").acquire()
    finally:
        processes.this_process.cache_clear()
