"""Say which process holds a lock: the record that is stored as its value."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from functools import cache, lru_cache
from typing import Any
from unicodedata import category

__all__ = [
    "Holder",
    "Process",
    "boot_id",
    "clean",
    "describe_run",
    "read_stat",
    "start_time",
    "this_process",
]

# A part of the key of a marker, which memcached must take.
IS_TOKEN = re.compile("[!-9;-~]{1,32}")
LONGEST = 255
"""Characters of a text: of a column, and of the longest name or task id."""
USUAL = 4096
"""Bytes of a record that is worth keeping in memory."""
MOST = 2**31 - 1
"""The largest number that a column holds."""
MONTH = 30 * 24 * 60 * 60
"""Seconds of the longest lease."""
CENTURY = 2**32
"""Seconds of the last time that is believed: the year 2106."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclasses.dataclass(frozen=True)
class Process:
    """Identify one process on one boot of one host.

    ``boot_id`` and ``pid_ns`` tell two hosts, or two containers on one host, apart even if both
    have the same name. ``start``, in clock ticks since the boot, tells a process from a later one
    with the same pid. Each is empty where the system does not tell.
    """

    host: str
    boot_id: str
    pid_ns: str
    pid: int
    start: str


@dataclasses.dataclass(frozen=True)
class Holder(Process):
    """The record stored as the value of a lock: who holds it, since when, for how long.

    ``since`` is a Unix time in seconds by the holder's own clock: for people to read, never to
    compute a lease with. ``timeout`` is the length of the lease in seconds. ``kept``: no process
    has the entry any more; it stays for ``timeout`` seconds from ``since``.
    """

    token: str
    name: str
    task: str | None
    task_id: str | None
    retries: int
    since: float
    timeout: float
    kept: bool = False
    slots: int = 1
    """How many runs may hold the lock at once, as this holder knows it; not stored if it is one."""

    @classmethod
    def new(cls, name: str, timeout: float, *, token: str | None = None, **run: Any) -> Holder:
        """Describe an acquisition by this process, now; the default token is random.

        ``run`` has the fields ``task``, ``task_id`` and ``retries``, and ``slots`` if not one.
        """
        token, holder = token or os.urandom(16).hex(), object.__new__(cls)
        # In a fifth of the time of a frozen dataclass, which sets its fields one by one.
        vars(holder).update(vars(this_process()), token=token, name=name, **run)
        vars(holder).update(since=time.time(), timeout=timeout)
        return holder

    def encode(self) -> bytes:
        """Return the record as the bytes that a store keeps."""
        return _encode(vars(self)).encode("ascii")

    @classmethod
    def decode(cls, value: bytes) -> Holder:
        """Read a record; bytes that something else wrote become a holder without a name."""
        return _decode(value) if len(value) <= USUAL else _decode.__wrapped__(value)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Holder:
        """Read a record that may lack fields, or hold values that cannot be.

        Anything can write into a cache. What stays is short, safe to show, and what a key and a
        column of each store can hold.
        """
        token = str(data.get("token") or "")
        texts = ("host", "boot_id", "pid_ns", "start", "name")
        holder = object.__new__(cls)
        vars(holder).update(
            {name: _text(data.get(name)) or "" for name in texts},
            token=token if IS_TOKEN.fullmatch(token) else "",
            task=_text(data.get("task")),
            task_id=_text(data.get("task_id")),
            pid=int(_number(data.get("pid"), MOST)),
            retries=int(_number(data.get("retries"), MOST)),
            since=_number(data.get("since"), CENTURY),
            timeout=_number(data.get("timeout"), MONTH),
            kept=data.get("kept") is True,
            slots=int(_number(data.get("slots"), MOST)) or 1,
        )
        return holder

    def without_process(self, timeout: float, **changes: Any) -> Holder:
        """Return the record of an entry that no process has and that ends after ``timeout``."""
        return dataclasses.replace(self, pid=0, start="", timeout=timeout, **changes)

    def is_run_of(self, task_id: str | None) -> bool:
        """Say whether the task of this id has the lock; the record may have its id cleaned."""
        return task_id is not None and self.task_id == _text(task_id)

    def mark(self) -> bytes:
        """Return the bytes by which a record shows that it is of this task id; empty without one.

        A text in a record cannot look like them, since its quotes are escaped.
        """
        return b"" if self.task_id is None else f'"task_id":{_encode(self.task_id)}'.encode("ascii")

    def __str__(self) -> str:
        return describe_run(self.task_id, self.host, self.pid)


@lru_cache(maxsize=64)
def _decode(value: bytes) -> Holder:
    """Read a record once, although many runs may meet its holder."""
    try:
        return Holder.from_dict(json.loads(value.decode()))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return Holder.from_dict({})


def describe_run(task_id: str | None, host: str, pid: int) -> str:
    """Name a run and its process, if it has one: ``task 3f0c on web-3, process 8121``."""
    run = f"task {task_id}" if task_id else "code outside a task"
    return f"{run} on {host or 'an unknown host'}{f', process {pid}' if pid else ''}"


def clean(text: str, length: int | None = None) -> str:
    """Cut a text that anything may have written, and escape what no page and no column may have.

    Control characters steer a terminal, format characters turn the direction of what follows, and
    some databases refuse NUL and surrogates.
    """
    text = text[:length]
    if text.isprintable():
        return text
    # The spaces of Japanese and French are among what Python does not call printable.
    return "".join(
        c if c.isprintable() or category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )[:length]


def _text(value: object) -> str | None:
    if type(value) is str and value.isprintable() and len(value) <= LONGEST:
        return value  # nearly always; a long list of locks reads many records
    return None if value is None else clean(str(value), LONGEST)


def _number(value: Any, most: float) -> float:
    number = float(value or 0)
    if 0 <= number <= most:
        return number
    return most if most < number < math.inf else 0


@cache
def this_process() -> Process:
    """Describe the running process; computed once in a process, and anew after a fork."""
    pid = os.getpid()
    return Process(socket.gethostname(), boot_id(), _pid_namespace(), pid, start_time(pid))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=this_process.cache_clear)


def boot_id() -> str:
    """Return the id that this machine was given when it was booted; empty where unknown."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return _read("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; empty where unknown."""
    fields = read_stat(pid)
    return fields[19] if fields else ""


def read_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on; an empty list if unreadable."""
    # The name of the program is in parentheses and may itself contain spaces and parentheses. So
    # the fields are counted from the last one: the first is the state, the 20th the start time.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 19 else []


def _read(path: str) -> str:
    # This takes a third of the time of open(), and each conflict reads a file.
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, 4096).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(file)
