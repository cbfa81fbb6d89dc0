"""Find the tasks of this project that take locks."""

from __future__ import annotations

from celery import current_app
from django.utils.module_loading import autodiscover_modules

from django_singletask.task.base import SingletonTask

__all__ = ["import_tasks", "singleton_tasks"]


def import_tasks() -> None:
    """Import the modules of tasks that a worker imports: only a worker does so by itself.

    Not by the loader's own ``import_default_modules()``, which makes Celery run the checks.
    """
    autodiscover_modules("tasks")
    for module in (*current_app.conf.imports, *current_app.conf.include):
        current_app.loader.import_task_module(module)


def singleton_tasks() -> dict[str, SingletonTask]:
    """Return the registered tasks that take locks, by name, in the order of their names.

    Call :func:`import_tasks` first, unless a worker or a check has done so.
    """
    tasks = sorted(current_app.tasks.items())
    return {name: task for name, task in tasks if isinstance(task, SingletonTask)}
