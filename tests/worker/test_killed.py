"""No lock outlives its run: real processes are killed while they hold one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from django_singletask.holder import Holder
from django_singletask.locks.liveness import is_gone
from django_singletask.models import TaskLockEvent
from django_singletask.operators.words import stop_command
from django_singletask.stores import get_store
from tests.deadline import wait_for
from tests.testapp import log, tasks
from tests.testapp.celery import app

# A worker with this environment seems to run on another host, so there is no proof of its death.
ELSEWHERE = {"SINGLETASK_TEST_BOOT_ID": "another machine"}


def start_one(worker, task, queue, seconds=60, **options):
    result = task.apply_async(("a", seconds), queue=queue, **options)
    line = wait_for(
        lambda: [e for e in worker.events("start") if e["task_id"] == result.id], "it runs"
    )[0]
    return result, line["pid"]


def it_runs_again(queue, pid):
    """Wait until the process is gone and its lock is free, long before the lease ends."""
    wait_for(lambda: is_gone(pid, ""), "the process is gone")
    wait_for(lambda: not tasks.long.lock("a").locked(), "its lock is free")
    return tasks.long.apply_async(("a", 0), queue=queue).get(timeout=30) == "ran"


# The same code frees the lock on each store. "elsewhere" there is no proof of death to help it.
@pytest.mark.only_all(
    "another case shows it", "db_postgres", "late-redis-elsewhere", "long-redis-elsewhere"
)
@pytest.mark.parametrize(
    ("task", "alias", "env"),
    [
        pytest.param("long", "redis", {}, id="long-redis-here"),
        pytest.param("long", "redis", ELSEWHERE, id="long-redis-elsewhere"),
        pytest.param("long", "pymemcache", ELSEWHERE, id="long-pymemcache-elsewhere"),
        pytest.param("long", "db_postgres", ELSEWHERE, id="long-db_postgres-elsewhere"),
        pytest.param("late", "redis", {}, id="late-redis-here"),
        pytest.param("late", "redis", ELSEWHERE, id="late-redis-elsewhere"),
    ],
)
def test_a_killed_child(start_worker, queue, on_cache, alias, env, task):
    on_cache(alias)
    worker = start_worker(cache=alias, env=env, concurrency=1)
    if task == "late":
        # The same message is delivered again and takes the lock; the work is done once.
        result, pid = start_one(worker, tasks.late, queue, seconds=1)
        os.kill(pid, signal.SIGKILL)
        assert result.get(timeout=20) == "ran"
        assert len(worker.events("end")) == 1
        first, second = worker.events("start")
        print(f"began again {second['t'] - first['t']:.2f} s after its first start")
        # The death of the first run is known, so the message need not look for its result twice.
        rows = TaskLockEvent.objects.filter(task_id=result.id)
        wait_for(rows.filter(result="returned").exists, "the history is written")
        assert not rows.filter(result="postponed").exists()
        return
    _, pid = start_one(worker, tasks.long, queue)
    os.kill(pid, signal.SIGKILL)
    assert it_runs_again(queue, pid)


@pytest.mark.only_all("shown on another cache", "pymemcache")
@pytest.mark.parametrize("alias", ["redis", "pymemcache"])
def test_a_killed_child_frees_its_own_slot(start_worker, queue, on_cache, alias):
    on_cache(alias)
    worker = start_worker(cache=alias, env=ELSEWHERE, concurrency=3)
    options = {"lock_options": {"lock_slots": 2}}
    runs = dict(start_one(worker, tasks.long, queue, **options) for _ in range(2))
    _first, second = tasks.long.lock("a")._lock_key.slots(2)
    holder = Holder.decode(get_store(alias).read(second).value)
    (pid,) = (pid for result, pid in runs.items() if result.id == holder.task_id)
    assert tasks.long.apply_async(("a", 0), queue=queue, **options).get(timeout=20) is None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid, ""), "the process is gone")
    wait_for(lambda: get_store(alias).read(second) is None, "its slot is free")
    # The other run keeps its slot, which is the lock of later tests. Nobody could prove its death.
    assert tasks.long.lock("a").clear()


def test_a_hard_time_limit(start_worker, queue):
    worker = start_worker(env=ELSEWHERE, concurrency=2)
    _, pid = start_one(worker, tasks.long, queue, time_limit=1)
    assert it_runs_again(queue, pid)


def test_revoke_with_terminate(start_worker, queue):
    worker = start_worker(env=ELSEWHERE, concurrency=2)
    result, pid = start_one(worker, tasks.long, queue)
    result.revoke(terminate=True)
    assert it_runs_again(queue, pid)


@pytest.mark.only_all("it starts a worker")
def test_the_command_that_why_prints_ends_the_run_and_not_as_completed(start_worker, queue):
    worker = start_worker(concurrency=1)
    result, pid = start_one(worker, tasks.long, queue)
    command = [sys.executable, "-m", *shlex.split(stop_command(result.id))]
    subprocess.run(command, env=worker.env, check=True, timeout=60)
    wait_for(lambda: is_gone(pid, ""), "the process is gone")
    rows = TaskLockEvent.objects.filter(task_id=result.id).exclude(outcome="")
    run = wait_for(rows.first, "its end is in the history")
    assert (run.outcome, run.result) == ("released", "terminated")
    assert not run.is_completed


def test_a_killed_group_and_a_new_worker_on_the_same_host(start_worker, queue):
    worker = start_worker(concurrency=1)
    start_one(worker, tasks.long, queue)
    worker.kill_group()
    start_worker(concurrency=1, name="two")
    assert tasks.long.apply_async(("a", 0), queue=queue).get(timeout=30) == "ran"


@pytest.mark.only_all("shown on another cache", "pymemcache")
@pytest.mark.parametrize("alias", ["redis", "pymemcache"])
def test_a_lost_host_blocks_for_the_lease_alone(start_worker, queue, on_cache, alias):
    on_cache(alias)
    worker = start_worker(cache=alias, env=ELSEWHERE, concurrency=1)
    tasks.long.apply_async(("a", 60), queue=queue, lock_options={"lock_timeout": 3})
    wait_for(lambda: worker.events("start"), "it runs")
    worker.kill_group()
    killed = time.monotonic()
    start_worker(cache=alias, concurrency=1, name="two")
    blocked, sent = killed, killed
    while len(worker.events("start")) == 1:
        blocked, sent = sent, time.monotonic()
        assert sent - killed < 60
        tasks.long.apply_async(("a", 0), queue=queue).get(timeout=20)
    assert blocked - killed < 3 + 1 + 1  # memcached: + 1


VISIBILITY = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


def test_a_redelivery_beside_its_live_first_run(start_worker, queue, runs_log):
    options = {"broker_transport_options": VISIBILITY}
    start_worker(conf=options, concurrency=2)
    start_worker(conf=options, concurrency=2, name="two")
    result = tasks.late.apply_async(("a", 7), queue=queue)
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
        # The postponed message still ends by itself, without a second run.
        wait_for(lambda: not copies(), "no copy of the message is left", deadline=20)
    assert log.overlaps(runs_log) == 0
    assert len(log.runs(runs_log)) == 1


@pytest.mark.only_all("it starts a worker")
def test_retry_at_once_on_an_idle_worker(start_worker, queue):
    worker = start_worker(concurrency=4)
    result = tasks.retrying.apply_async(("a", 29), queue=queue)
    assert result.get(timeout=60) == "done"
    assert [line["retries"] for line in worker.events("try")] == list(range(30))


def test_the_thread_that_frees_locks_imports_nothing(start_worker, queue, on_cache):
    """A child that is forked during an import would wait for that import for ever."""
    on_cache("db_postgres")
    worker = start_worker(cache="db_postgres", env={"SINGLETASK_TEST_IMPORTS": "1"}, concurrency=1)
    _, pid = start_one(worker, tasks.long, queue)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "freed, because" in worker.text(), "the lock is freed")
    rows = TaskLockEvent.objects.filter(outcome="dead")
    wait_for(rows.exists, "the history is written")
    main = worker.process.pid
    assert [line["module"] for line in worker.events("import") if line["pid"] == main] == []
