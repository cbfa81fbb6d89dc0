"""Random load, with children and whole workers killed at random."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from django_singletask.models import TaskLockEvent
from tests.deadline import wait_for
from tests.testapp import log, tasks

CONF = {
    "broker_transport_options": {
        "visibility_timeout": 3,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
}
KEYS = "abcdef"


def longest_block(runs_log):
    """Return the longest time in seconds for which the lock of a dead process blocked calls."""
    died = {line["victim"]: line["at"] for line in log.read(runs_log) if line["event"] == "killed"}
    rows = TaskLockEvent.objects
    held_by = dict(rows.filter(kind="acquired").values_list("token", "pid"))
    skips = rows.filter(kind="skipped").values_list("blocked_by", "last_at")
    blocked = [
        last_at.timestamp() - died[held_by[token]]
        for token, last_at in skips
        if held_by.get(token) in died
    ]
    return max([0.0, *blocked])


@pytest.mark.timeout(0)  # it takes as long as --soak says; its parts have deadlines
def test_soak(start_worker, queue, runs_log, request, record_property):
    seconds = request.config.getoption("soak")
    rng = random.Random(seconds)
    workers = [start_worker(name=name, concurrency=4, conf=CONF) for name in ("one", "two")]
    began = time.monotonic()
    next_child, next_group = began + 2, began + 6
    results, sent, groups_killed = [], {}, []
    while time.monotonic() - began < seconds:
        key = rng.choice(KEYS)
        results.append(tasks.late.apply_async((key, rng.uniform(0, 0.5)), queue=queue))
        sent[results[-1].id] = time.monotonic()
        time.sleep(rng.uniform(0.03, 0.1))
        if time.monotonic() > next_child:
            next_child += 2
            kill_a_child(rng.choice(workers), rng)
        if time.monotonic() > next_group:
            next_group += 10
            groups_killed.append(time.monotonic())
            kill_a_group(rng.choice(workers))
    # Redis gives a message to the client that waits for it, and forgets it; then kombu records it
    # as not acknowledged. If a whole worker is killed between these two steps, the broker loses the
    # message, and no worker ever receives it.
    latest = time.monotonic()
    left = len(results)
    while left and time.monotonic() - latest < 10:
        now_left = sum(not delivered(workers, result) for result in results)
        if now_left < left:
            left, latest = now_left, time.monotonic()
        time.sleep(0.1)
    undelivered = [result for result in results if not delivered(workers, result)]
    for result in undelivered:
        since = min((sent[result.id] - at for at in groups_killed), key=abs)
        print(f"lost by the broker: sent {since:.3f} s after a worker was killed")
        assert abs(since) < 0.5, "not the broker's loss"
    answers = [result.get(timeout=60) for result in results if result not in undelivered]
    facts = {
        "calls": len(results),
        "lost by the broker": len(undelivered),
        "ran": answers.count("ran"),
        "killed": sum(line["event"] == "killed" for line in log.read(runs_log)),
        "overlaps": log.overlaps(runs_log),
        "blocked by the dead, at most": round(longest_block(runs_log), 2),
    }
    print(facts)
    assert facts["overlaps"] == 0
    assert set(answers) <= {"ran", None}
    assert facts["ran"] > 0
    assert facts["killed"] > 0
    rows = TaskLockEvent.objects
    assert rows.filter(kind="expired").exists()
    assert rows.filter(kind="skipped", blocked_by__gt="").exists()
    assert facts["blocked by the dead, at most"] < 2


def delivered(workers, result):
    return result.ready() or any(f"{result.id}] received" in worker.text() for worker in workers)


def kill_a_child(worker, rng):
    pids = worker.children()
    if pids:
        victim = rng.choice(pids)
        # Take the time before the signal: a later one could fall into the next run.
        log.write("killed", victim=victim, at=time.time())
        os.kill(victim, signal.SIGKILL)


def kill_a_group(worker):
    for victim in worker.children():
        log.write("killed", victim=victim, at=time.time())
    worker.kill_group()
    worker.start(ready=False)
    wait_for(lambda: worker.process.poll() is None, "it starts")
