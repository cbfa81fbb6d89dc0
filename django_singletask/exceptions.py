"""The errors of this package; all of them survive pickle and Celery's JSON results."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore

from django_singletask.holder import Holder

__all__ = [
    "Dropped",
    "DuplicateTask",
    "LockConflict",
    "LockError",
    "LockLost",
    "LockUnavailable",
    "Postponed",
]


class LockError(Exception):
    """A lock was used in a way that it does not allow; base of the other errors here."""


class LockConflict(LockError):
    """The lock is held by somebody else.

    ``name`` is the lock's name. ``holder`` is the :class:`Holder` that was seen, None if it gave
    the lock back at that moment. ``remaining`` is the rest of its lease in seconds, None where
    the store cannot tell. ``note`` says more, such as how long was waited. ``lock`` is the
    :class:`TaskLock` that was refused; None after a pickle.
    """

    __slots__ = ("lock",)  # so it is not in __dict__, which an exception pickles

    def __init__(
        self,
        name: str,
        holder: Holder | dict[str, Any] | None = None,
        remaining: float | None = None,
        note: str = "",
    ) -> None:
        if isinstance(holder, dict):
            holder = Holder.from_dict(holder)
        # Plain values only: Celery stores these as JSON and calls the class with them again.
        super().__init__(name, holder and dict(vars(holder)), remaining, note)
        self.name = name
        self.holder = holder
        self.remaining = remaining
        self.note = note
        self.lock: Any = None

    @classmethod
    def of(cls, lock: Any) -> LockConflict:
        """Return the error for a :class:`TaskLock` that was just refused."""
        conflict = cls(lock.name, lock.blocker, lock.blocker_remaining, lock.note)
        conflict.lock = lock
        return conflict

    def __str__(self) -> str:
        text = f"{self.name} is held"
        if self.holder is not None:
            text += f" by {self.holder}"
        if self.remaining is not None:
            kept = self.holder is not None and self.holder.kept
            text += f"; {'kept for' if kept else 'its lease ends in'} {self.remaining:.0f} s"
            text += " more" if kept else " unless renewed"
        return f"{text}; {self.note}" if self.note else text

    def __repr__(self) -> str:
        # Celery logs it. The arguments would be the whole record of the holder, token and boot id.
        return f"{type(self).__name__}({str(self)!r})"


class LockLost(LockError):
    """The running body no longer has its lock: the lease ended, or an operator cleared it.

    Or somebody else took it after the cache had forgotten it.
    """


class LockUnavailable(LockError):
    """The cache cannot be asked; the error of its client is the cause (``__cause__``).

    Or it grants no lock: it answers later than the lease lasts, or keeps no new entry.
    """


class DuplicateTask(LockError):
    """An equal call stops this one; ``task_id`` is the id of that call."""

    def __init__(self, name: str, task_id: str) -> None:
        super().__init__(name, task_id)
        self.name = name
        self.task_id = task_id

    def __str__(self) -> str:
        return f"{self.name}: an equal call was sent before, as task {self.task_id}"


class Postponed(Ignore):
    """End this delivery of a message: the message is published again, for a little later."""


class Dropped(Ignore):
    """End this delivery of a message: another delivery did the work, or goes on with it."""
