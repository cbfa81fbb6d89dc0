"""What a type checker says about tasks; it refuses the lines with ``# refused``, and no others."""

from __future__ import annotations

from typing import Any, assert_type

from celery import shared_task
from celery.result import AsyncResult, EagerResult

from django_singletask import CallOptions, SingletonTask, TaskLock, singleton_task


@singleton_task
def bare(feed_id: int, text: str = "") -> str:
    return text


@singleton_task(on_conflict="wait", lock_wait=5, lock_on=["feed_id"], acks_late=True)
def with_options(feed_id: int, text: str = "") -> str:
    return text


@singleton_task(bind=True, unique_until="start")
def bound(self: SingletonTask[..., str], feed_id: int) -> str:
    assert_type(self.lock(1), TaskLock)
    return self.name


class Own(SingletonTask):
    on_conflict = "raise"
    lock_on = ("feed_id",)


class ByClass(Own):
    lock_timeout = 30

    def run(self, feed_id: int) -> str:
        return self.lock(feed_id).name

    def apply_async_later(self, feed_id: int, **options: Any) -> AsyncResult[Any]:
        return super().apply_async((feed_id,), countdown=60, **options)


@singleton_task(base=Own, queue="feeds", routing_key="feed.import", compression="gzip")
def with_own_base(feed_id: int) -> str:
    return ""


# Calls

bare.delay(1, text="x")
bare.delay(feed_id=1)
bare.delay("x")  # refused
bare.delay()  # refused
bare.delay(1, txt="x")  # refused
bare.delay_on_commit(feed_id=1)
bare.delay_on_commit("x")  # refused
bare("x")  # refused
bare.si("x")  # refused
with_options.delay(1, text="x")
with_options.delay(feed_id="x")  # refused
bound.delay(1)
bound.delay("x")  # refused
with_own_base.delay(1)
with_own_base.delay("x")  # refused

# These take any arguments.
bare.s("x")
bare.lock("x")
bare.queued("x")
bare.apply_async(("x",))
bare.apply(("x",))

assert_type(bare(1), str)
assert_type(bare.run(1), str)
assert_type(bare.delay(1), AsyncResult[str])
assert_type(with_options.apply_async((1,)), AsyncResult[str])
assert_type(bound.apply((1,)), EagerResult[str])
assert_type(with_own_base.queued(1), AsyncResult[str] | None)
assert_type(bare.lock(1), TaskLock)

# Options of one call

bare.apply_async((1,), lock_options={"on_conflict": "requeue", "lock_wait": 60})
bare.apply_async((1,), lock_options={"on_conflikt": "raise"})  # refused
bare.apply_async((1,), lock_options={"on_conflict": "rise"})  # refused
bare.apply_async((1,), lock_options={"on_skip": print})  # refused
bare.apply((1,), lock_options={"on_skip": print, "lock_timeout": 60})
bare.apply((1,), lock_options={"lock_timeout": 60})
bare.apply((1,), lock_options={"lock_timeout": "60"})  # refused
bare.apply((1,), lock_options={"on_skpi": print})  # refused
bare.apply_async((1,), countdown=5, queue="feeds", headers=None)
bare.apply_async((1,), delivery_mode=1, priority=None, soft_time_limit=2.5, ignore_result=None)
bare.apply_async((1,), countdwn=5)  # refused
bare.apply_async((1,), lock_timeout=5)  # refused
urgent: CallOptions = {"on_outage": "run", "skip_result": 0}
bare.apply_async((1,), lock_options=urgent)
bare.apply((1,), lock_options=urgent)


# Options in the decorator, and on a class


@singleton_task(on_konflict="skip")  # refused
def misspelled() -> None: ...


@singleton_task(on_conflict="skpi")  # refused
def wrong_choice() -> None: ...


@singleton_task(lock_on="feed_id")  # refused
def text_for_a_list(feed_id: int) -> None: ...


@singleton_task(base=dict)  # refused
def another_base() -> None: ...


class Wrong(SingletonTask):
    on_conflict = "skpi"  # refused


class Misspelled(SingletonTask):
    lock_timout = 5  # a TypeError at run time


class Methods(SingletonTask):
    def lock_name(self, feed_id: int) -> str:
        return f"feed:{feed_id}"

    def on_skip(self, conflict: Exception, feed_id: int) -> str:
        return ""


# With @shared_task, a checker knows the class of the task, but no parameters, options or result.


@shared_task(base=SingletonTask, on_konflict="skip")
def plain(feed_id: int) -> str:
    return ""


plain.delay("x")
assert_type(plain(1), Any)
plain.apply_async((1,), lock_options={"on_conflikt": "raise"})  # refused
