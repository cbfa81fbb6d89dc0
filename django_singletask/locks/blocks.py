"""The ``with`` blocks that are open here, in this thread and asyncio task."""

from __future__ import annotations

import asyncio
import weakref
from asyncio import _get_running_loop
from collections.abc import Iterator
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from django_singletask import threads

Place = tuple[object, int | None]
"""A mark of a thread, and the id of the asyncio task that runs in it."""


def here() -> Place:
    loop = _get_running_loop()  # without a loop, a tenth of the time of get_running_loop()
    task = None if loop is None else asyncio.current_task(loop)
    # Mark each thread with an object, because the number of a thread can be used again.
    try:
        mark = threads.variables.mark
    except AttributeError:
        mark = threads.own("mark", object)
    return mark, None if task is None else id(task)


class Block(NamedTuple):
    """A block, and the block around it.

    The reference is weak: if a signal strikes between a body and its ``__exit__``, the context
    would otherwise keep the lock, and so its renewal, for ever.
    """

    lock: weakref.ref[Any]
    place: Place
    outer: Block | None


_innermost: ContextVar[Block | None] = ContextVar("innermost", default=None)


def enter(lock: Any) -> Token[Block | None]:
    return _innermost.set(Block(weakref.ref(lock), here(), _innermost.get()))


def leave(token: Token[Block | None]) -> None:
    """Note that the block for which :func:`enter` returned the token has ended."""
    # The loop may close an asynchronous generator with an open block in another context.
    try:  # noqa: SIM105 - suppress() takes longer than the rest
        _innermost.reset(token)
    except ValueError:
        pass


def innermost() -> Any:
    """Return the lock of the innermost block; None outside all blocks."""
    block = _innermost.get()
    return None if block is None else block.lock()


def around(lease: Any, place: Place) -> Any:
    """Return the lease of a block around this place that has a slot of the same lock.

    With one slot the store finds that. With several slots, a nested call could take another slot,
    and would wait for itself when none is free.
    """
    for lock in _around(place):
        held = lock.lease
        if held.cache == lease.cache and held.key in lease.slots.keys and not held.lost:
            return held
    return None


def outlast(token: str, key: str, until: float, place: Place) -> bool:
    """Return whether a block around this place holds the lock until after ``until``.

    A new thread or asyncio task may have a copy of the context, but its blocks were entered in
    another thread or task, which may end them. A fixed lease may end before its block does.
    """
    for lock in _around(place):
        if (lock.lease.token, lock.lease.key) == (token, key):
            return bool(lock.lease.renews or lock.lease.deadline >= until)
    return False


def _around(place: Place) -> Iterator[Any]:
    """Yield the locks held by the blocks around this place, the innermost first."""
    block = _innermost.get()
    while block is not None:
        lock = block.lock() if block.place == place else None
        if lock:
            yield lock
        block = block.outer
