"""Deliver a message to a task as a worker does, and let another run hold its lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from celery.app.trace import build_tracer
from django.db import connections

from django_singletask import LockUnavailable, TaskLock
from tests import inside
from tests.entries import eventually
from tests.testapp import tasks

AWAITED: list[dict[str, Any]] = [
    {"task_id": "mine"},
    {"link": tasks.plain.si("a")},
    {"link_error": tasks.plain.si("a")},
    {"chord": tasks.plain.si("a")},
    {"group_id": "a group"},
    {"chain": [tasks.plain.si("a")]},
]
"""Options of calls for which others wait."""


def receive(
    task: Any, *args: Any, task_id: str = "mine", header: Any = None, **request: Any
) -> Any:
    """Run a message as the worker's tracer does."""
    headers = inside.headers_for(task, task_id, **(header or {}))
    facts = {"id": task_id, "args": args, "kwargs": {}, "retries": 0, "headers": headers}
    task.push_request(**{**facts, "called_directly": False, **request})
    try:
        return task(*args)
    finally:
        task.pop_request()


def header_of(message: dict[str, Any]) -> dict[str, Any]:
    """Return what the package has written into a message."""
    return inside.header_of(message["headers"])


def receive_sent(task: Any, message: dict[str, Any], **request: Any) -> Any:
    """Run a message that was collected, in the same way."""
    facts = {"task_id": message["task_id"], "header": header_of(message), **request}
    return receive(task, *message["args"], **facts)


def elsewhere(work: Callable[..., Any], *args: Any) -> Any:
    """Do something in a thread of its own, as another process does it; return the result."""
    return at_once(work, [args])[0]


def at_once(work: Callable[..., Any], calls: Sequence[Any]) -> list[Any]:
    """Make each of these calls in a thread of its own, at the same moment; return the results."""
    barrier = threading.Barrier(len(calls))

    def one(args: Any) -> Any:
        barrier.wait()
        try:
            return work(*args)
        finally:
            connections.close_all()
            inside.close_connections()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(one, calls))


def at_the_first_pause(monkeypatch: Any, work: Callable[[], Any]) -> list[float]:
    """Do something when this thread sleeps first, instead of sleeping; return all its pauses."""
    this_thread, pauses = threading.get_ident(), []

    def sleep(seconds: float) -> None:
        if threading.get_ident() == this_thread:
            pauses.append(seconds)
            if len(pauses) == 1:
                work()

    monkeypatch.setattr("time.sleep", sleep)
    return pauses


def refuse(*args: Any, **options: Any) -> None:
    """Answer as a cache that is down."""
    raise LockUnavailable("down")


def collect_sent(app: Any, monkeypatch: Any, make: Any = dict) -> list[Any]:
    """Collect the messages that would be published, each as ``make(name=…, args=…, …)``."""
    messages: list[Any] = []

    def send_task(name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        messages.append(make(name=name, args=args, **options))
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)
    return messages


class held_by:
    """Let the run of a task id hold the lock of ``task("a")``, in Redis."""

    def __init__(self, task_id: str, retries: int = 0, task: Any = tasks.hold) -> None:
        self.lock = task.lock("a")
        self.value = inside.holder_of(self.lock, task, task_id, retries).encode()

    def __enter__(self) -> held_by:
        assert inside.read(self.lock) is None
        inside.write(self.lock, self.value)
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    def free(self) -> None:
        inside.free(self.lock, self.value)


def leave_lock(lock: Any, alias: str, *, length: float, left: float, **changes: Any) -> None:
    """Let a lock be there that a run has left for ``length`` seconds, of which some are left."""
    holder = inside.holder_of(lock, task_id="another")
    changes = {"pid": 0, "start": "", "since": time.time() - length + left, **changes}
    holder = replace(holder, timeout=length, **changes)
    inside.put_entry(lock.key, holder.encode(), max(left, 0.5), alias)


def wait_for_debts() -> None:
    """Wait until all entries are freed that the background had to free in Redis so far."""
    last = TaskLock("the last debt")
    inside.write(last, b"last")
    inside.free_in_background(last, b"last")  # they are paid in turn
    eventually(lambda: inside.read(last) is None)


def deliver(task: Any, *args: Any, task_id: str = "mine", **request: Any) -> Any:
    """Run a message as a pool's process does; return what Celery's tracer says of it."""
    facts = {"id": task_id, "task": task.name, "retries": 0, "headers": None, "delivery_info": {}}
    facts |= {"argsrepr": repr(args), "kwargsrepr": "{}", "ignore_result": True, **request}
    return build_tracer(task.name, task, app=task.app)(task_id, args, {}, facts)
