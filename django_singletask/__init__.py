"""A Celery task that runs only once at a time, with the lock in Django's cache."""

from __future__ import annotations

from django_singletask.exceptions import (
    DuplicateTask,
    LockConflict,
    LockError,
    LockLost,
    LockUnavailable,
)
from django_singletask.holder import Holder
from django_singletask.locks.lock import TaskLock, current_lock
from django_singletask.locks.only_one import only_one
from django_singletask.task.base import SingletonTask
from django_singletask.task.decorator import singleton_task
from django_singletask.task.options import CallOptions
from django_singletask.version import VERSION as __version__  # noqa: F401, for users

__all__ = [
    "CallOptions",
    "DuplicateTask",
    "Holder",
    "LockConflict",
    "LockError",
    "LockLost",
    "LockUnavailable",
    "SingletonTask",
    "TaskLock",
    "current_lock",
    "only_one",
    "singleton_task",
]
