"""Tasks of which workflows are made; they write what happens into the log.

All that are given the same key want the same lock, members and bodies of chords alike.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from celery import chain, group, shared_task
from celery.worker.request import Request
from pydantic import BaseModel

from django_singletask import LockConflict, SingletonTask, current_lock
from django_singletask.signals import lock_event
from tests.testapp import log
from tests.testapp.celery import app

SKIPPED = -1000
"""What a skipped run returns: it shows in every sum."""

LOCK: dict[str, Any] = {
    "bind": True,
    "base": SingletonTask,
    "lock_name": "workflow:{key}",
    # A run that is put off behind another comes back within a quarter of this.
    "lock_timeout": 6,
    "skip_result": SKIPPED,
}
FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {"bind": True},
    "skip": LOCK,
    "raise": {**LOCK, "on_conflict": "raise"},
    "wait": {**LOCK, "on_conflict": "wait", "lock_wait": 30},
    "requeue": {**LOCK, "on_conflict": "requeue"},
    "rerun": {**LOCK, "on_conflict": "rerun"},
    "start": {**LOCK, "unique_until": "start"},
    "finish": {**LOCK, "unique_until": "finish"},
}


def tell(event: Any, **kwargs: Any) -> None:
    """Write what happens to the locks into the log, from every process of the worker."""
    if event.name.startswith("workflow") and event.kind in ("skipped", "expired"):
        log.write(event.kind, name=event.name, reason=event.reason, of=event.task_id)


lock_event.connect(tell, dispatch_uid="workflow_tasks")


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
    """Give the next number."""
    run(self, key, seconds)
    return number + 1


@flavours
def total(self: Any, numbers: Any, key: str) -> int:
    """Add up what the members of a group have given."""
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
    """Replace itself by what wants the same lock, while it has it."""
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
    """Call this very task from its own body, and say what came of it."""
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
            # It meets this body, and ends before it where it does not wait for it.
            ends = self.on_conflict in ("skip", "raise") and answer != self.request.id
            until = time.monotonic() + (20 if ends else 0.3)
            while time.monotonic() < until and not (ends and result.ready()):
                time.sleep(0.01)
    except LockConflict as conflict:
        answer = f"conflict with {conflict.holder.task_id if conflict.holder else None}"
    return answer


@flavours
def call_another(self: Any, key: str, other: str, how: str) -> Any:
    """Call a task that wants another lock, or the same one, from a body that has one."""
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


# Errbacks. One with a parameter for each is called in the worker that saw the error, any other one
# is sent as a message with the failed task's id.


@shared_task(name="workflow.told")
def told(request: Any, error: Exception, traceback: Any, key: str) -> None:
    log.write("told", key=key, of=request.id, error=type(error).__name__)


@shared_task(name="workflow.locked_told", base=SingletonTask, lock_on=["key"])
def locked_told(request: Any, error: Exception, traceback: Any, key: str) -> None:
    lock = current_lock()
    assert lock is not None
    log.write("told", key=key, of=request.id, error=type(error).__name__, lock=lock.name)


@shared_task(name="workflow.raising", base=SingletonTask, lock_on=["key"], on_conflict="raise")
def raising(request: Any, error: Exception, traceback: Any, key: str) -> None:
    log.write("told", key=key, of=request.id, error=type(error).__name__)


@shared_task(name="workflow.unlockable", base=SingletonTask)
def unlockable(request: Any, error: Exception, traceback: Any, key: str) -> None:
    """Have a lock of all arguments, of which a request, an error and a traceback make none."""


@shared_task(name="workflow.sent", bind=True, base=SingletonTask, lock_on=["key"])
def sent(self: Any, failed: str, key: str) -> None:
    log.write("told", key=key, of=failed, lock=current_lock().name)


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


# Celery 5.5 does not understand those that are strings.
next_item.__annotations__ = {"item": Item, "return": Item}
modelled = shared_task(
    name="workflow.modelled", bind=True, base=SingletonTask, pydantic=True, skip_result=None
)(next_item)


class OwnRequest(Request):
    """Tell what happens, as a project's own class may."""

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        log.write("accepted", key=self.id, by=pid)
        super().on_accepted(pid, time_accepted)


class WithRequest(SingletonTask):
    abstract = True
    Request = OwnRequest


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
