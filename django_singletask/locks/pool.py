"""Threads that make the requests of asyncio code, so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

from django_singletask.conf import conf
from django_singletask.stores import close_stores

__all__ = ["IDLE", "MAX_THREADS", "submit"]

T = TypeVar("T")

MAX_THREADS = 8
"""Threads for each cache, so that a cache that does not answer delays no other."""
IDLE = 5.0
"""Seconds without a job after which a thread closes its connections and ends."""


class Pool:
    """The threads for one cache; each has separate connections.

    They are daemons, so that a process can end while a server does not answer.
    """

    def __init__(self) -> None:
        self.jobs: deque[Callable[[], None]] = deque()
        self.changed = threading.Condition()
        self.threads = 0
        self.idle = 0

    def add(self, job: Callable[[], None]) -> None:
        with self.changed:
            # Each idle thread takes one of the jobs that wait already.
            if self.idle <= len(self.jobs) and self.threads < MAX_THREADS:
                threading.Thread(target=self.run, name="singletask-asyncio", daemon=True).start()
                self.threads += 1
            self.jobs.append(job)
            self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                self.idle += 1
                self.changed.wait_for(lambda: self.jobs, IDLE)
                self.idle -= 1
                if not self.jobs:
                    self.threads -= 1
                    break
                job = self.jobs.popleft()
            job()
            del job  # it refers to a lock
        close_stores()
        connections.close_all()


_pools: dict[str, Pool] = {}
_in_transactions: set[asyncio.Future[Any]] = set()
"""Strong references, since the loop keeps only weak ones."""


def submit(cache: str, job: Callable[[], T]) -> Future[T]:
    """Do a job with requests to a cache in another thread, in a copy of the current context.

    The job can be cancelled until it begins.
    """
    future: Future[T] = Future()
    work = partial(_settle, future, partial(contextvars.copy_context().run, job))
    # No loop runs if a coroutine is closed after the end of its loop.
    if conf.history == "inline" and _get_running_loop() is not None:
        # As in tests, the history is written in the caller's transaction, which is in the thread
        # that Django uses for asyncio code.
        task = asyncio.ensure_future(sync_to_async(work)())
        _in_transactions.add(task)
        task.add_done_callback(_in_transactions.discard)
    else:
        _pools.setdefault(cache, Pool()).add(work)
    return future


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # the child has none of the threads
