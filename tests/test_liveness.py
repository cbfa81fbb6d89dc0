from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from django_singletask import TaskLock
from django_singletask.holder import Holder, start_time, this_process
from django_singletask.locks.liveness import is_gone, proof_of_death

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, as only Linux has it"
)


@pytest.fixture
def child():
    """Give a process that lives until it is told to end."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.stdin.close()
    process.wait()


def held_by(pid, **facts):
    holder = Holder.new("nightly", 60, task=None, task_id=None, retries=0)
    return dataclasses.replace(holder, pid=pid, start=start_time(pid), **facts)


def test_a_living_process(child):
    assert proof_of_death(held_by(child.pid)) is None


def test_this_process():
    assert proof_of_death(held_by(os.getpid())) is None


def test_a_process_that_is_gone(child):
    holder = held_by(child.pid)
    child.kill()
    child.wait()
    assert proof_of_death(holder) == f"process {child.pid} is gone"


def test_a_zombie(child, wait_for):
    holder = held_by(child.pid)
    child.kill()
    wait_for(lambda: proof_of_death(holder), "it is a zombie")
    assert proof_of_death(holder) == f"process {child.pid} has ended"


def test_a_pid_that_was_given_to_another(child):
    holder = dataclasses.replace(held_by(child.pid), start="1")
    assert proof_of_death(holder) == f"process {child.pid} is another one by now"


def test_of_another_user(child, monkeypatch):
    def denied(pid, number):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", denied)
        assert is_gone(child.pid, start_time(child.pid)) is None


def test_hidden_processes_are_no_proof(child, monkeypatch):
    holder = held_by(child.pid)
    monkeypatch.setattr("django_singletask.holder._read", lambda path: "")
    assert is_gone(holder.pid, holder.start) is None


@pytest.mark.parametrize(
    "facts",
    [{"boot_id": "another"}, {"pid_ns": "pid:[1]"}, {"boot_id": ""}],
    ids=["another boot or host", "another container", "unknown"],
)
def test_elsewhere_there_is_no_proof(child, facts):
    holder = held_by(child.pid, **facts)
    child.kill()
    child.wait()
    assert proof_of_death(holder) is None


@pytest.mark.parametrize("pid", [0, -1])
def test_no_process_group_is_asked(pid):
    assert proof_of_death(dataclasses.replace(held_by(os.getpid()), pid=pid)) is None


def test_never_on_windows(child, monkeypatch):
    holder = held_by(child.pid)
    child.kill()
    child.wait()
    this_process()
    monkeypatch.setattr(os, "name", "nt")
    assert is_gone(holder.pid, holder.start) is None


def test_a_name_with_parentheses_and_spaces(tmp_path):
    program = tmp_path / "a) R (b 1"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([str(program), "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert start_time(process.pid).isdigit()
        assert is_gone(process.pid, start_time(process.pid)) is None
    finally:
        process.kill()
        process.stdin.close()
        process.wait()


def test_a_fork_is_another_process():
    pid = os.fork()
    if pid == 0:
        os._exit(this_process().pid == os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.mark.django_db
class TestTakeover:
    SCRIPT = """
import django
django.setup()
from django_singletask import TaskLock
lock = TaskLock("nightly")
assert lock.acquire()
print(lock.token, flush=True)
input()
"""

    @pytest.fixture
    def holder(self, cache_alias):
        """Hold the lock in another process."""
        process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "SINGLETASK_TEST_CACHE": cache_alias},
        )
        process.token = process.stdout.readline().strip()
        assert process.token
        yield process
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()

    @pytest.fixture(autouse=True)
    def shared_caches_only(self, cache_alias):
        if cache_alias == "locmem":
            pytest.skip("LocMem locks in one process alone")

    def test_the_lock_of_a_killed_process_is_taken_over(self, holder):
        lock = TaskLock("nightly")
        assert not lock.acquire()
        assert lock.blocker.token == holder.token
        holder.kill()
        holder.wait()
        assert lock.acquire()
        assert lock.took_over
        lock.release()

    def test_without_proof_there_is_no_takeover(self, holder, monkeypatch):
        """Negative control: the same death, on what looks like another host."""
        monkeypatch.setattr("django_singletask.holder._boot_id", lambda: "another machine")
        this_process.cache_clear()
        try:
            holder.kill()
            holder.wait()
            assert not TaskLock("nightly").acquire()
        finally:
            this_process.cache_clear()
