"""The run of a task that wants a lock, and the result of its body."""

from __future__ import annotations

from typing import Any, NamedTuple

from celery import current_task
from celery.exceptions import Ignore, Reject, Retry

from django_singletask.exceptions import Postponed
from django_singletask.holder import Holder
from django_singletask.locks.keys import LockKey
from django_singletask.stores.base import MAX_SLOTS, Slots


class Run(NamedTuple):
    """The run of a task that wants a lock.

    ``token`` is chosen by the worker's main process (None: a random one). ``quiet`` is set for
    tasks with ``lock_history=False``. ``redelivered`` is set for a message that was delivered
    before, according to the broker or an earlier delivery.
    """

    task: str | None = None
    task_id: str | None = None
    retries: int = 0
    token: str | None = None
    quiet: bool = False
    redelivered: bool = False

    @classmethod
    def current(cls) -> Run:
        """Return the run of the Celery task whose body is running here, if one is."""
        task = current_task._get_current_object()  # type: ignore[attr-defined] # noqa: SLF001
        if task is None:  # current_task itself is a proxy, never None
            return NO_RUN
        return cls(task.name, task.request.id, task.request.retries or 0)

    def holder(self, name: str, length: float, slots: int = 1, **process: Any) -> Holder:
        """Return the record of an acquisition by this run now; ``process`` replaces fields."""
        task, task_id, retries, token, *_ = self
        more = {"slots": slots, **process} if slots > 1 else process
        return Holder.new(
            name, length, token=token, task=task, task_id=task_id, retries=retries, **more
        )

    # Processes that allow different numbers of slots
    #
    # A deploy that lowers the number from 5 to 2 leaves runs in the slots 3 to 5. A process that
    # allows 2 neither takes nor counts those slots. So until the old processes are gone, there are
    # at most 5 runs: the greatest number that a process allows. A redelivery reads all possible
    # slots, to find its own first run. With several slots a retry does so, too, because the
    # previous try may not have released its slot yet.

    def slots(self, lock_key: LockKey, holder: Holder) -> Slots:
        """Return the slots that a take reads; a delivery takes no second slot for one message."""
        if holder.slots == 1 and not self.redelivered:
            return Slots((lock_key.key,))
        looks_at = MAX_SLOTS if self.redelivered or self.retries else holder.slots
        # Locks of a body have no mark, since it may take slots in several threads or asyncio tasks.
        mark = holder.mark() if self.task_id else b""
        return Slots(lock_key.slots(looks_at), holder.slots, mark)


NO_RUN = Run()


def result_of(error: BaseException | None) -> str:
    """Return the history's word for the end of a body, given the error that ended it."""
    if isinstance(error, Retry):
        return "retried"
    if isinstance(error, Postponed):
        return "postponed"
    if isinstance(error, (Ignore, Reject)):
        return "ignored"
    if error is None:
        return "returned"
    # SystemExit, for example: Celery's terminate ended the process under the body.
    return "raised" if isinstance(error, Exception) else "terminated"
