"""Tasks that write into a log what they do."""

from __future__ import annotations

import time
import uuid

from celery import Task, shared_task
from celery.exceptions import Ignore, Reject

from django_singletask import LockConflict, SingletonTask, TaskLock, current_lock, only_one
from tests import intervals
from tests.testapp import log


def body(key: str, seconds: float = 0, task_id: str | None = None, **facts: object) -> str:
    """Run for these seconds, or until the test says that it has seen enough."""
    run = uuid.uuid4().hex
    log.write("start", key=key, run=run, task_id=task_id, **facts)
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not log.enough(key).exists():
            time.sleep(min(0.01, max(0, until - time.monotonic())))
    finally:
        log.write("end", key=key, run=run, task_id=task_id)
    return "ran"


@shared_task
def plain(key: str, seconds: float = 0) -> str:
    return body(key, seconds)


@shared_task(bind=True, base=SingletonTask, lock_on=["key"], skip_result="skipped")
def hold(self, key: str, seconds: float = 0) -> str:
    return body(key, seconds, self.request.id)


@shared_task(base=SingletonTask, lock_on=["key"], on_conflict="raise")
def insist(key: str, seconds: float = 0) -> str:
    return body(key, seconds)


@shared_task(base=SingletonTask)
def whose(key: str) -> tuple[str, str, bool]:
    lock = current_lock()
    assert lock is not None
    return lock.name, lock.key, lock.owned()


@shared_task
@only_one(key="the only one", skip_result="skipped")
def alone(seconds: float = 0) -> str:
    return body("alone", seconds)


@shared_task(base=SingletonTask, lock_on=["key"], skip_result="skipped")
def meet(key: str, number: int, place: str) -> str:
    """Wait until so many runs have come to a place."""
    log.write("meets", place=place)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if sum(line.get("place") == place for line in log.read(log.path())) >= number:
            return "met"
        time.sleep(0.01)
    return "alone"


@shared_task(bind=True, base=SingletonTask, lock_on=["key"], lock_timeout=600)
def long(self, key: str, seconds: float = 0) -> str:
    """No test waits until its lease ends. So if its lock is free, somebody freed it."""
    return body(key, seconds, self.request.id)


@shared_task(
    bind=True,
    base=SingletonTask,
    lock_on=["key"],
    lock_timeout=20,
    acks_late=True,
    reject_on_worker_lost=True,
)
def late(self, key: str, seconds: float = 0) -> str:
    return body(key, seconds, self.request.id)


@shared_task(
    bind=True, base=SingletonTask, lock_on=["key"], acks_late=True, reject_on_worker_lost=True
)
def careful(self, key: str, seconds: float = 0) -> str:
    """Ask every 10 ms whether the lock is lost, and note what there is to know of it."""
    lock = current_lock()
    with intervals.body(lock, self.request.id):
        intervals.fence(lock)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            lock.check()
            time.sleep(0.01)
    return "ran"


@shared_task(
    bind=True, base=SingletonTask, lock_on=["key"], acks_late=True, reject_on_worker_lost=True
)
def finish(self, handle: str, key: str, seconds: float = 0) -> str:
    """Run under a lock of its own and the one that was handed over."""
    with TaskLock.receive(handle):
        return body(key, seconds, self.request.id)


@shared_task
def pass_on(handle: str, key: str, seconds: float = 0) -> str:
    """Run under the lock that was handed over, and hand it over to the next link."""
    with TaskLock.receive(handle) as lock:
        body(key, seconds)
        return lock.hand_over(for_=60)


@shared_task(bind=True, base=SingletonTask, lock_on=["key"], max_retries=1000)
def retrying(self, key: str, retries: int) -> str:
    """Retry at once, with a body that takes a moment to end."""
    log.write("try", key=key, retries=self.request.retries)
    try:
        if self.request.retries < retries:
            raise self.retry(countdown=0)
    finally:
        time.sleep(0.01)
    return "done"


@shared_task(bind=True, base=SingletonTask, lock_on=[])
def replacing(self, step: int) -> str:
    """Replace itself by one call, then by a chain of two, all with the same lock."""
    log.write("step", step=step)
    if step == 0:
        raise self.replace(replacing.si(1))
    if step == 1:
        raise self.replace(replacing.si(2) | replacing.si(3))
    return f"step {step}"


# The limit is longer than a take waits because the tests have emptied the cache.
@shared_task(bind=True, base=SingletonTask, lock_on=["key"], soft_time_limit=3)
def limited(self, key: str) -> str:
    return body(key, 30, self.request.id)


# Tasks with the other policies, and with unique_until

POLICY = {"bind": True, "base": SingletonTask, "lock_on": ["key"], "lock_timeout": 4}


@shared_task(**POLICY, on_conflict="wait", lock_wait=30)
def wait(self, key: str, seconds: float = 0, value: int = 0) -> str:
    return body(key, seconds, self.request.id, value=value)


@shared_task(**POLICY, on_conflict="requeue")
def requeue(self, key: str, seconds: float = 0, value: int = 0) -> str:
    return body(key, seconds, self.request.id, value=value)


@shared_task(**POLICY, on_conflict="requeue", acks_late=True, reject_on_worker_lost=True)
def requeue_late(self, key: str, seconds: float = 0, value: int = 0) -> str:
    return body(key, seconds, self.request.id, value=value)


LATEST = {"unique_until": "start", "on_duplicate": "replace", "on_conflict": "requeue"}


@shared_task(**POLICY, **LATEST, skip_result="superseded")
def latest(self, key: str, seconds: float = 0, value: int = 0) -> str:
    return body(key, seconds, self.request.id, value=value)


@shared_task(**POLICY, unique_until="start", skip_result="skipped")
def unique(self, key: str, seconds: float = 0, value: int = 0) -> str:
    return body(key, seconds, self.request.id, value=value)


def try_again(self, conflict, key: str, seconds: float = 0) -> None:
    log.write("skipped", key=key, task_id=self.request.id, by=conflict.holder.task_id)
    raise self.retry(countdown=0.5)


@shared_task(**POLICY, unique_until="finish", on_skip=try_again, max_retries=100)
def trying_again(self, key: str, seconds: float = 0) -> str:
    return body(key, seconds, self.request.id)


def reject(self, conflict, key: str) -> None:
    log.write("skipped", key=key, task_id=self.request.id, by=conflict.holder.task_id)
    raise Reject("busy", requeue=False)


@shared_task(
    **POLICY, unique_until="start", on_skip=reject, acks_late=True, reject_on_worker_lost=True
)
def rejecting(self, key: str) -> str:
    return body(key, 0, self.request.id)


@shared_task(**POLICY, unique_until="finish", skip_result="skipped", max_retries=10)
def unique_to_the_end(self, key: str, seconds: float = 0, retries: int = 0) -> str:
    answer = body(key, seconds, self.request.id)
    if self.request.retries < retries:
        raise self.retry(countdown=1)
    return answer


@shared_task(
    **POLICY,
    skip_result="skipped",
    acks_late=True,
    reject_on_worker_lost=True,
    max_retries=100,
    autoretry_for=(ArithmeticError,),
    retry_kwargs={"countdown": 0.05},
)
def ending(self, key: str, *ends: str) -> str:
    """End each run of this call by the next of these words, and then return."""
    answer = body(key, 0, self.request.id)
    runs = [line for line in log.read(log.path()) if line.get("task_id") == self.request.id]
    earlier = sum(line["event"] == "start" for line in runs) - 1
    end = [*ends, "return"][min(earlier, len(ends))]
    if end == "free and raise":
        current_lock().hand_over(for_=0.001)
    if end in ("raise", "free and raise"):
        raise LookupError(end)
    if end == "retry":
        raise self.retry(countdown=0.05)
    if end == "autoretry":
        raise ArithmeticError(end)
    if end == "reject":
        raise Reject(end, requeue=True)
    if end == "ignore":
        raise Ignore
    return answer


@shared_task(**POLICY, on_outage="run")
def regardless(self, key: str) -> str:
    return body(key, 0, self.request.id)


@shared_task(
    **POLICY,
    on_conflict="raise",
    unique_until="start",
    autoretry_for=(LockConflict,),
    default_retry_delay=1,
    max_retries=20,
)
def tenacious(self, key: str) -> str:
    return body(key, 0, self.request.id)


# Tasks with another base that has a __call__


class Noted(Task):
    def __call__(self, *args: object, **kwargs: object) -> object:
        log.write("called", task=self.name, locked=bool(current_lock()))
        return super().__call__(*args, **kwargs)


class LockFirst(SingletonTask, Noted):
    abstract = True


class LockLast(Noted, SingletonTask):
    abstract = True


NOTED = {"bind": True, "lock_on": ["key"], "unique_until": "finish", "max_retries": 3}


@shared_task(**NOTED, base=LockFirst)
def noted_inside(self, key: str) -> str:
    if not self.request.retries:
        raise self.retry(countdown=1)
    return body(key, 0, self.request.id)


@shared_task(**NOTED, base=LockLast)
def noted_outside(self, key: str) -> str:
    if not self.request.retries:
        raise self.retry(countdown=1)
    return body(key, 0, self.request.id)
