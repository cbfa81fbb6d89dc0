"""Let one TaskLock object serve one acquisition at a time."""

from __future__ import annotations

from django_singletask.exceptions import LockError

__all__ = ["Use"]


class Use:
    """Who uses an object now: an acquisition, or a block until its end.

    The object is in use from before the take until after the release, and for as long as a block
    runs, also one that is skipped. Without that, the acquisition of one thread would let the
    other thread in:

      thread 1: with LOCK as lock: (taken)  body ...................... exit: frees it
      thread 2:     with LOCK as lock: (held by another)   if lock: True, by thread 1 -> body
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_block = False
        self._by: dict[str, object] = {}  # each of its methods is one step, also between threads

    def is_by(self, user: object) -> bool:
        """Say whether the object is in use by this acquisition or block."""
        return self._by.get("now") is user

    def begin(self, user: object) -> None:
        """Reserve the object; raises :class:`LockError` if it is in use."""
        if self._by.setdefault("now", user) is not user:
            raise LockError(
                f"This TaskLock of {self.name} is in use: one object serves one acquisition at a "
                "time. Make one for each use: with TaskLock(…):"
            )

    def receive(self, user: object) -> None:
        """Reserve a new object that holds the lock already, until it is released or entered."""
        self._by.update(now=user, received=user)

    def begin_block(self, user: object) -> bool:
        """Reserve the object for a block; say whether it holds the lock already."""
        received = self._by.pop("received", None) is not None
        if received:
            self._by["now"] = user
        else:
            self.begin(user)
        self.in_block = True
        return received

    def end(self) -> None:
        """Let the object be used again; inside a block, the end of the block does it."""
        if not self.in_block:
            self._by.clear()

    def end_block(self) -> None:
        """Let the object be used again after a block."""
        self.in_block = False
        self._by.clear()
