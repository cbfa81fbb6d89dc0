"""The locks in the admin; Django registers them by importing this package."""

from __future__ import annotations

from django_singletask.admin.pages import TaskLockEventAdmin

__all__ = ["TaskLockEventAdmin"]
