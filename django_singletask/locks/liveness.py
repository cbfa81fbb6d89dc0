"""Prove that the process of a holder is gone."""

from __future__ import annotations

import os
import sys
from functools import lru_cache

from django_singletask import clock
from django_singletask.process import Process, read_stat, this_process

ALIVE_FOR = 0.01
"""Seconds for which a process whose record was read is only checked for its number."""


def proof_of_death(holder: Process) -> str | None:
    """Return the proof that a holder's process is gone, as text; None if there is none.

    Only a process of this boot of this machine, in these namespaces, can be judged: elsewhere its
    pid and its start mean another process. No proof does not mean that the process is alive.
    """
    process = this_process()
    if (holder.pid, holder.start) == (process.pid, process.start):
        return None
    if not _is_here(holder):
        return None
    return proof_that_gone(holder.pid, holder.start)


def _is_here(holder: Process) -> bool:
    """Return whether the holder is a process that can be judged from here."""
    here = this_process()
    if holder.pid <= 0 or not here.boot_id:
        return False
    if not here.pid_ns and sys.platform.startswith("linux"):
        return False
    # A record of an older version has no time namespace.
    if holder.time_ns not in ("", here.time_ns):
        return False
    return (holder.boot_id, holder.pid_ns) == (here.boot_id, here.pid_ns)


def proof_that_gone(pid: int, start: str) -> str | None:
    """Return the proof that a process of this machine is gone, as text; None if there is none."""
    if os.name == "nt":
        return None  # kill(pid, 0) would end the process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"process {pid} is gone"
    except OSError:
        pass  # the process belongs to another user, and is alive
    # Many runs may meet one holder at once, so the record of its process is not read for each. If a
    # new process got the number meanwhile, the proof is found after ALIVE_FOR.
    return _read_proof(pid, start, clock.now() // ALIVE_FOR)


@lru_cache(maxsize=1)
def _read_proof(pid: int, start: str, _now: float) -> str | None:
    """Return the proof that the record of a process gives; the same one at the same ``_now``."""
    # An absent /proc/<pid> proves nothing: hidepid hides the processes of other users.
    fields = read_stat(pid)
    if not fields:
        return None
    # If the main thread has ended before the other threads, the process lives on.
    if fields[0] == "Z" and fields[17] in {"0", "1"}:
        return f"process {pid} has ended"
    if start and fields[19] != start:
        return f"process id {pid} now belongs to another process"
    return None


def is_alive(holder: Process) -> bool | None:
    """Return whether a holder's process is alive; None if this host cannot know."""
    if not _is_here(holder):
        return None
    return proof_of_death(holder) is None


def is_stopped(holder: Process) -> bool:
    """Return whether a holder's process is stopped, by SIGSTOP or in a debugger."""
    if not is_alive(holder):
        return False
    state = read_stat(holder.pid)[:1]  # empty if the process has just ended
    return state in (["T"], ["t"])
