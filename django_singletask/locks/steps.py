"""Go through the steps of an acquisition: in this thread, or in others while a loop goes on.

A step is a function that makes requests. It returns the seconds to sleep until it is called again,
or None when there is nothing left to do.
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
"""Seconds for which a cancelled call waits for the reply to its request, to give back at once."""


def do(step: Callable[P, float | None], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Do the steps here."""
    while (pause := step(*args, **kwargs)) is not None:
        time.sleep(pause)


async def do_in_threads(
    cache: str, step: Callable[[], float | None], undo: Callable[[BaseException], None]
) -> None:
    """Do each step in a thread of the cache, and sleep in the loop between two steps.

    If that fails or is cancelled, ``undo`` is called in a thread, with the error. The request
    that is under way may still take the lock, so ``undo`` comes after the reply:

      loop:    await    cancelled: CancelledError    waits at most GRACE      goes on
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
    """Do a job with requests to a cache in another thread; it is done even if this is cancelled."""
    future = submit(cache, job)
    try:
        return await _reply(future)
    except asyncio.CancelledError:
        await asyncio.wait([_quiet(future)], timeout=GRACE)
        raise


async def _reply(future: Future[T]) -> T:
    """Return the result of a job; to cancel this does not cancel the job."""
    await asyncio.wait([_quiet(future)])
    return future.result()


def _quiet(future: Future[Any]) -> asyncio.Future[Any]:
    """Let the loop wait for a job whose error it need not report: a cancelled call ignores it."""
    waiter = asyncio.wrap_future(future)
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiter


def offer_in_thread(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method of a lock as a coroutine function, whose requests stop no loop."""

    @functools.wraps(method)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await in_thread(self.address.cache, functools.partial(method, self, *args, **kwargs))

    call.__name__ = f"a{method.__name__}"
    call.__qualname__ = method.__qualname__.replace(method.__name__, call.__name__)
    return call
