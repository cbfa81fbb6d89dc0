"""Send calls as a project does that traces them; show that no header of this package is lost.

    python -m tests.send_traced <queue>

The variable SINGLETASK_TEST_TRACE says what traces them; see traced.py.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import django


def send_all(queue: str) -> None:
    """Send a call for each thing that the header of a message says; raise an error for a loss."""
    from django_singletask import LockConflict
    from tests.deadline import wait_for
    from tests.testapp import log, tasks

    def until(condition: Callable[[], Any], what: str) -> Any:
        return wait_for(condition, what, deadline=30)

    def starts(result: Any) -> list[dict[str, Any]]:
        lines = log.read(log.path())
        return [line for line in lines if (line["event"], line["task_id"]) == ("start", result.id)]

    # The entry of a queued call: freed when the call starts.
    first = tasks.unique.apply_async(("started",), queue=queue)
    assert first.get(timeout=30) == "ran"
    assert tasks.unique.queued("started") is None
    assert tasks.unique.apply_async(("started",), queue=queue).id != first.id

    # It is kept by a retry, and freed after it.
    again = tasks.unique_to_the_end.apply_async(("retried", 0, 1), queue=queue)
    until(lambda: again.state == "RETRY", "it waits for its retry")
    assert tasks.unique_to_the_end.queued("retried", 0, 1).id == again.id
    assert again.get(timeout=30) == "ran"
    until(lambda: tasks.unique_to_the_end.queued("retried", 0, 1) is None, "it is freed")

    # It is freed by a worker that discards a revoked call.
    revoked = tasks.unique.apply_async(("revoked",), queue=queue, countdown=5)
    revoked.revoke()
    until(lambda: tasks.unique.queued("revoked") is None, "the revoked call is freed")

    # The options of one call, also after hops.
    with tasks.hold.lock("options"):
        strict = {"on_conflict": "raise"}
        failing = tasks.hold.apply_async(("options",), queue=queue, lock_options=strict)
        assert isinstance(failing.get(timeout=30, propagate=False), LockConflict)
        postponed = {"on_conflict": "requeue", "lock_wait": 1.5}
        waiting = tasks.hold.apply_async(("options",), queue=queue, lock_options=postponed)
        assert isinstance(waiting.get(timeout=30, propagate=False), LockConflict)

    # The token of the main process, with which it frees the lock of a killed process.
    killed = tasks.long.apply_async(("killed", 60), queue=queue)
    [line] = until(lambda: starts(killed), "it runs")
    os.kill(line["pid"], signal.SIGKILL)
    until(lambda: not tasks.long.lock("killed").locked(), "the lock of a killed process is free")


if __name__ == "__main__":
    django.setup()
    from tests.testapp.celery import app

    app.set_default()
    send_all(sys.argv[1])
    print("nothing is lost")
