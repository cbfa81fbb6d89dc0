"""The record of a lock's holder, which is stored as the lock's value in the cache."""

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

# A token is part of the key of a marker, and memcached must accept that key.
IS_TOKEN = re.compile("[!-9;-~]{1,32}")
LONGEST = 255
"""The maximum number of characters in a text, as in a database column."""
USUAL = 4096
"""Longer records, in bytes, are not kept in memory."""
MOST = 2**31 - 1
"""The largest number that a database column holds."""
MONTH = 30 * 24 * 60 * 60
"""The longest lease in seconds."""
CENTURY = 2**32
"""The largest Unix time that is accepted: the year 2106."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclasses.dataclass(frozen=True)
class Process:
    """Identify one process on one boot of one host.

    ``boot_id`` and ``pid_ns`` distinguish hosts and containers that have the same name. ``start``,
    in clock ticks since the boot, distinguishes a process from a later one with the same pid. Each
    is empty where the system does not provide it.
    """

    host: str
    boot_id: str
    pid_ns: str
    pid: int
    start: str


@dataclasses.dataclass(frozen=True)
class Holder(Process):
    """The record stored as the value of a lock: who holds it, since when, for how long.

    ``since`` is a Unix time by the clock of the holder's host: people read it, but no lease is
    computed from it. ``timeout`` is the length of the lease in seconds. ``kept`` is true for an
    entry that belongs to no process any more and stays for ``timeout`` seconds from ``since``.
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
    """How many runs may hold the lock at once, according to this holder; 1 is not stored."""

    @classmethod
    def new(cls, name: str, timeout: float, *, token: str | None = None, **run: Any) -> Holder:
        """Return the record of an acquisition by this process now; the default token is random.

        ``run`` has the fields ``task``, ``task_id`` and ``retries``, and ``slots`` if not 1.
        """
        token, holder = token or os.urandom(16).hex(), object.__new__(cls)
        # This takes a fifth of the time of a frozen dataclass's __init__.
        vars(holder).update(vars(this_process()), token=token, name=name, **run)
        vars(holder).update(since=time.time(), timeout=timeout)
        return holder

    def encode(self) -> bytes:
        return _encode(vars(self)).encode("ascii")

    @classmethod
    def decode(cls, value: bytes) -> Holder:
        """Read a record. Bytes of another origin become a holder without a name."""
        return _decode(value) if len(value) <= USUAL else _decode.__wrapped__(value)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Holder:
        """Read a record with missing or invalid fields, since anything can write into a cache.

        The values of the result are safe to show, and short enough for a key and for a column.
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
        """Return the record of an entry without a process, which ends after ``timeout``."""
        return dataclasses.replace(self, pid=0, start="", timeout=timeout, **changes)

    def is_run_of(self, task_id: str | None) -> bool:
        """Return whether the task with this id is the holder, also if the record cleaned the id."""
        return task_id is not None and self.task_id == _text(task_id)

    def mark(self) -> bytes:
        """Return the bytes that identify this task id in a record; empty without a task id.

        Quotes in other fields are escaped, so no other field can contain these bytes.
        """
        return b"" if self.task_id is None else f'"task_id":{_encode(self.task_id)}'.encode("ascii")

    def __str__(self) -> str:
        return describe_run(self.task_id, self.host, self.pid)


@lru_cache(maxsize=64)
def _decode(value: bytes) -> Holder:
    try:
        return Holder.from_dict(json.loads(value.decode()))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return Holder.from_dict({})


def describe_run(task_id: str | None, host: str, pid: int) -> str:
    """Return a run and its process as text: ``task 3f0c on web-3, process 8121``."""
    run = f"task {task_id}" if task_id else "code outside a task"
    return f"{run} on {host or 'an unknown host'}{f', process {pid}' if pid else ''}"


def clean(text: str, length: int | None = None) -> str:
    """Shorten an untrusted text, and escape the characters that are not printable.

    Control characters steer a terminal, format characters change the direction of the text after
    them, and some databases refuse NUL and surrogates.
    """
    text = text[:length]
    if text.isprintable():
        return text
    # Python does not count the spaces of Japanese and French as printable.
    return "".join(
        c if c.isprintable() or category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )[:length]


def _text(value: object) -> str | None:
    if type(value) is str and value.isprintable() and len(value) <= LONGEST:
        return value  # nearly always, and a list of locks reads many records
    return None if value is None else clean(str(value), LONGEST)


def _number(value: Any, most: float) -> float:
    number = float(value or 0)
    if 0 <= number <= most:
        return number
    return most if most < number < math.inf else 0


@cache
def this_process() -> Process:
    """Return the running process; computed once per process, and again after a fork."""
    pid = os.getpid()
    return Process(socket.gethostname(), boot_id(), _pid_namespace(), pid, start_time(pid))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=this_process.cache_clear)


def boot_id() -> str:
    """Return the id of this boot of the machine; empty where unknown."""
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
    # The program's name is in parentheses, and may itself contain spaces and parentheses. After
    # the last one, the first field is the state and the 20th the start time.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 19 else []


def _read(path: str) -> str:
    # A third of the time of open(), and each conflict reads a file.
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
