"""Make requests in other threads, so that the event loop never waits for them."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import functools
import queue
import threading
from asyncio import _get_running_loop
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

from django_singletask import clock
from django_singletask.conf import conf
from django_singletask.forks import at_fork
from django_singletask.holder import Holder
from django_singletask.locks.lease import Lease

P = ParamSpec("P")
T = TypeVar("T")

GRACE = 1.0
"""Seconds for which a cancelled call waits for the reply to its request, to release at once."""
MAX_THREADS = 8
"""Threads for each cache, so that a cache that does not answer delays no other."""
IDLE = 5.0
"""Seconds without a job after which a thread closes its connections and ends."""


class Threads:
    """The threads for one cache; each has separate connections.

    They are daemons, so that a process can end while a server does not answer.
    """

    def __init__(self) -> None:
        self.jobs: Any = queue.SimpleQueue()
        # Re-entrant: while a thread holds this lock, the garbage collector can close a coroutine,
        # which then adds a job.
        self.counting: threading.RLock = threading.RLock()
        self.unfinished: int = 0
        self.threads: int = 0

    def add(self, job: Callable[[], object]) -> None:
        with self.counting:
            self.unfinished += 1
            if self.threads < min(self.unfinished, MAX_THREADS):
                _thread.start_new_thread(self.run, ())
                self.threads += 1
        self.jobs.put(job)

    def run(self) -> None:
        while True:
            with suppress(queue.Empty):
                # The job is called at once: a variable would keep it, and the lock in it, for as
                # long as this thread waits for the next job.
                self.jobs.get(timeout=IDLE)()
                with self.counting:
                    self.unfinished -= 1
                continue
            with self.counting:
                # A job that add() has counted arrives at once.
                if self.unfinished < self.threads:
                    self.threads -= 1
                    break
        connections.close_all()


pools: defaultdict[str, Threads] = defaultdict(Threads)

at_fork(after_in_child=pools.clear)  # the child has none of the threads


def submit(cache: str, work: Callable[[], Any]) -> asyncio.Future[Any] | None:
    """Do a job in a thread of the cache, in a copy of the current context.

    Return the future of its result and its error; None if no loop runs here, since a coroutine is
    closed after the end of its loop.
    """
    context, loop = contextvars.copy_context(), _get_running_loop()

    def outcome() -> tuple[Any, BaseException | None]:
        try:
            return context.run(work), None
        except BaseException as error:
            return None, error

    if loop is None:
        pools[cache].add(outcome)
        return None
    # The history is written on the caller's connection, which is in the thread that Django uses for
    # asyncio code.
    if conf.history == "inline":
        return asyncio.ensure_future(sync_to_async(outcome)())
    future = loop.create_future()

    def job() -> None:
        result = outcome()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(future.set_result, result)

    pools[cache].add(job)
    return future


async def in_thread(cache: str, work: Callable[[], T], *, grace: float = GRACE) -> T:
    """Do a job with requests to a cache in another thread, and return its result.

    A cancel does not stop the job. The cancelled call waits for the job, at most ``grace`` seconds.
    """
    future = submit(cache, work)
    assert future is not None
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        await asyncio.wait([future], timeout=grace)
        raise
    result: T
    result, error = future.result()
    if error is not None:
        raise error
    return result


def offer_in_thread(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method of a lock as a coroutine function, which runs it in another thread."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        job = functools.partial(method, self, *args, **kwargs)
        cache = self.cache
        if cache is None:
            cache = conf.cache
        return await in_thread(cache, job)

    call.__name__ = f"a{method.__name__}"
    call.__qualname__ = method.__qualname__.replace(method.__name__, call.__name__)
    return call


class Attempts:
    """The attempts of asyncio code to take a lease, which other threads make one by one.

    The request of a call that fails or is cancelled may still take the lock. So it is undone, by
    another thread and after the reply; and an attempt that has not begun by then does nothing:

      loop:    await    cancelled: CancelledError    waits at most GRACE      continues
      thread:  add ->                                -> added     undo: release ->
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.turn: threading.Lock = threading.Lock()
        self.is_over: bool = False

    async def take(self) -> Holder | None:
        """Take the entry as :meth:`Lease.take` does, without stopping the event loop."""
        lease = self.lease
        lease.until = clock.now() + lease.wait
        pause = await in_thread(lease.cache, self._attempt, grace=0)
        while pause is not None:
            await asyncio.sleep(pause)
            pause = await in_thread(lease.cache, self._attempt, grace=0)
        return lease.blocker

    def _attempt(self) -> float | None:
        with self.turn:
            if self.is_over:
                return None
            return self.lease.attempt()

    def undo(self, undo: Callable[[], object]) -> asyncio.Future[Any] | None:
        """Call ``undo`` in a thread, once no attempt runs; see :func:`submit`."""

        def work() -> None:
            with self.turn:
                self.is_over = True
                undo()

        return submit(self.lease.cache, work)
