"""What the guides about periodic tasks and limits promise, without workers."""

from __future__ import annotations

import functools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.beat import Scheduler, SchedulingError
from celery.exceptions import Retry

from django_singletask import LockConflict, SingletonTask, TaskLock
from django_singletask.task.header import HEADER
from tests.deliveries import collect_sent, receive
from tests.guides import blocks

pytestmark = pytest.mark.usefixtures("on_redis")


@pytest.fixture
def app():
    with Celery("guides", set_as_current=False, broker="memory://") as app:
        yield app


@pytest.fixture
def limits(app):
    """Give what the page about limits defines."""
    names: dict[str, Any] = {
        "__name__": "limits",
        "shared_task": functools.partial(app.task, shared=False, lazy=False),
        **{cls.__name__: cls for cls in (LockConflict, SingletonTask, TaskLock)},
    }
    exec("\n".join(blocks("guides/rate-limits.rst")), names)
    return SimpleNamespace(names=names, **names)


def fail():
    raise ZeroDivisionError


@pytest.mark.parametrize(("fetch", "pause"), [(lambda: None, 600), (fail, 60)])
def test_a_pause_counts_from_the_end_and_depends_on_it(limits, fetch, pause):
    limits.names["fetch"] = fetch
    with suppress(ZeroDivisionError):
        limits.poll.run()
    assert pause - 5 < TaskLock("poll").remaining() <= pause
    limits.names["fetch"] = lambda: pytest.fail("it is the pause")
    limits.poll.run()
    assert TaskLock("poll").clear()


def test_calls_with_other_numbers_share_the_first_slots(take):
    """A plan of 1 waits for slot 1, although 2 and 3 are free for a plan of 3."""
    first = take("export", slots=3)
    with pytest.raises(LockConflict), TaskLock("export"):
        pass
    others = [take("export", slots=3) for _ in range(2)]
    assert not TaskLock("export", slots=3).acquire()
    first.release()
    with TaskLock("export") as lock:
        assert lock
        assert all(other.owned() for other in others)


def test_a_call_over_the_limit_for_all_is_tried_again(limits, take):
    for _ in range(50):
        take("all queries", slots=50)
    with pytest.raises(Retry):
        receive(limits.query, 7, "select 1")
    assert not limits.query.lock(7).locked()


class TestBeat:
    @pytest.fixture
    def schedule(self, app):
        """Give the two schedules of the page, with its task."""
        found: dict[str, Any] = {}
        names: dict[str, Any] = {
            "shared_task": functools.partial(
                app.task, shared=False, lazy=False, name="feeds.tasks.import_all_feeds"
            ),
            "SingletonTask": SingletonTask,
        }
        for block in blocks("guides/periodic-tasks.rst"):
            if "CELERY_BEAT_SCHEDULE" in block:
                exec(block, names)
                found |= names["CELERY_BEAT_SCHEDULE"]
        return found

    @pytest.fixture
    def send(self, app, schedule):
        scheduler = Scheduler(app, lazy=True)

        def send(name):
            entry = scheduler.Entry(name=name, app=app, **schedule[name])
            return scheduler.apply_async(entry, advance=False)

        return send

    def test_a_call_is_not_sent_while_one_is_queued(self, send):
        assert send("import-feeds").id == send("import-feeds").id

    def test_options_in_the_schedule_travel_with_the_call(self, app, send, monkeypatch):
        sent = collect_sent(app, monkeypatch)
        send("nightly")
        assert sent[0]["headers"][HEADER]["options"] == {"on_conflict": "requeue"}

    def test_beat_reports_that_the_cache_is_down_and_continues(self, send, settings, dead_redis):
        settings.SINGLETASK_CACHE = dead_redis
        with pytest.raises(SchedulingError, match="dead"):
            send("import-feeds")
