"""Processes that take one lock by turns, are killed and stopped at random, and record it.

A program, so that it forks from a process without threads:

    SINGLETASK_TEST_INTERVALS=<folder> python -m tests.holders <alias> <way>

``way`` is "right", or how the lock is broken: "renewals ask nobody", "each counts its tokens". A
lock in the cache "locmem" is broken by itself, since each process has a memory of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import django
from django.conf import settings

from django_singletask import TaskLock
from django_singletask.stores import get_store
from django_singletask.stores.base import Outcome
from tests import intervals

PROCESSES = 4
LEASE = 0.3
BODIES = [0.01, 0.1, 2 * LEASE]  # seconds
GIVE_UP = 40

fork = multiprocessing.get_context("fork")


def hold(alias: str, way: str) -> None:
    """Take the lock again and again, for bodies that are shorter or longer than its lease."""
    if way == "renewals ask nobody":
        store = type(get_store(alias))
        store.renew_many = lambda self, requests: [Outcome.OK for _ in requests]
    numbers = itertools.count(1)
    random.seed(os.getpid())
    parent = os.getppid()
    while os.getppid() == parent:
        with TaskLock("turns", timeout=LEASE, on_conflict="skip", cache=alias) as lock:
            if lock:
                with intervals.body(lock):
                    if way == "each counts its tokens":
                        intervals.note_fence(lock, next(numbers))
                    elif way == "right":
                        intervals.fence(lock)
                    work(lock, random.choice(BODIES))
        time.sleep(random.uniform(0, 0.02))


def work(lock: TaskLock, seconds: float) -> None:
    """Go on for some time, or until the lock is lost."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not lock.lost:
        time.sleep(0.01)


def main(alias: str, way: str) -> None:
    """Run the processes; kill the holder and start another in its place, or stop it for a while."""
    settings.SINGLETASK_HISTORY = "off"
    intervals.record()

    def start() -> Any:
        process = fork.Process(target=hold, args=(alias, way))
        process.start()
        return process.pid, process

    processes = dict(start() for _ in range(PROCESSES))
    began = time.monotonic()
    for kills in itertools.cycle([True, False]):
        time.sleep(random.uniform(0.1, 0.3))
        holder = TaskLock("turns", cache=alias).holder()
        pid = holder.pid if holder and holder.pid in processes else random.choice([*processes])
        if kills:
            intervals.kill(pid)
            processes.pop(pid).join()
            processes.update([start()])
        else:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(random.uniform(0.9, 1.7) * LEASE)
            os.kill(pid, signal.SIGCONT)
        recording = intervals.Recording.here()
        ends = Counter(hold.ended_by for hold in recording.holds)
        renewed = any(hold.renewals for hold in recording.holds)
        enough = ends["killed"] > 1 and ends["its deadline"] > 1 and ends["released"] > 9
        # A broken lock goes wrong by chance, so wait until it has.
        seen = recording.faults() or (way == "right" and alias != "locmem")
        if enough and renewed and seen:
            break
        if time.monotonic() - began > GIVE_UP:
            sys.exit(f"Too few of some ends: {ends}, renewed: {renewed}, seen: {seen}")
    intervals.kill(*processes)
    for process in processes.values():
        process.join()


if __name__ == "__main__":
    django.setup()
    main(*sys.argv[1:])
