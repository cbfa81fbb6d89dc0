"""Say which process holds a lock."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from functools import cache
from typing import Any

__all__ = ["Holder", "Process", "this_process"]


@dataclasses.dataclass(frozen=True)
class Process:
    """Identify one process on one boot of one host.

    ``boot_id`` and ``pid_ns`` tell two hosts, or two containers on one host, apart even if both
    carry the same name; ``start`` (clock ticks since boot) tells a process from a later one that
    was given the same pid. Each is empty where the system does not tell.
    """

    host: str
    boot_id: str
    pid_ns: str
    pid: int
    start: str


@dataclasses.dataclass(frozen=True)
class Holder:
    """The record stored as the value of a lock: who holds it, since when, for how long.

    ``since`` is a Unix time in seconds by the holder's own clock: for people to read, never to
    compute a lease with. ``timeout`` is the length of the lease in seconds.
    """

    token: str
    name: str
    task: str | None
    task_id: str | None
    retries: int
    host: str
    boot_id: str
    pid_ns: str
    pid: int
    start: str
    since: float
    timeout: float

    @classmethod
    def new(
        cls, name: str, timeout: float, *, task: str | None, task_id: str | None, retries: int
    ) -> Holder:
        """Describe an acquisition by this process, now, with a random token of its own."""
        return cls(
            token=os.urandom(16).hex(),
            name=name,
            task=task,
            task_id=task_id,
            retries=retries,
            since=time.time(),
            timeout=timeout,
            **vars(this_process()),
        )

    def encode(self) -> bytes:
        """Return the record as the bytes that a store keeps."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, value: bytes) -> Holder:
        """Read a record; what something else wrote under the key becomes a nameless holder."""
        try:
            return cls.from_dict(json.loads(value))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return cls.from_dict({})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Holder:
        """Read a record that may lack fields or hold values of a wrong type."""
        return cls(
            token=str(data.get("token") or ""),
            name=str(data.get("name") or ""),
            task=_text(data.get("task")),
            task_id=_text(data.get("task_id")),
            retries=int(data.get("retries") or 0),
            host=str(data.get("host") or ""),
            boot_id=str(data.get("boot_id") or ""),
            pid_ns=str(data.get("pid_ns") or ""),
            pid=int(data.get("pid") or 0),
            start=str(data.get("start") or ""),
            since=float(data.get("since") or 0),
            timeout=float(data.get("timeout") or 0),
        )

    def __str__(self) -> str:
        who = f"task {self.task_id}" if self.task_id else "a lock in code"
        return f"{who} on {self.host or 'an unknown host'}, process {self.pid or 'unknown'}"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


@cache
def this_process() -> Process:
    """Describe the running process; computed once a process, and anew after a fork."""
    pid = os.getpid()
    return Process(
        host=socket.gethostname(),
        boot_id=_read("/proc/sys/kernel/random/boot_id"),
        pid_ns=_pid_namespace(),
        pid=pid,
        start=_start_time(pid),
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=this_process.cache_clear)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    # The name of the program stands in parentheses and may hold spaces and parentheses itself:
    # count the fields from the last one. The start time is field 22, the state field 3.
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""
