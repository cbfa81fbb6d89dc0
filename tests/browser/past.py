"""An hour of history, which differs from run to run only by the clock."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.utils import timezone

from django_singletask.models import TaskLockEvent
from tests import inside, past_rows
from tests.command_line import hold as put
from tests.entries import key_of

FEED = "news.tasks.fetch_feed(feed_url='https://example.org/{}.xml')"
MONTHLY = "reports.tasks.monthly()"
CUSTOMER = "customer:4711"


def key_of_shown(name: str) -> str:
    """Return the key of the lock that pages show by one of these names."""
    task, _, arguments = name.partition("(")
    if "'" in arguments:
        return inside.call_lock(task, feed_url=arguments.split("'")[1])[1]
    if arguments:
        return inside.call_lock(task)[1]
    return key_of(name)


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
            "ref": f"{number:032x}",
            "host": f"web-{number % 3 + 1}",
            "pid": 8000 + number,
            "timeout": 60,
        }
        usual = {
            "kind": "run",
            "name": name,
            "key": key_of_shown(name),
            "task": task,
            "at": at,
        }
        rows.append(past_rows.new(**{**usual, **run, **facts}))
        return rows[-1]

    def hold(name: str, minutes: float, seconds: float, **facts: Any) -> TaskLockEvent:
        ended = now - timedelta(minutes=minutes) + timedelta(seconds=seconds)
        done = {"outcome": "released", "result": "returned", "ended_at": ended}
        return add(name, minutes, **{**done, **facts})

    def conflicts(holder: TaskLockEvent, minutes: float, count: int) -> None:
        by = {"blocked_by": holder.token, "blocked_by_task_id": holder.task_id}
        by |= {"kind": "conflict", "reason": "skip", "result": "skipped"}
        add(holder.name, minutes, last_at=now - timedelta(minutes=minutes), count=count, **by)

    for feed, every, lasts in (("news", 4, 20), ("sports", 7, 65), ("weather", 11, 9)):
        name = FEED.format(feed)
        for minute in range(58, 3, -every):
            result = "raised" if (feed, minute) == ("weather", 36) else "returned"
            holder = hold(name, minute, lasts + minute % 3 * 7, result=result)
            if feed == "sports":
                conflicts(holder, minute - 0.8, 1 + minute * minute % 29)
    noticed = {"noticed_at": now - timedelta(minutes=43), "actor": "web-2:8007"}
    add(MONTHLY, 52, outcome="dead", reason="process 8142 is gone", pid=8142, **noticed)
    hold(MONTHLY, 43, 14 * 60)
    cleared = {"noticed_at": now - timedelta(minutes=29), "actor": "grace"}
    hold(CUSTOMER, 40, 13 * 60, outcome="cleared", **cleared)
    gone = "gone from the cache (evicted, flushed or restarted empty)"
    lost = {"noticed_at": now - timedelta(minutes=15), "reason": gone}
    hold(CUSTOMER, 20, 6 * 60, outcome="lost", **lost)
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
            tokens = {"id": None, "ref": f"{ago}-{facts['ref'][-20:]}", "blocked_by": ""}
            rows.append(past_rows.new(**{**facts, **times, **tokens}))
    TaskLockEvent.objects.bulk_create(sorted(rows, key=lambda row: row.at))


def fill_held() -> None:
    """Let other hosts hold three locks: one slow, one with conflicts, and one that starves."""
    now = timezone.now()
    rows: list[TaskLockEvent] = []

    def add(name: str, minutes: float, **facts: Any) -> None:
        common = {"name": name, "key": key_of(name), "task": name.partition("(")[0]}
        common |= {"ref": f"{len(rows):032x}", "kind": "run", "host": "web-1", "pid": 40}
        rows.append(past_rows.new(at=now - timedelta(minutes=minutes), **{**common, **facts}))

    def hold(name: str, minutes: float, host: str, pid: int, conflicts: int) -> None:
        token = f"{pid:032x}"
        task_id = str(UUID(int=pid * 0x1F3C_0000_0000_0000_7777_0000_0001))
        since = now.timestamp() - 60 * minutes
        facts = {"token": token, "task": name.partition("(")[0], "task_id": task_id}
        facts |= {"host": host, "pid": pid, "since": since, "timeout": 60.0}
        put(name=name, key=key_of(name), left=48, **facts)
        add(name, minutes, ref=token, task_id=task_id, host=host, pid=pid)
        if conflicts:
            by = {"blocked_by": token, "kind": "conflict", "reason": "skip", "result": "skipped"}
            add(name, minutes - 0.5, last_at=now, count=conflicts, **by)

    for days in range(1, 7):
        ended = now - timedelta(days=days) + timedelta(minutes=11)
        done = {"outcome": "released", "result": "returned", "ended_at": ended}
        add("reports.tasks.nightly()", 24 * 60 * days, **done)
    hold("reports.tasks.nightly()", 62, "web-1", 40, 0)
    hold("shop.tasks.sync_stock(customer_id=7)", 95, "web-2", 8144, 57)
    hold("feeds.tasks.import_feed(feed_id=7)", 2.2, "web-3", 8121, 31)
    TaskLockEvent.objects.bulk_create(sorted(rows, key=lambda row: row.at))
