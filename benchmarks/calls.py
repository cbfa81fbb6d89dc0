"""What a call costs its sender: to make the key, and to enqueue the call only once."""

from __future__ import annotations

import inspect
import itertools

import redis

from benchmarks import app
from benchmarks.measure import in_turns
from benchmarks.report import Check, Table, at_most, compared, figure
from benchmarks.settings import REDIS
from django_singletask.locks.keys import call_key
from django_singletask.locks.parameters import Parameters

OURS = "django-singletask"


def keys(rounds: int) -> Table:
    def import_feed(feed_id: int, force: bool = False) -> None: ...

    name, parameters = "feeds.tasks.import_feed", Parameters(inspect.signature(import_feed))
    once = app.app.task(import_feed, name=name, base=app.QueueOnce)
    singleton = app.app.task(import_feed, name=f"{name}_", base=app.Singleton)
    series = in_turns(
        {
            "celery-once": lambda: once.get_key((7, True), {}),
            OURS: lambda: call_key(name, parameters, (7, True), {}),
            "celery-singleton": lambda: singleton.generate_lock(name, (7, True), {}),
        },
        rounds,
        calls=100,
    )
    microseconds = series.median(OURS)
    checks = [Check(f"{OURS}: < 15 µs", f"{figure(microseconds)} µs", microseconds < 15)]
    text = (
        "For celery-singleton, f(7, True) and f(feed_id=7, force=True) are two calls. For"
        " celery-singleton and celery-once, f(7) and f(7, False) are two calls."
    )
    return compared("Key of two arguments", text, series, checks)


def enqueue(rounds: int) -> Table:
    broker, *stores = [redis.Redis.from_url(f"{REDIS}/{number}") for number in (1, 0, 2)]
    numbers = itertools.count()

    def purge() -> None:
        """Empty the queue, and remove the locks that would stop equal calls."""
        broker.delete(app.app.conf.task_default_queue)
        for store in stores:
            store.flushdb()

    series = in_turns(
        {
            "plain Task": lambda: app.plain.delay(next(numbers)),
            OURS: lambda: app.ours_unique.delay(next(numbers)),
            "celery-singleton": lambda: app.celery_singleton.delay(next(numbers)),
            "celery-once": lambda: app.celery_once.delay(next(numbers)),
        },
        rounds,
        after=purge,
    )
    text = (
        '``delay()`` of a task with ``unique_until="start"``, to a Redis broker. No call is a'
        " duplicate, and the queue is emptied after each turn. A plain Task does not look for"
        " duplicates."
    )
    checks = [at_most(series, OURS, 1.35, "plain Task")]
    return compared("Enqueue only once", text, series, checks)
