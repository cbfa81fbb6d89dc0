"""Threads that make the requests of asyncio code, so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
import contextvars
import os
import queue
import threading
from asyncio import _get_running_loop
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from django_singletask.conf import conf
from django_singletask.stores import close_stores
from django_singletask.threads import new_queue, start

MAX_THREADS = 8
"""Threads for each cache, so that a cache that does not answer delays no other."""
IDLE = 5.0
"""Seconds without a job after which a thread closes its connections and ends."""


def _nothing() -> None:
    pass


class Job:
    """A call in another thread, in a copy of the current context; the loop can wait for its end.

    The methods for the loop use no lock, because a signal could leave it locked.
    """

    result: Any = None
    error: BaseException | None = None
    pending = False
    next: Job
    """The job that :meth:`end_by` has set."""

    def __init__(self, cache: str, work: Callable[[], Any]) -> None:
        self.cache = cache
        self.work: Callable[[], Any] = partial(contextvars.copy_context().run, work)
        loop = _get_running_loop()  # none if a coroutine is closed after the end of its loop
        self.ended = None if loop is None else loop.create_future()

    def submit(self) -> Job:
        self.pending = True
        try:
            self._hand_in()
        except BaseException:  # a signal; end_by() must not wait for this job
            self.pending, self.work = False, _nothing
            raise
        return self

    def _hand_in(self) -> None:
        # As in tests, the history is written in the caller's transaction, which is in the thread
        # that Django uses for asyncio code.
        if conf.history == "inline" and self.ended is not None:
            task = asyncio.ensure_future(sync_to_async(self.run)())
            _in_transactions.add(task)
            task.add_done_callback(_in_transactions.discard)
        else:
            pools[self.cache].add(self)

    async def end(self, seconds: float | None = None) -> None:
        """Wait until the job has ended; a cancel does not stop the job."""
        assert self.ended is not None
        await asyncio.wait([self.ended], timeout=seconds)

    async def reply(self) -> Any:
        await self.end()
        if self.error is not None:
            raise self.error
        return self.result

    # Each side says what it does before it looks at the other side, and pop() is atomic. So the
    # last job runs once, in whichever thread sees both:
    #
    #   loop:    next = undo   pending? yes
    #   thread:                               pending = False   next? undo -> runs it

    def end_by(self, last: Job) -> None:
        """Let a last job run after this one, or instead of it if this one has not begun."""
        self.next = last
        if not self.pending:
            self._continue(Job.submit)

    def run(self) -> None:
        if "next" not in vars(self):
            try:
                self.result = self.work()
            except BaseException as error:
                self.error = error
        self.pending = False
        if self.ended is not None:
            with suppress(RuntimeError):  # the loop is closed
                self.ended.get_loop().call_soon_threadsafe(self._tell)
        self._continue(Job.run)

    def _continue(self, how: Callable[[Job], Any]) -> None:
        last = vars(self).pop("next", None)
        if last is not None:
            how(last)

    def _tell(self) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


class Pool:
    """The threads for one cache; each has separate connections.

    They are daemons, so that a process can end while a server does not answer.
    """

    def __init__(self) -> None:
        self.jobs = new_queue()
        self.counting = threading.Lock()
        self.unfinished = 0
        self.threads = 0

    def add(self, job: Job) -> None:
        with self.counting:
            self.unfinished += 1
            if self.threads < min(self.unfinished, MAX_THREADS):
                start(self.run)
                self.threads += 1
        self.jobs.put(job)

    def run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=IDLE)
            except queue.Empty:
                with self.counting:
                    # A job that add() has counted arrives at once.
                    if self.unfinished < self.threads:
                        self.threads -= 1
                        break
                continue
            job.run()
            del job  # it refers to a lock
            with self.counting:
                self.unfinished -= 1
        close_stores()
        connections.close_all()


pools: defaultdict[str, Pool] = defaultdict(Pool)
_in_transactions: set[asyncio.Future[Any]] = set()
"""Strong references, since the loop keeps only weak ones."""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pools.clear)  # the child has none of the threads
