"""Choose the token of each delivery in the main process, and free what a worker discards."""

from __future__ import annotations

import os
from typing import Any

from django_singletask.task.base import SingletonTask
from django_singletask.task.header import HEADER, Header, put_token
from django_singletask.task.unique import discard
from django_singletask.worker.hops import Hops
from django_singletask.worker.watcher import Accepted, current_watcher, has_processes

__all__ = ["free_revoked", "free_unreadable", "hand_out_token"]

_hops = Hops()


def hand_out_token(sender: Any, request: Any, **kwargs: Any) -> None:
    """Choose the token under which this delivery takes its lock, and note which process runs it.

    So main process and child know the same token. It is set on the request itself, because a class
    of requests of this package would displace a user's own.
    """
    if not isinstance(request.task, SingletonTask) or not has_processes(sender):
        return
    put_token(request.request_dict, request.id, request.task.name, os.urandom(16).hex())
    delivery = Accepted(request)
    accepted = request.on_accepted

    def on_accepted(pid: int, time_accepted: float) -> None:
        del request.on_accepted  # else the request refers to itself, and stays until a collection
        watcher = current_watcher()
        if watcher is not None and pid:
            watcher.deliveries[pid] = delivery
        accepted(pid, time_accepted)

    request.on_accepted = on_accepted
    _hops.follow(sender, request, request.request_dict[HEADER])
    if "queued" in request.request_dict[HEADER]:
        note_end(request, delivery)


def note_end(request: Any, delivery: Accepted) -> None:
    """Note that the process of a delivery has reported it, whatever became of the task."""
    succeeded = request.on_success

    def on_success(*args: Any, **kwargs: Any) -> None:
        del request.on_success
        delivery.ended = True
        succeeded(*args, **kwargs)

    request.on_success = on_success


def free_revoked(sender: Any, request: Any, terminated: bool, **kwargs: Any) -> None:
    """Let equal calls be queued again: this one was revoked or has expired before its start."""
    if not terminated:
        discard(Header.of(request.headers, request.id, sender.name))


def free_unreadable(message: Any, **kwargs: Any) -> None:
    """Let equal calls be queued again: the worker cannot read this one, or knows no such task."""
    headers = getattr(message, "headers", None) or {}
    discard(Header.of(headers, headers.get("id"), str(headers.get("task"))))
