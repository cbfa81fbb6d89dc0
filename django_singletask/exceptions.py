"""The errors of this package; all of them survive pickle and Celery's JSON results."""

from __future__ import annotations

from typing import Any

from celery.exceptions import Ignore

from django_singletask.holder import Holder

__all__ = ["DuplicateTask", "LockConflict", "LockError", "LockLost"]


class LockError(Exception):
    """A lock was used in a way that it does not allow; base of the other errors here."""


class LockConflict(LockError):
    """The lock is held by somebody else.

    ``name`` is the lock's name, ``holder`` the :class:`Holder` that was seen (None if it went
    away at that moment) and ``remaining`` the seconds left of its lease (None where the store
    cannot tell).
    """

    def __init__(
        self,
        name: str,
        holder: Holder | dict[str, Any] | None = None,
        remaining: float | None = None,
    ) -> None:
        if isinstance(holder, dict):
            holder = Holder.from_dict(holder)
        # Plain values only: Celery's JSON results keep these and call the class with them.
        super().__init__(name, holder and dict(vars(holder)), remaining)
        self.name = name
        self.holder = holder
        self.remaining = remaining

    def __str__(self) -> str:
        text = f"{self.name} is held"
        if self.holder is not None:
            text += f" by {self.holder}"
        if self.remaining is not None:
            text += f"; its lease ends in {self.remaining:.0f} s unless renewed"
        return text


class LockLost(LockError):
    """The lock of a running body is no longer its own: its lease ended or it was cleared."""


class DuplicateTask(LockError):
    """An equal call is queued already; ``task_id`` is that call's."""

    def __init__(self, name: str, task_id: str) -> None:
        super().__init__(name, task_id)
        self.name = name
        self.task_id = task_id

    def __str__(self) -> str:
        return f"{self.name} is queued already, as task {self.task_id}"


class PutOff(Ignore):
    """This delivery of a message ends here; the next one is published."""


class Done(Ignore):
    """This delivery of a message ends here; another one has done the work, or goes on with it."""
