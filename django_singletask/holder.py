"""The record of a lock's holder, which is stored as the lock's value in the cache."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import socket
import subprocess
import sys
from functools import cache, lru_cache
from typing import Any, get_args, get_type_hints
from unicodedata import category

from django_singletask.forks import at_fork

# A token is part of the key of a marker, and memcached must accept that key.
IS_TOKEN = re.compile("[!-9;-~]{0,32}")
LONGEST = 255
"""The maximum number of characters in a text, as in a database column."""
LARGEST = 2**14
"""The maximum number of bytes in a record."""
COLUMN = 2**31 - 1
"""The largest number that a database column holds."""
VERSION = 1
"""Grows if a field gets another meaning; the holder of a newer record is unknown."""
LIMITS = {"since": 2**32, "timeout": 30 * 24 * 60 * 60, "version": VERSION}
"""The largest other numbers: the year 2106, and a month."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


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


@dataclasses.dataclass
class Holder(Process):
    """The record stored as the value of a lock: who holds it, since when, for how long.

    ``since`` is a Unix time by the clock of the holder's host: people read it, but no lease is
    computed from it. ``timeout`` is the length of the lease in seconds. ``kept`` is true for an
    entry that belongs to no process any more and stays for ``timeout`` seconds from ``since``. Do
    not change a record: other code may have the same object.
    """

    token: str
    name: str
    task: str | None
    task_id: str | None
    retries: int
    since: float | int
    timeout: float | int
    kept: bool = False
    slots: int = 1
    """How many runs may hold the lock at once, according to this holder."""
    version: int = VERSION

    def encode(self) -> bytes:
        return _encode(vars(self)).encode("ascii")

    @classmethod
    @lru_cache(maxsize=64)
    def decode(cls, value: bytes) -> Holder:
        """Read a record. Bytes of another origin become :data:`UNKNOWN`."""
        try:
            data = json.loads(value.decode()) if len(value) <= LARGEST else None
        except (ValueError, RecursionError):
            return UNKNOWN
        return cls.from_dict(data) if isinstance(data, dict) else UNKNOWN

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Holder:
        """Read the fields that this version has; missing fields are as in :data:`UNKNOWN`.

        If one value does not fit, nothing of the record is trusted: the holder is unknown. Texts
        become safe to show, and short enough for a column.
        """
        fields = {}
        for name, unknown in vars(UNKNOWN).items():
            value = data.get(name, unknown)
            if type(value) not in TYPES[name]:
                return UNKNOWN
            if type(value) is str:
                value = clean(value, LONGEST)
            elif not 0 <= (value or 0) <= LIMITS.get(name, COLUMN):
                return UNKNOWN
            fields[name] = value
        return cls(**fields) if IS_TOKEN.fullmatch(data.get("token", "")) else UNKNOWN

    def is_run_of(self, task_id: str | None) -> bool:
        """Return whether the task with this id is the holder, also if the record cleaned the id."""
        return task_id is not None and self.task_id == clean(task_id, LONGEST)

    def __str__(self) -> str:
        """Return the run and its process as text: ``task 3f0c on web-3, process 8121``."""
        run = f"task {self.task_id}" if self.task_id else "code outside a task"
        process = f", process {self.pid}" if self.pid else ""
        return f"{run} on {self.host or 'an unknown host'}{process}"


UNKNOWN = Holder("", "", "", "", 0, "", "", "", None, None, 0, 0.0, 0.0)
"""The holder of an entry that this package did not write."""
TYPES = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Holder).items()}
"""The types that each field can have; True is no number here."""


def without_process(holder: Holder, timeout: float, **changes: Any) -> Holder:
    """Return the record of an entry without a process, which ends after ``timeout``."""
    return dataclasses.replace(holder, pid=0, start="", timeout=timeout, **changes)


def mark_of(task_id: str | None) -> bytes:
    """Return the bytes that identify this task id in a record; empty without a task id.

    Quotes in other fields are escaped, so no other field can contain these bytes.
    """
    return b"" if task_id is None else f'"task_id":{_encode(task_id)}'.encode("ascii")


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


def _escape(record: logging.LogRecord) -> bool:
    """Let a line into the log; :func:`clean` its names, ids and texts of errors first."""
    line = record.getMessage()
    if (cleaned := clean(line)) != line:
        record.msg, record.args = cleaned, ()
    return True


# On the logger, not on a handler: the handlers are the project's.
logging.getLogger("django_singletask").addFilter(_escape)


@cache
def this_process() -> Process:
    """Return the running process; computed once per process, and again after a fork."""
    pid, pid_ns, time_ns = os.getpid(), _namespace("pid"), _namespace("time")
    return Process(socket.gethostname(), boot_id(), pid_ns, time_ns, pid, start_time(pid))


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
    return fields[19] if fields else ""


def read_stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on; an empty list if unreadable."""
    # The program's name is in parentheses, and may itself contain spaces and parentheses. After
    # the last one, the first field is the state, the 18th is the number of threads, and the 20th
    # the start time.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if len(fields) > 19 else []


def _read(path: str) -> str:
    # A third of the time of open(), and each conflict reads a file.
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            return os.read(file, 4096).decode(errors="replace").strip()
        finally:
            os.close(file)
    except OSError:
        return ""
