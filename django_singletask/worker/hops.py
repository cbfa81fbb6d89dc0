"""Start a postponed call early when a run of its lock ends in the same worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any
from weakref import ref

from celery.bootsteps import RUN  # type: ignore[attr-defined]
from celery.exceptions import Ignore
from celery.worker import state

__all__ = ["FEW", "Hops"]

FEW = 1000
"""Number of locks in ``Hops.calls`` before unused ones are removed."""

# A hop that is shortened
#
# A postponed message waits for its ETA in the main process, unacknowledged, as an entry of the
# worker's timer. When a run of the same lock ends in this worker, one of the waiting messages is
# started at once: the entry does earlier what Celery does at the ETA, and is cancelled. No message
# depends on this:
#
#   worker 1: run ends -> starts A                  (B keeps waiting)
#   worker 2:              C's hop ends: takes      A: held by C -> postponed again
#
# If the run ends in another worker, or a worker or a connection dies, the ETA or the redelivery
# comes as usual.


class Hops:
    """The calls of "requeue" that wait in this worker, by the key of their lock."""

    def __init__(self) -> None:
        self.calls: dict[str, deque[ref[Any]]] = {}
        self.most = FEW

    def follow(self, consumer: Any, request: Any, wire: Mapping[str, Any]) -> None:
        """Note a message of "requeue" if it waits here, and start the next when its run ends.

        ``wire`` is this package's header of the message. Without a hub, as for the filesystem
        broker, this does nothing, because the timer is in another thread.
        """
        key, options = wire.get("key"), wire.get("options") or {}
        if key is None or options.get("on_conflict", request.task.on_conflict) != "requeue":
            return
        if getattr(consumer, "hub", None) is None or not hasattr(state, "scheduled_requests"):
            return  # Celery 5.4 to 5.6 do not list waiting messages
        if wire.get("hops") and not wire.get("redelivered") and request.eta:
            self._note(key, request)
        succeeded = request.on_success

        def on_success(outcome: Any, **kwargs: Any) -> None:
            vars(request).pop("on_success", None)  # a cycle
            succeeded(outcome, **kwargs)
            if _has_ended(outcome):
                self._start_next(consumer, key)

        request.on_success = on_success

    def _note(self, key: str, request: Any) -> None:
        calls = self.calls.setdefault(key, deque())
        while calls and not _is_waiting(calls[0]):
            calls.popleft()
        calls.append(ref(request))  # weak, since a message may be large
        if len(self.calls) > self.most:
            busy = {key: calls for key, calls in self.calls.items() if any(map(_is_waiting, calls))}
            self.calls, self.most = {**busy, key: calls}, max(FEW, 2 * len(busy))

    def _start_next(self, consumer: Any, key: str) -> None:
        """Start the call that has waited longest for this lock."""
        calls = self.calls.get(key)
        while calls and consumer.blueprint.state == RUN and consumer.connection:
            call = calls.popleft()
            request: Any = call()
            if not _is_waiting(call):
                continue
            entry = request._eta_timer_entry  # noqa: SLF001, Celery's consumer uses it as well
            # A task with a rate limit has its bucket in args, too. After its ETA it waits in the
            # bucket, but still counts as scheduled, and would be started twice.
            if entry.args == (request,):
                consumer.timer.cancel(entry)
                consumer.timer.apply_entry(entry)
                entry.args = ()  # the timer keeps the entry until the ETA
                return


def _is_waiting(call: ref[Any]) -> bool:
    return call() in state.scheduled_requests  # type: ignore[attr-defined]


def _has_ended(outcome: Any) -> bool:
    """Return whether the outcome is the end of a run, and not of a postponed call."""
    failed, result, _runtime = outcome
    return not (failed and isinstance(getattr(result.exception, "exc", result.exception), Ignore))
