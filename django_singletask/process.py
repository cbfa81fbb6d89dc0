"""The running process, and what the system knows of another one."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from functools import cache

from django_singletask.forks import at_fork


@dataclasses.dataclass
class Process:
    """Identify one process on one boot of one host.

    ``boot_id`` and ``pid_ns`` distinguish hosts and containers that have the same name. ``start``,
    in clock ticks since the boot, distinguishes a process from a later one with the same pid; it is
    another number in each time namespace. Each is empty where the system does not provide it.
    """

    host: str
    boot_id: str
    pid_ns: str
    time_ns: str
    pid: int
    start: str


@cache
def this_process() -> Process:
    """Return the running process; each process computes this once, a forked child as well."""
    pid = os.getpid()
    return Process(
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_ns=_namespace("pid"),
        time_ns=_namespace("time"),
        pid=pid,
        start=start_time(pid),
    )


at_fork(after_in_child=this_process.cache_clear)


def boot_id() -> str:
    """Return the id of this boot of the machine; empty where unknown."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return _read("/proc/sys/kernel/random/boot_id")


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; empty where unknown."""
    fields = read_stat(pid)
    if not fields:
        return ""
    return fields[19]


def read_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on; an empty list if unreadable."""
    # The program's name is in parentheses, and may itself contain spaces and parentheses. After
    # the last one, the first field is the state, the 18th is the number of threads, and the 20th
    # the start time.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20:
        return []
    return fields


def _read(path: str) -> str:
    """Return the text of a small file without spaces at its ends; empty if it is unreadable."""
    # os.open() takes a third of the time of open(), and each conflict reads a file.
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            return os.read(file, 4096).decode(errors="replace").strip()
        finally:
            os.close(file)
    except OSError:
        return ""
