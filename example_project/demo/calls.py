"""The calls that were sent, and their results."""

from __future__ import annotations

from collections import Counter, defaultdict

from celery import Task
from celery.result import AsyncResult


class Calls:
    """Send calls of one task and follow their results, counted by feed address."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sent: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.imported: Counter[str] = Counter()
        self.failed: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.pending: dict[str, tuple[str, AsyncResult]] = {}

    @property
    def done(self) -> int:
        return self.sent.total() - len(self.pending)

    def send(self, feed_url: str) -> None:
        result = self.task.delay(feed_url=feed_url)
        self.sent[feed_url] += 1
        self.pending[result.id] = (feed_url, result)

    def update(self) -> bool:
        """Count the calls that are done. Return whether any is done since the last update."""
        finished = [key for key, (_, result) in self.pending.items() if _is_done(result)]
        for key in finished:
            feed_url, result = self.pending.pop(key)
            if result.failed():
                self.failed[feed_url][str(result.result)] += 1
            elif result.result is None:
                # This is the skip_result of a run that found the lock held.
                self.skipped[feed_url] += 1
            else:
                self.imported[feed_url] += 1
            result.forget()
        return bool(finished)


def _is_done(result: AsyncResult) -> bool:
    try:
        return bool(result.ready())
    except ValueError:
        # Celery's file backend has written only a part of this result.
        return False
