"""Run the steps of an acquisition: in this thread, or in others without stopping an event loop.

A step is a function that sends requests. It returns the seconds to sleep until the next step, or
None after the last one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from django_singletask.locks.pool import Job

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
    job = Job(cache, step)
    try:
        while (pause := await job.submit().reply()) is not None:
            await asyncio.sleep(pause)
            job = Job(cache, step)
    except BaseException as error:
        last = Job(cache, functools.partial(undo, error))
        job.end_by(last)
        if not isinstance(error, GeneratorExit):  # after the end of the loop nothing can be awaited
            await last.end(GRACE)
        raise


async def in_thread(cache: str, work: Callable[[], T]) -> T:
    """Do a job with requests to a cache in another thread; a cancel does not stop the job."""
    job = Job(cache, work).submit()
    try:
        result: T = await job.reply()
        return result
    except asyncio.CancelledError:
        await job.end(GRACE)
        raise


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
