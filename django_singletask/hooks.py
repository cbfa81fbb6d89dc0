"""What this package uses of Celery and kombu although they do not promise it."""

from __future__ import annotations

from importlib.util import find_spec
from pkgutil import resolve_name
from types import SimpleNamespace

from celery.app.autoretry import add_autoretry_behaviour

TESTED = (5, 7)
"""The newest minor version of Celery with which all tests pass."""

ORIGINAL_BODY = "celery.app.autoretry:add_autoretry_behaviour._orig_run"

HOOKS = {
    "celery.app.amqp:AMQP.argsrepr_maxsize": "see whether the sender of a call hides arguments",
    "celery.app.amqp:AMQP.kwargsrepr_maxsize": "see whether the sender of a call hides arguments",
    ORIGINAL_BODY: "let autoretry_for repeat a call that finds its lock held",
    "celery.app.task:Context._protected": "tell the run of a message from a direct call",
    "celery.app.task:Task.Strategy": "refuse bases that run the body without its lock",
    "celery.app.task:Task.on_bound": "check the options of a task before its first call",
    "celery.app.task:Task.on_replace": "release the lock before an eager replacement runs",
    "celery.app.task:Task.push_request": "let other base classes call the body",
    "celery.app.task:Task.request_stack": "find the message of a run",
    "celery.app.task:Task.signature_from_request": "postpone and retry a message with its lock",
}
HOOKS |= {
    "celery.app.base:Celery.annotations": "check task_annotations",
    "celery.concurrency.base:BasePool.maintain_pool": "replace a killed process at once",
    "celery.concurrency.prefork": "know a worker whose pool consists of processes",
    "celery.loaders.base:BaseLoader.import_task_module": "find all tasks",
    "celery.utils.dispatch.signal:Signal.receivers": "find all tasks",
    "celery.worker.request:Request._payload": "find the lock of a killed process",
    "celery.worker.request:Request.on_accepted": "know which process runs which message",
    "celery.worker.request:Request.on_success": "know which message a killed process had done",
    "celery.worker.request:Request.request_dict": "choose the token of a lock for its process",
    "kombu.asynchronous.hub:Hub.call_repeatedly": "replace a killed process at once",
}
"""Each name, with what this package needs it for: a check reports those that are missing.

These names are looked up on classes and modules of Celery and kombu when something uses them. Names
that are imported are not here: if one is missing, the ``ImportError`` of this package names it. Nor
are attributes that only objects have, such as ``pool`` and ``hub`` of a worker's consumer, because
no object is there to look at: if one is missing, an ``AttributeError`` names it where it is used.
"""


def missing_hooks() -> list[str]:
    """Return which names of ``HOOKS`` the installed versions do not have."""
    return [name for name in HOOKS if not is_there(name)]


def is_there(name: str) -> bool:
    """Return whether the installed versions have this name of ``HOOKS``."""
    try:
        if name == ORIGINAL_BODY:
            task = SimpleNamespace(autoretry_for=(Exception,), run=is_there)
            add_autoretry_behaviour(task)
            return hasattr(task, "_orig_run")
        if ":" not in name:  # a module that is large, and that only some workers need
            return find_spec(name) is not None
        resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True
