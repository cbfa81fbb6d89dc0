"""An hour of history, which differs from run to run only by the clock."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.utils import timezone

from django_singletask.models import TaskLockEvent

FEED = "news.tasks.fetch_feed(feed_url='https://example.org/{}.xml')"
MONTHLY = "reports.tasks.monthly()"
CUSTOMER = "customer:4711"


def fill() -> None:
    """Write what a site with three kinds of tasks does within an hour."""
    now = timezone.now().replace(microsecond=0)
    rows: list[TaskLockEvent] = []

    def add(name: str, minutes: float, **facts: Any) -> TaskLockEvent:
        number = len(rows) + 1
        task = name.partition("(")[0] if "(" in name else "billing.tasks.bill"
        at: datetime = now - timedelta(minutes=minutes)
        run = {
            "task_id": str(UUID(int=number * 0x1F3C_0000_0000_0000_7777_0000_0001)),
            "token": f"{number:032x}",
            "host": f"web-{number % 3 + 1}",
            "pid": 8000 + number,
            "timeout": 60,
        }
        usual = {"kind": "acquired", "name": name, "key": name, "task": task, "at": at}
        rows.append(TaskLockEvent(**{**usual, **run, **facts}))
        return rows[-1]

    def hold(name: str, minutes: float, seconds: float, **facts: Any) -> TaskLockEvent:
        ended = now - timedelta(minutes=minutes) + timedelta(seconds=seconds)
        done = {"outcome": "released", "result": "returned", "ended_at": ended}
        return add(name, minutes, **{**done, **facts})

    def skips(holder: TaskLockEvent, minutes: float, count: int) -> None:
        by = {"blocked_by": holder.token, "blocked_by_task_id": holder.task_id}
        at = now - timedelta(minutes=minutes)
        add(holder.name, minutes, kind="skipped", reason="skip", count=count, last_at=at, **by)

    for feed, every, lasts in (("news", 4, 20), ("sports", 7, 65), ("weather", 11, 9)):
        name = FEED.format(feed)
        for minute in range(58, 3, -every):
            result = "raised" if (feed, minute) == ("weather", 36) else "returned"
            holder = hold(name, minute, lasts + minute % 3 * 7, result=result)
            if feed == "sports":
                skips(holder, minute - 0.8, 1 + minute * minute % 29)
    dead = hold(MONTHLY, 52, 9 * 60, outcome="dead", result="")
    gone = {"token": dead.token, "task_id": dead.task_id, "host": dead.host, "pid": dead.pid}
    add(MONTHLY, 43, kind="expired", reason=f"process {dead.pid} is gone", **gone)
    hold(MONTHLY, 43, 14 * 60)
    cleared = hold(CUSTOMER, 40, 11 * 60, outcome="cleared", result="returned")
    add(CUSTOMER, 29, kind="cleared", actor="grace", token=cleared.token, task_id=cleared.task_id)
    lost = hold(CUSTOMER, 20, 6 * 60, outcome="lost", result="returned")
    gone = "gone from the cache (evicted, flushed or restarted empty)"
    add(CUSTOMER, 15, kind="lost", reason=gone, token=lost.token, task_id=lost.task_id)
    hold(CUSTOMER, 13, 95, result="retried")
    rows.sort(key=lambda row: row.at)
    TaskLockEvent.objects.bulk_create(rows)


def fill_day() -> None:
    """Write a day, with an hour like that of :func:`fill` at its end, and more by day."""
    fill()
    hour = TaskLockEvent.objects.filter(name__startswith="news").order_by("pk").values()
    rows = []
    for ago in range(1, 23):
        for facts in list(hour)[: len(hour) * (ago * ago % 9 + 2) // 12]:
            times = {
                field: facts[field] and facts[field] - timedelta(hours=ago)
                for field in ("at", "ended_at", "last_at")
            }
            tokens = {"id": None, "token": f"{ago}-{facts['token'][-20:]}", "blocked_by": ""}
            rows.append(TaskLockEvent(**{**facts, **times, **tokens}))
    TaskLockEvent.objects.bulk_create(sorted(rows, key=lambda row: row.at))
