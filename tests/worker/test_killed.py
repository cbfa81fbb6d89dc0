"""No lock outlives its run: real processes are killed while they hold one."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from django_singletask.history import sweep as history
from django_singletask.models import TaskLockEvent
from tests.command_line import locks
from tests.deadline import wait_for
from tests.testapp import tasks
from tests.testapp.celery import app
from tests.worker.harness import ELSEWHERE, get, is_gone

elsewhere = pytest.mark.parametrize("place", ["elsewhere"], ids=[""])
"""For a worker that seems to run on another host: nothing else proves a death."""


def it_runs_again(worker, key, pid):
    """Wait until the process is gone and its lock is free, long before the lease ends."""
    wait_for(lambda: is_gone(pid), "the process is gone")
    wait_for(lambda: not tasks.long.lock(key).locked(), "its lock is free")
    return worker.call(tasks.long, key) == "ran"


# The same code frees the lock on each store. "elsewhere" there is no proof of death to help it.
@pytest.mark.only_all("another case shows it", "redis-elsewhere", "db_postgres-elsewhere")
@pytest.mark.parametrize(
    ("cache", "place"),
    [
        ("redis", "here"),
        ("redis", "elsewhere"),
        ("pymemcache", "elsewhere"),
        ("db_postgres", "elsewhere"),
    ],
)
def test_a_killed_child(worker, key):
    _, pid = worker.run(tasks.long, key)
    os.kill(pid, signal.SIGKILL)
    assert it_runs_again(worker, key, pid)


@pytest.mark.only_all("another case shows it", "elsewhere")
@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_the_message_of_a_killed_child_is_delivered_again_and_runs_once(worker, key):
    result, pid = worker.run(tasks.late, key)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(worker.events("start")) == 2, "the same message takes the lock")
    worker.end(key)
    assert get(result) == "ran"
    # The death of the first run is known, so the message need not look for its result twice.
    rows = TaskLockEvent.objects.filter(task_id=result.id)
    wait_for(rows.filter(result="returned").exists, "the history is written")
    assert not rows.filter(result="postponed").exists()


@pytest.mark.only_all("shown on another cache", "pymemcache")
@pytest.mark.parametrize("cache", ["redis", "pymemcache"])
@elsewhere
def test_a_killed_child_frees_its_own_slot(worker, key):
    options = {"lock_options": {"lock_slots": 2}}
    runs = dict(worker.run(tasks.long, key, **options) for _ in range(2))
    lock = tasks.long.lock(key)  # with one slot, the first
    first = lock.holder()
    (pid,) = (pid for result, pid in runs.items() if result.id != first.task_id)
    assert worker.call(tasks.long, key, **options) is None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: worker.call(tasks.long, key, **options) == "ran", "its slot is free")
    assert lock.holder() == first
    worker.end(key)


@elsewhere
def test_a_hard_time_limit(worker, key):
    _, pid = worker.run(tasks.long, key, time_limit=1)
    assert it_runs_again(worker, key, pid)


@elsewhere
def test_revoke_with_terminate(worker, key):
    result, pid = worker.run(tasks.long, key)
    result.revoke(terminate=True)
    assert it_runs_again(worker, key, pid)


def test_the_command_that_why_prints_ends_the_run_and_not_as_completed(worker, key):
    result, pid = worker.run(tasks.long, key)
    (command,) = re.findall(
        "^  stop +(celery .+)", locks("why", tasks.long.lock(key).name), re.MULTILINE
    )
    command = [sys.executable, "-m", *shlex.split(command)]
    subprocess.run(command, env=worker.env, check=True, timeout=60)
    wait_for(lambda: is_gone(pid), "the process is gone")
    rows = TaskLockEvent.objects.filter(task_id=result.id).exclude(outcome="")
    run = wait_for(rows.first, "its end is in the history")
    assert (run.outcome, run.result) == ("released", "terminated")
    assert not run.is_completed


def test_a_killed_group_and_a_new_worker_on_the_same_host(start_worker, key):
    worker = start_worker(concurrency=1)
    worker.run(tasks.long, key)
    worker.kill_group()
    start_worker(concurrency=1, name="two")
    assert worker.call(tasks.long, key) == "ran"


@pytest.mark.only_all("shown on another cache", "pymemcache")
@pytest.mark.parametrize("cache", ["redis", "pymemcache"])
def test_a_lost_host_blocks_for_the_lease_alone(start_worker, worker, key):
    lost = start_worker(env=ELSEWHERE, concurrency=1)
    lost.run(tasks.long, key, lock_options={"lock_timeout": 3})
    lost.kill_group()
    killed = time.monotonic()
    blocked, sent = killed, killed
    while worker.call(tasks.long, key) is None:
        blocked, sent = sent, time.monotonic()
        assert sent - killed < 60
    assert blocked - killed < 3 + 1 + 1  # memcached: + 1


@pytest.mark.parametrize(("victim", "outcome"), [("child", "dead"), ("worker", "expired")])
def test_a_killed_run_leaves_a_row_where_only_trouble_is_kept(start_worker, key, victim, outcome):
    env = {"DJANGO_SETTINGS_MODULE": "tests.only_trouble_settings", **ELSEWHERE}
    worker = start_worker(env=env, concurrency=1)
    assert worker.call(tasks.hold, key) == "ran"
    result, pid = worker.run(tasks.long, key, lock_options={"lock_timeout": 2})
    rows = TaskLockEvent.objects.filter(name__contains=key)
    wait_for(rows.exists, "its begin is written")
    if victim == "child":
        os.kill(pid, signal.SIGKILL)
    else:
        worker.kill_group()

    def found():
        history.sweep()
        return rows.filter(outcome=outcome).exists()

    wait_for(found, "its end is noticed")
    [run] = rows  # the run before it left none
    assert (run.task_id, run.pid, run.timeout, run.ended_at) == (result.id, pid, 2, None)
    assert run.at < run.noticed_at


VISIBILITY = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


def test_a_redelivery_beside_its_live_first_run(start_worker, key):
    options = {"broker_transport_options": VISIBILITY}
    workers = [start_worker(conf=options, name=name) for name in ("one", "two")]
    queue = workers[0].queue
    result, _ = workers[0].run(tasks.late, key)
    with app.connection_or_acquire() as connection:
        client = connection.default_channel.client

        def copies():
            """Count the message in the broker: waiting, and handed out but not acknowledged."""
            with client.pipeline(transaction=True) as pipeline:
                waiting, unacked = pipeline.lrange(queue, 0, -1).hvals("unacked").execute()
            return sum(result.id.encode() in raw for raw in [*waiting, *unacked])

        def is_redelivered_twice():
            assert copies() <= 2
            return sum(worker.text().count(f"{result.id}] received") for worker in workers) > 2

        wait_for(is_redelivered_twice, "the broker redelivers it", deadline=60)
        workers[0].end(key)
        assert get(result) == "ran"
        # The postponed message still ends by itself, without a second run.
        wait_for(lambda: not copies(), "no copy of the message is left")
    assert len(workers[0].events("start")) == 1


def test_retry_at_once_on_an_idle_worker(worker, key):
    assert worker.call(tasks.retrying, key, 29) == "done"
    assert [line["retries"] for line in worker.events("try")] == list(range(30))


@pytest.mark.parametrize("cache", ["db_postgres"])
def test_the_thread_that_frees_locks_imports_nothing(start_worker, key):
    """A child that is forked during an import would wait for that import for ever."""
    worker = start_worker(env={"SINGLETASK_TEST_IMPORTS": "1"}, concurrency=1)
    result, pid = worker.run(tasks.long, key)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "freed, because" in worker.text(), "the lock is freed")
    rows = TaskLockEvent.objects.filter(outcome="dead", task_id=result.id)
    wait_for(rows.exists, "the history is written")
    assert not worker.events("import", pid=worker.process.pid)
