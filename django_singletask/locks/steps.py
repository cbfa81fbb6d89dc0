"""Run the steps of an acquisition: in this thread, or in others without stopping an event loop.

A step is a function that sends requests. It returns the seconds to sleep until the next step, or
None after the last one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, Concatenate, ParamSpec, TypeVar

from django_singletask.locks.pool import submit

__all__ = ["GRACE", "do", "do_in_threads", "in_thread", "offer_in_thread"]

P = ParamSpec("P")
T = TypeVar("T")

GRACE = 1.0
"""Seconds for which a cancelled call waits for the reply to its request, to release at once."""


def do(step: Callable[P, float | None], /, *args: P.args, **kwargs: P.kwargs) -> None:
    while (pause := step(*args, **kwargs)) is not None:
        time.sleep(pause)


async def do_in_threads(
    cache: str, step: Callable[[], float | None], undo: Callable[[BaseException], None]
) -> None:
    """Run each step in a thread of the cache, and sleep in the loop between two steps.

    If that fails or is cancelled, ``undo`` is called in a thread, with the error. The request
    that is on its way may still take the lock, so ``undo`` comes after the reply:

      loop:    await    cancelled: CancelledError    waits at most GRACE      continues
      thread:  add ->                                -> added     undo: release ->
    """
    job: Future[float | None] | None = None
    try:
        while True:
            job = submit(cache, step)
            pause = await _reply(job)
            if pause is None:
                return
            await asyncio.sleep(pause)
    except BaseException as error:
        left = submit(cache, functools.partial(_leave, job, undo, error))
        if not isinstance(error, GeneratorExit):  # after the end of the loop nothing can be awaited
            await asyncio.wait([_quiet(left)], timeout=GRACE)
        raise


def _leave(
    job: Future[Any] | None, undo: Callable[[BaseException], None], error: BaseException
) -> None:
    if job is not None and not job.cancel():
        wait([job])
    undo(error)


async def in_thread(cache: str, job: Callable[[], T]) -> T:
    """Do a job with requests to a cache in another thread; a cancel does not stop the job."""
    future = submit(cache, job)
    try:
        return await _reply(future)
    except asyncio.CancelledError:
        await asyncio.wait([_quiet(future)], timeout=GRACE)
        raise


async def _reply(future: Future[T]) -> T:
    """Return the result of a job; a cancel does not stop the job."""
    await asyncio.wait([_quiet(future)])
    return future.result()


def _quiet(future: Future[Any]) -> asyncio.Future[Any]:
    """Let the loop wait for a job; it does not report the job's error if nothing awaits that."""
    waiter = asyncio.wrap_future(future)
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiter


def offer_in_thread(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method of a lock as a coroutine function, which runs it in another thread."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(self.address.cache, functools.partial(method, self, *args, **kwargs))

    call.__name__ = f"a{method.__name__}"
    call.__qualname__ = method.__qualname__.replace(method.__name__, call.__name__)
    return call
