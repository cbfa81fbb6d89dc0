"""Deliver a message to a task as a worker does, and let another run hold its lock."""

from __future__ import annotations

from typing import Any

from celery.app.trace import build_tracer

from django_singletask.conf import conf
from django_singletask.locks import renewal
from django_singletask.locks.address import Run
from django_singletask.locks.keys import LATEST
from django_singletask.stores import get_store
from django_singletask.task.header import HEADER
from django_singletask.task.latest import State
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
    headers = {HEADER: {"id": task_id, "task": task.name, **(header or {})}}
    facts = {"id": task_id, "args": args, "kwargs": {}, "retries": 0, "headers": headers}
    task.push_request(**{**facts, "called_directly": False, **request})
    try:
        return task(*args)
    finally:
        task.pop_request()


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
        holder = Run(task.name, task_id, retries=retries).holder(self.lock.name, 60)
        self.value = holder.encode()

    def __enter__(self) -> None:
        assert get_store("redis").add(self.lock.key, self.value, 60) is None

    def __exit__(self, *exc: object) -> None:
        get_store("redis").release(self.lock.key, self.value)


def noted(key: str, task: Any = tasks.rerun) -> int:
    """Return the highest number that a message of "rerun" has noted."""
    beside = task.lock(key)._lock_key.beside(LATEST, task.name).key
    entry = get_store(conf.cache).read(beside)
    return 0 if entry is None else State.decode(entry.value).noted


def wait_for_debts() -> None:
    """Wait until all entries are freed that the background had to free in Redis so far."""
    store = get_store("redis")
    store.add("singletask:last", b"last", 60)
    renewal.renewers["redis"].owe(["singletask:last"], b"last", 60)  # they are paid in turn
    eventually(lambda: store.read("singletask:last") is None)


def deliver(task: Any, *args: Any, task_id: str = "mine", **request: Any) -> Any:
    """Run a message as a pool's process does; return what Celery's tracer says of it."""
    facts = {"id": task_id, "task": task.name, "retries": 0, "headers": None, "delivery_info": {}}
    facts |= {"argsrepr": repr(args), "kwargsrepr": "{}", "ignore_result": True, **request}
    return build_tracer(task.name, task, app=task.app)(task_id, args, {}, facts)
