"""Not again for a while, and only the latest arguments, with real workers."""

from __future__ import annotations

import os
import signal
import time
import uuid

import pytest
from celery import chain

from tests.deadline import wait_for
from tests.deliveries import leave_lock
from tests.testapp import tasks
from tests.worker.harness import get

pytestmark = [
    pytest.mark.parametrize("cache", ["redis", "pymemcache"]),
    pytest.mark.only_all("shown on another cache", "pymemcache"),
]

KEEP = {"lock_at_least": 60}
DAILY = {"unique_until": "expiry", "unique_for": 60}
ENDS = ["raise", "ignore"]
REPLACE = {"on_duplicate": "replace", "on_conflict": "requeue"}


def test_a_kept_lock_skips_the_next_call_and_frees_after(worker, key):
    options = {"lock_options": {"lock_at_least": 1.5}}
    assert worker.call(tasks.hold, key, **options) == "ran"
    assert worker.call(tasks.hold, key, **options) == "skipped"
    wait_for(lambda: not tasks.hold.lock(key).locked(), "the time is over")
    # Counted from the take, a moment before the body began.
    assert time.monotonic() - worker.events("start")[0]["t"] > 1
    assert worker.call(tasks.hold, key, **options) == "ran"


def test_a_process_that_is_killed_after_its_run_leaves_the_kept_lock(worker, key):
    worker.call(tasks.hold, key, lock_options=KEEP)
    pid = worker.events("start")[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    # The worker frees what the process held before it starts the next one.
    wait_for(lambda: len({*worker.children()} - {pid}) == 4, "another process takes its place")
    assert tasks.hold.lock(key).holder().kept


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "terminate"])
def test_the_lock_of_a_killed_body_is_not_kept(worker, key, sign):
    _, pid = worker.run(tasks.long, key, lock_options=KEEP)
    os.kill(pid, sign)
    wait_for(lambda: not tasks.long.lock(key).locked(), "it is free")


def test_a_body_that_ends_in_another_way_keeps_its_lock(worker, key):
    """Of these messages none comes again."""
    sent = {end: worker.send(tasks.ending, f"{key} {end}", end, lock_options=KEEP) for end in ENDS}
    late = worker.send(tasks.limited, f"{key} limited", lock_options=KEEP)
    for end in ENDS:
        lock = tasks.ending.lock(f"{key} {end}")
        wait_for(lambda lock=lock: lock.holder() and lock.holder().kept, f"after {end}")
        assert worker.call(tasks.ending, f"{key} {end}", lock_options=KEEP) == "skipped"
    assert sent["raise"].state == "FAILURE"
    wait_for(late.ready, "its soft time limit ends it")
    assert tasks.limited.lock(f"{key} limited").holder().kept


def test_the_next_try_waits_for_the_rest_and_is_not_skipped(worker, key):
    """first try: begins   retry, or Reject(requeue=True): kept ........... ends
    next try:                                              comes: waits          runs
    """
    calls = {}
    for end in ("retry", "autoretry", "reject"):
        for policy in ("skip", "raise", "requeue"):
            options = {"lock_at_least": 2, "on_conflict": policy}
            each = f"{key} {end} {policy}"
            calls[each] = worker.send(tasks.ending, each, end, lock_options=options)
    assert {get(call) for call in calls.values()} == {"ran"}
    for each in calls:
        first, second = (line["t"] for line in worker.events("start", key=each))
        assert second - first > 1.5, each


@pytest.mark.parametrize("step", [0, 1], ids=["one call", "a chain"])
def test_a_replacement_waits_for_the_rest_and_is_not_skipped(worker, step):
    options = {"lock_at_least": 2}
    assert worker.call(tasks.replacing, step, lock_options=options) == "step 3"
    steps = worker.events("step")
    assert [line["step"] for line in steps] == [*range(step, 4)]
    assert steps[1]["t"] - steps[0]["t"] > 1.5


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "handed over"])
def test_a_call_that_waits_starts_when_an_hourly_lock_ends(worker, key, cache, kept):
    """Its hops have grown, and a quarter of the lock's length is 15 minutes."""
    lock, task_id = tasks.requeue.lock(key), uuid.uuid4().hex
    leave_lock(lock, cache, length=3600, left=3, kept=kept)
    headers = {"singletask": {"id": task_id, "task": tasks.requeue.name, "hops": 20}}
    call = worker.send(tasks.requeue, key, task_id=task_id, headers=headers)
    wait_for(lambda: worker.events("conflict"), "it waits")
    wait_for(lambda: not lock.locked(), "the lock ends")
    assert get(call) == "ran"


def test_a_redelivery_that_meets_its_own_kept_lock_ends(worker):
    def deliver(task_id, due, **options):
        """Send the same message, as a broker delivers it again."""
        headers = {"singletask": {"id": task_id, "task": tasks.late.name, "due": due}}
        options = {"task_id": task_id, "headers": headers, "lock_options": KEEP, **options}
        return worker.send(tasks.late, task_id, **options)

    first, unknown, due = uuid.uuid4().hex, uuid.uuid4().hex, time.time()
    assert get(deliver(first, due)) == "ran"
    deliver(first, due)
    wait_for(lambda: "its work is done: dropped" in worker.text(), "it is dropped")
    # Without a result it hops once, and is then skipped: its body has returned.
    deliver(unknown, due, ignore_result=True)
    wait_for(lambda: worker.events("end", key=unknown), "it has run")
    deliver(unknown, due, ignore_result=True)
    wait_for(
        lambda: [line["reason"] for line in worker.events("conflict")] == ["redelivery", "skip"],
        "it hops and is skipped",
    )
    assert [line["key"] for line in worker.events("start")] == [first, unknown]


def test_once_a_day_however_the_run_ends(worker, key):
    task = tasks.unique_to_the_end

    def call(key, retries=0):
        return worker.send(task, key, 0, retries, lock_options=DAILY)

    first = call(key, retries=1)
    wait_for(lambda: first.state == "RETRY", "it waits to be tried again")
    assert call(key).id == first.id
    assert get(first) == "ran"
    assert len(worker.events("start")) == 2
    assert call(key).id == first.id
    assert task.queued(key) is None
    # A call that was revoked before it began stops nobody.
    other = f"other {key}"
    with worker.deaf():
        worker.obey("revoke", call(other).id)
    wait_for(lambda: task.queued(other) is None, "the worker has discarded it")
    assert get(call(other)) == "ran"


def test_the_latest_arguments_win_unless_a_chain_waits(worker, key):
    options = {"queue": worker.queue, "lock_options": REPLACE}
    links = [
        tasks.unique.si(key, 0, 1).set(**options),
        tasks.plain.si(f"after {key}").set(queue=worker.queue),
    ]
    with worker.deaf():
        waited_for = chain(*links).apply_async()
        second, third = (tasks.unique.apply_async((key, 0, value), **options) for value in (2, 3))
    assert [get(second), get(third), get(waited_for)] == ["skipped", "ran", "ran"]
    ran = [line["value"] for line in worker.events("start") if "value" in line]
    assert sorted(ran) == [1, 3]
