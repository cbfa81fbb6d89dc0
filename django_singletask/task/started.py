"""Store the state STARTED when the body begins, and not before (``task_track_started``)."""

from __future__ import annotations

import os
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.states import STARTED

from django_singletask.log import logger

# Celery stores STARTED before it calls the task. Some backends let it replace the result of an
# earlier delivery, and all of them let it replace RETRY. Then this delivery could not see that its
# work is done, and the result would be gone:
#
#   first run:  ........ SUCCESS
#   message:                      again: Celery stores STARTED   reads STARTED -> runs again
#
# So SingletonTask switches Celery's storing off, and the delivery stores STARTED when its body
# begins. The row of a call that is skipped, postponed or dropped stays as it was.


def store_started(task: Any, request: Any) -> None:
    """Store what Celery stores; nothing for a call without a message, whose ``request`` is None.

    An error is logged, because it must not end the task.
    """
    if request is None or vars(request).get("ignore_result", task.ignore_result):
        return
    facts = {"pid": os.getpid(), "hostname": request.hostname}
    try:
        task.backend.store_result(request.id, facts, STARTED, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        logger.exception("The state STARTED of task %s cannot be stored.", request.id)
