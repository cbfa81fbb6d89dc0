"""Tasks for workflows; they write what happens into the log.

Tasks with the same key take the same lock, also if one is a member and one the body of a chord.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from celery import chain, group, shared_task
from celery.worker.request import Request
from pydantic import BaseModel

from django_singletask import LockConflict, SingletonTask, current_lock
from tests.testapp import log
from tests.testapp.celery import app

SKIPPED = -1000
"""The result of a skipped run, which shows in every sum."""

LOCK: dict[str, Any] = {
    "bind": True,
    "base": SingletonTask,
    "lock_name": "workflow:{key}",
    # A postponed run is delivered again within a quarter of this.
    "lock_timeout": 6,
}
SKIPS = {**LOCK, "skip_result": SKIPPED}
FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {"bind": True},
    "skip": SKIPS,
    "raise": {**LOCK, "on_conflict": "raise"},
    "wait": {**LOCK, "on_conflict": "wait", "lock_wait": 30},
    "requeue": {**LOCK, "on_conflict": "requeue"},
    "start": {**SKIPS, "unique_until": "start"},
    "finish": {**SKIPS, "unique_until": "finish"},
}


def flavours(function: Any) -> dict[str, Any]:
    """Make a task of each flavour."""
    name = f"workflow.{function.__name__}"
    return {
        flavour: shared_task(name=f"{name}.{flavour}", **options)(function)
        for flavour, options in FLAVOURS.items()
    }


def run(task: Any, key: str, seconds: float = 0, **facts: Any) -> None:
    name = uuid.uuid4().hex
    log.write("start", key=key, run=name, task_id=task.request.id, **facts)
    try:
        time.sleep(0.1 if key.startswith("slow") else seconds)
    finally:
        log.write("end", key=key, run=name)


@flavours
def add(self: Any, number: int, key: str, seconds: float = 0) -> int:
    """Return the next number."""
    run(self, key, seconds)
    return number + 1


@flavours
def total(self: Any, numbers: Any, key: str) -> int:
    """Add up the results of the members of a group."""
    run(self, key)
    return sum(flat(numbers))


def flat(numbers: Any) -> list[int]:
    if isinstance(numbers, int):
        return [numbers]
    return [number for part in numbers for number in flat(part)]


@flavours
def once(self: Any, key: str) -> str:
    run(self, key)
    return key


@flavours
def fail(self: Any, number: int, key: str) -> None:
    run(self, key)
    raise ZeroDivisionError(key)


@flavours
def replace(self: Any, number: int, key: str, by: str) -> int:
    """Replace itself by tasks that take the same lock, while it holds that lock."""
    run(self, key)
    flavour = self.name.rpartition(".")[2]
    same, last = add[flavour], (key, 0.05)
    other = same.si(number + 10, f"{key} other")
    with_what = {
        "one": same.si(number, *last),
        "itself": self.s(number, key, "one"),
        "chain": chain(same.s(number, *last), same.s(*last), same.s(*last)),
        "group": group(same.si(number, *last), other),
        "chord": group(same.si(number, *last), other) | total[flavour].s(key),
        "group of chains": group(same.si(number, *last) | same.s(*last), other),
        "chain into a group": same.si(number, *last) | group(same.s(*last), other),
    }
    try:
        return self.replace(with_what[by])
    finally:
        if not self.request.is_eager:
            time.sleep(0.03)  # so that the replacement arrives before this body has ended


@flavours
def call_itself(self: Any, key: str, how: str) -> Any:
    """Call this task from its own body, and return what the call returns or raises."""
    if how == "bottom":
        run(self, key)
        return "ran"
    run(self, key, how=how)
    answer: Any
    try:
        if how == "direct":
            answer = self(key, "bottom")
        elif how == "apply":
            answer = self.apply((key, "bottom")).get(disable_sync_subtasks=False)
        else:
            result = self.apply_async((key, "bottom"))
            answer = result.id
            # With these policies the message meets this body, and ends before it.
            ends = self.on_conflict in ("skip", "raise") and answer != self.request.id
            until = time.monotonic() + (20 if ends else 0.3)
            while time.monotonic() < until and not (ends and result.ready()):
                time.sleep(0.01)
    except LockConflict as conflict:
        answer = f"conflict with {conflict.holder.task_id if conflict.holder else None}"
    return answer


@shared_task(name="workflow.page", unique_until="finish", on_conflict="requeue", **LOCK)
def page(self: Any, key: str, number: int) -> int:
    """Send the next page, under the same lock."""
    run(self, key, number=number)
    if number < 2:
        self.apply_async((key, number + 1))
    return number


@flavours
def call_another(self: Any, key: str, other: str, how: str) -> Any:
    """Call a task that takes another lock, or the same one, from a body that holds a lock."""
    inner = add[self.name.rpartition(".")[2]]
    lock = current_lock()
    try:
        if how == "direct":
            answer = inner(1, other)
        else:
            answer = inner.apply((1, other)).get(disable_sync_subtasks=False)
    except LockConflict as conflict:
        answer = f"conflict with {conflict.holder.task_id if conflict.holder else None}"
    assert current_lock() is lock
    return answer


# Errbacks. Celery calls one with these parameters in the worker that saw the error, and sends any
# other one as a message with the id of the failed task.


@shared_task(name="workflow.errback")
def errback(request: Any, error: Exception, traceback: Any, key: str) -> None:
    log.write("errback", key=key, of=request.id, error=type(error).__name__)


@shared_task(name="workflow.locked_errback", base=SingletonTask, lock_on=["key"])
def locked_errback(request: Any, error: Exception, traceback: Any, key: str) -> None:
    lock = current_lock()
    assert lock is not None
    log.write("errback", key=key, of=request.id, error=type(error).__name__, lock=lock.name)


@shared_task(name="workflow.raising", base=SingletonTask, lock_on=["key"], on_conflict="raise")
def raising(request: Any, error: Exception, traceback: Any, key: str) -> None:
    log.write("errback", key=key, of=request.id, error=type(error).__name__)


@shared_task(name="workflow.unlockable", base=SingletonTask)
def unlockable(request: Any, error: Exception, traceback: Any, key: str) -> None:
    """Make a lock of all arguments, which a request, an error and a traceback do not allow."""


@shared_task(name="workflow.sent_errback", bind=True, base=SingletonTask, lock_on=["key"])
def sent_errback(self: Any, failed: str, key: str) -> None:
    log.write("errback", key=key, of=failed, lock=current_lock().name)


# Kinds of tasks


@shared_task(name="workflow.bound", bind=True, base=SingletonTask)
def bound(self: Any, key: str) -> tuple[str, str, str]:
    return self.request.id, self.name, current_lock().name


@shared_task(name="workflow.untyped", base=SingletonTask, typing=False)
def untyped(key: str, *rest: int, **more: int) -> str:
    return current_lock().name


class ByClass(SingletonTask):
    name = "workflow.by_class"
    lock_on = ("key",)
    skip_result = SKIPPED

    def run(self, number: int, key: str) -> int:
        run(self, key)
        return number + 1


by_class = app.register_task(ByClass())


@shared_task(
    name="workflow.impatient",
    bind=True,
    base=SingletonTask,
    lock_on=["key"],
    autoretry_for=(ZeroDivisionError,),
    max_retries=5,
    default_retry_delay=0,
)
def impatient(self: Any, number: int, key: str, failures: int) -> int:
    run(self, key, retries=self.request.retries)
    if self.request.retries < failures:
        raise ZeroDivisionError
    return number + 1


class Item(BaseModel):
    key: str
    number: int = 0


def next_item(self: Any, item: Any) -> Any:
    run(self, item.key, lock=current_lock().name)
    return Item(key=item.key, number=item.number + 1)


# Celery 5.5 does not understand annotations that are strings.
next_item.__annotations__ = {"item": Item, "return": Item}
modelled = shared_task(
    name="workflow.modelled", bind=True, base=SingletonTask, pydantic=True, skip_result=None
)(next_item)


class LoggedRequest(Request):
    """Write accepted messages into the log; a project may have such a class."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        log.write("accepted", key=self.id, by=pid)
        super().on_accepted(pid, time_accepted)


class WithRequest(SingletonTask):
    abstract = True
    Request = LoggedRequest


@shared_task(
    name="workflow.requested", bind=True, base=WithRequest, lock_on=["key"], lock_timeout=120
)
def requested(self: Any, key: str, seconds: float = 0) -> str:
    run(self, key, seconds)
    return "ran"


@shared_task(name="workflow.shared", bind=True, base=SingletonTask, skip_result="skipped")
def shared(self: Any, key: str) -> str:
    run(self, key)
    return current_lock().key
