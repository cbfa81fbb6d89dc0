"""The errors of this package. All of them survive pickle and Celery's JSON results."""

from __future__ import annotations

from typing import Any

from django_singletask.holder import Holder


class LockError(Exception):
    """A lock was used in a way that it does not allow; the base class of the other errors."""


class LockConflict(LockError):
    """Another holder has the lock.

    * ``name``: the name of the lock.
    * ``holder``: its :class:`Holder`, or None if the lock was just released.
    * ``remaining``: seconds that the holder's lease has left; None if unknown.
    * ``note``: details, such as how long the call waited.
    * ``lock``: the refused :class:`TaskLock`; None after unpickling.
    """

    __slots__ = ("lock",)  # outside __dict__, which is pickled

    holder: Holder | None
    lock: Any

    def __init__(
        self,
        name: str,
        holder: Holder | dict[str, Any] | None = None,
        remaining: float | None = None,
        note: str = "",
        lock: Any = None,
    ) -> None:
        if isinstance(holder, dict):
            holder = Holder.from_dict(holder)
        record = None
        if holder is not None:
            record = dict(vars(holder))
        # Plain values only: Celery stores these as JSON and calls the class with them again.
        super().__init__(name, record, remaining, note)
        self.name = name
        self.holder = holder
        self.remaining = remaining
        self.note = note
        self.lock = lock

    def __str__(self) -> str:
        text = f"{self.name} is held"
        if self.holder:
            text += f" by {self.holder}"
        if self.remaining is not None:
            if self.holder and self.holder.kept:
                text += f"; kept for {self.remaining:.0f} s more"
            else:
                text += f"; its lease ends in {self.remaining:.0f} s unless renewed"
        if self.note:
            text += f"; {self.note}"
        return text

    def __repr__(self) -> str:
        # Celery logs it. The default would show the holder's whole record, with token and boot id.
        return f"{type(self).__name__}({str(self)!r})"


class LockLost(LockError):
    """The running code has lost its lock: the lease ended, or the lock was cleared or forgotten."""


class LockUnavailable(LockError):
    """The cache does not answer, answers too late for the lease, or keeps no new entry.

    The error of its client is the cause (``__cause__``).
    """


class DuplicateTask(LockError):
    """An identical call stops this one; ``task_id`` is the id of that call."""

    def __init__(self, name: str, task_id: str) -> None:
        super().__init__(name, task_id)
        self.name = name
        self.task_id = task_id

    def __str__(self) -> str:
        return f"{self.name}: an identical call was sent earlier, as task {self.task_id}"
