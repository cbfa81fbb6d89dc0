"""Prove that the process of a holder is gone."""

from __future__ import annotations

import os
import sys

from django_singletask import clock
from django_singletask.holder import Process, read_stat, this_process

__all__ = [
    "ALIVE_FOR",
    "is_alive",
    "is_gone",
    "is_stopped",
    "proof_of_death",
    "started_at",
]

ALIVE_FOR = 0.01
"""Seconds for which a process that was seen alive is only checked for its number."""
_alive: tuple[int, str, float] = 0, "", 0.0
"""The last process that was seen alive, and until when it counts as alive."""


def proof_of_death(holder: Process) -> str | None:
    """Return the proof that a holder's process is gone, as text; None if there is none.

    Only a process of this boot of this machine, in this pid namespace, can be judged: elsewhere
    the number means another process. No proof does not mean that the process is alive.
    """
    process = this_process()
    can_judge = process.boot_id and (process.pid_ns or not sys.platform.startswith("linux"))
    if not can_judge or holder.pid <= 0:
        return None
    if (holder.boot_id, holder.pid_ns) != (process.boot_id, process.pid_ns):
        return None
    if (holder.pid, holder.start) == (process.pid, process.start):
        return None
    return is_gone(holder.pid, holder.start)


def is_gone(pid: int, start: str) -> str | None:
    """Return the proof that a process of this machine is gone, as text; None if there is none."""
    global _alive
    if os.name == "nt":
        return None  # kill(pid, 0) would end the process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return f"process {pid} is gone"
    except OverflowError:
        return None  # too large for a pid
    except OSError:
        pass  # a process of another user: it is alive
    # Many runs may meet one holder at once. If a new process got its number meanwhile, the proof is
    # found after ALIVE_FOR.
    if _alive[:2] == (pid, start) and clock.now() < _alive[2]:
        return None
    # An absent /proc/<pid> proves nothing: hidepid hides the processes of other users.
    fields = read_stat(pid)
    if not fields:
        return None
    if fields[0] in {"Z", "X", "x"}:
        return f"process {pid} has ended"
    if start and fields[19] != start:
        return f"process id {pid} now belongs to another process"
    _alive = pid, start, clock.now() + ALIVE_FOR
    return None


def is_alive(holder: Process) -> bool | None:
    """Return whether a holder's process is alive; None if this host cannot know."""
    process = this_process()
    same = (holder.boot_id, holder.pid_ns) == (process.boot_id, process.pid_ns)
    if not (process.boot_id and same and holder.pid > 0) or os.name == "nt":
        return None
    return proof_of_death(holder) is None


def is_stopped(holder: Process) -> bool:
    """Return whether a holder's process is stopped, by SIGSTOP or in a debugger."""
    return bool(is_alive(holder)) and read_stat(holder.pid)[:1] in (["T"], ["t"])


def started_at(holder: Process) -> float | None:
    """Return the Unix time at which a holder's process on this host started; None if unknown."""
    try:
        with open("/proc/stat") as file:
            boot = next(float(line.split()[1]) for line in file if line.startswith("btime"))
        return boot + int(holder.start) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration):
        return None
