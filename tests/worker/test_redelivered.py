"""Calls that wait in workers for longer than the visibility timeout: Redis delivers them again."""

from __future__ import annotations

from collections import Counter

from tests.deadline import wait_for
from tests.overwriting import ADDRESS
from tests.testapp import tasks
from tests.testapp.celery import app
from tests.worker.harness import get

VISIBILITY = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
CONF = {
    "broker_transport_options": VISIBILITY,
    # The worst that a project can have: STARTED replaces the result of an earlier run.
    "result_backend": ADDRESS,
    "task_track_started": True,
}


def test_each_call_with_a_result_runs_once(start_worker, key):
    """With ``acks_late`` and without, and a call that runs for longer than the timeout."""
    worker, _ = (start_worker(conf=CONF, name=name) for name in ("one", "two"))
    long = worker.send(tasks.late, f"long {key}", 7)
    with app.connection_or_acquire() as connection:
        client = connection.default_channel.client

        def left():
            """Return all messages in the broker: waiting, and not acknowledged."""
            return client.llen(worker.queue) + client.hlen("unacked")

        def result_of_long():
            return app.backend.get(app.backend.get_key_for_task(long.id))

        early, late, unknown = (
            [
                worker.send(task, f"{kind} {number} {key}", 0.1, countdown=8, **options)
                for number in range(20)
            ]
            for kind, task, options in (
                ("early", tasks.hold, {}),
                ("late", tasks.late, {}),
                ("unknown", tasks.hold, {"ignore_result": True}),
            )
        )
        assert get(long) == "ran"
        stored = result_of_long()
        wait_for(lambda: not left(), "no copy of a message is left", deadline=90)
        assert result_of_long() == stored
    runs = Counter(line["task_id"] for line in worker.events("start"))
    assert [runs[result.id] for result in [long, *early, *late]] == [1] * 41
    # Negative control: without a result nobody can know that a call has run.
    assert sum(runs[result.id] for result in unknown) > 20
