"""Not again for a while, and only the latest arguments, with real workers."""

from __future__ import annotations

import os
import signal
import time
import uuid

import pytest
from celery import chain

from django_singletask.task.header import HEADER
from tests.deadline import wait_for
from tests.testapp import tasks

BOTH = pytest.mark.parametrize("cache", ["redis", "pymemcache"])

KEEP = {"lock_at_least": 60}
DAILY = {"unique_until": "expiry", "unique_for": 60}
REPLACE = {"on_duplicate": "replace", "on_conflict": "requeue"}


@pytest.fixture
def worker(start_worker, on_cache, request):
    """Start a worker with one process, whose locks are in the cache of the test."""
    cache = request.node.callspec.params["cache"]
    on_cache(cache)
    return start_worker(cache=cache, concurrency=1)


@pytest.mark.only_all("shown on another cache", "pymemcache")
@BOTH
def test_a_kept_lock_skips_the_next_call_and_frees_after(worker, queue, cache):
    def call():
        options = {"lock_at_least": 1.5}
        return tasks.hold.apply_async(("a",), queue=queue, lock_options=options).get(timeout=20)

    assert call() == "ran"
    began = worker.events("start")[0]["t"]
    assert call() == "skipped"
    wait_for(lambda: not tasks.hold.lock("a").locked(), "the time is over")
    # Counted from the take, a moment before the body began.
    assert time.monotonic() - began > 1.4
    assert call() == "ran"


@pytest.mark.only_all("it starts a worker")
@BOTH
def test_a_process_that_is_killed_after_its_run_leaves_the_kept_lock(worker, queue, cache):
    tasks.hold.apply_async(("a",), queue=queue, lock_options=KEEP).get(timeout=20)
    os.kill(worker.events("start")[0]["pid"], signal.SIGKILL)
    # The worker frees what the process held before it starts the next one.
    assert tasks.plain.apply_async(("b",), queue=queue).get(timeout=20) == "ran"
    assert tasks.hold.lock("a").holder().kept


@pytest.mark.only_all("it starts a worker")
@BOTH
def test_the_lock_of_a_killed_body_is_not_kept(worker, queue, cache):
    tasks.long.apply_async(("a", 60), queue=queue, lock_options=KEEP)
    wait_for(lambda: worker.events("start"), "it runs")
    os.kill(worker.events("start")[0]["pid"], signal.SIGKILL)
    wait_for(lambda: not tasks.long.lock("a").locked(), "it is free")


@pytest.mark.only_all("it starts a worker")
@BOTH
def test_a_redelivery_that_meets_its_own_kept_lock_ends(worker, queue, cache):
    def deliver(task_id, due, **options):
        """Send the same message, as a broker delivers it again."""
        headers = {HEADER: {"id": task_id, "task": tasks.late.name, "due": due}}
        return tasks.late.apply_async(
            (task_id,), queue=queue, task_id=task_id, headers=headers, lock_options=KEEP, **options
        )

    first, unknown, due = uuid.uuid4().hex, uuid.uuid4().hex, time.time()
    assert deliver(first, due).get(timeout=20) == "ran"
    deliver(first, due)
    wait_for(lambda: "its work is done: dropped" in worker.text(), "it is dropped")
    # Without a result it hops once, and is then skipped: its body has returned.
    for _ in range(2):
        deliver(unknown, due, ignore_result=True)
    wait_for(
        lambda: [line["reason"] for line in worker.events("conflict")] == ["redelivery", "skip"],
        "it hops and is skipped",
    )
    assert [line["key"] for line in worker.events("start")] == [first, unknown]


@pytest.mark.only_all("shown on another cache", "pymemcache")
@BOTH
def test_once_a_day_however_the_run_ends(worker, queue, cache):
    task = tasks.unique_to_the_end

    def call(key="a", retries=0):
        return task.apply_async((key, 0, retries), queue=queue, lock_options=DAILY)

    first = call(retries=1)
    wait_for(lambda: first.state == "RETRY", "it waits to be tried again")
    assert call().id == first.id
    assert first.get(timeout=20) == "ran"
    assert len(worker.events("start")) == 2
    assert call().id == first.id
    assert task.queued("a") is None
    # A call that was revoked before it began stops nobody.
    busy = tasks.plain.apply_async(("busy", 1), queue=queue)
    revoked = call("b")
    revoked.revoke()
    busy.get(timeout=20)
    wait_for(lambda: task.queued("b") is None, "the worker has discarded it")
    assert call("b").get(timeout=20) == "ran"


@pytest.mark.only_all("shown on another cache", "pymemcache")
@BOTH
def test_the_latest_arguments_win_unless_a_chain_waits(worker, queue, cache):
    busy = tasks.plain.apply_async(("busy", 1), queue=queue)
    wait_for(lambda: worker.events("start"), "no process is free")
    options = {"queue": queue, "lock_options": REPLACE}
    links = [tasks.unique.si("a", 0, 1).set(**options), tasks.plain.si("after").set(queue=queue)]
    waited_for = chain(*links).apply_async()
    second, third = (tasks.unique.apply_async(("a", 0, value), **options) for value in (2, 3))
    assert [busy.get(timeout=20), second.get(timeout=20), third.get(timeout=20)] == [
        "ran",
        "skipped",
        "ran",
    ]
    assert waited_for.get(timeout=20) == "ran"
    assert [line["value"] for line in worker.events("start") if "value" in line] == [1, 3]
