"""No lock outlives its run: processes that are really killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from django_singletask.locks.liveness import is_gone
from django_singletask.models import TaskLockEvent
from tests.deadline import wait_for
from tests.testapp import log, tasks
from tests.testapp.celery import app

CACHES = ["redis", "pymemcache"]
AND_DATABASE = [*CACHES, "db_postgres"]

# A worker whose tests look as if it ran on another host: no proof of death.
ELSEWHERE = {"SINGLETASK_TEST_BOOT_ID": "another machine"}


def start_one(worker, task, queue, seconds=60, **options):
    result = task.apply_async(("a", seconds), queue=queue, **options)
    starts = worker.events("start")
    line = wait_for(
        lambda: [e for e in worker.events("start")[len(starts) :] if e["task_id"] == result.id],
        "it runs",
    )[0]
    return result, line["pid"]


def seconds_until_it_runs_again(worker, task, queue, pid, again=0):
    """Send equal calls from the moment on at which the process is gone."""
    wait_for(lambda: is_gone(pid, ""), "the process is gone", deadline=20)
    gone = time.monotonic()
    starts = len(worker.events("start"))
    while len(worker.events("start")) == starts:
        assert time.monotonic() - gone < 30, "it never ran again"
        task.apply_async(("a", again), queue=queue).get(timeout=20)
    seconds = worker.events("start")[starts]["t"] - gone
    print(f"ran again {seconds:.2f} s after the process was gone")
    return seconds


@pytest.mark.parametrize("env", [{}, ELSEWHERE], ids=["here", "elsewhere"])
@pytest.mark.parametrize("alias", AND_DATABASE)
@pytest.mark.parametrize("task", ["long", "late"])
def test_a_killed_child(start_worker, queue, settings, alias, env, task):
    settings.SINGLETASK_CACHE = alias
    worker = start_worker(cache=alias, env=env, concurrency=1)
    if task == "late":
        # The same message comes back and takes the lock; the work completes once.
        result, pid = start_one(worker, tasks.late, queue, seconds=2)
        os.kill(pid, signal.SIGKILL)
        assert result.get(timeout=20) == "ran"
        assert len(worker.events("end")) == 1
        return
    _, pid = start_one(worker, tasks.long, queue)
    os.kill(pid, signal.SIGKILL)
    assert seconds_until_it_runs_again(worker, tasks.long, queue, pid) < 1


@pytest.mark.parametrize("alias", CACHES)
def test_a_hard_time_limit(start_worker, queue, settings, alias):
    settings.SINGLETASK_CACHE = alias
    worker = start_worker(cache=alias, env=ELSEWHERE, concurrency=2)
    _, pid = start_one(worker, tasks.long, queue, time_limit=1)
    assert seconds_until_it_runs_again(worker, tasks.long, queue, pid) < 1


@pytest.mark.parametrize("alias", CACHES)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_revoke_with_terminate(start_worker, queue, settings, alias, name):
    settings.SINGLETASK_CACHE = alias
    worker = start_worker(cache=alias, env=ELSEWHERE, concurrency=2)
    result, pid = start_one(worker, tasks.long, queue)
    result.revoke(terminate=True, signal=name)
    assert seconds_until_it_runs_again(worker, tasks.long, queue, pid) < 1


@pytest.mark.parametrize("alias", AND_DATABASE)
def test_a_killed_group_and_a_new_worker_on_the_same_host(start_worker, queue, settings, alias):
    settings.SINGLETASK_CACHE = alias
    worker = start_worker(cache=alias, concurrency=1)
    start_one(worker, tasks.long, queue)
    worker.kill_group()
    other = start_worker(cache=alias, concurrency=1, name="two")
    ready = time.monotonic()
    tasks.long.apply_async(("a", 0), queue=queue).get(timeout=20)
    assert other.events("start")[-1]["t"] - ready < 1


@pytest.mark.parametrize("alias", CACHES)
def test_a_lost_host_blocks_for_the_lease_alone(start_worker, queue, settings, alias):
    settings.SINGLETASK_CACHE = alias
    worker = start_worker(cache=alias, env=ELSEWHERE, concurrency=1)
    tasks.long.apply_async(("a", 60), queue=queue, lock_options={"lock_timeout": 5})
    wait_for(lambda: worker.events("start"), "it runs")
    worker.kill_group()
    killed = time.monotonic()
    start_worker(cache=alias, concurrency=1, name="two")
    while len(worker.events("start")) == 1:
        assert time.monotonic() - killed < 20
        tasks.long.apply_async(("a", 0), queue=queue).get(timeout=20)
    assert worker.events("start")[1]["t"] - killed < 5 + 1 + 1  # memcached: + 1


def test_acks_late_and_a_killed_group(start_worker, queue, runs_log):
    options = {"broker_transport_options": VISIBILITY}
    worker = start_worker(conf=options, concurrency=1)
    result, _ = start_one(worker, tasks.late, queue, seconds=1)
    worker.kill_group()
    start_worker(conf=options, concurrency=1, name="two")
    assert result.get(timeout=30) == "ran"
    assert len(worker.events("end")) == 1


VISIBILITY = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


def test_a_redelivery_beside_its_live_first_run(start_worker, queue, runs_log):
    options = {"broker_transport_options": VISIBILITY}
    start_worker(conf=options, concurrency=2)
    start_worker(conf=options, concurrency=2, name="two")
    result = tasks.late.apply_async(("a", 10), queue=queue)
    with app.connection_or_acquire() as connection:
        client = connection.default_channel.client

        def copies():
            """Count the message in the broker: waiting, and handed out but not acknowledged."""
            with client.pipeline(transaction=True) as pipeline:
                waiting, unacked = pipeline.lrange(queue, 0, -1).hvals("unacked").execute()
            return sum(result.id.encode() in raw for raw in [*waiting, *unacked])

        most = 0
        while not result.ready():
            most = max(most, copies())
            time.sleep(0.005)
        assert result.get() == "ran"
        outputs = [path.read_text() for path in runs_log.parent.glob("worker-*.log")]
        received = sum(text.count(f"{result.id}] received") for text in outputs)
        assert received > 1, "the broker never redelivered it"
        assert most <= 2
        # What is put off still ends by itself, without a second run.
        wait_for(lambda: not copies(), "no copy of the message is left", deadline=20)
    assert log.overlaps(runs_log) == 0
    assert len(log.runs(runs_log)) == 1


def test_retry_at_once_on_an_idle_worker(start_worker, queue):
    worker = start_worker(concurrency=4)
    result = tasks.retrying.apply_async(("a", 59), queue=queue)
    assert result.get(timeout=90) == "done"
    assert [line["retries"] for line in worker.events("try")] == list(range(60))


def test_a_task_longer_than_its_lease(start_worker, queue, runs_log):
    worker = start_worker(concurrency=2)
    options = {"lock_timeout": 4}
    result = tasks.hold.apply_async(("a", 12), queue=queue, lock_options=options)
    wait_for(lambda: worker.events("start"), "it runs")
    answers = []
    while not result.ready():
        call = tasks.hold.apply_async(("a", 0), queue=queue, lock_options=options)
        answers.append(call.get(timeout=10))
        time.sleep(1)
    assert result.get() == "ran"
    assert len(answers) >= 9
    assert log.overlaps(runs_log) == 0
    assert "lost" not in worker.text()


@pytest.mark.parametrize("alias", AND_DATABASE)
def test_the_thread_that_frees_locks_imports_nothing(start_worker, queue, settings, alias):
    """A child that is forked meanwhile, for the killed one, would wait for the import for ever."""
    settings.SINGLETASK_CACHE = alias
    worker = start_worker(cache=alias, env={"SINGLETASK_TEST_IMPORTS": "1"}, concurrency=1)
    _, pid = start_one(worker, tasks.long, queue)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "freed, since" in worker.text(), "the lock is freed")
    rows = TaskLockEvent.objects.filter(kind="expired")
    wait_for(rows.exists, "the history is written")
    main = worker.process.pid
    assert [line["module"] for line in worker.events("import") if line["pid"] == main] == []
