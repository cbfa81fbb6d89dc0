"""Choose the token of each delivery in the main process, and free what a worker discards."""

from __future__ import annotations

import os
from typing import Any

from django_singletask.task.base import SingletonTask
from django_singletask.task.header import Header
from django_singletask.task.unique import discard
from django_singletask.worker.watcher import Accepted, current_watcher, has_processes, header_of

__all__ = ["free_revoked", "free_unreadable", "hand_out_token"]


def hand_out_token(sender: Any, request: Any, **kwargs: Any) -> None:
    """Choose the token under which this delivery takes its lock, and note which process runs it.

    So main process and child know the same token. It is set on the request itself, because a class
    of requests of this package would displace a user's own.
    """
    if not isinstance(request.task, SingletonTask) or not has_processes(sender):
        return
    token = os.urandom(16).hex()
    header = header_of(request)._replace(token=token)
    request.request_dict.update(header.into(None))
    delivery = Accepted(header, request)
    accepted, succeeded = request.on_accepted, request.on_success

    def on_accepted(pid: int, time_accepted: float) -> None:
        watcher = current_watcher()
        if watcher is not None and pid:
            watcher.accepted(pid, delivery)
        accepted(pid, time_accepted)

    def on_success(*args: Any, **kwargs: Any) -> None:
        # Whatever became of the task, its process has reported it.
        delivery.ended = True
        succeeded(*args, **kwargs)

    request.on_accepted, request.on_success = on_accepted, on_success


def free_revoked(sender: Any, request: Any, terminated: bool, **kwargs: Any) -> None:
    """Let equal calls be queued again: this one was revoked or has expired before its start."""
    if not terminated:
        discard(Header.of(request.headers, request.id, sender.name))


def free_unreadable(message: Any, **kwargs: Any) -> None:
    """Let equal calls be queued again: the worker cannot read this one, or knows no such task."""
    headers = getattr(message, "headers", None) or {}
    discard(Header.of(headers, headers.get("id"), str(headers.get("task"))))
