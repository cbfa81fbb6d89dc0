"""Choose the token of each delivery in the main process, and free entries of discarded calls."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from django_singletask.task.base import SingletonTask
from django_singletask.task.header import HEADER, Header, wire_of
from django_singletask.task.unique import discard
from django_singletask.worker.watcher import Accepted, current_watcher, has_processes


def hand_out_token(sender: Any, request: Any, **kwargs: Any) -> None:
    """Choose the token of this delivery's lock, and note which process runs the delivery.

    So the main process and the child know the same token. This changes the request itself, because
    a request class of this package would replace the user's.
    """
    if not isinstance(request.task, SingletonTask) or not has_processes(sender):
        return
    name = request.task.name
    try:
        wire = wire_of(request.request_dict, request.id, name) or {"id": request.id, "task": name}
    except ValueError:
        return  # the run itself fails with this error
    wire = request.request_dict[HEADER] = {**wire, "token": os.urandom(16).hex()}
    delivery, accepted, succeeded = Accepted(request), request.on_accepted, request.on_success

    def on_accepted(pid: int, time_accepted: float) -> None:
        del request.on_accepted  # a cycle, which would keep the request until a collection
        watcher = current_watcher()
        if watcher is not None and pid:
            watcher.deliveries[pid] = delivery
        accepted(pid, time_accepted)

    def on_success(*args: Any, **kwargs: Any) -> None:
        del request.on_success
        delivery.ended = True
        succeeded(*args, **kwargs)

    request.on_accepted = on_accepted
    if "queued" in wire:
        request.on_success = on_success


def free_revoked(sender: Any, request: Any, terminated: bool, **kwargs: Any) -> None:
    """Free the entry of a call that was revoked, or expired, before its start."""
    if not terminated:
        with suppress(ValueError):  # a malformed header names no entry
            discard(Header.of(request.headers, request.id, sender.name))


def free_unreadable(message: Any, **kwargs: Any) -> None:
    """Free the entry of a call whose message or task the worker does not know."""
    headers = getattr(message, "headers", None) or {}
    with suppress(ValueError):
        discard(Header.of(headers, headers.get("id"), str(headers.get("task"))))
