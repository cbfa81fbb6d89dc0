"""The ``with`` blocks that are open here, in this thread and asyncio task."""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

__all__ = ["enter", "innermost", "leave", "outlast"]


class Block(NamedTuple):
    """A block, and the block around it.

    The reference is weak: after a signal that strikes between a body and its ``__exit__``, the
    context would keep the lock, and so its renewal, for ever.
    """

    lock: weakref.ref[Any]
    thread: int
    outer: Block | None


_innermost: ContextVar[Block | None] = ContextVar("innermost", default=None)


def enter(lock: Any) -> Token[Block | None]:
    """Note that the block of a lock begins here."""
    return _innermost.set(Block(weakref.ref(lock), threading.get_ident(), _innermost.get()))


def leave(token: Token[Block | None]) -> None:
    """Note that the block for which :func:`enter` gave the token has ended."""
    _innermost.reset(token)


def innermost() -> Any:
    """Return the lock of the innermost block; None outside all blocks."""
    block = _innermost.get()
    return None if block is None else block.lock()


def outlast(token: str, key: str, until: float) -> bool:
    """Say whether a block around this call holds the lock, and cannot end before ``until``.

    The context says which blocks are around this call. A thread to which a job was passed has a
    copy of the context, but the blocks in it were entered in another thread, which may end them. A
    fixed lease may end before its block does.
    """
    block = _innermost.get()
    while block is not None:
        lock = block.lock() if block.thread == threading.get_ident() else None
        if lock and (lock.lease.token, lock.lease.key) == (token, key):
            return bool(lock.lease.renews or lock.lease.deadline >= until)
        block = block.outer
    return False
